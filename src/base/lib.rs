//! What every crate of anec stands on: errors that name their remedy, progress, mapped files, what a process used.

#![deny(unsafe_code)] // but for the memory map of `file`

pub mod clock;
pub mod error;
pub mod file;
pub mod progress;
pub mod resources;

pub use error::{Diagnostic, Error, Fault, Result};
pub use file::{FileError, MappedFile, hexadecimal};
pub use progress::Progress;
