//! State of a run, and execution of its steps.

use std::sync::Arc;
use std::time::Instant;

use super::error::ExecError;
use super::kernel::Call;
use super::operand::Operand;
use super::profile::ExecProfile;
use super::state::State;
use super::step::{Output, Step};
use super::tensor::{Tensor, TensorData};
use super::value::Value;
use super::workspace::Workspace;
use anec_kernels::round::round_to_f16;
use anec_mil::DataType;

/// Observer of op results, by name.
pub(super) type ValueObserver<'a> = &'a mut dyn FnMut(&str, &Tensor);

/// State of one run of a function.
pub(super) struct Frame<'a> {
    pub function: &'a str,
    /// Values, and tensors for reuse.
    pub workspace: Workspace,
    /// States of the sequence.
    pub state: &'a mut State,
    /// Whether values declared fp16 are rounded.
    pub half: bool,
    pub observer: Option<ValueObserver<'a>>,
    pub profile: Option<&'a mut ExecProfile>,
}

impl Frame<'_> {
    /// Runs `body` and adds its time to the profile.
    pub fn timed<R>(&mut self, operator: &'static str, body: impl FnOnce(&mut Self) -> R) -> R {
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

    /// Runs a step.
    pub fn step(&mut self, step: &Step) -> Result<(), ExecError> {
        self.timed(step.operator, |frame| frame.run(step)).map_err(|problem| self.failed(step, problem))
    }

    /// Error of a step.
    pub fn failed(&self, step: &Step, problem: String) -> ExecError {
        ExecError::Op {
            function: self.function.to_owned(),
            op: step.name.clone(),
            operator: step.operator.to_owned(),
            problem,
        }
    }

    fn run(&mut self, step: &Step) -> Result<(), String> {
        self.fetch_arguments(step)?;
        self.compute(step)?;
        self.store_results(step)
    }

    /// Fetches the arguments of a step.
    pub fn fetch_arguments(&mut self, step: &Step) -> Result<(), String> {
        for operand in &step.operands {
            let value = self.fetch(operand).ok_or("an argument has not been computed")?;
            self.workspace.values.push(Some(value));
        }
        Ok(())
    }

    /// Runs the kernel of a step whose arguments are fetched.
    pub fn compute(&mut self, step: &Step) -> Result<(), String> {
        let Workspace { values, results, pool, .. } = &mut self.workspace;
        let mut call = Call { values, state: self.state, takes_state: step.takes_state, results };
        step.kernel.run(&mut call, pool)
    }

    /// Stores the results of a step's kernel.
    pub fn store_results(&mut self, step: &Step) -> Result<(), String> {
        let Workspace { values, pool, .. } = &mut self.workspace;
        for value in values.drain(..).flatten() {
            if let Value::Tensor(tensor) = value {
                pool.recycle(tensor);
            }
        }
        let mut results = std::mem::take(&mut self.workspace.results);
        if results.len() != step.outputs.len() {
            return Err(format!("it gives {} results, {} are declared", results.len(), step.outputs.len()));
        }
        for ((mut result, output), ty) in results.drain(..).zip(&step.outputs).zip(&step.types) {
            if !step.moves && self.rounds(ty.dtype) {
                self.round(&mut result);
            }
            self.store(output, result);
        }
        self.workspace.results = results;
        Ok(())
    }

    /// Stores a result in its slot.
    pub fn store(&mut self, output: &Output, result: Arc<Tensor>) {
        if let Some(observer) = &mut self.observer {
            observer(&output.name, &result);
        }
        let replaced = match output.read {
            true => self.workspace.slots[output.slot].replace(result),
            false => Some(result),
        };
        if let Some(tensor) = replaced {
            self.workspace.pool.recycle(tensor);
        }
    }

    /// Frees the value of a slot.
    pub fn free(&mut self, slot: usize) {
        if let Some(tensor) = self.workspace.slots[slot].take() {
            self.workspace.pool.recycle(tensor);
        }
    }

    /// Value of an operand, moved out of its slot if this is its last use.
    pub fn fetch(&mut self, operand: &Operand) -> Option<Value> {
        match operand {
            Operand::Constant(value) => Some(value.clone()),
            Operand::Slot { slot, last: true } => self.workspace.slots[*slot].take().map(Value::Tensor),
            Operand::Slot { slot, last: false } => self.workspace.slots[*slot].clone().map(Value::Tensor),
        }
    }

    /// Tensor of an operand, left in its slot.
    pub fn peek(&self, operand: &Operand) -> Option<Arc<Tensor>> {
        match operand {
            Operand::Constant(Value::Tensor(tensor)) => Some(tensor.clone()),
            Operand::Constant(Value::Weight(weight)) => Some(weight.dense().clone()),
            Operand::Constant(_) => None,
            Operand::Slot { slot, .. } => self.workspace.slots[*slot].clone(),
        }
    }

    /// Returns whether values of this type are rounded.
    pub fn rounds(&self, dtype: DataType) -> bool {
        self.half && dtype == DataType::Fp16
    }

    pub fn round(&mut self, tensor: &mut Arc<Tensor>) {
        if tensor.floats().is_some()
            && let TensorData::F32(values) = &mut self.workspace.pool.make_mut(tensor).data
        {
            round_to_f16(values);
        }
    }
}
