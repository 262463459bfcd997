//! A function that is being run, and carrying out its steps.

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

/// Sees the results of ops by name, as they are computed.
pub(super) type Observer<'a> = &'a mut dyn FnMut(&str, &Tensor);

/// A function that is being run.
pub(super) struct Frame<'a> {
    /// The function's name.
    pub function: &'a str,
    /// The executable's number.
    pub executable: u64,
    /// Values, and tensors to be used again.
    pub workspace: Workspace,
    /// The states.
    pub state: &'a mut State,
    /// Whether values declared fp16 are rounded.
    pub half: bool,
    /// Is shown results.
    pub observer: Option<Observer<'a>>,
    /// Is told how long steps take.
    pub profile: Option<&'a mut ExecProfile>,
}

impl Frame<'_> {
    /// Does something, and tells the profile how long it took.
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

    /// Carries out a step.
    pub fn step(&mut self, step: &Step) -> Result<(), ExecError> {
        self.timed(step.operator, |frame| frame.run(step)).map_err(|problem| self.failed(step, problem))
    }

    /// A step can't be carried out.
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
        self.give_results(step)
    }

    /// Makes the arguments of a step ready.
    pub fn fetch_arguments(&mut self, step: &Step) -> Result<(), String> {
        for operand in &step.operands {
            let value = self.fetch(operand).ok_or("an argument has not been computed")?;
            self.workspace.values.push(Some(value));
        }
        Ok(())
    }

    /// Runs the kernel of a step whose arguments are ready.
    pub fn compute(&mut self, step: &Step) -> Result<(), String> {
        if self.state.memo.is_some() && self.recall(step)? {
            return Ok(());
        }
        let Workspace { values, results, pool, .. } = &mut self.workspace;
        let mut call = Call { values, state: self.state, takes_state: step.takes_state, results };
        step.kernel.run(&mut call, pool)
    }

    /// Computes a product with a weight as far as it isn't remembered; gives false, with everything as it was, if the step
    /// is none or something else than the activations is computed.
    fn recall(&mut self, step: &Step) -> Result<bool, String> {
        let computed = step.operands.iter().filter(|operand| operand.slot().is_some()).count();
        let Some(memo) = self.state.memo.clone().filter(|_| computed == 1 && step.multiplies_weight()) else {
            return Ok(false);
        };
        let Workspace { values, results, pool, .. } = &mut self.workspace;
        let call = Call { values, state: self.state, takes_state: step.takes_state, results };
        let Some(product) = step.kernel.weight_product(&call)? else { return Ok(false) };
        let mut output = pool.filled(&product.shape, 0f32);
        let done = match Arc::get_mut(&mut output).map(|tensor| &mut tensor.data) {
            Some(TensorData::F32(out)) => memo.multiply((self.executable, step.place), &product, out),
            _ => false,
        };
        drop(product);
        match done {
            true => self.workspace.results.push(output),
            false => self.workspace.pool.recycle(output),
        }
        Ok(done)
    }

    /// Puts what a step's kernel gave where it goes.
    pub fn give_results(&mut self, step: &Step) -> Result<(), String> {
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
            self.give(output, result);
        }
        self.workspace.results = results;
        Ok(())
    }

    /// Puts a result where it goes.
    pub fn give(&mut self, output: &Output, result: Arc<Tensor>) {
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

    /// Gives up the value of a slot.
    pub fn free(&mut self, slot: usize) {
        if let Some(tensor) = self.workspace.slots[slot].take() {
            self.workspace.pool.recycle(tensor);
        }
    }

    /// The value of an operand; moved out of its slot if this is its last use.
    pub fn fetch(&mut self, operand: &Operand) -> Option<Value> {
        match operand {
            Operand::Constant(value) => Some(value.clone()),
            Operand::Slot { slot, last: true } => self.workspace.slots[*slot].take().map(Value::Tensor),
            Operand::Slot { slot, last: false } => self.workspace.slots[*slot].clone().map(Value::Tensor),
        }
    }

    /// The tensor of an operand, which stays where it is.
    pub fn peek(&self, operand: &Operand) -> Option<Arc<Tensor>> {
        match operand {
            Operand::Constant(Value::Tensor(tensor)) => Some(tensor.clone()),
            Operand::Constant(Value::Weight(weight)) => Some(weight.dense().clone()),
            Operand::Constant(_) => None,
            Operand::Slot { slot, .. } => self.workspace.slots[*slot].clone(),
        }
    }

    /// Whether values of this type are rounded.
    pub fn rounds(&self, dtype: DataType) -> bool {
        self.half && dtype == DataType::Fp16
    }

    /// Rounds a tensor to fp16.
    pub fn round(&mut self, tensor: &mut Arc<Tensor>) {
        if tensor.floats().is_some()
            && let TensorData::F32(values) = &mut self.workspace.pool.make_mut(tensor).data
        {
            round_to_f16(values);
        }
    }
}
