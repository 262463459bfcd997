//! Errors of Core ML and of compute plans.

use std::path::{Path, PathBuf};

use anec_base::{Diagnostic, Fault, FileError};

/// What can go wrong with Core ML.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoreMlError {
    /// It isn't there.
    #[error("Core ML isn't here: {0}")]
    Unavailable(String),
    /// It refused.
    #[error("Core ML can't {action} {}: {problem}", path.display())]
    Refused {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What it said.
        problem: String,
    },
    /// The system refused a file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file that is no compute plan, or not one that can be judged here.
    #[error("compute plan {}: {problem}", path.display())]
    Plan {
        /// The file.
        path: PathBuf,
        /// Found and expected.
        problem: String,
    },
    /// A program has no such function, or its function doesn't take so many tokens.
    #[error("function `{function}`: {problem}")]
    Function {
        /// The function.
        function: String,
        /// Found and expected.
        problem: String,
    },
}

impl CoreMlError {
    /// A [`CoreMlError::Plan`].
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
            CoreMlError::Plan { .. } => {
                "take a new one on a Mac: anec validate BUNDLE --residency --plan-out plan.json"
            }
            _ => return None,
        };
        Some(help.into())
    }
}
