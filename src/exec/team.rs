//! The threads that steps divide their work among.
//!
//! A call of a function is a few hundred products, each divided among rayon's threads, with small steps between them that
//! one thread does alone. A thread without work goes to sleep within microseconds, and waking it takes as long as a small
//! product. So while a call lasts, the other threads stay awake and look for work.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::Yield;

/// How often a thread waits for a moment before it looks for work again.
const MOMENTS: usize = 16;

thread_local! {
    /// Whether this thread runs a call or looks for work because of one.
    static ENGAGED: Cell<bool> = const { Cell::new(false) };
}

/// Marks the thread as engaged until it is dropped.
struct Engagement {
    before: bool,
}

impl Engagement {
    fn begin() -> Self {
        Engagement { before: ENGAGED.replace(true) }
    }
}

impl Drop for Engagement {
    fn drop(&mut self) {
        ENGAGED.set(self.before);
    }
}

/// Says that the call is over, also when it panics.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Does `body`, on one of rayon's threads, while the others look for work.
pub(super) fn kept_awake<R>(body: impl FnOnce() -> R) -> R {
    if rayon::current_num_threads() == 1 {
        return body();
    }
    let over = Over(Arc::new(AtomicBool::new(false)));
    let _engagement = Engagement::begin();
    let flag = over.0.clone();
    rayon::spawn_broadcast(move |_| look_for_work(&flag));
    body()
}

/// Does what work there is until the call is over.
fn look_for_work(over: &AtomicBool) {
    // A thread that runs a call itself, and found this while it waited for others, must not wait for another call's end:
    // two calls could wait for each other.
    if ENGAGED.get() {
        return;
    }
    let _engagement = Engagement::begin();
    while !over.load(Ordering::Acquire) {
        if rayon::yield_now() != Some(Yield::Executed) {
            (0..MOMENTS).for_each(|_| std::hint::spin_loop());
            // others may need the processor
            std::thread::yield_now();
        }
    }
}
