//! What a function is made of: steps, and groups of steps that are carried out as one.

use std::sync::Arc;

use super::error::ExecError;
use super::frame::Frame;
use super::operand::Operand;
use super::step::Step;
use super::tensor::Tensor;

/// One step, or several that are carried out as one.
pub(super) enum Node {
    /// One op.
    Step(Step),
    /// Several that are carried out as one.
    Group(Group),
}

/// Steps that are carried out as one.
pub(super) struct Group {
    /// The steps it stands for, in order.
    pub steps: Vec<Step>,
    /// What computes them.
    pub kernel: Box<dyn FusedKernel>,
}

/// What computes several steps as one.
pub(super) trait FusedKernel: Send + Sync {
    /// What it does, in words.
    fn name(&self) -> &'static str;

    /// Computes the steps, which are the group's; `None`, with everything as it was, if that can't be done with what there is.
    fn run(&self, steps: &[Step], frame: &mut Frame<'_>) -> Option<FusedResult>;
}

/// What fused steps give.
pub(super) enum FusedResult {
    /// The first result of the last step.
    Tensor(Arc<Tensor>),
    /// They only wrote a state.
    Nothing,
}

impl Node {
    /// The steps, in order.
    pub fn steps(&self) -> &[Step] {
        match self {
            Node::Step(step) => std::slice::from_ref(step),
            Node::Group(group) => &group.steps,
        }
    }

    /// As [`steps`](Node::steps), to be changed.
    pub fn steps_mut(&mut self) -> &mut [Step] {
        match self {
            Node::Step(step) => std::slice::from_mut(step),
            Node::Group(group) => &mut group.steps,
        }
    }

    /// The step that it is, if sequences can share it: one product with a large constant.
    pub fn shared(&self) -> Option<&Step> {
        match self {
            Node::Step(step) if step.multiplies_weight() => Some(step),
            _ => None,
        }
    }

    /// Carries it out.
    pub fn run(&self, frame: &mut Frame<'_>) -> Result<(), ExecError> {
        match self {
            Node::Step(step) => frame.step(step),
            Node::Group(group) => {
                let done = frame.timed(group.kernel.name(), |frame| group.run(frame));
                // in any unforeseen case the ops are carried out as they stand
                if done { Ok(()) } else { group.steps.iter().try_for_each(|step| frame.step(step)) }
            }
        }
    }
}

impl Group {
    /// Carries the steps out as one; gives false, with everything as it was, if that can't be done.
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
            frame.give(output, tensor);
        }
        true
    }
}
