//! Memory in whole cache lines, kept from product to product.

use std::cell::Cell;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; WORDS]);

/// Words of a line.
const WORDS: usize = 16;

thread_local! {
    /// What the last product of this thread left.
    static SPARE: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Words of 32 bits that begin with a cache line. What they hold at first is not said.
pub(super) struct Lines {
    lines: Vec<Line>,
    words: usize,
}

impl Lines {
    /// Room for so many words.
    pub fn new(words: usize) -> Self {
        let mut lines = SPARE.take();
        // never fewer than there were: what is added is filled with zeros, which takes a while
        lines.resize(words.div_ceil(WORDS).max(lines.len()), Line([0; WORDS]));
        Lines { lines, words }
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

    /// Where they begin.
    pub fn pointer(&self) -> *const u32 {
        self.lines.as_ptr().cast()
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        SPARE.set(std::mem::take(&mut self.lines));
    }
}
