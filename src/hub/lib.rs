//! Hugging Face hub: download and upload of repository files.
//!
//! Downloads are resumable, and a file gets its name once its digest equals the hub's. Uploads go through Git LFS where
//! the hub asks for it; present files aren't sent again.
//!
//! | module | holds |
//! |---|---|
//! | `client` | hub of the environment, and its answers |
//! | `repository` | contents of a repository at a commit |
//! | [`download`] | download of files |
//! | `cache` | cache shared by all Hugging Face tools |
//! | `upload` | upload of files |
//!
//! ```
//! use anec_hub::FileHash;
//!
//! // git's name of the file that holds `hello`
//! let hash = FileHash::git_blob(b"hello");
//! assert_eq!(hash.hex(), "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0");
//! ```

#![forbid(unsafe_code)]

mod cache;
mod client;
pub mod download;
mod error;
mod hash;
mod repository;
mod upload;

pub use cache::HubCache;
pub use client::Hub;
pub use error::HubError;
pub use hash::FileHash;
pub use repository::{RemoteFile, RemoteRepository};
pub use upload::{HubCommit, Upload, UploadContent};

#[cfg(test)]
mod tests;
