//! Groups of steps that are carried out as one.
//!
//! A program for the Neural Engine has no loops and no sizes that change from call to call: attention goes over all
//! slots of the cache, whether they hold anything or not, and a cache is written by computing all of it anew. A
//! processor can do with a part. When a function is compiled, two forms are looked for: the write of a cache through a
//! mask, and attention under a mask. Their steps become a [`Group`], which looks at the masks when it runs, and leaves
//! out what they close.
//!
//! A group keeps the steps that it stands for. If what it finds when it runs isn't what it was made for (other shapes,
//! a token that sees nothing), it says so, and the steps are carried out as they stand.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::ops::Value;
use super::step::{Frame, Node, Operand, Step};
use super::tensor::{Tensor, TensorData};

mod attention;
mod cache_write;

/// Steps that are carried out as one.
pub(super) struct Group {
    /// The steps it stands for, in order.
    pub steps: Vec<Step>,
    form: Form,
}

/// What a group computes.
enum Form {
    Attention(attention::Attention),
    CacheWrite(cache_write::CacheWrite),
}

impl Group {
    /// What it does, in words.
    pub fn name(&self) -> &'static str {
        match self.form {
            Form::Attention(_) => "attention",
            Form::CacheWrite(_) => "cache write",
        }
    }

    /// Carries the steps out as one; gives false, with everything as it was, if that can't be done.
    pub fn run(&self, frame: &mut Frame<'_>) -> bool {
        let result = match &self.form {
            Form::Attention(attention) => attention.run(frame).map(|tensor| Some(Arc::new(tensor))),
            Form::CacheWrite(write) => write.run(frame).map(|()| None),
        };
        let Some(result) = result else { return false };
        for operand in self.steps.iter().flat_map(Step::operands) {
            if let Operand::Slot { slot, last: true } = operand {
                frame.slots[*slot] = None;
            }
        }
        if let (Some(tensor), Some(output)) = (result, self.steps.last().and_then(|step| step.outputs.first())) {
            frame.give(output, tensor);
        }
        true
    }
}

/// Steps that were found to make a group.
struct Found {
    /// Those that it takes, which nothing else needs.
    members: Vec<usize>,
    /// Those that it repeats, since others may need them, too: they only say where elements are.
    copies: Vec<usize>,
    form: Form,
}

/// Finds the groups. A group stands where the last of its steps stood.
pub(super) fn fuse(steps: Vec<Step>, outputs: &[(String, Operand)]) -> Vec<Node> {
    let flow = Flow::new(&steps, outputs);
    let found = (0..steps.len()).filter_map(|at| match steps[at].operator.as_str() {
        "softmax" => attention::find(&flow, at),
        "write_state" => cache_write::find(&flow, at),
        _ => None,
    });
    let mut groups = BTreeMap::new();
    let (mut taken, mut copied) = (BTreeSet::<usize>::new(), BTreeSet::<usize>::new());
    for mut found in found {
        if found.members.iter().any(|member| taken.contains(member)) {
            continue;
        }
        found.members.sort_unstable();
        let Some(last) = found.members.last().copied() else { continue };
        taken.extend(&found.members);
        copied.extend(&found.copies);
        let order: BTreeSet<usize> = found.members.into_iter().chain(found.copies).collect();
        let steps = order.into_iter().map(|i| steps[i].clone()).collect();
        groups.insert(last, Group { steps, form: found.form });
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
    for slot in
        nodes.iter().flat_map(|(_, node)| node.steps()).flat_map(Step::operands).chain(kept).filter_map(Operand::slot)
    {
        *uses.entry(slot).or_default() += 1;
    }
    // the groups use their own copies
    for group in nodes.iter().filter(|(_, node)| matches!(node, Node::Group(_))) {
        let steps = group.1.steps();
        let own: BTreeSet<usize> = steps.iter().flat_map(|step| &step.outputs).map(|output| output.slot).collect();
        for slot in steps.iter().flat_map(Step::operands).filter_map(Operand::slot).filter(|slot| own.contains(slot)) {
            uses.entry(slot).and_modify(|count| *count -= 1);
        }
    }
    let mut kept = Vec::with_capacity(nodes.len());
    for (i, node) in nodes.into_iter().rev() {
        let idle = |step: &Step| step.outputs.iter().all(|output| uses.get(&output.slot).is_none_or(|n| *n == 0));
        match node {
            Node::Step(step) if copied.contains(&i) && idle(&step) => {
                for slot in step.operands().filter_map(Operand::slot) {
                    uses.entry(slot).and_modify(|count| *count -= 1);
                }
            }
            node => kept.push(node),
        }
    }
    kept.reverse();
    kept
}

/// Who gives and who needs the values of a function.
struct Flow<'a> {
    steps: &'a [Step],
    producers: HashMap<usize, usize>,
    /// By slot; twice where a step needs it twice.
    users: HashMap<usize, Vec<usize>>,
    outputs: BTreeSet<usize>,
}

