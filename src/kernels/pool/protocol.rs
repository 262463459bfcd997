//! Protocol by which a thread submits work and others join it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::sync::{AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, spin_loop, yield_now};

/// Time that a thread polls for work before it sleeps: longer than any sequential step between two products. Zero under
/// loom, which has no time.
const POLL_TIME: Duration = if cfg!(loom) { Duration::ZERO } else { Duration::from_millis(1) };

/// Maximum ranges that parts are divided into.
const RANGES: usize = if cfg!(loom) { 2 } else { 16 };

/// Polls before a thread yields the processor.
const POLLS: usize = if cfg!(loom) { 1 } else { 128 };

/// Work that is divided.
struct Work<'a> {
    part: &'a (dyn Fn(usize) + Sync),
    /// Number of used [`RANGES`].
    count: usize,
    ranges: [Range; RANGES],
    /// Threads that joined: the caller and helpers.
    joined: AtomicUsize,
    /// Helpers that are working.
    helpers: AtomicUsize,
    /// Panic of a helper's part.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Consecutive parts, on a separate cache line.
#[repr(align(64))]
struct Range {
    /// First part that nobody has begun; `end` or more if there is none.
    next: AtomicUsize,
    end: usize,
}

impl<'a> Work<'a> {
    fn new(part: &'a (dyn Fn(usize) + Sync), parts: usize, threads: usize) -> Self {
        let count = threads.min(RANGES).min(parts);
        let first = |i: usize| if i < count { parts * i / count } else { 0 };
        let end = |i: usize| if i < count { parts * (i + 1) / count } else { 0 };
        let ranges = std::array::from_fn(|i| Range { next: AtomicUsize::new(first(i)), end: end(i) });
        let (joined, helpers) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Work { part, count, ranges, joined, helpers, panic: Mutex::new(None) }
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges[..self.count]
    }

    /// Runs parts until all have been begun.
    fn take_part(&self) {
        let own = self.joined.fetch_add(1, Ordering::Relaxed) % self.count;
        let (before, from_own) = self.ranges().split_at(own);
        for range in from_own.iter().chain(before) {
            loop {
                let i = range.next.fetch_add(1, Ordering::Relaxed);
                if i >= range.end {
                    break;
                }
                (self.part)(i);
            }
        }
    }

    /// Runs parts on a helper thread, which survives their panics.
    fn help(&self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_part())) {
            self.end();
            locked(&self.panic).get_or_insert(panic);
        }
    }

    fn has_parts(&self) -> bool {
        self.ranges().iter().any(|range| range.next.load(Ordering::Relaxed) < range.end)
    }

    /// Skips parts that nobody has begun.
    fn end(&self) {
        self.ranges().iter().for_each(|range| range.next.store(range.end, Ordering::Relaxed));
    }
}

/// Pointer to work on a caller's stack.
#[derive(Clone, Copy, PartialEq, Eq)]
struct WorkPointer(*const Work<'static>);
// SAFETY: work can be shared between threads: its parts are `Sync`, the rest is atomic or locked.
unsafe impl Send for WorkPointer {}

/// Work that helpers may join.
pub struct ThreadPool {
    offers: Mutex<Submissions>,
    /// Number of submissions.
    submissions: AtomicUsize,
    bell: Condvar,
}

struct Submissions {
    /// Listed work; alive while it is listed and while it has helpers.
    work: Vec<WorkPointer>,
    /// Helpers that sleep.
    asleep: usize,
    /// Whether helpers should end; never set for the pool of the process.
    closed: bool,
}

/// Submission; the work is listed until this is dropped.
struct Submission<'a> {
    pool: &'a ThreadPool,
    work: &'a Work<'a>,
}

impl ThreadPool {
    /// Pool without helpers.
    pub fn new() -> Self {
        let offers = Submissions { work: Vec::new(), asleep: 0, closed: false };
        ThreadPool { offers: Mutex::new(offers), submissions: AtomicUsize::new(0), bell: Condvar::new() }
    }

    /// Calls `part` for each number below `count`, which is not 0, together with helpers; `threads` are expected. A
    /// panic in a part continues here after all running parts have ended.
    pub fn divide(&self, part: &(dyn Fn(usize) + Sync), count: usize, threads: usize) {
        let work = Work::new(part, count, threads);
        {
            let _offer = self.offer(&work);
            work.take_part();
        }
        if let Some(panic) = locked(&work.panic).take() {
            resume_unwind(panic);
        }
    }

    /// Main loop of a helper, which returns when the pool is closed.
    pub fn help(&self) {
        let mut seen = 0;
        while let Some(submissions) = self.wait(seen) {
            seen = submissions;
            while let Some(WorkPointer(work)) = self.join() {
                // SAFETY: the work is alive until `helpers`, which counts this one, is 0 again; the last access is
                // that.
                unsafe {
                    (*work).help();
                    (*work).helpers.fetch_sub(1, Ordering::Release);
                }
            }
        }
    }

