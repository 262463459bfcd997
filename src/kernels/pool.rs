//! The threads that steps divide their work among.
//!
//! A call of a function is a few hundred products, each divided among threads, with small steps between them that one
//! thread does alone. Waking a thread takes as long as a small product does, so a thread without work looks for some for
//! a while before it goes to sleep.
//!
//! The calling thread works, too, and any number of threads may have work at a time. The parts of it are divided into a few
//! ranges, from which threads claim them with atomic counters: a thread begins with a range of its own, for memory is read
//! fastest from end to end, and goes on with what the others have left. While a thread does a part it never waits for
//! another: what a part would divide further it does by itself. So no two threads can wait for each other.
//!
//! The threads are those of the process: as many as [`set_threads`] says before the first work is divided, else as many as
//! rayon would use. They are never ended, and a process that is forked has none of them: the child must not compute.
//!
//! `protocol` is what threads do with each other. Loom tries the ways in which its steps may follow each other:
//! `RUSTFLAGS="--cfg loom" cargo test --release -p anec-kernels --lib --target-dir target/loom loom`.

mod protocol;
mod sync;

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::sync::OnceLock;

use protocol::ThreadPool;

/// Elements beyond which a step that does little with each is worth dividing.
pub const LARGE: usize = 1 << 15;
/// Elements that a part of it then has.
pub const PART: usize = LARGE / 4;

thread_local! {
    /// Whether this thread does a part of some work.
    static ENGAGED: Cell<bool> = const { Cell::new(false) };
}

/// How many threads there are, once it has been decided.
static THREADS: OnceLock<usize> = OnceLock::new();

/// How many threads work is divided among, the calling one included.
pub fn threads() -> usize {
    *THREADS.get_or_init(|| rayon::current_num_threads().max(1))
}

/// Says how many threads work is divided among, the calling one included.
///
/// # Errors
/// The number of threads, if it has been decided already: it was set, asked for, or work was divided.
pub fn set_threads(threads: NonZeroUsize) -> Result<(), usize> {
    match THREADS.set(threads.get()) {
        Err(_) if self::threads() != threads.get() => Err(self::threads()),
        _ => Ok(()),
    }
}

/// The threads of this process. There is one less than there are to be, for the calling thread works, too.
fn pool() -> &'static ThreadPool {
    static POOL: OnceLock<&ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| {
        let pool: &ThreadPool = Box::leak(Box::new(ThreadPool::new()));
        for i in 1..threads() {
            let help = move || {
                let _engaged = Engaged::new();
                pool.help();
            };
            // without them the work is done all the same
            let _ = std::thread::Builder::new().name(format!("executor {i}")).spawn(help);
        }
        pool
    })
}

/// Does `part` for every number below `count`, each once, in no order, on as many threads as there are. A panic in a
/// part goes on in the caller, after the parts under way have ended.
pub fn for_each(count: usize, part: impl Fn(usize) + Sync) {
    if count <= 1 || ENGAGED.get() || threads() == 1 {
        return (0..count).for_each(part);
    }
    let _engaged = Engaged::new();
    pool().divide(&part, count, threads());
}

/// Does `part` for every `size` elements of `values` (at the end there may be fewer) and the number of the piece, as
/// [`for_each`].
///
/// # Panics
/// If `size` is 0.
pub fn for_each_chunk<T: Send>(values: &mut [T], size: usize, part: impl Fn(usize, &mut [T]) + Sync) {
    /// Where the elements begin.
    struct Start<T>(*mut T);
    // SAFETY: every thread gets other elements, which may be sent to it.
    unsafe impl<T: Send> Sync for Start<T> {}
    impl<T> Start<T> {
        fn pointer(&self) -> *mut T {
            self.0
        }
    }

    let (length, start) = (values.len(), Start(values.as_mut_ptr()));
    for_each(length.div_ceil(size), |i| {
        let first = i * size;
        // SAFETY: `first` is less than `length`, the piece ends at `length` at most, and each `i` is given once.
        let piece = unsafe { std::slice::from_raw_parts_mut(start.pointer().add(first), size.min(length - first)) };
        part(i, piece);
    });
}

/// Does `part` for parts of `values` that follow each other, each with the number of its first: by several threads if there are
/// [many](LARGE).
pub fn for_each_part<T: Send>(values: &mut [T], part: impl Fn(usize, &mut [T]) + Sync) {
    match values.len() > LARGE {
        true => for_each_chunk(values, PART, |i, values| part(i * PART, values)),
        false => part(0, values),
    }
}

/// As [`for_each_part`], for parts of whole rows of so many values, each with the number of its first row.
pub fn for_each_part_of_rows<T: Send>(values: &mut [T], width: usize, part: impl Fn(usize, &mut [T]) + Sync) {
    let rows = PART.div_ceil(width.max(1));
    match values.len() > LARGE {
        true => for_each_chunk(values, rows * width, |i, values| part(i * rows, values)),
        false => part(0, values),
    }
}

/// Does `part` for each of `items` and its number, as [`for_each`].
pub fn for_each_mut<T: Send>(items: &mut [T], part: impl Fn(usize, &mut T) + Sync) {
    for_each_chunk(items, 1, |i, items| items.iter_mut().for_each(|item| part(i, item)));
}

/// Marks this thread as doing a part until it is dropped.
struct Engaged;

impl Engaged {
    fn new() -> Self {
        ENGAGED.set(true);
        Engaged
    }
}

impl Drop for Engaged {
    fn drop(&mut self) {
        ENGAGED.set(false);
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
    fn a_panic_reaches_the_caller_and_the_helpers_live_on() {
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
