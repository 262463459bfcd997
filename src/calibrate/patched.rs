//! A backend one of whose functions can be another for a while: the same model with some weights in another format.

use std::sync::{Arc, Mutex, PoisonError};

use anec_base::Result;
use anec_bundle::Bundle;
use anec_exec::{Executable, State, Tensor};
use anec_runtime::backend::{BatchMember, BatchResult, FunctionCall, Phase, run_anew, run_each, run_in_turn};
use anec_runtime::{Backend, CpuBackend, RuntimeError, Sequence, Watch};

/// The function that stands for another.
struct Stand {
    /// The index of the other in `bundle.json`.
    function: usize,
    /// Names of the inputs, in the order of the other's.
    inputs: Vec<String>,
    executable: Executable,
}

/// What stands for what, at the moment.
#[derive(Clone, Default)]
pub struct Patch(Arc<Mutex<Option<Arc<Stand>>>>);

impl Patch {
    /// Lets an executable stand for a function in all texts that begin from here on. It has the same inputs, in the same
    /// order, and the same outputs.
    pub fn set(&self, function: usize, inputs: Vec<String>, executable: Executable) {
        self.put(Some(Arc::new(Stand { function, inputs, executable })));
    }

    /// Every function is itself again.
    pub fn clear(&self) {
        self.put(None);
    }

    fn put(&self, stand: Option<Arc<Stand>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = stand;
    }
}

/// The CPU executor, patched.
pub struct PatchedBackend {
    inner: CpuBackend,
    patch: Patch,
}

impl PatchedBackend {
    /// Functions run on `inner`, but for the patched one.
    pub fn new(inner: CpuBackend, patch: Patch) -> Self {
        PatchedBackend { inner, patch }
    }
}

impl Backend for PatchedBackend {
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
        let stand = self.patch.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let stand = stand.map(|stand| (stand.executable.new_state(), stand));
        Ok(Box::new(Patched { inner: self.inner.sequence()?, stand }))
    }
}

struct Patched {
    inner: Box<dyn Sequence>,
    stand: Option<(State, Arc<Stand>)>,
}

impl Sequence for Patched {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        match &mut self.stand {
            Some((state, stand)) if stand.function == function => {
                let named: Vec<(&str, &Tensor)> =
                    stand.inputs.iter().map(String::as_str).zip(inputs.iter().copied()).collect();
                let outputs = stand.executable.run(&named, state)?;
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
        match &self.stand {
            Some((_, stand)) if stand.function == function => {
                let problem = "what stands for a function keeps its states to itself".to_owned();
                Err(RuntimeError::Backend { backend: "patched", problem }.into())
            }
            _ => self.inner.states(function),
        }
    }

    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()> {
        self.inner.set_states(function, values)
    }

    fn reset(&mut self) -> Result<()> {
        if let Some((state, stand)) = &mut self.stand {
            *state = stand.executable.new_state();
        }
        self.inner.reset()
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        Ok(None)
    }
}
