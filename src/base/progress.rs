//! Progress as events: what long work tells whoever started it.
//!
//! ```
//! use anec_base::progress::{Progress, ProgressEvent};
//!
//! let progress = Progress::new(|event| {
//!     if let ProgressEvent::Stage(name) = event {
//!         println!("now: {name}");
//!     }
//! });
//! progress.stage("layers_00_12");
//! progress.finish();
//! ```

use std::fmt;
use std::sync::Arc;

/// What is told of long work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProgressEvent<'a> {
    /// The part with this name has begun.
    Stage(&'a str),
    /// The work has this many units in all: bytes, or what the work counts.
    Total(u64),
    /// This many more units are done.
    Advanced(u64),
    /// This many units are done in all.
    Reached(u64),
    /// Something that the user should know.
    Note(&'a str),
    /// The work is over.
    Finished,
}

/// What is called with every event.
type Observer = dyn Fn(ProgressEvent<'_>) + Send + Sync;

/// A receiver of events, called by any thread. Clones are the same receiver; the default one ignores everything.
#[derive(Clone, Default)]
pub struct Progress(Option<Arc<Observer>>);

impl Progress {
    /// A receiver.
    pub fn new(receiver: impl Fn(ProgressEvent<'_>) + Send + Sync + 'static) -> Self {
        Progress(Some(Arc::new(receiver)))
    }

    /// Nobody listens.
    pub fn hidden() -> Self {
        Self::default()
    }

    fn tell(&self, event: ProgressEvent<'_>) {
        if let Some(receiver) = &self.0 {
            receiver(event);
        }
    }

    /// Says how far the work is.
    pub fn set(&self, done: u64, of: u64) {
        self.tell(ProgressEvent::Total(of));
        self.tell(ProgressEvent::Reached(done));
    }

    /// Says how many bytes there will be.
    pub fn expect(&self, bytes: u64) {
        self.tell(ProgressEvent::Total(bytes));
    }

    /// Names what is in work.
    pub fn stage(&self, name: &str) {
        self.tell(ProgressEvent::Stage(name));
    }

    /// Adds bytes that are done.
    pub fn add(&self, bytes: u64) {
        self.tell(ProgressEvent::Advanced(bytes));
    }

    /// Tells the user something.
    pub fn note(&self, line: &str) {
        self.tell(ProgressEvent::Note(line));
    }

    /// Says that the work is over.
    pub fn finish(&self) {
        self.tell(ProgressEvent::Finished);
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Progress(receiver)" } else { "Progress(hidden)" })
    }
}
