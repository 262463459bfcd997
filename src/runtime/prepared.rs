//! A call that is ready to be made.

use std::sync::Arc;

use super::backend::FunctionCall;
use anec_exec::Tensor;

/// A call of a function with the tensors that it needs.
pub(super) struct Prepared {
    /// The function's index in the bundle.
    pub(super) function: usize,
    /// Its inputs, in the order of the function's ports.
    pub(super) inputs: Vec<Arc<Tensor>>,
}

impl Prepared {
    /// The call, borrowed.
    pub(super) fn call(&self) -> FunctionCall<'_> {
        FunctionCall { function: self.function, inputs: self.inputs.iter().map(Arc::as_ref).collect() }
    }
}
