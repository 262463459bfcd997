//! Released ranges of a mapped file, collected until they are worth a system call.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Minimum number of bytes returned to the system at once. Each call interrupts all cores that run threads of the
/// process, because their page tables change.
const UNMAP_SIZE: usize = 2 << 20;

/// Released ranges of bytes whose pages are still mapped.
#[derive(Debug, Default)]
pub(crate) struct Released(Mutex<Vec<Range<usize>>>);

impl Released {
    /// Adds a range, merging adjacent ones. Returns all ranges to unmap now, if there are enough.
    pub(crate) fn add(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match ranges.iter_mut().find(|known| known.start <= range.end && range.start <= known.end) {
            Some(known) => *known = known.start.min(range.start)..known.end.max(range.end),
            None => ranges.push(range),
        }
        let enough = ranges.iter().map(ExactSizeIterator::len).sum::<usize>() >= UNMAP_SIZE;
        if enough { std::mem::take(&mut *ranges) } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_given_back_once_there_are_enough_of_them() {
        let released = Released::default();
        assert!(released.add(0..1).is_empty());
        assert!(released.add(10..UNMAP_SIZE / 2).is_empty());
        // merges on both sides
        assert!(released.add(UNMAP_SIZE / 2..UNMAP_SIZE - 8).is_empty());
        assert!(released.add(7..12).is_empty());
        let last = UNMAP_SIZE..UNMAP_SIZE + 14;
        assert_eq!(released.add(last.clone()), [0..1, 7..UNMAP_SIZE - 8, last]);
        assert!(released.add(0..UNMAP_SIZE - 1).is_empty());
        let all = 0..UNMAP_SIZE;
        assert!(released.add(5..UNMAP_SIZE).iter().eq([&all]));
    }
}
