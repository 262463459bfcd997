//! Functions in memory: loaded on first use, evicted under a limit.
//!
//! Core ML wires a copy of the weights for each loaded function (published: a package of 0.69 GB took 1.05 GB with one
//! function and 2.09 GB with two; coremltools#2351). Functions that a text no longer needs, such as those of its prompt
//! or of a shorter context, make room for others. The least recently used weights are evicted first.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::RuntimeError;
use anec_base::Result;
use anec_bundle::{Bundle, FunctionEntry};

/// Weights that are in memory while a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FunctionWeights {
    /// Identifier; functions with the same identifier share the weights.
    pub(super) id: usize,
    /// Size in the package in bytes.
    pub(super) bytes: u64,
}

/// Pool of functions in memory.
pub(super) struct FunctionPool<K, F> {
    /// Maximum bytes of weights.
    limit: Option<u64>,
    held: Mutex<PoolState<K, F>>,
}

struct PoolState<K, F> {
    slots: BTreeMap<K, Slot<F>>,
    /// Counter of uses.
    clock: u64,
}

struct Slot<F> {
    function: Arc<F>,
    weights: FunctionWeights,
    used: u64,
}

impl<K: Ord, F> FunctionPool<K, F> {
    /// Creates a pool with an optional limit. An evicted function no longer counts, but its memory is freed only when
    /// its current call ends.
    pub(super) fn new(limit: Option<u64>) -> Self {
        FunctionPool { limit, held: Mutex::new(PoolState { slots: BTreeMap::new(), clock: 0 }) }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState<K, F>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a function, loaded if it isn't in memory. `load` receives whether others were evicted for it.
    ///
    /// # Errors
    /// Returns any error from `load`.
    pub(super) fn get(&self, key: K, weights: FunctionWeights, load: impl FnOnce(bool) -> Result<F>) -> Result<Arc<F>> {
        // loading takes seconds to minutes: other callers wait instead of loading the function twice
        let mut held = self.lock();
        held.clock += 1;
        let used = held.clock;
        if let Some(slot) = held.slots.get_mut(&key) {
            slot.used = used;
            return Ok(slot.function.clone());
        }
        let let_go = self.limit.is_some_and(|limit| held.make_room(weights, limit));
        let function = Arc::new(load(let_go)?);
        held.slots.insert(key, Slot { function: function.clone(), weights, used });
        Ok(function)
    }

    /// Returns whether functions with these weights fit into memory together.
    pub(super) fn holds_together(&self, weights: impl IntoIterator<Item = FunctionWeights>) -> bool {
        let by_id: BTreeMap<usize, u64> = weights.into_iter().map(|weights| (weights.id, weights.bytes)).collect();
        self.limit.is_none_or(|limit| by_id.values().sum::<u64>() <= limit)
    }

    /// Returns whether a function can be loaded without eviction.
    pub(super) fn has_room(&self, weights: FunctionWeights) -> bool {
        self.limit.is_none_or(|limit| self.lock().bytes_with(weights) <= limit)
    }

    /// Returns the bytes of weights in memory.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn bytes(&self) -> u64 {
        self.lock().bytes_with(FunctionWeights { id: usize::MAX, bytes: 0 })
    }
}

impl<K: Ord, F> PoolState<K, F> {
    /// Returns the bytes of weights with `more` added.
    fn bytes_with(&self, more: FunctionWeights) -> u64 {
        let own = self.slots.values().map(|slot| (slot.weights.id, slot.weights.bytes));
        let by_id: BTreeMap<usize, u64> = own.chain([(more.id, more.bytes)]).collect();
        by_id.values().sum()
    }

    /// Evicts the least recently used weights until `more` fits; returns whether anything was evicted.
    fn make_room(&mut self, more: FunctionWeights, limit: u64) -> bool {
        let before = self.slots.len();
        while self.bytes_with(more) > limit {
            let mut last_use: BTreeMap<usize, u64> = BTreeMap::new();
            for slot in self.slots.values().filter(|slot| slot.weights.id != more.id) {
                let used = last_use.entry(slot.weights.id).or_default();
                *used = slot.used.max(*used);
            }
            let Some((oldest, _)) = last_use.into_iter().min_by_key(|(_, used)| *used) else { break };
            self.slots.retain(|_, slot| slot.weights.id != oldest);
        }
        self.slots.len() < before
    }
}

/// Returns the bytes of weights that loading a function brings into memory: those of its package.
pub(super) fn weight_bytes(bundle: &Bundle, function: &FunctionEntry) -> u64 {
    bundle.packages.iter().find(|package| package.package == function.package).map_or(0, |package| package.weight_bytes)
}

/// Checks a limit against each function of the bundle.
///
/// # Errors
/// If a function alone exceeds the limit.
pub(super) fn check_limit(bundle: &Bundle, limit: Option<u64>) -> Result<(), RuntimeError> {
    let Some(limit) = limit else { return Ok(()) };
    let largest = bundle.functions.iter().max_by_key(|function| weight_bytes(bundle, function));
    match largest.map(|function| (function, weight_bytes(bundle, function))) {
        Some((function, needed)) if needed > limit => {
            Err(RuntimeError::Memory { package: function.package.clone(), needed, limit })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(pool: &FunctionPool<&'static str, ()>, key: &'static str, id: usize, bytes: u64) -> bool {
        let mut loaded = false;
        let load = |_| {
            loaded = true;
            Ok(())
        };
        pool.get(key, FunctionWeights { id, bytes }, load).unwrap();
        loaded
    }

    #[test]
    fn the_least_recently_used_function_is_evicted() {
        let pool = FunctionPool::new(Some(10));
        assert!(get(&pool, "a", 0, 4) && get(&pool, "b", 1, 4));
        assert!(!get(&pool, "a", 0, 4), "it is there");
        assert!(get(&pool, "c", 2, 5));
        assert_eq!(pool.bytes(), 9, "b has gone");
        assert!(!get(&pool, "a", 0, 4) && get(&pool, "b", 1, 4));
        assert_eq!(pool.bytes(), 8, "c has gone");
        assert!(get(&pool, "d", 3, 10));
        assert_eq!(pool.bytes(), 10, "all others have gone");
    }

    #[test]
    fn weights_in_common_count_once_and_go_together() {
        let pool = FunctionPool::new(Some(10));
        assert!(get(&pool, "a1", 0, 6) && get(&pool, "a2", 0, 6) && get(&pool, "b", 1, 4));
        assert_eq!(pool.bytes(), 10);
        assert!(get(&pool, "c", 2, 3));
        assert_eq!(pool.bytes(), 7);
        assert!(!get(&pool, "b", 1, 4) && get(&pool, "a1", 0, 6), "both of a have gone");
        assert!(
            pool.has_room(FunctionWeights { id: 0, bytes: 6 }) && !pool.has_room(FunctionWeights { id: 7, bytes: 1 })
        );
    }

    #[test]
    fn a_function_that_cant_be_loaded_is_tried_again() {
        let pool: FunctionPool<u8, ()> = FunctionPool::new(None);
        let weights = FunctionWeights { id: 0, bytes: 1 };
        assert!(pool.get(0, weights, |_| Err(RuntimeError::NoTokens.into())).is_err());
        let loaded = pool.get(0, weights, |let_go| {
            assert!(!let_go);
            Ok(())
        });
        assert!(loaded.is_ok());
    }
}
