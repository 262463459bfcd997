//! Pool of states of finished texts, reused by new ones.
//!
//! A cache has room for a whole context, of which most texts write only a part. Reusing its memory means that only the
//! written part is cleared.

use std::collections::BTreeSet;

use anec_base::IdlePool;
use anec_exec::State;

/// Maximum bytes of pooled states.
const MAX_BYTES: usize = 128 << 20;

/// States of a text.
#[derive(Clone, Default)]
pub(super) struct SequenceStates {
    /// States by id.
    pub state: State,
    /// Functions whose states are included.
    pub known: BTreeSet<usize>,
}

/// Pool of unused states.
pub(super) struct IdleStates(IdlePool<SequenceStates>);

impl Default for IdleStates {
    fn default() -> Self {
        IdleStates(IdlePool::new(MAX_BYTES, |states| states.state.bytes()))
    }
}

impl IdleStates {
    /// Returns states for a new text: all zeros, or none yet.
    pub fn take(&self) -> SequenceStates {
        self.0.take().unwrap_or_default()
    }

    /// Returns states to the pool. They are freed if the pool is full or another text shares them.
    pub fn give(&self, SequenceStates { state, known }: SequenceStates) {
        if let Some(state) = state.into_zeros().filter(|state| state.bytes() > 0) {
            self.0.give(SequenceStates { state, known });
        }
    }
}

#[cfg(test)]
mod tests {
    use anec_exec::Tensor;

    use super::*;

    fn states(elements: usize) -> SequenceStates {
        let mut states = SequenceStates::default();
        states.state.set("cache", Tensor::new([1, elements], vec![1.0; elements]));
        states
    }

    #[test]
    fn a_text_that_begins_finds_the_memory_of_one_that_has_ended() {
        let idle = IdleStates::default();
        let cache = |states: &SequenceStates| states.state.get("cache").unwrap().floats().unwrap().to_vec();
        let place = |states: &SequenceStates| states.state.get("cache").unwrap().floats().unwrap().as_ptr();
        let [first, shared] = [(); 2].map(|()| states(3));
        let (at, copy) = (place(&first), shared.clone());
        idle.give(shared);
        assert!(idle.take().state.get("cache").is_none(), "a copy has a part of them");
        assert_eq!(cache(&copy), [1.0; 3]);
        idle.give(first);
        let next = idle.take();
        assert_eq!((place(&next), cache(&next)), (at, vec![0.0; 3]));
        idle.give(SequenceStates::default());
        assert_eq!(idle.0.count(), 0, "a text that had no states leaves none");
    }

    #[test]
    fn the_pool_is_bounded() {
        let idle = IdleStates::default();
        let large = MAX_BYTES / size_of::<f32>() / 2;
        [large, large, large, 1].into_iter().for_each(|elements| idle.give(states(elements)));
        assert_eq!(idle.0.count(), 2);
        assert_eq!([(); 2].map(|()| idle.take().state.bytes()), [MAX_BYTES / 2; 2]);
    }
}
