//! Cache-aligned memory, reused from product to product.

use std::cell::Cell;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; WORDS]);

/// Words of a line.
const WORDS: usize = 16;

/// Maximum lines of a buffer that a thread keeps: enough for a product of 512 columns with rows of 16 thousand
/// elements. Larger buffers are freed, so that a long prompt doesn't hold memory forever.
const MAX_KEPT_LINES: usize = (32 << 20) / size_of::<Line>();

/// Buffers that a thread keeps: the maximum in use at a time.
const MAX_BUFFERS: usize = 3;

thread_local! {
    /// Free buffers of this thread.
    static FREE_BUFFERS: Cell<[Vec<Line>; MAX_BUFFERS]> = const { Cell::new([const { Vec::new() }; MAX_BUFFERS]) };
}

/// 32-bit words aligned to a cache line. Initial contents are unspecified.
pub struct AlignedBuf {
    lines: Vec<Line>,
    words: usize,
}

impl AlignedBuf {
    /// Allocates `words` words.
    pub fn new(words: usize) -> Self {
        let mut spare = FREE_BUFFERS.take();
        // the largest buffer, so that the maximum size is reached soon
        let mut lines = std::mem::take(&mut spare[0]);
        spare.rotate_left(1);
        FREE_BUFFERS.set(spare);
        // never shrinks: added lines are filled with zeros, which takes time
        lines.resize(words.div_ceil(WORDS).max(lines.len()), Line([0; WORDS]));
        AlignedBuf { lines, words }
    }

    /// All words.
    pub fn words(&mut self) -> &mut [u32] {
        // SAFETY: lines are arrays of words without padding, and there are enough of them.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.words) }
    }

    /// All words as floats.
    pub fn floats(&mut self) -> &mut [f32] {
        // SAFETY: as above; every word is a number.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.words) }
    }

    /// All words as floats, read-only.
    pub fn as_floats(&self) -> &[f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.words) }
    }

    /// Address of the first word.
    pub fn pointer(&self) -> *const u32 {
        self.lines.as_ptr().cast()
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        if lines.len() <= MAX_KEPT_LINES {
            let mut spare = FREE_BUFFERS.take();
            // replace the smallest buffer; sorted by size
            if spare[MAX_BUFFERS - 1].len() < lines.len() {
                spare[MAX_BUFFERS - 1] = lines;
            }
            spare.sort_by_key(|lines| std::cmp::Reverse(lines.len()));
            FREE_BUFFERS.set(spare);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> Vec<usize> {
        let spare = FREE_BUFFERS.take();
        let sizes = spare.iter().map(Vec::len).collect();
        FREE_BUFFERS.set(spare);
        sizes
    }

    #[test]
    fn a_thread_keeps_a_bounded_number_of_buffers() {
        // a fresh thread
        let thread = std::thread::spawn(|| {
            {
                let (mut outer, mut inner) = (AlignedBuf::new(1000), AlignedBuf::new(100));
                assert_eq!((outer.floats().len(), inner.words().len()), (1000, 100));
                assert_eq!(outer.pointer().addr() % align_of::<Line>(), 0);
            }
            assert_eq!(kept(), [63, 7, 0]);
            drop(AlignedBuf::new(10));
            assert_eq!(kept(), [63, 7, 0], "the largest is there for the next, and comes back");
            drop(AlignedBuf::new(MAX_KEPT_LINES * WORDS + 1));
            assert_eq!(kept(), [7, 0, 0], "what it grew to is freed");
        });
        thread.join().unwrap();
    }
}
