//! Arguments of ops at run time.

use std::sync::Arc;

use super::tensor::Tensor;
use super::weight::LoadedWeight;

/// Argument of an op at run time.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// Tensor, shared while another op needs it.
    Tensor(Arc<Tensor>),
    /// Large constant in its stored form.
    Weight(Arc<LoadedWeight>),
    /// String constant.
    Text(Arc<str>),
    /// Name of a state.
    State(Arc<str>),
}

impl Value {
    /// Tensor of the value; strings and states have none.
    pub fn tensor(&self) -> Option<&Arc<Tensor>> {
        match self {
            Value::Tensor(tensor) => Some(tensor),
            Value::Weight(weight) => Some(weight.dense()),
            Value::Text(_) | Value::State(_) => None,
        }
    }
}
