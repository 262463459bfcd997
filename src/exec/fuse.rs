//! Groups of steps that are carried out as one.
//!
//! A program for the Neural Engine has no loops and no sizes that change from call to call: attention goes over all
//! slots of the cache, whether they hold anything or not, and a cache is written by computing all of it anew. A
//! processor can do with a part. When a function is compiled, the writes of caches and attention under a mask
//! are looked for. Their steps become a [`Group`], which looks at the masks when it runs, and leaves out what they close.
//! Other steps become groups because each by itself has little to do: rotary position embeddings, and of the others those
//! that work on each element by itself, with those that reduce rows of elements, such as a norm's.
//!
//! A group keeps the steps that it stands for. If what it finds when it runs isn't what it was made for (other shapes,
//! a token that sees nothing), it says so, and the steps are carried out as they stand.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::node::{FusedKernel, Group, Node};
use super::operand::Operand;
use super::ops::{Concat, Softmax, WriteState};
use super::step::Step;
use anec_mil::Uses;

mod attention;
mod cache_write;
mod elementwise;
mod flow;
mod members;
mod rope;
mod rows;
mod slice_write;
#[cfg(test)]
mod testing;

use flow::Flow;

/// Steps that were found to make a group.
struct Found {
    /// Those that it takes, which nothing else needs.
    members: Vec<usize>,
    /// Those that it repeats, since others may need them, too: they only say where elements are.
    copies: Vec<usize>,
    kernel: Box<dyn FusedKernel>,
}

/// Finds the groups. A group stands where the last of its steps stood.
pub(super) fn fuse(steps: Vec<Step>, uses: &Uses<'_>, outputs: &[(String, Operand)]) -> Vec<Node> {
    let flow = Flow::new(&steps, uses);
    let (mut groups, mut copied) = (BTreeMap::new(), BTreeSet::<usize>::new());
    let mut taken = BTreeSet::<usize>::new();
    let mut take = |found: Found, taken: &mut BTreeSet<usize>| {
        let Found { mut members, copies, kernel } = found;
        members.sort_unstable();
        let Some(last) = members.last().copied().filter(|_| taken.is_disjoint(&members.iter().copied().collect()))
        else {
            return;
        };
        taken.extend(&members);
        copied.extend(&copies);
        let order: BTreeSet<usize> = members.into_iter().chain(copies).collect();
        let steps = order.into_iter().map(|i| steps[i].clone()).collect();
        groups.insert(last, Group { steps, kernel });
    };
    for at in 0..steps.len() {
        let found = if let Some(softmax) = flow.kernel::<Softmax>(at) {
            attention::find(&flow, at, softmax)
        } else if let Some(write) = flow.kernel::<WriteState>(at) {
            cache_write::find(&flow, at, write).or_else(|| slice_write::find(&flow, at, write))
        } else if let Some(concat) = flow.kernel::<Concat>(at) {
            rope::find(&flow, at, concat)
        } else {
            None
        };
        if let Some(found) = found {
            take(found, &mut taken);
        }
    }
    // of what is left, the longest
    for at in (0..steps.len()).rev() {
        let is_free = |step: usize| !taken.contains(&step);
        if let Some(found) = rows::find(&flow, at, is_free).or_else(|| elementwise::find(&flow, at, is_free)) {
            take(found, &mut taken);
        }
    }
    let mut nodes: Vec<(usize, Node)> = Vec::with_capacity(steps.len());
    for (i, step) in steps.into_iter().enumerate() {
        match groups.remove(&i) {
            Some(group) => nodes.push((i, Node::Group(group))),
            None if taken.contains(&i) => {}
            None => nodes.push((i, Node::Step(step))),
        }
    }
    // a step that was copied and that nobody else needs has no more purpose
    let mut uses: HashMap<usize, usize> = HashMap::new();
    let kept = outputs.iter().map(|(_, operand)| operand);
    for slot in nodes
        .iter()
        .flat_map(|(_, node)| node.steps())
        .flat_map(|step| &step.operands)
        .chain(kept)
        .filter_map(Operand::slot)
    {
        *uses.entry(slot).or_default() += 1;
    }
    // the groups use their own copies
    for group in nodes.iter().filter(|(_, node)| matches!(node, Node::Group(_))) {
        let steps = group.1.steps();
        let own: BTreeSet<usize> = steps.iter().flat_map(|step| &step.outputs).map(|output| output.slot).collect();
        for slot in
            steps.iter().flat_map(|step| &step.operands).filter_map(Operand::slot).filter(|slot| own.contains(slot))
        {
            uses.entry(slot).and_modify(|count| *count -= 1);
        }
    }
    let mut kept = Vec::with_capacity(nodes.len());
    for (i, node) in nodes.into_iter().rev() {
        let idle = |step: &Step| step.outputs.iter().all(|output| uses.get(&output.slot).is_none_or(|n| *n == 0));
        match node {
            Node::Step(step) if copied.contains(&i) && idle(&step) => {
                for slot in step.operands.iter().filter_map(Operand::slot) {
                    uses.entry(slot).and_modify(|count| *count -= 1);
                }
            }
            node => kept.push(node),
        }
    }
    kept.reverse();
    kept
}
