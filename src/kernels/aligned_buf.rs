//! Memory in whole cache lines, kept from product to product.

use std::cell::Cell;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; WORDS]);

/// Words of a line.
const WORDS: usize = 16;

/// Most memory that a thread keeps in one piece, in lines: what a product of 512 columns with rows of 16 thousand elements
/// needs. More than this is freed after use, so that one long prompt doesn't hold memory for ever.
const MOST_KEPT: usize = (32 << 20) / size_of::<Line>();

/// Pieces that a thread keeps: as many as are in use at a time.
const PIECES: usize = 3;

thread_local! {
    /// What is not in use of this thread's memory.
    static SPARE: Cell<[Vec<Line>; PIECES]> = const { Cell::new([const { Vec::new() }; PIECES]) };
}

/// Words of 32 bits that begin with a cache line. Their contents are unspecified at first.
pub struct AlignedBuf {
    lines: Vec<Line>,
    words: usize,
}

impl AlignedBuf {
    /// Room for so many words.
    pub fn new(words: usize) -> Self {
        let mut spare = SPARE.take();
        // the largest, so that what is needed at most is there after a while
        let mut lines = std::mem::take(&mut spare[0]);
        spare.rotate_left(1);
        SPARE.set(spare);
        // never fewer than there were: what is added is filled with zeros, which takes a while
        lines.resize(words.div_ceil(WORDS).max(lines.len()), Line([0; WORDS]));
        AlignedBuf { lines, words }
    }

    /// All of them.
    #[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))] // where there is no AMX
    pub fn words(&mut self) -> &mut [u32] {
        // SAFETY: lines are arrays of words without padding, and there are enough of them.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.words) }
    }

    /// As numbers.
    pub fn floats(&mut self) -> &mut [f32] {
        // SAFETY: as above; every word is a number.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.words) }
    }

    /// As numbers, to be read.
    pub fn as_floats(&self) -> &[f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.words) }
    }

    /// Where they begin.
    pub fn pointer(&self) -> *const u32 {
        self.lines.as_ptr().cast()
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        if lines.len() <= MOST_KEPT {
            let mut spare = SPARE.take();
            // in place of an empty one, or of the smallest; in order of size
            if spare[PIECES - 1].len() < lines.len() {
                spare[PIECES - 1] = lines;
            }
            spare.sort_by_key(|lines| std::cmp::Reverse(lines.len()));
            SPARE.set(spare);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> Vec<usize> {
        let spare = SPARE.take();
        let sizes = spare.iter().map(Vec::len).collect();
        SPARE.set(spare);
        sizes
    }

    #[test]
    fn a_thread_keeps_what_is_in_use_at_a_time_but_nothing_huge() {
        // a thread that nothing else has run on
        let thread = std::thread::spawn(|| {
            {
                let (mut outer, mut inner) = (AlignedBuf::new(1000), AlignedBuf::new(100));
                assert_eq!((outer.floats().len(), inner.words().len()), (1000, 100));
                assert_eq!(outer.pointer().addr() % align_of::<Line>(), 0);
            }
            assert_eq!(kept(), [63, 7, 0]);
            drop(AlignedBuf::new(10));
            assert_eq!(kept(), [63, 7, 0], "the largest is there for the next, and comes back");
            drop(AlignedBuf::new(MOST_KEPT * WORDS + 1));
            assert_eq!(kept(), [7, 0, 0], "what it grew to is freed");
        });
        thread.join().unwrap();
    }
}
