//! Progress events of long operations.
//!
//! ```
//! use anec_base::{Progress, ProgressEvent};
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

/// Event of a long operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProgressEvent<'a> {
    /// A named stage begins.
    Stage(&'a str),
    /// Total number of units (bytes, or whatever the operation counts).
    Total(u64),
    /// Number of additional units that are done.
    Advanced(u64),
    /// Number of units done so far.
    Reached(u64),
    /// Message for the user.
    Note(&'a str),
    /// The operation is over.
    Finished,
}

type Observer = dyn Fn(ProgressEvent<'_>) + Send + Sync;

/// Receiver of events, callable from any thread. Clones share the receiver; the default one ignores all events.
#[derive(Clone, Default)]
pub struct Progress(Option<Arc<Observer>>);

impl Progress {
    /// Creates a receiver.
    pub fn new(receiver: impl Fn(ProgressEvent<'_>) + Send + Sync + 'static) -> Self {
        Progress(Some(Arc::new(receiver)))
    }

    /// Creates a receiver that ignores all events.
    pub fn hidden() -> Self {
        Self::default()
    }

    fn tell(&self, event: ProgressEvent<'_>) {
        if let Some(receiver) = &self.0 {
            receiver(event);
        }
    }

    /// Reports the units done so far and their total.
    pub fn set(&self, done: u64, of: u64) {
        self.tell(ProgressEvent::Total(of));
        self.tell(ProgressEvent::Reached(done));
    }

    /// Reports the total number of bytes.
    pub fn expect(&self, bytes: u64) {
        self.tell(ProgressEvent::Total(bytes));
    }

    /// Reports the beginning of a stage.
    pub fn stage(&self, name: &str) {
        self.tell(ProgressEvent::Stage(name));
    }

    /// Reports additional bytes that are done.
    pub fn add(&self, bytes: u64) {
        self.tell(ProgressEvent::Advanced(bytes));
    }

    /// Reports a message for the user.
    pub fn note(&self, line: &str) {
        self.tell(ProgressEvent::Note(line));
    }

    /// Reports the end of the operation.
    pub fn finish(&self) {
        self.tell(ProgressEvent::Finished);
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Progress(receiver)" } else { "Progress(hidden)" })
    }
}
