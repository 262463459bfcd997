//! Thread pool of the executor.
//!
//! A call of a function is a few hundred products, each divided among threads, with small sequential steps between
//! them. Waking a thread takes as long as a small product, so an idle thread polls for work for a while before it
//! sleeps.
//!
//! The calling thread works too, and several threads may submit work at the same time. Parts are divided into a few
//! ranges, from which threads claim them with atomic counters: a thread begins with a range of its own, because memory
//! is read fastest sequentially, and continues with parts that others left. A thread never waits inside a part: nested
//! divisions run on the thread itself. So threads can't deadlock.
//!
//! The pool belongs to the process. [`set_threads`] sets its size before the first work is divided; the default is that
//! of rayon. Threads never end, and a forked process has none of them: a child must not compute.
//!
//! `protocol` is the synchronization. Loom tests interleavings of its steps: `RUSTFLAGS="--cfg loom" cargo test
//! --release -p anec-kernels --lib --target-dir target/loom loom`.

mod protocol;
mod sync;

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::sync::OnceLock;

use protocol::ThreadPool;

/// Minimum elements for which a step with little work per element is divided.
pub const LARGE: usize = 1 << 15;
/// Elements of a part of such a step.
pub const PART: usize = LARGE / 4;

thread_local! {
    /// Whether this thread is inside a part.
    static IN_PART: Cell<bool> = const { Cell::new(false) };
}

/// Number of threads, once decided.
static THREADS: OnceLock<usize> = OnceLock::new();

/// Returns the number of threads, including the calling one.
pub fn threads() -> usize {
    *THREADS.get_or_init(|| rayon::current_num_threads().max(1))
}

/// Sets the number of threads, including the calling one.
///
/// # Errors
/// The current number of threads if it is decided already: it was set, read, or work was divided.
pub fn set_threads(threads: NonZeroUsize) -> Result<(), usize> {
    match THREADS.set(threads.get()) {
        Err(_) if self::threads() != threads.get() => Err(self::threads()),
        _ => Ok(()),
    }
}

/// Pool of the process. It has one thread less than [`threads`], because the calling thread works too.
fn pool() -> &'static ThreadPool {
    static POOL: OnceLock<&ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| {
        let pool: &ThreadPool = Box::leak(Box::new(ThreadPool::new()));
        for i in 1..threads() {
            let help = move || {
                let _engaged = InPart::new();
                pool.help();
            };
            // if no thread starts, the caller does all the work
            let _ = std::thread::Builder::new().name(format!("executor {i}")).spawn(help);
        }
        pool
    })
}

/// Calls `part` once for each number below `count`, in no order, on all threads. A panic in a part continues in the
/// caller after all running parts have ended.
pub fn for_each(count: usize, part: impl Fn(usize) + Sync) {
    if count <= 1 || IN_PART.get() || threads() == 1 {
        return (0..count).for_each(part);
    }
    let _engaged = InPart::new();
    pool().divide(&part, count, threads());
}

/// Calls `part` for each `size` elements of `values` (the last chunk may be shorter) with the number of the chunk, as
/// [`for_each`].
///
/// # Panics
/// If `size` is 0.
pub fn for_each_chunk<T: Send>(values: &mut [T], size: usize, part: impl Fn(usize, &mut [T]) + Sync) {
    /// Address of the first element.
    struct StartPointer<T>(*mut T);
    // SAFETY: each thread gets different elements, which may be sent to it.
    unsafe impl<T: Send> Sync for StartPointer<T> {}
    impl<T> StartPointer<T> {
        fn pointer(&self) -> *mut T {
            self.0
        }
    }

    let (length, start) = (values.len(), StartPointer(values.as_mut_ptr()));
    for_each(length.div_ceil(size), |i| {
        let first = i * size;
        // SAFETY: `first` is less than `length`, the piece ends within `length`, and each `i` occurs once.
        let piece = unsafe { std::slice::from_raw_parts_mut(start.pointer().add(first), size.min(length - first)) };
        part(i, piece);
    });
}

