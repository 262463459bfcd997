//! Steps over value slots, and carrying them out.

use std::sync::Arc;
use std::time::Instant;

use super::error::ExecError;
use super::fuse::Group;
use super::ops::{Call, Row, Value};
use super::profile::Profile;
use super::state::State;
use super::tensor::{Tensor, TensorData};
use anec_kernels::round::round_to_f16;
use anec_mil::{DataType, TensorType};

/// Where a step finds an argument.
#[derive(Clone, Debug)]
pub(super) enum Operand {
    /// A constant.
    Constant(Value),
    /// A computed value; `last` when nothing later needs it.
    Slot { slot: usize, last: bool },
}

impl Operand {
    /// The slot, if it is one.
    pub fn slot(&self) -> Option<usize> {
        match self {
            Operand::Slot { slot, .. } => Some(*slot),
            Operand::Constant(_) => None,
        }
    }
}

/// One op made ready.
#[derive(Clone)]
pub(super) struct Step {
    pub operator: String,
    pub name: String,
    pub row: &'static Row,
    pub arguments: Vec<(String, Vec<Operand>)>,
    pub types: Vec<TensorType>,
    pub outputs: Vec<Output>,
    pub takes_state: bool,
}

impl Step {
    /// The one operand of a parameter.
    pub fn argument(&self, parameter: &str) -> Option<&Operand> {
        match self.arguments.iter().find(|(name, _)| name == parameter)?.1.as_slice() {
            [one] => Some(one),
            _ => None,
        }
    }

    /// Every operand.
    pub fn operands(&self) -> impl DoubleEndedIterator<Item = &Operand> {
        self.arguments.iter().flat_map(|(_, operands)| operands)
    }

    /// The state that it reads or writes.
    pub fn state(&self) -> Option<&Arc<str>> {
        self.operands().find_map(|operand| match operand {
            Operand::Constant(Value::State(name)) => Some(name),
            _ => None,
        })
    }

    /// Declared type of the first result.
    pub fn dtype(&self) -> DataType {
        self.types.first().map_or(DataType::Fp32, |ty| ty.dtype)
    }
}

/// Where a result of a step goes.
#[derive(Clone)]
pub(super) struct Output {
    pub name: String,
    pub slot: usize,
    /// Whether anything reads it.
    pub read: bool,
}

/// What a function is made of.
pub(super) enum Node {
    /// One op.
    Step(Step),
    /// Several that are carried out as one.
    Group(Group),
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
}

/// Sees the results of ops by name, as they are computed.
pub(super) type Observer<'a> = &'a mut dyn FnMut(&str, &Tensor);

/// A function that is being run.
pub(super) struct Frame<'a> {
    /// The function's name.
    pub function: &'a str,
    /// Values that have been computed and are still needed.
    pub slots: Vec<Option<Arc<Tensor>>>,
    /// The states.
    pub state: &'a mut State,
    /// Whether values declared fp16 are rounded.
    pub half: bool,
    /// Is shown results.
    pub observer: Option<Observer<'a>>,
    /// Is told how long steps take.
    pub profile: Option<&'a mut Profile>,
}

impl Frame<'_> {
    /// Carries out a node.
    pub fn node(&mut self, node: &Node) -> Result<(), ExecError> {
        match node {
            Node::Step(step) => self.timed(&step.operator, |frame| frame.step(step)),
            Node::Group(group) => {
                let done = self.timed(group.name(), |frame| group.run(frame));
                // in any unforeseen case the ops are carried out as they stand
                if done {
                    Ok(())
                } else {
                    group.steps.iter().try_for_each(|step| self.timed(&step.operator, |f| f.step(step)))
                }
            }
        }
    }

    fn timed<R>(&mut self, operator: &str, body: impl FnOnce(&mut Self) -> R) -> R {
        if self.profile.is_none() {
            return body(self);
        }
        let start = Instant::now();
        let result = body(self);
        if let Some(profile) = &mut self.profile {
            profile.add(operator, start.elapsed());
        }
        result
    }

    fn step(&mut self, step: &Step) -> Result<(), ExecError> {
        let function = self.function;
        let wrong = |problem: String| ExecError::Op {
            function: function.to_owned(),
            op: step.name.clone(),
            operator: step.operator.clone(),
            problem,
        };
        let mut arguments = Vec::with_capacity(step.arguments.len());
        for (parameter, operands) in &step.arguments {
            let values: Option<Vec<Value>> = operands.iter().map(|operand| self.fetch(operand)).collect();
            let values = values.ok_or_else(|| wrong(format!("parameter `{parameter}` has not been computed")))?;
            arguments.push((parameter.as_str(), values));
        }
        let mut call = Call { arguments, types: &step.types, state: self.state, takes_state: step.takes_state };
        let results = (step.row.kernel)(&mut call).map_err(wrong)?;
        drop(call);
        if results.len() != step.outputs.len() {
            return Err(wrong(format!("it gives {} results, {} are declared", results.len(), step.outputs.len())));
        }
        for ((mut result, output), ty) in results.into_iter().zip(&step.outputs).zip(&step.types) {
            if !step.row.moves && self.rounds(ty.dtype) {
                self.round(Arc::make_mut(&mut result), ty.dtype);
            }
            self.give(output, result);
        }
        Ok(())
    }

    /// Puts a result where it goes.
    pub fn give(&mut self, output: &Output, result: Arc<Tensor>) {
        if let Some(observer) = &mut self.observer {
            observer(&output.name, &result);
        }
        if output.read {
            self.slots[output.slot] = Some(result);
        }
    }

    /// The value of an operand; moved out of its slot if this is its last use.
    pub fn fetch(&mut self, operand: &Operand) -> Option<Value> {
        match operand {
            Operand::Constant(value) => Some(value.clone()),
            Operand::Slot { slot, last: true } => self.slots[*slot].take().map(Value::Tensor),
            Operand::Slot { slot, last: false } => self.slots[*slot].clone().map(Value::Tensor),
        }
    }

    /// The tensor of an operand, which stays where it is.
    pub fn peek(&self, operand: &Operand) -> Option<Arc<Tensor>> {
        match operand {
            Operand::Constant(Value::Tensor(tensor)) => Some(tensor.clone()),
            Operand::Constant(_) => None,
            Operand::Slot { slot, .. } => self.slots[*slot].clone(),
        }
    }

    /// Whether values of this type are rounded.
    pub fn rounds(&self, dtype: DataType) -> bool {
        self.half && dtype == DataType::Fp16
    }

    /// Rounds a tensor declared of a type.
    pub fn round(&self, tensor: &mut Tensor, dtype: DataType) {
        if let TensorData::F32(values) = &mut tensor.data
            && self.rounds(dtype)
        {
            round_to_f16(values);
        }
    }
}
