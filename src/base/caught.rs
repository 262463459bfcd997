//! Panics of libraries on untrusted input, which become errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// Number of calls of [`caught`] on the stack.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Runs work; `None` if it panics. The work must leave nothing behind that a panic could spoil.
///
/// ```
/// use anec_base::caught::caught;
///
/// assert_eq!(caught(|| 5), Some(5));
/// assert_eq!(caught(|| [1, 2][std::hint::black_box(2)]), None);
/// ```
pub fn caught<T>(work: impl FnOnce() -> T) -> Option<T> {
    DEPTH.set(DEPTH.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(work)).ok();
    DEPTH.set(DEPTH.get() - 1);
    result
}

/// Lets panics that become errors print nothing. For programs; a library must leave the hook to its program.
pub fn silence() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if DEPTH.get() == 0 {
            print(panic);
        }
    }));
}
