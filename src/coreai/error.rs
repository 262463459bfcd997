//! Errors of assets.

use std::path::{Path, PathBuf};

use anec_base::{Diagnostic, Error, Fault, FileError};

use crate::bytecode::Malformed;

/// Errors of assets.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoreAiError {
    /// The system refused to read or write a file.
    #[error(transparent)]
    File(#[from] FileError),
    /// Bytecode that breaks the format.
    #[error("{}, byte {}: {}", .path.display(), .cause.at, .cause.problem)]
    Bytecode {
        /// The file.
        path: PathBuf,
        /// Place, what was found, what was expected.
        cause: Malformed,
    },
    /// A file of an asset that isn't what it should be.
    #[error("{}: {problem}", .path.display())]
    Asset {
        /// The file or folder.
        path: PathBuf,
        /// Found and expected.
        problem: String,
    },
    /// Parts of a program that Core AI can't express.
    #[error("Core AI can't express: {}", .problems.join("; "))]
    Unsupported {
        /// Each part, by name.
        problems: Vec<String>,
    },
    /// The data of a constant can't be produced.
    #[error("{owner}: {cause}")]
    Constant {
        /// Key of the constant.
        owner: String,
        /// Why.
        cause: Error,
    },
}

impl CoreAiError {
    pub(crate) fn asset(path: &Path, problem: impl Into<String>) -> Self {
        CoreAiError::Asset { path: path.to_owned(), problem: problem.into() }
    }
}

impl Diagnostic for CoreAiError {
    fn fault(&self) -> Fault {
        match self {
            CoreAiError::File(error) => error.fault(),
            CoreAiError::Constant { cause, .. } => cause.fault(),
            CoreAiError::Bytecode { .. } | CoreAiError::Asset { .. } | CoreAiError::Unsupported { .. } => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            CoreAiError::File(error) => error.help(),
            CoreAiError::Constant { cause, .. } => cause.help(),
            CoreAiError::Bytecode { .. } | CoreAiError::Asset { .. } => {
                Some("name an .aimodel folder with a whole `main.mlirb`".into())
            }
            CoreAiError::Unsupported { .. } => Some("keep the model as an .mlpackage, or replace these parts".into()),
        }
    }
}
