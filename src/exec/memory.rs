//! Memory of tensors that come and go.

/// Has the system's allocator keep freed memory for the next step, where it is glibc's. Left to itself it returns what
/// lies at the end of a heap as soon as it exceeds a few megabytes, two results of a call of 64 tokens, and each result
/// after that begins with a page fault for every 4 KB.
pub(super) fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use std::sync::Once;

        /// Bytes at the end of a heap that are kept.
        const KEPT: libc::c_int = 64 << 20;
        /// Bytes from which memory comes from the system and returns to it, as that of weights should: the most that
        /// glibc allows.
        const LARGE: libc::c_int = 32 << 20;
        static ONCE: Once = Once::new();
        // SAFETY: the calls set two numbers of the allocator, which locks them.
        ONCE.call_once(|| unsafe {
            libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
            libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        });
    }
}
