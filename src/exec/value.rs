//! What an argument of an op is when the op runs.

use std::sync::Arc;

use super::tensor::Tensor;
use super::weight::LoadedWeight;

/// What an argument is when an op runs.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// A tensor; shared as long as another op needs it.
    Tensor(Arc<Tensor>),
    /// A large constant in its stored form.
    Weight(Arc<LoadedWeight>),
    /// A string constant.
    Text(Arc<str>),
    /// A state, by name.
    State(Arc<str>),
}

impl Value {
    /// As a tensor, which strings and states aren't.
    pub fn tensor(&self) -> Option<&Arc<Tensor>> {
        match self {
            Value::Tensor(tensor) => Some(tensor),
            Value::Weight(weight) => Some(weight.dense()),
            Value::Text(_) | Value::State(_) => None,
        }
    }
}
