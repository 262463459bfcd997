//! Errors of Core ML and of compute plans.

use std::path::{Path, PathBuf};

use crate::error::{Diagnostic, Fault};

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
    /// The system refused.
    #[error("{}: can't {action}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
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
    /// Turns an I/O error of `action` on `path` into a [`CoreMlError::Io`].
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| CoreMlError::Io { path: path.to_owned(), action, source }
    }

    /// A [`CoreMlError::Plan`].
    pub(crate) fn plan(path: &Path, problem: impl Into<String>) -> Self {
        CoreMlError::Plan { path: path.to_owned(), problem: problem.into() }
    }
}

impl Diagnostic for CoreMlError {
    fn fault(&self) -> Fault {
        match self {
            CoreMlError::Unavailable(_) | CoreMlError::Refused { .. } | CoreMlError::Io { .. } => Fault::Platform,
            CoreMlError::Plan { .. } | CoreMlError::Function { .. } => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            CoreMlError::Unavailable(_) => "a Mac with macOS 15 or later has it",
            CoreMlError::Plan { .. } => {
                "take a new one on a Mac: anec validate BUNDLE --residency --plan-out plan.json"
            }
            _ => return None,
        };
        Some(help.into())
    }
}
