//! What can't be done as it was asked on the command line, or by a process under its limits.

use anec::base::{Diagnostic, Fault};

/// A request that can't be met, and what can be asked for instead.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub(super) struct UsageError {
    problem: String,
    help: &'static str,
}

impl UsageError {
    /// `help` is one sentence.
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

/// The system gives this process no threads.
#[derive(Debug, thiserror::Error)]
#[error("can't start threads: {0}")]
pub(super) struct ThreadError(pub(super) std::io::Error);

impl Diagnostic for ThreadError {
    fn fault(&self) -> Fault {
        Fault::Platform
    }

    fn help(&self) -> Option<String> {
        Some("raise the limit on processes (`ulimit -u`; in a container, that of its pids), or end some".into())
    }
}
