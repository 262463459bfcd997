//! The states of a text: those that the backend keeps, and those that functions take as inputs and give as outputs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::backend::{Sequence, Watch};
use super::inputs::shape_of;
use super::prepared::Prepared;
use anec_base::Result;
use anec_bundle::FunctionEntry;
use anec_bundle::{Port, PortRole};
use anec_exec::Tensor;
use anec_mil::DataType;

/// All that a text carries from call to call.
pub(super) struct States {
    /// What the backend keeps, and runs the functions on.
    pub(super) sequence: Box<dyn Sequence>,
    /// What functions gave last, by the id of the state. What isn't there is zero.
    given: BTreeMap<String, Arc<Tensor>>,
}

impl States {
    /// Those of a new text.
    pub(super) fn new(sequence: Box<dyn Sequence>) -> Self {
        States { sequence, given: BTreeMap::new() }
    }

    /// What the state of an input holds.
    pub(super) fn input(&self, id: &str, port: &Port) -> Arc<Tensor> {
        let zeros = || Arc::new(Tensor::zeros(DataType::Fp16, shape_of(port, 1)));
        self.given.get(id).cloned().unwrap_or_else(zeros)
    }

    /// Runs a function and keeps the states among its outputs, of which only the shapes stay where they were.
    pub(super) fn run(
        &mut self,
        entry: &FunctionEntry,
        prepared: &Prepared,
        watch: Option<Watch<'_>>,
    ) -> Result<Vec<Tensor>> {
        let mut outputs = self.sequence.run(prepared.function, &prepared.call().inputs, watch)?;
        for (port, output) in entry.outputs.iter().zip(&mut outputs) {
            if let PortRole::State { id, .. } = &port.role {
                let emptied = Tensor::new(output.shape.clone(), Vec::<f32>::new());
                self.given.insert(id.clone(), Arc::new(std::mem::replace(output, emptied)));
            }
        }
        Ok(outputs)
    }

    /// All are zero again.
    pub(super) fn reset(&mut self) -> Result<()> {
        self.given.clear();
        self.sequence.reset()
    }

    /// Those of a text that begins likewise; nothing where the backend can't copy its own.
    pub(super) fn fork(&self) -> Result<Option<States>> {
        let given = self.given.clone();
        Ok(self.sequence.fork()?.map(|sequence| States { sequence, given }))
    }
}
