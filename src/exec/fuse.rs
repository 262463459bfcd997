//! Fusion of steps.
//!
//! A program for the Neural Engine has no loops and fixed sizes: attention covers all slots of the cache, and a cache
//! write computes the whole cache anew. A CPU can skip most of that. Compilation looks for cache writes and for
//! attention under a mask. Their steps become a [`Group`], which reads the mask at run time and skips closed slots.
//! Other steps become groups because each of them has little work: rotary position embeddings, chains of elementwise
//! ops, and norms, which also reduce rows of elements.
//!
//! A group keeps its steps. If the run-time conditions of the group don't hold (other shapes, a token that sees no
//! slot), the steps run one by one.

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

/// Steps that match a group.
struct GroupMatch {
    /// Steps that the group replaces; nothing else uses their results.
    members: Vec<usize>,
    /// Steps that the group recomputes because others may use them too; they only select elements.
    copies: Vec<usize>,
    kernel: Box<dyn FusedKernel>,
}

/// Finds groups. A group takes the place of the last of its steps.
pub(super) fn fuse(steps: Vec<Step>, uses: &Uses<'_>, outputs: &[(String, Operand)]) -> Vec<Node> {
    let flow = Flow::new(&steps, uses);
    let (mut groups, mut copied) = (BTreeMap::new(), BTreeSet::<usize>::new());
    let mut taken = BTreeSet::<usize>::new();
    let mut take = |found: GroupMatch, taken: &mut BTreeSet<usize>| {
        let GroupMatch { mut members, copies, kernel } = found;
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
    // longest chains of the remaining steps
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
    // drop steps that were copied and that nothing else uses
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
    // groups use their own copies
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
