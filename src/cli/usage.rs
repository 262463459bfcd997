//! Errors of the command line itself.

use anec::base::{Diagnostic, Error, Fault};

/// Invalid request, with a remedy.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub(super) struct UsageError {
    problem: String,
    help: &'static str,
}

impl UsageError {
    /// Creates an error; `help` is one sentence.
    pub(super) fn new(problem: impl Into<String>, help: &'static str) -> Self {
        UsageError { problem: problem.into(), help }
    }
}

impl Diagnostic for UsageError {
    fn fault(&self) -> Fault {
        Fault::Usage
    }

    fn help(&self) -> Option<String> {
        Some(self.help.into())
    }
}

/// A bundle in the cache that can't be opened.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub(super) struct CachedBundleError {
    pub(super) error: Error,
    /// Name in the cache.
    pub(super) name: String,
}

impl Diagnostic for CachedBundleError {
    fn fault(&self) -> Fault {
        self.error.fault()
    }

    fn help(&self) -> Option<String> {
        let name = &self.name;
        Some(format!("`anec rm {name}` removes the bundle from the cache; the next use of the model converts it anew"))
    }
}

/// The environment names an instruction set that this architecture doesn't have.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct InstructionError(pub(super) String);

impl Diagnostic for InstructionError {
    fn fault(&self) -> Fault {
        Fault::Usage
    }

    fn help(&self) -> Option<String> {
        Some("name one of them, or unset the variable to use all that the processor has".into())
    }
}

/// The system refused to create threads.
#[derive(Debug, thiserror::Error)]
#[error("can't start threads: {0}")]
pub(super) struct ThreadError(pub(super) std::io::Error);

impl Diagnostic for ThreadError {
    fn fault(&self) -> Fault {
        Fault::Platform
    }

    fn help(&self) -> Option<String> {
        Some("raise the process limit (`ulimit -u`; in a container, the pids limit), or end other processes".into())
    }
}
