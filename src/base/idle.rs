//! Pool of idle objects for reuse.

use std::sync::{Mutex, PoisonError};

/// Returned objects, limited by their total size in bytes.
pub struct IdlePool<T> {
    items: Mutex<Vec<T>>,
    max_bytes: usize,
    bytes_of: fn(&T) -> usize,
}

impl<T> IdlePool<T> {
    /// Creates a pool that keeps at most `max_bytes`; `bytes_of` is the size of an object.
    pub fn new(max_bytes: usize, bytes_of: fn(&T) -> usize) -> Self {
        IdlePool { items: Mutex::default(), max_bytes, bytes_of }
    }

    /// Takes the object that was returned last.
    pub fn take(&self) -> Option<T> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Returns an object to the pool, or drops it if the pool is full.
    pub fn give(&self, item: T) {
        let mut items = self.items.lock().unwrap_or_else(PoisonError::into_inner);
        if items.iter().chain([&item]).map(self.bytes_of).sum::<usize>() <= self.max_bytes {
            items.push(item);
        }
    }

    /// Number of objects in the pool.
    pub fn count(&self) -> usize {
        self.items.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}
