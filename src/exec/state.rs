//! The states of a sequence.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::memo::ProductMemo;
use super::tensor::Tensor;
use anec_mil::DataType;

/// The states of one sequence, by name. Functions that declare states of the same name share them. A clone is a
/// snapshot: buffers are copied when one of the two is written.
#[derive(Clone, Default)]
pub struct State {
    /// A state is missing while a run changes it.
    tensors: BTreeMap<String, Option<Arc<Tensor>>>,
    /// Where products are remembered.
    pub(super) memo: Option<Arc<ProductMemo>>,
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.tensors == other.tensors
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(&self.tensors).finish()
    }
}

impl State {
    /// The content of a state.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)?.as_deref()
    }

    /// Puts a content in place of a state's own, or adds a state.
    pub fn set(&mut self, name: &str, tensor: Tensor) {
        self.put(name, Arc::new(tensor));
    }

    /// Names, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().filter(|(_, tensor)| tensor.is_some()).map(|(name, _)| name.as_str())
    }

    /// From now on, products with weights are looked for in `memo` before they are computed, and put there. The results of
    /// runs are the same, bit for bit.
    pub fn remember(&mut self, memo: Arc<ProductMemo>) {
        self.memo = Some(memo);
    }

    /// Sets everything to zero.
    pub fn reset(&mut self) {
        for tensor in self.tensors.values_mut().flatten() {
            *tensor = Arc::new(Tensor::zeros(DataType::Fp16, tensor.shape.clone()));
        }
    }

    /// Adds the states of another that this one doesn't have, so that several executables can run on it.
    pub fn merge(&mut self, other: State) {
        for (name, tensor) in other.tensors {
            let own = self.tensors.entry(name).or_default();
            if own.is_none() {
                *own = tensor;
            }
        }
    }

    /// The buffer of a state, kept here as well.
    pub fn share(&self, name: &str) -> Option<Arc<Tensor>> {
        self.tensors.get(name).cloned().flatten()
    }

    /// The buffer of a state, which is missing until it is put back.
    pub(super) fn take(&mut self, name: &str) -> Option<Arc<Tensor>> {
        self.tensors.get_mut(name)?.take()
    }

    /// Puts a buffer in, and gives the one that it replaces.
    pub(super) fn put(&mut self, name: &str, tensor: Arc<Tensor>) -> Option<Arc<Tensor>> {
        match self.tensors.get_mut(name) {
            Some(place) => place.replace(tensor),
            None => self.tensors.insert(name.to_owned(), Some(tensor)).flatten(),
        }
    }
}
