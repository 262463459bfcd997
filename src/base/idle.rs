//! What nobody uses for the moment, for whoever needs it next.

use std::sync::{Mutex, PoisonError};

/// Things that were given back, up to so many bytes in all.
pub struct IdlePool<T> {
    kept: Mutex<Vec<T>>,
    most_bytes: usize,
    bytes_of: fn(&T) -> usize,
}

impl<T> IdlePool<T> {
    /// Keeps things as long as they have no more bytes together, by what `bytes_of` says of each.
    pub fn new(most_bytes: usize, bytes_of: fn(&T) -> usize) -> Self {
        IdlePool { kept: Mutex::default(), most_bytes, bytes_of }
    }

    /// The one that was given back last.
    pub fn take(&self) -> Option<T> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Keeps one, or frees it if there are too many.
    pub fn give(&self, item: T) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.iter().chain([&item]).map(self.bytes_of).sum::<usize>() <= self.most_bytes {
            kept.push(item);
        }
    }

    /// How many are kept.
    pub fn count(&self) -> usize {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}
