//! States of a sequence.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::pool::Pool;
use super::state_buffer::StateBuffer;
use super::tensor::Tensor;

/// States of one sequence, by name. Functions that declare states of the same name share them. A clone is a snapshot:
/// buffers are copied on write.
#[derive(Clone, Default)]
pub struct State {
    contents: BTreeMap<String, Content>,
}

/// Content of a state.
#[derive(Clone, Default)]
struct Content {
    /// Missing while a run modifies it.
    buffer: Option<StateBuffer>,
    /// Slots of a cache `[…, S, D]` that may be non-zero; `None` if unknown.
    written: Option<Range<usize>>,
}

impl Content {
    /// Sets all elements to zero, in place if the buffer isn't shared.
    fn clear(&mut self) {
        if let Some(buffer) = &mut self.buffer {
            buffer.clear(self.written.clone());
            self.written = Some(0..0);
        }
    }
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.contents.keys().eq(other.contents.keys()) && self.buffers().eq(other.buffers())
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.contents.keys().zip(self.buffers())).finish()
    }
}

impl State {
    /// Buffers, in the order of the names.
    fn buffers(&self) -> impl Iterator<Item = Option<&StateBuffer>> {
        self.contents.values().map(|content| content.buffer.as_ref())
    }

    /// Content of a state: the buffer itself, unless it is in half precision.
    pub fn get(&self, name: &str) -> Option<Arc<Tensor>> {
        self.read(name, &mut Pool::default())
    }

    /// Sets the content of a state, which is added if it is missing.
    pub fn set(&mut self, name: &str, tensor: Tensor) {
        self.put(name, Arc::new(tensor));
    }

    /// Stores the floats of a state in half precision from now on: written values are rounded to fp16.
    pub fn hold_in_half_precision(&mut self, name: &str) {
        if let Some(content) = self.contents.get_mut(name) {
            let is_zero = content.written.as_ref().is_some_and(Range::is_empty);
            content.buffer = content.buffer.take().map(|buffer| buffer.in_half_precision(is_zero));
        }
    }

    /// Adds a state of zeros.
    pub(super) fn add_zeros(&mut self, name: &str, zeros: Tensor) {
        self.contents.insert(
            name.to_owned(),
            Content { buffer: Some(StateBuffer::Tensor(Arc::new(zeros))), written: Some(0..0) },
        );
    }

    /// Names, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.contents.iter().filter(|(_, content)| content.buffer.is_some()).map(|(name, _)| name.as_str())
    }

    /// Sets everything to zero.
    pub fn reset(&mut self) {
        self.contents.values_mut().for_each(Content::clear);
    }

    /// Returns this memory as zeros for another sequence; only written slots are cleared. `None` if a part is shared,
    /// or missing after an error.
    pub fn into_zeros(mut self) -> Option<State> {
        let own = |content: &mut Content| content.buffer.as_mut().is_some_and(StateBuffer::is_own);
        self.contents.values_mut().all(own).then(|| {
            self.reset();
            self
        })
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.buffers().flatten().map(StateBuffer::bytes).sum()
    }

    /// Adds states of `other` that are missing here, so that several executables can run on one state.
    pub fn merge(&mut self, other: State) {
        for (name, content) in other.contents {
            let own = self.contents.entry(name).or_default();
            if own.buffer.is_none() {
                *own = content;
            }
        }
    }

    /// Buffer of a state, shared with the caller.
    pub(super) fn share(&self, name: &str) -> Option<StateBuffer> {
        self.contents.get(name)?.buffer.clone()
    }

    /// Rows, slots and width of a state that is a cache `[1, rows, S, D]`.
    pub(super) fn cache_sizes(&self, name: &str) -> Option<[usize; 3]> {
        match *self.contents.get(name)?.buffer.as_ref()?.shape() {
            [1, rows, slots, width] => Some([rows, slots, width]),
            _ => None,
        }
    }

    /// Takes the buffer of a state, which is missing until `put_back`.
    pub(super) fn take(&mut self, name: &str) -> Option<StateBuffer> {
        self.contents.get_mut(name)?.buffer.take()
    }

    /// Returns the buffer of a cache of which only `slots` were written.
    pub(super) fn put_back(&mut self, name: &str, buffer: StateBuffer, slots: Range<usize>) {
        let Some(content) = self.contents.get_mut(name) else { return };
        content.buffer = Some(buffer);
        content.written = match content.written.take() {
            Some(written) if written.is_empty() => Some(slots),
            Some(written) => Some(written.start.min(slots.start)..written.end.max(slots.end)),
            None => None,
        };
    }

    /// Content of a state.
    pub(super) fn read(&self, name: &str, pool: &mut Pool) -> Option<Arc<Tensor>> {
        Some(self.contents.get(name)?.buffer.as_ref()?.tensor(pool))
    }

    /// Takes the content of a state for modification in place; it is missing until `put`.
    pub(super) fn read_to_write(&mut self, name: &str, pool: &mut Pool) -> Option<Arc<Tensor>> {
        let buffer = &mut self.contents.get_mut(name)?.buffer;
        match buffer.take() {
            Some(StateBuffer::Tensor(tensor)) => Some(tensor),
            half => {
                *buffer = half;
                Some(buffer.as_ref()?.tensor(pool))
            }
        }
    }

    /// Sets the content of a state; returns the replaced tensor.
    pub(super) fn put(&mut self, name: &str, tensor: Arc<Tensor>) -> Option<Arc<Tensor>> {
        let content = match self.contents.get_mut(name) {
            Some(content) => content,
            None => self.contents.entry(name.to_owned()).or_default(),
        };
        content.written = None;
        match &mut content.buffer {
            Some(buffer) => Some(buffer.replace(tensor)),
            None => {
                content.buffer = Some(StateBuffer::Tensor(tensor));
                None
            }
        }
    }
}
