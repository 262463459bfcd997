//! Nodes of a compiled function: steps, fused groups of steps, and control flow.

pub(super) mod control;

use std::collections::BTreeSet;
use std::sync::Arc;

use self::control::Control;
use super::error::ExecError;
use super::frame::Frame;
use super::operand::Operand;
use super::step::Step;
use super::tensor::Tensor;

/// Step, fused group of steps, or op with nested blocks.
pub(super) enum Node {
    /// One op.
    Step(Step),
    /// Fused steps.
    Group(Group),
    /// Branch or loop.
    Control(Control),
}

/// Fused steps.
pub(super) struct Group {
    /// Steps that the group replaces, in order.
    pub steps: Vec<Step>,
    /// Kernel that computes them.
    pub kernel: Box<dyn FusedKernel>,
}

/// Kernel of a fused group.
pub(super) trait FusedKernel: Send + Sync {
    /// Name in profiles.
    fn name(&self) -> &'static str;

    /// Computes the steps of the group. Returns `None`, and changes nothing, if the conditions of the group don't hold.
    fn run(&self, steps: &[Step], frame: &mut Frame<'_>) -> Option<FusedResult>;
}

/// Result of a fused kernel.
pub(super) enum FusedResult {
    /// First result of the last step.
    Tensor(Arc<Tensor>),
    /// None: the steps only write a state.
    Nothing,
}

impl Node {
    /// Steps, in order; those of nested blocks are left out.
    pub fn steps(&self) -> &[Step] {
        match self {
            Node::Step(step) => std::slice::from_ref(step),
            Node::Group(group) => &group.steps,
            Node::Control(_) => &[],
        }
    }

    /// Steps, in order, for modification.
    pub fn steps_mut(&mut self) -> &mut [Step] {
        match self {
            Node::Step(step) => std::slice::from_mut(step),
            Node::Group(group) => &mut group.steps,
            Node::Control(_) => &mut [],
        }
    }

    /// The step, if sequences of a batch can share it: one product with a large constant.
    pub fn shared(&self) -> Option<&Step> {
        match self {
            Node::Step(step) if step.multiplies_weight() => Some(step),
            _ => None,
        }
    }

    /// The step, if the node is one.
    pub fn into_step(self) -> Option<Step> {
        match self {
            Node::Step(step) => Some(step),
            Node::Group(_) | Node::Control(_) => None,
        }
    }

    /// Runs the node.
    pub fn run(&self, frame: &mut Frame<'_>) -> Result<(), ExecError> {
        match self {
            Node::Step(step) => frame.step(step),
            Node::Control(control) => control.run(frame),
            Node::Group(group) => {
                let done = frame.timed(group.kernel.name(), |frame| group.run(frame));
                // fall back to single steps
                if done { Ok(()) } else { group.steps.iter().try_for_each(|step| frame.step(step)) }
            }
        }
    }
}

impl Group {
    /// Runs the fused kernel. Returns false, and changes nothing, if its conditions don't hold.
    fn run(&self, frame: &mut Frame<'_>) -> bool {
        let Some(result) = self.kernel.run(&self.steps, frame) else { return false };
        for operand in self.steps.iter().flat_map(|step| &step.operands) {
            if let Operand::Slot { slot, last: true } = operand {
                frame.free(*slot);
            }
        }
        if let (FusedResult::Tensor(tensor), Some(output)) =
            (result, self.steps.last().and_then(|step| step.outputs.first()))
        {
            frame.store(output, tensor);
        }
        true
    }
}

/// Marks last uses in nodes, after which the slots `needed` are used.
pub(super) fn mark_nodes(nodes: &mut [Node], needed: &mut BTreeSet<usize>) {
    for node in nodes.iter_mut().rev() {
        if let Node::Control(control) = node {
            control.mark_last_uses(needed);
            continue;
        }
        let steps = node.steps_mut();
        // a group that falls back from a recomputed step leaves the value to the step itself
        let repeated = steps.iter().rev().skip(1).flat_map(|step| &step.outputs).map(|output| output.slot);
        let repeated: Vec<usize> = repeated.filter(|slot| needed.contains(slot)).collect();
        for step in steps.iter_mut().rev() {
            for output in &mut step.outputs {
                output.read = needed.remove(&output.slot);
            }
            for operand in step.operands.iter_mut().rev() {
                mark(operand, needed);
            }
        }
        needed.extend(repeated);
    }
}

pub(super) fn mark(operand: &mut Operand, needed: &mut BTreeSet<usize>) {
    if let Operand::Slot { slot, last } = operand {
        *last = needed.insert(*slot);
    }
}