/// Calls `part` for consecutive parts of `values`, each with the index of its first element, on several threads if
/// there are [many](LARGE) values.
pub fn for_each_part<T: Send>(values: &mut [T], part: impl Fn(usize, &mut [T]) + Sync) {
    match values.len() > LARGE {
        true => for_each_chunk(values, PART, |i, values| part(i * PART, values)),
        false => part(0, values),
    }
}

/// Calls `part` for parts of whole rows of `width` values, each with the number of its first row, as [`for_each_part`].
pub fn for_each_part_of_rows<T: Send>(values: &mut [T], width: usize, part: impl Fn(usize, &mut [T]) + Sync) {
    let rows = PART.div_ceil(width.max(1));
    match values.len() > LARGE {
        true => for_each_chunk(values, rows * width, |i, values| part(i * rows, values)),
        false => part(0, values),
    }
}

/// Calls `part` for each of `items` with its number, as [`for_each`].
pub fn for_each_mut<T: Send>(items: &mut [T], part: impl Fn(usize, &mut T) + Sync) {
    for_each_chunk(items, 1, |i, items| items.iter_mut().for_each(|item| part(i, item)));
}

/// Guard that marks this thread as being inside a part.
struct InPart;

impl InPart {
    fn new() -> Self {
        IN_PART.set(true);
        InPart
    }
}

impl Drop for InPart {
    fn drop(&mut self) {
        IN_PART.set(false);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_part_is_done_once_whoever_else_has_work() {
        std::thread::scope(|threads| {
            for caller in 0..4 {
                threads.spawn(move || {
                    for round in 0..500 {
                        let count = (round * 7 + caller) % 60;
                        let done: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(0)).collect();
                        for_each(count, |i| {
                            done[i].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(done.iter().all(|times| times.load(Ordering::Relaxed) == 1));
                    }
                });
            }
        });
    }

    #[test]
    fn pieces_cover_the_elements_and_the_last_may_be_shorter() {
        for length in [0, 1, 5, 64, 1000] {
            let mut values = vec![0; length];
            for_each_chunk(&mut values, 7, |i, piece| {
                assert_eq!(piece.len(), 7.min(length - 7 * i));
                piece.iter_mut().for_each(|value| *value += i + 1);
            });
            assert!(values.iter().enumerate().all(|(at, value)| *value == at / 7 + 1));
        }
    }

    #[test]
    fn a_part_does_what_it_divides_further_by_itself() {
        let sums: Vec<AtomicUsize> = (0..8).map(|_| AtomicUsize::new(0)).collect();
        for_each(sums.len(), |i| {
            let thread = std::thread::current().id();
            for_each(100, |j| {
                assert_eq!(std::thread::current().id(), thread);
                sums[i].fetch_add(j, Ordering::Relaxed);
            });
        });
        assert!(sums.iter().all(|sum| sum.load(Ordering::Relaxed) == 4950));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_helpers_survive() {
        for culprit in 0..20 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                for_each(20, |i| {
                    assert!(i != culprit, "part {i}");
                    std::thread::sleep(Duration::from_micros(50));
                });
            }));
            let message = *outcome.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(message, format!("part {culprit}"));
        }
        let done = AtomicUsize::new(0);
        for_each(50, |_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 50);
    }

    #[test]
    fn the_number_of_threads_is_decided_once() {
        let decided = threads();
        assert!(decided >= 1);
        assert_eq!(set_threads(NonZeroUsize::new(decided).unwrap()), Ok(()));
        assert_eq!(set_threads(NonZeroUsize::new(decided + 1).unwrap()), Err(decided));
        assert_eq!(threads(), decided);
    }

    #[test]
    fn threads_of_other_pools_may_have_work_while_they_do_theirs() {
        let done = AtomicUsize::new(0);
        rayon::scope(|pool| {
            for _ in 0..32 {
                pool.spawn(|_| {
                    for_each(16, |_| {
                        done.fetch_add(1, Ordering::Relaxed);
                    });
                });
            }
        });
        assert_eq!(done.load(Ordering::Relaxed), 32 * 16);
    }
}
