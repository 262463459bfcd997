//! What a run works with, kept from run to run so that the next one finds it.

use std::sync::Arc;

use super::pool::Pool;
use super::tensor::Tensor;
use super::value::Value;

/// Values of a run, and room for the arguments and results of one step.
#[derive(Default)]
pub(super) struct Workspace {
    /// Values that have been computed and are still needed.
    pub slots: Vec<Option<Arc<Tensor>>>,
    /// Arguments of a step.
    pub values: Vec<Option<Value>>,
    /// Results of a step.
    pub results: Vec<Arc<Tensor>>,
    /// Tensors that nobody needs.
    pub pool: Pool,
}

impl Workspace {
    /// Makes room for the values of a function.
    pub fn begin(&mut self, slots: usize) {
        self.pool.begin_run();
        self.clear();
        self.slots.resize(slots, None);
    }

    /// Gives up all values.
    pub fn clear(&mut self) {
        for tensor in self.slots.drain(..).flatten().chain(self.results.drain(..)) {
            self.pool.recycle(tensor);
        }
        for value in self.values.drain(..).flatten() {
            if let Value::Tensor(tensor) = value {
                self.pool.recycle(tensor);
            }
        }
    }
}
