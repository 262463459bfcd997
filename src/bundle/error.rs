//! Errors of reading a `bundle.json`.

use std::path::PathBuf;

use crate::SCHEMA_VERSION;
use anec_base::{Diagnostic, Fault, FileError};

/// Reason why a `bundle.json` can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// Failure of the file system.
    #[error(transparent)]
    File(#[from] FileError),
    /// Content that isn't a bundle, or contradicts itself.
    #[error("{}: {problem}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// Problem: found and expected.
        problem: String,
    },
    /// Unsupported version of the schema.
    #[error("{}: schema version {found}, expected {}", path.display(), SCHEMA_VERSION)]
    Version {
        /// Path of the file.
        path: PathBuf,
        /// Version in the file.
        found: u64,
    },
}

impl Diagnostic for BundleError {
    fn fault(&self) -> Fault {
        match self {
            BundleError::File(error) => error.fault(),
            BundleError::Content { .. } | BundleError::Version { .. } => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            BundleError::File(error) => error.help(),
            BundleError::Version { found, .. } if *found < u64::from(SCHEMA_VERSION) => {
                Some("an older anec wrote it: convert the model again, or run it with that version".into())
            }
            BundleError::Version { .. } => {
                Some("a newer anec wrote it: update anec, or convert the model again".into())
            }
            BundleError::Content { .. } => Some("convert the model again, or unpack the bundle again".into()),
        }
    }
}
