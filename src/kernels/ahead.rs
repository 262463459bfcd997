//! Asking for memory before it is read.

use super::simd::CACHE_LINE;

/// Asks for the line of the cache that a place is in, where there need not be anything. On x86-64; elsewhere it does nothing.
#[inline(always)]
pub(super) fn ask<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint reads nothing, whatever the address, and every processor of the architecture has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// How far ahead what is decoded from end to end is asked for, in bytes: more than comes from memory in the time that the first of it takes, few enough for the innermost
/// cache. A processor's own prefetching ends with each page.
const AHEAD: usize = 2048;

/// Asks for as many bytes as `block` has, some way further on, where there need not be any.
#[inline(always)]
pub fn ask_ahead<const BYTES: usize>(block: &[u8; BYTES]) {
    for line in 0..BYTES.div_ceil(CACHE_LINE) {
        ask(block.as_ptr().wrapping_add(AHEAD + line * CACHE_LINE));
    }
}
