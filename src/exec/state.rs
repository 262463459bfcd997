//! The states of a sequence.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::tensor::Tensor;
use anec_mil::DataType;

/// The states of one sequence, by name. Functions that declare states of the same name share them. A clone is a
/// snapshot: buffers are copied when one of the two is written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    tensors: BTreeMap<String, Arc<Tensor>>,
}

impl State {
    /// The content of a state.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name).map(Arc::as_ref)
    }

    /// Puts a content in place of a state's own, or adds a state.
    pub fn set(&mut self, name: &str, tensor: Tensor) {
        self.tensors.insert(name.to_owned(), Arc::new(tensor));
    }

    /// Names, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Sets everything to zero.
    pub fn reset(&mut self) {
        for tensor in self.tensors.values_mut() {
            *tensor = Arc::new(Tensor::zeros(DataType::Fp16, tensor.shape.clone()));
        }
    }

    /// Adds the states of another that this one doesn't have, so that several executables can run on it.
    pub fn merge(&mut self, other: State) {
        for (name, tensor) in other.tensors {
            self.tensors.entry(name).or_insert(tensor);
        }
    }

    /// The buffer of a state, kept here as well.
    pub(super) fn share(&self, name: &str) -> Option<Arc<Tensor>> {
        self.tensors.get(name).cloned()
    }

    /// The buffer of a state, which is missing until it is put back.
    pub(super) fn take(&mut self, name: &str) -> Option<Arc<Tensor>> {
        self.tensors.remove(name)
    }

    /// Puts a buffer in.
    pub(super) fn put(&mut self, name: &str, tensor: Arc<Tensor>) {
        self.tensors.insert(name.to_owned(), tensor);
    }
}
