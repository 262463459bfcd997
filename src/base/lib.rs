//! Foundation of all anec crates: errors with remedies, progress, mapped files, resource usage.
//!
//! ```
//! use anec_base::{Fault, FileError, Result};
//!
//! fn length(path: &str) -> Result<usize> {
//!     Ok(std::fs::read(path).map_err(FileError::of(path, "read"))?.len())
//! }
//!
//! let error = length("no/such/file").unwrap_err();
//! assert!(error.to_string().contains("no/such/file"));
//! assert_eq!(error.fault(), Fault::Source);
//! ```

#![deny(unsafe_code)] // but for memory maps, their signal handler, and the allocator

pub mod allocation;
pub mod caught;
pub mod clock;
mod digest;
mod error;
pub mod fault;
mod file;
mod idle;
pub mod input;
pub mod json;
pub mod listing;
mod name;
pub mod output;
mod progress;
mod random;
mod regular;
mod release;
pub mod resources;
mod skip;

pub use digest::{ContentDigest, hexadecimal};
pub use error::{Diagnostic, Error, Fault, Result};
pub use file::{FileError, MappedFile, open_file};
pub use idle::IdlePool;
pub use name::path_inside;
pub use progress::{Progress, ProgressEvent};
pub use random::SplitMix64;
#[doc(hidden)]
pub use skip::skipped;
