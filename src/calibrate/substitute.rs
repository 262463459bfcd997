//! Backend that can replace one function by another, such as the same function with some weights in another format.

use std::sync::{Arc, Mutex, PoisonError};

use anec_base::Result;
use anec_bundle::Bundle;
use anec_exec::{Executable, State, Tensor};
use anec_runtime::{
    Backend, BatchMember, BatchResult, CpuBackend, FunctionCall, Phase, RuntimeError, Sequence, Watch, run_anew,
    run_each, run_in_turn,
};

/// Replacement of a function.
struct Substitute {
    /// Index of the replaced function in `bundle.json`.
    function: usize,
    /// Names of the inputs, in the order of the replaced function's.
    inputs: Vec<String>,
    executable: Executable,
}

/// Handle for setting and clearing the replacement.
#[derive(Clone, Default)]
pub struct SubstituteHandle(Arc<Mutex<Option<Arc<Substitute>>>>);

impl SubstituteHandle {
    /// Replaces a function in all sequences that start from now on. The executable must have the same inputs and
    /// outputs in the same order.
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
        let substitute = self.substitute.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let substitute = substitute.map(|substitute| (substitute.executable.new_state(), substitute));
        Ok(Box::new(SubstitutingSequence { inner: self.inner.sequence()?, substitute }))
    }
}

struct SubstitutingSequence {
    inner: Box<dyn Sequence>,
    substitute: Option<(State, Arc<Substitute>)>,
}

impl Sequence for SubstitutingSequence {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        match &mut self.substitute {
            Some((state, substitute)) if substitute.function == function => {
                let named: Vec<(&str, &Tensor)> =
                    substitute.inputs.iter().map(String::as_str).zip(inputs.iter().copied()).collect();
                let outputs = substitute.executable.run(&named, state)?;
                Ok(outputs.into_iter().map(|(_, tensor)| tensor).collect())
            }
            _ => self.inner.run(function, inputs, watch),
        }
    }

    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
        run_anew(self, call, outputs)
    }

    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
        run_in_turn(self, calls, outputs)
    }

    fn enter(&mut self, _phase: Phase) {}

    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>> {
        match &self.substitute {
            Some((_, substitute)) if substitute.function == function => {
                let problem = "states of a substituted function can't be read".to_owned();
                Err(RuntimeError::Backend { backend: "substitute", problem }.into())
            }
            _ => self.inner.states(function),
        }
    }

    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()> {
        self.inner.set_states(function, values)
    }

    fn reset(&mut self) -> Result<()> {
        if let Some((state, substitute)) = &mut self.substitute {
            *state = substitute.executable.new_state();
        }
        self.inner.reset()
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        Ok(None)
    }
}
