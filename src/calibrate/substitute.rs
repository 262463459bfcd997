//! Backend that can replace one function by another, such as the same function with some weights in another format.

use std::sync::{Arc, Mutex, PoisonError};

use anec_base::Result;
use anec_bundle::Bundle;
use anec_exec::{Executable, State, Tensor};
use anec_runtime::{
    Backend, BatchMember, BatchResult, CpuBackend, FunctionCall, Phase, RuntimeError, Sequence, Watch, run_each,
    run_in_turn,
};

/// Replacement of a function.
struct Substitute {
    /// Index of the replaced function in `bundle.json`.
    function: usize,
    /// Names of the inputs, in the order of the replaced function's.
    inputs: Vec<String>,
    executable: Executable,
}

impl Substitute {
    /// Returns the inputs with their names.
    fn named<T>(&self, inputs: impl IntoIterator<Item = T>) -> Vec<(&str, T)> {
        self.inputs.iter().map(String::as_str).zip(inputs).collect()
    }
}

/// Handle for setting and clearing the replacement.
#[derive(Clone, Default)]
pub struct SubstituteHandle(Arc<Mutex<Option<Arc<Substitute>>>>);

impl SubstituteHandle {
    /// Replaces a function in all sequences from now on. The executable must have the same inputs and outputs in the
    /// same order.
    pub fn set(&self, function: usize, inputs: Vec<String>, executable: Executable) {
        self.put(Some(Arc::new(Substitute { function, inputs, executable })));
    }

    /// Removes the replacement.
    pub fn clear(&self) {
        self.put(None);
    }

    fn put(&self, substitute: Option<Arc<Substitute>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = substitute;
    }

    /// Returns the replacement of a function.
    fn of(&self, function: usize) -> Option<Arc<Substitute>> {
        let substitute = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        substitute.clone().filter(|substitute| substitute.function == function)
    }
}

/// CPU executor with a replaceable function.
pub struct SubstitutingBackend {
    inner: CpuBackend,
    substitute: SubstituteHandle,
}

impl SubstitutingBackend {
    /// Returns a backend that runs functions on `inner`, except for the replaced one.
    pub fn new(inner: CpuBackend, substitute: SubstituteHandle) -> Self {
        SubstitutingBackend { inner, substitute }
    }
}

impl Backend for SubstitutingBackend {
    fn prepare(&self, function: usize) -> Result<()> {
        self.inner.prepare(function)
    }

    fn has_room(&self, _function: usize) -> bool {
        true
    }

    fn of_bundle(&self, _bundle: &Bundle) -> Result<Option<Box<dyn Backend>>> {
        Ok(None)
    }

    fn run_batch(&self, function: usize, members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
        run_each(function, members)
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(SubstitutingSequence {
            inner: self.inner.sequence()?,
            substitute: self.substitute.clone(),
            states: None,
        }))
    }
}

struct SubstitutingSequence {
    inner: Box<dyn Sequence>,
    substitute: SubstituteHandle,
    /// States of the last replacement that ran since the sequence was reset.
    states: Option<(Arc<Substitute>, State)>,
}

impl SubstitutingSequence {
    /// Returns the replacement of a function with its states.
    fn replacement(&mut self, function: usize) -> Option<(&Substitute, &mut State)> {
        let current = self.substitute.of(function)?;
        if !self.states.as_ref().is_some_and(|(known, _)| Arc::ptr_eq(known, &current)) {
            let state = current.executable.new_state();
            self.states = Some((current, state));
        }
        self.states.as_mut().map(|(substitute, state)| (&**substitute, state))
    }
}

impl Sequence for SubstitutingSequence {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        let Some((substitute, state)) = self.replacement(function) else {
            return self.inner.run(function, inputs, watch);
        };
        let outputs = substitute.executable.run(&substitute.named(inputs.iter().copied()), state)?;
        Ok(outputs.into_iter().map(|(_, tensor)| tensor).collect())
    }

    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
        let Some((substitute, state)) = self.replacement(call.function) else {
            return self.inner.run_into(call, outputs);
        };
        Ok(substitute.executable.run_into(&substitute.named(call.inputs), state, outputs)?)
    }

    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
        run_in_turn(self, calls, outputs)
    }

    fn enter(&mut self, _phase: Phase) {}

    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>> {
        if self.substitute.of(function).is_some() {
            let problem = "states of a substituted function can't be read".to_owned();
            return Err(RuntimeError::Backend { backend: "substitute", problem }.into());
        }
        self.inner.states(function)
    }

    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()> {
        self.inner.set_states(function, values)
    }

    fn reset(&mut self) -> Result<()> {
        // frees a replacement that was cleared
        self.states = None;
        self.inner.reset()
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        Ok(None)
    }
}
