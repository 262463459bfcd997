//! Parts of a mapped file that nobody needs any more, until they are worth a call of the system.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Bytes that are given back together. Each time, the system stops all cores that have threads of the process, for them to
/// forget where the pages were.
const TOGETHER: usize = 2 << 20;

/// Ranges of bytes that were released, and whose pages were not yet given back.
#[derive(Debug, Default)]
pub(crate) struct Released(Mutex<Vec<Range<usize>>>);

impl Released {
    /// Adds a range. Gives all that are to be given back now, if there are enough of them; neighbours are one range.
    pub(crate) fn add(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match ranges.iter_mut().find(|known| known.start <= range.end && range.start <= known.end) {
            Some(known) => *known = known.start.min(range.start)..known.end.max(range.end),
            None => ranges.push(range),
        }
        let enough = ranges.iter().map(ExactSizeIterator::len).sum::<usize>() >= TOGETHER;
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
        assert!(released.add(10..TOGETHER / 2).is_empty());
        // from both sides of what is known
        assert!(released.add(TOGETHER / 2..TOGETHER - 8).is_empty());
        assert!(released.add(7..12).is_empty());
        let last = TOGETHER..TOGETHER + 14;
        assert_eq!(released.add(last.clone()), [0..1, 7..TOGETHER - 8, last]);
        assert!(released.add(0..TOGETHER - 1).is_empty());
        let all = 0..TOGETHER;
        assert!(released.add(5..TOGETHER).iter().eq([&all]));
    }
}
