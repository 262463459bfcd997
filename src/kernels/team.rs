//! The threads that steps divide their work among.
//!
//! A call of a function is a few hundred products, each divided among threads, with small steps between them that one
//! thread does alone. Waking a thread takes as long as a small product does, so a thread without work looks for some for
//! a while before it goes to sleep.
//!
//! Whoever has work takes part in it, and any number may have some at a time. The parts lie in a few stretches; a thread
//! begins with a stretch of its own, for memory is read fastest from end to end, and goes on with what the others have
//! left. While a thread does a part it never waits for another: what a part would divide further it does by itself. So no
//! two threads can wait for each other.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Elements beyond which a step that does little with each is worth dividing.
pub const LARGE: usize = 1 << 15;
/// Elements that a part of it then has.
pub const PART: usize = LARGE / 4;

/// How long a thread looks for work before it sleeps: longer than anything that one thread does alone between two
/// products.
const PATIENCE: Duration = Duration::from_millis(1);

/// Most stretches that parts lie in.
const STRETCHES: usize = 16;

/// How often a thread looks before it lets others have the processor.
const LOOKS: usize = 128;

thread_local! {
    /// Whether this thread does a part of some work.
    static ENGAGED: Cell<bool> = const { Cell::new(false) };
}

/// Does `part` for every number below `count`, each once, in no order, on as many threads as there are. A panic in a
/// part goes on in the caller, after the parts under way have ended.
pub fn for_each(count: usize, part: impl Fn(usize) + Sync) {
    let team = Team::get();
    if count <= 1 || team.helpers == 0 || ENGAGED.get() {
        return (0..count).for_each(part);
    }
    let work = Work::new(&part, count, team.helpers + 1);
    {
        let _engaged = Engaged::new();
        let _offer = team.offer(&work);
        work.take_part();
    }
    if let Some(panic) = locked(&work.panic).take() {
        resume_unwind(panic);
    }
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

/// Work that is divided.
struct Work<'a> {
    part: &'a (dyn Fn(usize) + Sync),
    /// The stretches that there are, of [`STRETCHES`].
    count: usize,
    stretches: [Stretch; STRETCHES],
    /// Who has come: the caller and helpers.
    came: AtomicUsize,
    /// Helpers that are at it.
    helpers: AtomicUsize,
    /// What a helper's part panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Parts that follow each other, on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Stretch {
    /// The first that nobody has begun; `end` or more when there is none.
    next: AtomicUsize,
    end: usize,
}

impl<'a> Work<'a> {
    fn new(part: &'a (dyn Fn(usize) + Sync), parts: usize, threads: usize) -> Self {
        let count = threads.min(STRETCHES).min(parts);
        let stretches = std::array::from_fn(|i| match i < count {
            true => Stretch { next: AtomicUsize::new(parts * i / count), end: parts * (i + 1) / count },
            false => Stretch::default(),
        });
        let (came, helpers) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Work { part, count, stretches, came, helpers, panic: Mutex::default() }
    }

    fn stretches(&self) -> &[Stretch] {
        &self.stretches[..self.count]
    }

    /// Does parts until all have been begun.
    fn take_part(&self) {
        let own = self.came.fetch_add(1, Ordering::Relaxed) % self.count;
        let (before, from_own) = self.stretches().split_at(own);
        for stretch in from_own.iter().chain(before) {
            loop {
                let i = stretch.next.fetch_add(1, Ordering::Relaxed);
                if i >= stretch.end {
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
        self.stretches().iter().any(|stretch| stretch.next.load(Ordering::Relaxed) < stretch.end)
    }

    /// Leaves what nobody has begun.
    fn end(&self) {
        self.stretches().iter().for_each(|stretch| stretch.next.store(stretch.end, Ordering::Relaxed));
    }
}

/// A pointer to work on somebody's stack.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place(*const Work<'static>);
// SAFETY: work is shared between threads as it stands: its parts are `Sync`, the rest is atomic or locked.
unsafe impl Send for Place {}

/// The helpers, and the work that they may take part in.
struct Team {
    helpers: usize,
    offers: Mutex<Offers>,
    /// How often work has been offered.
    news: AtomicUsize,
    bell: Condvar,
}

#[derive(Default)]
struct Offers {
    /// Work lives at least as long as it is listed here, and as long as it has helpers.
    work: Vec<Place>,
    /// Helpers that wait for the bell.
    asleep: usize,
}

/// Work that is listed until this is dropped.
struct Offer<'a> {
    team: &'static Team,
    work: &'a Work<'a>,
}

impl Team {
    /// One helper less than there are processors, for whoever has work takes part.
    fn get() -> &'static Team {
        static TEAM: OnceLock<&Team> = OnceLock::new();
        TEAM.get_or_init(|| {
            let team: &Team = Box::leak(Box::new(Team {
                helpers: rayon::current_num_threads().saturating_sub(1),
                offers: Mutex::default(),
                news: AtomicUsize::new(0),
                bell: Condvar::new(),
            }));
            for i in 0..team.helpers {
                // without them the work is done all the same
                let _ = std::thread::Builder::new().name(format!("executor {i}")).spawn(|| team.help());
            }
            team
        })
    }

    fn offer<'a>(&'static self, work: &'a Work<'a>) -> Offer<'a> {
        let mut offers = locked(&self.offers);
        offers.work.push(Place::of(work));
        self.news.fetch_add(1, Ordering::Release);
        let asleep = offers.asleep > 0;
        drop(offers);
        if asleep {
            self.bell.notify_all();
        }
        Offer { team: self, work }
    }

    /// A helper's life.
    fn help(&self) {
        let _engaged = Engaged::new();
        let mut seen = 0;
        loop {
            seen = self.wait(seen);
            while let Some(Place(work)) = self.join() {
                // SAFETY: the work lives until `helpers`, which counts this one, is 0 again; the last access is that.
                unsafe {
                    (*work).help();
                    (*work).helpers.fetch_sub(1, Ordering::Release);
                }
            }
        }
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

    /// Waits for work that was offered after the first `seen`; says how much has been.
    fn wait(&self, seen: usize) -> usize {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            for _ in 0..LOOKS {
                let news = self.news.load(Ordering::Acquire);
                if news != seen {
                    return news;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
        let mut offers = locked(&self.offers);
        loop {
            let news = self.news.load(Ordering::Acquire);
            if news != seen {
                return news;
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
        locked(&self.team.offers).work.retain(|other| *other != place);
        let mut looks = 0;
        while self.work.helpers.load(Ordering::Acquire) > 0 {
            std::hint::spin_loop();
            looks += 1;
            if looks % LOOKS == 0 {
                std::thread::yield_now();
            }
        }
    }
}

/// Nothing that is locked here is left half-done by a panic.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

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