    /// Ends the helpers.
    #[cfg(test)]
    pub fn close(&self) {
        locked(&self.offers).closed = true;
        self.bell.notify_all();
    }

    fn offer<'a>(&'a self, work: &'a Work<'a>) -> Submission<'a> {
        let mut offers = locked(&self.offers);
        offers.work.push(WorkPointer::of(work));
        self.submissions.fetch_add(1, Ordering::Release);
        let asleep = offers.asleep > 0;
        drop(offers);
        if asleep {
            self.bell.notify_all();
        }
        Submission { pool: self, work }
    }

    /// Finds work with remaining parts, and counts this helper.
    fn join(&self) -> Option<WorkPointer> {
        let offers = locked(&self.offers);
        // SAFETY: listed work is alive, and is removed from the list under the same lock.
        let place = offers.work.iter().copied().find(|place| unsafe { (*place.0).has_parts() })?;
        // SAFETY: as above.
        unsafe { (*place.0).helpers.fetch_add(1, Ordering::Relaxed) };
        Some(place)
    }

    /// Waits for a submission after the first `seen` ones; returns their number, or `None` when the pool is closed.
    fn wait(&self, seen: usize) -> Option<usize> {
        let start = Instant::now();
        while start.elapsed() < POLL_TIME {
            for _ in 0..POLLS {
                let submissions = self.submissions.load(Ordering::Acquire);
                if submissions != seen {
                    return Some(submissions);
                }
                spin_loop();
            }
            yield_now();
        }
        let mut offers = locked(&self.offers);
        loop {
            let submissions = self.submissions.load(Ordering::Acquire);
            if submissions != seen {
                return Some(submissions);
            }
            if offers.closed {
                return None;
            }
            offers.asleep += 1;
            offers = self.bell.wait(offers).unwrap_or_else(PoisonError::into_inner);
            offers.asleep -= 1;
        }
    }
}

impl WorkPointer {
    fn of(work: &Work<'_>) -> Self {
        WorkPointer(std::ptr::from_ref(work).cast())
    }
}

impl Drop for Submission<'_> {
    /// Removes the work from the list and waits for its helpers: afterwards nothing refers to it.
    fn drop(&mut self) {
        // parts remain if one has panicked
        self.work.end();
        let place = WorkPointer::of(self.work);
        locked(&self.pool.offers).work.retain(|other| *other != place);
        let mut looks = 0;
        while self.work.helpers.load(Ordering::Acquire) > 0 {
            spin_loop();
            looks += 1;
            if looks % POLLS == 0 {
                yield_now();
            }
        }
    }
}

/// Locks a mutex; a panic leaves no locked data inconsistent.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn helpers_take_part_until_the_team_is_closed() {
        let pool = ThreadPool::new();
        std::thread::scope(|threads| {
            for _ in 0..3 {
                threads.spawn(|| pool.help());
            }
            for count in 1..100 {
                let done: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.divide(&|i| _ = done[i].fetch_add(1, Ordering::Relaxed), count, 4);
                assert!(done.iter().all(|times| times.load(Ordering::Relaxed) == 1));
            }
            pool.close();
        });
        assert!(locked(&pool.offers).work.is_empty());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Destinations of parts. Loom reports concurrent access, and writes that may not be visible to other threads.
    struct Places(Vec<UnsafeCell<usize>>);
    // SAFETY: loom checks that each place is used by one thread at a time.
    unsafe impl Sync for Places {}

    /// Divides work of `parts` parts, and checks that each ran once when `divide` returns.
    fn divide(pool: &ThreadPool, parts: usize) {
        let places = Places((0..parts).map(|_| UnsafeCell::new(0)).collect());
        let all = &places;
        // SAFETY: each part has its own place.
        pool.divide(&|i| all.0[i].with_mut(|place| unsafe { *place += 1 }), parts, 2);
        // SAFETY: all writes have ended.
        assert!(places.0.iter().all(|place| place.with(|place| unsafe { *place }) == 1));
    }

    fn model(check: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(check);
    }

    #[test]
    fn loom_parts_are_done_once_and_seen_by_the_caller() {
        model(|| {
            let pool = Arc::new(ThreadPool::new());
            let helper = thread::spawn({
                let pool = pool.clone();
                move || pool.help()
            });
            divide(&pool, 2);
            divide(&pool, 1);
            pool.close();
            helper.join().unwrap();
        });
    }

    #[test]
    fn loom_two_threads_have_work_at_a_time() {
        model(|| {
            let pool = Arc::new(ThreadPool::new());
            let spawn = |run: fn(&ThreadPool)| {
                let pool = pool.clone();
                thread::spawn(move || run(&pool))
            };
            let (helper, other) = (spawn(|pool| pool.help()), spawn(|pool| divide(pool, 2)));
            divide(&pool, 2);
            other.join().unwrap();
            pool.close();
            helper.join().unwrap();
        });
    }
}
