//! Software prefetching.

use super::simd::CACHE_LINE;

/// Prefetches the cache line at an address, which need not be valid. Does nothing except on x86-64.
#[inline(always)]
pub(super) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch accepts any address, and every processor of the architecture has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetch distance of sequential decoding, in bytes: more than memory delivers while the start is processed, but
/// within the first-level cache. A processor's own prefetching ends at each page.
const PREFETCH_DISTANCE: usize = 2048;

/// Prefetches as many bytes as `block` has, some distance behind it; the address need not be valid.
#[inline(always)]
pub fn prefetch_ahead<const BYTES: usize>(block: &[u8; BYTES]) {
    for line in 0..BYTES.div_ceil(CACHE_LINE) {
        prefetch(block.as_ptr().wrapping_add(PREFETCH_DISTANCE + line * CACHE_LINE));
    }
}
