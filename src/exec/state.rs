//! The states of a sequence.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::memo::ProductMemo;
use super::tensor::Tensor;

/// The states of one sequence, by name. Functions that declare states of the same name share them. A clone is a
/// snapshot: buffers are copied when one of the two is written.
#[derive(Clone, Default)]
pub struct State {
    contents: BTreeMap<String, Content>,
    /// Where products are remembered.
    pub(super) memo: Option<Arc<ProductMemo>>,
}

/// What a state holds.
#[derive(Clone, Default)]
struct Content {
    /// Missing while a run changes it.
    tensor: Option<Arc<Tensor>>,
    /// The slots, of a cache `[…, S, D]`, outside of which everything is zero; anything may be anywhere if there are none.
    written: Option<Range<usize>>,
}

impl Content {
    /// Makes everything zero, in place if nobody else has the buffer.
    fn clear(&mut self) {
        let Some(tensor) = &mut self.tensor else { return };
        match Arc::get_mut(tensor) {
            Some(tensor) => tensor.clear_slots(self.written.clone()),
            None => *tensor = Arc::new(Tensor::zeros_like(tensor)),
        }
        self.written = Some(0..0);
    }
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.contents.keys().eq(other.contents.keys()) && self.tensors().eq(other.tensors())
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.contents.keys().zip(self.tensors())).finish()
    }
}

impl State {
    /// The contents, in the order of the names.
    fn tensors(&self) -> impl Iterator<Item = Option<&Arc<Tensor>>> {
        self.contents.values().map(|content| content.tensor.as_ref())
    }

    /// The content of a state.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.contents.get(name)?.tensor.as_deref()
    }

    /// Puts a content in place of a state's own, or adds a state.
    pub fn set(&mut self, name: &str, tensor: Tensor) {
        self.put(name, Arc::new(tensor));
    }

    /// Adds a state of zeros.
    pub(super) fn add_zeros(&mut self, name: &str, zeros: Tensor) {
        self.contents.insert(name.to_owned(), Content { tensor: Some(Arc::new(zeros)), written: Some(0..0) });
    }

    /// Names, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.contents.iter().filter(|(_, content)| content.tensor.is_some()).map(|(name, _)| name.as_str())
    }

    /// From now on, products with weights are looked for in `memo` before they are computed, and put there. The results of
    /// runs are the same, bit for bit.
    pub fn remember(&mut self, memo: Arc<ProductMemo>) {
        self.memo = Some(memo);
    }

    /// Sets everything to zero.
    pub fn reset(&mut self) {
        self.contents.values_mut().for_each(Content::clear);
    }

    /// The same memory, all zeros, for another sequence: what was written is cleared, which is less than all of a cache. `None`
    /// if somebody else has a part of it, or a part is missing after an error.
    pub fn emptied(mut self) -> Option<State> {
        let own = |content: &mut Content| content.tensor.as_mut().is_some_and(|tensor| Arc::get_mut(tensor).is_some());
        self.contents.values_mut().all(own).then(|| {
            self.reset();
            self.memo = None;
            self
        })
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.tensors().flatten().map(|tensor| tensor.data.bytes()).sum()
    }

    /// Adds the states of another that this one doesn't have, so that several executables can run on it.
    pub fn merge(&mut self, other: State) {
        for (name, content) in other.contents {
            let own = self.contents.entry(name).or_default();
            if own.tensor.is_none() {
                *own = content;
            }
        }
    }

    /// The buffer of a state, kept here as well.
    pub fn share(&self, name: &str) -> Option<Arc<Tensor>> {
        self.contents.get(name)?.tensor.clone()
    }

    /// The buffer of a state, which is missing until it is put back.
    pub(super) fn take(&mut self, name: &str) -> Option<Arc<Tensor>> {
        self.contents.get_mut(name)?.tensor.take()
    }

    /// Puts a buffer in, and gives the one that it replaces.
    pub(super) fn put(&mut self, name: &str, tensor: Arc<Tensor>) -> Option<Arc<Tensor>> {
        let content = match self.contents.get_mut(name) {
            Some(content) => content,
            None => self.contents.entry(name.to_owned()).or_default(),
        };
        content.written = None;
        content.tensor.replace(tensor)
    }

    /// Puts back the buffer of a cache, of which no other slots than these were written.
    pub(super) fn put_back(&mut self, name: &str, tensor: Arc<Tensor>, slots: Range<usize>) {
        let Some(content) = self.contents.get_mut(name) else { return };
        content.tensor = Some(tensor);
        content.written = match content.written.take() {
            Some(written) if written.is_empty() => Some(slots),
            Some(written) => Some(written.start.min(slots.start)..written.end.max(slots.end)),
            None => None,
        };
    }
}
