//! What every crate of anec stands on: errors that name their remedy, progress, mapped files, what a process used.

pub mod clock;
pub mod error;
pub mod file;
pub mod progress;
pub mod resources;
mod skip;

pub use error::{Diagnostic, Error, Fault, Result};
pub use file::{FileError, MappedFile, hexadecimal};
pub use progress::Progress;
#[doc(hidden)]
pub use skip::skipped;
