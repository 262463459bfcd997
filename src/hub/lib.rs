//! The Hugging Face hub: files of a repository, down and up.
//!
//! Downloads go on where they were broken off, and a file gets its name only when its digest is the one that the hub tells.
//! Uploads go through Git LFS where the hub asks for it; what the hub has already isn't sent again.
//!
//! | module | holds |
//! |---|---|
//! | [`client`] | the hub that the environment names, and its answers |
//! | [`repository`] | what a repository holds at a commit |
//! | [`download`] | files down |
//! | [`cache`] | the cache that all Hugging Face tools share |
//! | [`upload`] | files up |
//!
//! ```
//! use anec_hub::FileHash;
//!
//! // what git calls the file that holds `hello`
//! let hash = FileHash::git_blob(b"hello");
//! assert_eq!(hash.hex(), "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0");
//! ```

#![forbid(unsafe_code)]

pub mod cache;
pub mod client;
pub mod download;
pub mod error;
mod hash;
pub mod repository;
pub mod upload;

pub use cache::HubCache;
pub use client::Hub;
pub use error::HubError;
pub use hash::FileHash;
pub use repository::{RemoteFile, RemoteRepository};
pub use upload::{HubCommit, Upload, UploadContent};

#[cfg(test)]
mod tests;
