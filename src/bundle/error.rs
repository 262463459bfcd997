//! Errors of reading a `bundle.json`.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault, FileError};

/// Why a `bundle.json` can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The system refused the file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A `bundle.json` that isn't one, or contradicts itself.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong: found and expected.
        problem: String,
    },
}

impl Diagnostic for BundleError {
    fn fault(&self) -> Fault {
        match self {
            BundleError::File(error) => error.fault(),
            BundleError::Content { .. } => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            BundleError::File(error) => error.help(),
            BundleError::Content { .. } => Some("convert the model again, or unpack the bundle again".into()),
        }
    }
}
