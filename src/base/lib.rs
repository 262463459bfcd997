//! What every crate of anec stands on: errors that name their remedy, progress, mapped files, what a process used.

pub mod clock;
pub mod error;
pub mod file;
pub mod input;
pub mod output;
pub mod progress;
pub mod resources;

pub use error::{Diagnostic, Error, Fault, Result};
pub use file::{FileError, MappedFile, hexadecimal};
pub use output::OutputFile;
pub use progress::Progress;
