//! How a thread offers work and others take part in it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::sync::{AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, spin_loop, yield_now};

/// How long a thread looks for work before it sleeps: longer than anything that one thread does alone between two
/// products. Time means nothing to loom.
const PATIENCE: Duration = if cfg!(loom) { Duration::ZERO } else { Duration::from_millis(1) };

/// Most ranges that parts are divided into.
const RANGES: usize = if cfg!(loom) { 2 } else { 16 };

/// How often a thread looks before it lets others have the processor.
const LOOKS: usize = if cfg!(loom) { 1 } else { 128 };

/// Work that is divided.
struct Work<'a> {
    part: &'a (dyn Fn(usize) + Sync),
    /// The ranges that there are, of [`RANGES`].
    count: usize,
    ranges: [Range; RANGES],
    /// Who has come: the caller and helpers.
    came: AtomicUsize,
    /// Helpers that are at it.
    helpers: AtomicUsize,
    /// What a helper's part panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Parts that follow each other, on a cache line of its own.
#[repr(align(64))]
struct Range {
    /// The first that nobody has begun; `end` or more when there is none.
    next: AtomicUsize,
    end: usize,
}

impl<'a> Work<'a> {
    fn new(part: &'a (dyn Fn(usize) + Sync), parts: usize, threads: usize) -> Self {
        let count = threads.min(RANGES).min(parts);
        let first = |i: usize| if i < count { parts * i / count } else { 0 };
        let end = |i: usize| if i < count { parts * (i + 1) / count } else { 0 };
        let ranges = std::array::from_fn(|i| Range { next: AtomicUsize::new(first(i)), end: end(i) });
        let (came, helpers) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Work { part, count, ranges, came, helpers, panic: Mutex::new(None) }
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges[..self.count]
    }

    /// Does parts until all have been begun.
    fn take_part(&self) {
        let own = self.came.fetch_add(1, Ordering::Relaxed) % self.count;
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

    /// As [`take_part`](Work::take_part), for a helper, which must survive.
    fn help(&self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_part())) {
            self.end();
            locked(&self.panic).get_or_insert(panic);
        }
    }

    fn has_parts(&self) -> bool {
        self.ranges().iter().any(|range| range.next.load(Ordering::Relaxed) < range.end)
    }

    /// Leaves what nobody has begun.
    fn end(&self) {
        self.ranges().iter().for_each(|range| range.next.store(range.end, Ordering::Relaxed));
    }
}

/// A pointer to work on somebody's stack.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place(*const Work<'static>);
// SAFETY: work is shared between threads as it stands: its parts are `Sync`, the rest is atomic or locked.
unsafe impl Send for Place {}

/// The work that helpers may take part in.
pub struct ThreadPool {
    offers: Mutex<Offers>,
    /// How often work has been offered.
    news: AtomicUsize,
    bell: Condvar,
}

struct Offers {
    /// Work lives at least as long as it is listed here, and as long as it has helpers.
    work: Vec<Place>,
    /// Helpers that wait for the bell.
    asleep: usize,
    /// Helpers end; those of a process never do.
    closed: bool,
}

/// Work that is listed until this is dropped.
struct Offer<'a> {
    pool: &'a ThreadPool,
    work: &'a Work<'a>,
}

impl ThreadPool {
    /// A pool without helpers yet.
    pub fn new() -> Self {
        let offers = Offers { work: Vec::new(), asleep: 0, closed: false };
        ThreadPool { offers: Mutex::new(offers), news: AtomicUsize::new(0), bell: Condvar::new() }
    }

    /// Does `part` for every number below `count`, which is not 0, together with helpers: so many threads are expected. A
    /// panic in a part goes on here, after the parts under way have ended.
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

    /// A helper's life, which ends when the pool is closed.
    pub fn help(&self) {
        let mut seen = 0;
        while let Some(news) = self.wait(seen) {
            seen = news;
            while let Some(Place(work)) = self.join() {
                // SAFETY: the work lives until `helpers`, which counts this one, is 0 again; the last access is that.
                unsafe {
                    (*work).help();
                    (*work).helpers.fetch_sub(1, Ordering::Release);
                }
            }
        }
    }

    /// Lets the helpers end.
    #[cfg(test)]
    pub fn close(&self) {
        locked(&self.offers).closed = true;
        self.bell.notify_all();
    }

    fn offer<'a>(&'a self, work: &'a Work<'a>) -> Offer<'a> {
        let mut offers = locked(&self.offers);
        offers.work.push(Place::of(work));
        self.news.fetch_add(1, Ordering::Release);
        let asleep = offers.asleep > 0;
        drop(offers);
        if asleep {
            self.bell.notify_all();
        }
        Offer { pool: self, work }
    }

    /// Work that has parts left, with this helper counted.
    fn join(&self) -> Option<Place> {
        let offers = locked(&self.offers);
        // SAFETY: what is listed lives, and is taken off the list under the same lock.
        let place = offers.work.iter().copied().find(|place| unsafe { (*place.0).has_parts() })?;
        // SAFETY: as above.
        unsafe { (*place.0).helpers.fetch_add(1, Ordering::Relaxed) };
        Some(place)
    }

    /// Waits for work that was offered after the first `seen`, and gives how much has been; `None` when the pool is
    /// closed.
    fn wait(&self, seen: usize) -> Option<usize> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            for _ in 0..LOOKS {
                let news = self.news.load(Ordering::Acquire);
                if news != seen {
                    return Some(news);
                }
                spin_loop();
            }
            yield_now();
        }
        let mut offers = locked(&self.offers);
        loop {
            let news = self.news.load(Ordering::Acquire);
            if news != seen {
                return Some(news);
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

impl Place {
    fn of(work: &Work<'_>) -> Self {
        Place(std::ptr::from_ref(work).cast())
    }
}

impl Drop for Offer<'_> {
    /// Takes the work off the list and waits for those who are at it: afterwards nobody knows of it.
    fn drop(&mut self) {
        // there are parts left if one has panicked
        self.work.end();
        let place = Place::of(self.work);
        locked(&self.pool.offers).work.retain(|other| *other != place);
        let mut looks = 0;
        while self.work.helpers.load(Ordering::Acquire) > 0 {
            spin_loop();
            looks += 1;
            if looks % LOOKS == 0 {
                yield_now();
            }
        }
    }
}

/// Nothing that is locked here is left half-done by a panic.
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

    /// What parts write to, each to a place of its own. Loom objects if two threads are at a place at a time, or if what
    /// one wrote isn't certain to be seen by another.
    struct Places(Vec<UnsafeCell<usize>>);
    // SAFETY: loom checks that the places are used by one thread at a time.
    unsafe impl Sync for Places {}

    /// Divides work of so many parts, and checks that each was done once when `divide` is back.
    fn divide(pool: &ThreadPool, parts: usize) {
        let places = Places((0..parts).map(|_| UnsafeCell::new(0)).collect());
        let all = &places;
        // SAFETY: each part has its own place.
        pool.divide(&|i| all.0[i].with_mut(|place| unsafe { *place += 1 }), parts, 2);
        // SAFETY: nobody writes any more.
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
