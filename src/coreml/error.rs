//! Errors of Core ML and of compute plans.

use std::path::{Path, PathBuf};

use anec_base::{Diagnostic, Fault, FileError};

/// Error of Core ML or of a compute plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoreMlError {
    /// Missing Core ML.
    #[error("Core ML isn't here: {0}")]
    Unavailable(String),
    /// Refused action.
    #[error("Core ML can't {action} {}: {problem}", path.display())]
    Refused {
        /// Action that was refused.
        action: &'static str,
        /// File that it concerned.
        path: PathBuf,
        /// Message of Core ML.
        problem: String,
    },
    /// File error of the system.
    #[error(transparent)]
    File(#[from] FileError),
    /// Invalid compute plan.
    #[error("compute plan {}: {problem}", path.display())]
    Plan {
        /// Path of the file.
        path: PathBuf,
        /// Found and expected contents.
        problem: String,
    },
    /// Missing function, or a call size that it doesn't take.
    #[error("function `{function}`: {problem}")]
    Function {
        /// Name of the function.
        function: String,
        /// Found and expected values.
        problem: String,
    },
}

impl CoreMlError {
    /// Returns a [`CoreMlError::Plan`].
    pub fn plan(path: &Path, problem: impl Into<String>) -> Self {
        CoreMlError::Plan { path: path.to_owned(), problem: problem.into() }
    }
}

impl Diagnostic for CoreMlError {
    fn fault(&self) -> Fault {
        match self {
            CoreMlError::Unavailable(_) | CoreMlError::Refused { .. } => Fault::Platform,
            CoreMlError::File(error) => error.fault(),
            CoreMlError::Plan { .. } | CoreMlError::Function { .. } => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            CoreMlError::File(error) => return error.help(),
            CoreMlError::Unavailable(_) => "a Mac with macOS 15 or later has it",
            CoreMlError::Plan { .. } => "take a new one on a Mac",
            _ => return None,
        };
        Some(help.into())
    }
}
