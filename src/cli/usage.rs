//! What can't be done as it was asked on the command line.

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