impl<'a> Flow<'a> {
    fn new(steps: &'a [Step], outputs: &[(String, Operand)]) -> Self {
        let mut flow = Flow {
            steps,
            producers: HashMap::new(),
            users: HashMap::new(),
            outputs: outputs.iter().filter_map(|(_, operand)| operand.slot()).collect(),
        };
        for (i, step) in steps.iter().enumerate() {
            for slot in step.operands().filter_map(Operand::slot) {
                flow.users.entry(slot).or_default().push(i);
            }
            for output in &step.outputs {
                flow.producers.insert(output.slot, i);
            }
        }
        flow
    }

    /// The step that gives an operand.
    fn producer(&self, operand: &Operand) -> Option<usize> {
        self.producers.get(&operand.slot()?).copied()
    }

    /// The step that gives an operand, if it is of this operator.
    fn produced_by(&self, operand: &Operand, operator: &str) -> Option<usize> {
        self.producer(operand).filter(|i| self.steps[*i].operator == operator)
    }

    /// All uses of what a step gives; none if the function gives it out.
    fn users(&self, step: usize) -> &[usize] {
        match self.steps[step].outputs.as_slice() {
            [output] if !self.outputs.contains(&output.slot) => self.users.get(&output.slot).map_or(&[], Vec::as_slice),
            _ => &[],
        }
    }

    /// The step that alone uses, once, what a step gives.
    fn only_user(&self, step: usize) -> Option<usize> {
        match self.users(step) {
            [one] => Some(*one),
            _ => None,
        }
    }

    /// The writes of a state between two steps.
    fn writes<'f>(&'f self, state: &'f str, between: Range<usize>) -> impl Iterator<Item = usize> + 'f {
        let inner = between.start + 1..between.end;
        inner.filter(move |i| {
            let step = &self.steps[*i];
            step.operator == "write_state" && step.state().is_some_and(|name| **name == *state)
        })
    }

    /// The rows (places along axis 1) that a write of a state changes; `None` if they aren't known.
    fn written_rows(&self, write: usize) -> Option<Range<usize>> {
        let step = &self.steps[write];
        let state = step.state()?;
        let update = self.produced_by(step.argument("data")?, "slice_update")?;
        let read = self.produced_by(self.steps[update].argument("x")?, "read_state")?;
        let same = self.steps[read].state() == Some(state) && self.writes(state, read..write).next().is_none();
        let masked = ["begin_mask", "end_mask", "squeeze_mask", "stride"]
            .iter()
            .any(|name| self.steps[update].argument(name).is_some_and(|mask| !is_neutral(mask)));
        let first = |parameter: &str| self.leading(self.steps[update].argument(parameter)?).get(1).copied();
        let (begin, end) = (first("begin")?, first("end")?);
        (same && !masked && 0 <= begin && begin <= end).then_some(begin as usize..end as usize)
    }

    /// The elements at the front of a vector of integers that are known already.
    fn leading(&self, operand: &Operand) -> Vec<i32> {
        if let Some(values) = integers(operand) {
            return values.to_vec();
        }
        let Some(step) = self.produced_by(operand, "concat").map(|i| &self.steps[i]) else { return Vec::new() };
        let Some((_, values)) = step.arguments.iter().find(|(name, _)| name == "values") else { return Vec::new() };
        values.iter().map_while(integers).flatten().copied().collect()
    }
}

/// A constant tensor.
fn constant(operand: &Operand) -> Option<&Tensor> {
    match operand {
        Operand::Constant(Value::Tensor(tensor)) => Some(tensor),
        _ => None,
    }
}

/// Constant integers.
fn integers(operand: &Operand) -> Option<&[i32]> {
    constant(operand)?.integers()
}

/// Constants that leave a slice as it is: masks that are not set, strides of one.
fn is_neutral(operand: &Operand) -> bool {
    match constant(operand).map(|tensor| &tensor.data) {
        Some(TensorData::Bool(masks)) => !masks.contains(&true),
        Some(TensorData::I32(strides)) => strides.iter().all(|stride| *stride == 1),
        _ => false,
    }
}

/// A flag that is known; false if it is left out.
fn flag(step: &Step, parameter: &str) -> Option<bool> {
    match step.argument(parameter) {
        None => Some(false),
        Some(operand) => match constant(operand)?.booleans()? {
            [flag] => Some(*flag),
            _ => None,
        },
    }
}

/// The rows that a slice takes of a tensor of rank 4, if it takes all of its other axes and all numbers are known.
fn rows_of_slice(step: &Step) -> Option<Range<usize>> {
    let vector = |parameter: &str| step.argument(parameter).and_then(integers).filter(|values| values.len() == 4);
    let mask = |parameter: &str| match step.argument(parameter) {
        None => Some([false; 4]),
        Some(operand) => constant(operand)?.booleans()?.try_into().ok(),
    };
    let (begin, end) = (vector("begin")?, vector("end")?);
    let (from_start, to_end) = (mask("begin_mask")?, mask("end_mask")?);
    let whole = |axis: usize| (from_start[axis] || begin[axis] == 0) && to_end[axis];
    let plain = ["stride", "squeeze_mask"].iter().all(|name| step.argument(name).is_none_or(is_neutral));
    let rows = [0, 2, 3].into_iter().all(whole) && !to_end[1];
    let first = if from_start[1] { 0 } else { usize::try_from(begin[1]).ok()? };
    let last = usize::try_from(end[1]).ok()?;
    (step.operator == "slice_by_index" && plain && rows && first < last).then_some(first..last)
}
