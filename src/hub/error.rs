//! Errors of the hub.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault, FileError};

/// Result of a hub operation.
pub type Result<T, E = HubError> = std::result::Result<T, E>;

/// Error of a hub operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// File error of the system.
    #[error(transparent)]
    Io(#[from] FileError),
    /// Missing or private item.
    #[error("the hub doesn't have {what}, or not for everybody")]
    Absent {
        /// Requested item.
        what: String,
    },
    /// Item that this user may not access.
    #[error("the hub refuses {what}: it may not exist, or its licence must be accepted on its page and HF_TOKEN set")]
    Refused {
        /// Requested item.
        what: String,
    },
    /// Item that exists already or was changed concurrently.
    #[error("the hub has {what} already, or somebody else is changing it")]
    Exists {
        /// Item to be created.
        what: String,
    },
    /// Answer that differs from the hub's API.
    #[error("{what}: {problem}")]
    Answer {
        /// Requested item.
        what: String,
        /// Description of the answer.
        problem: String,
    },
    /// Unreachable hub.
    #[error("can't {action} {what}: {problem}")]
    Unreachable {
        /// Action: `download`, `upload`, `ask for`.
        action: &'static str,
        /// Requested item.
        what: String,
        /// Message of the network.
        problem: String,
    },
    /// File whose digest is wrong.
    #[error("{}: its digest is {found}, expected {expected}", path.display())]
    Digest {
        /// Path of the file.
        path: PathBuf,
        /// Expected digest.
        expected: String,
        /// Actual digest.
        found: String,
    },
    /// Upload without a token.
    #[error("no token: the hub must know who uploads")]
    NoToken,
}

impl HubError {
    /// Returns whether the hub reported a missing or private item, as opposed to not answering.
    pub fn is_absence(&self) -> bool {
        matches!(self, HubError::Absent { .. } | HubError::Refused { .. })
    }

    /// Returns whether the hub didn't answer.
    pub fn is_silence(&self) -> bool {
        matches!(self, HubError::Unreachable { .. })
    }
}

impl Diagnostic for HubError {
    fn fault(&self) -> Fault {
        match self {
            HubError::Io(error) => error.fault(),
            HubError::Unreachable { .. } => Fault::Platform,
            HubError::NoToken | HubError::Exists { .. } => Fault::Usage,
            HubError::Absent { .. } | HubError::Refused { .. } | HubError::Answer { .. } | HubError::Digest { .. } => {
                Fault::Source
            }
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            HubError::Io(error) => return error.help(),
            HubError::Absent { .. } | HubError::Refused { .. } => {
                "check the name and the revision; what isn't public needs a token in HF_TOKEN, and uploads need one that may write"
            }
            HubError::Answer { .. } => "try again later; HF_ENDPOINT names another hub",
            HubError::Exists { .. } => "give the same command again",
            HubError::Unreachable { .. } => {
                "check the network and HF_ENDPOINT, and give the same command again: it goes on where it was"
            }
            HubError::Digest { .. } => {
                "give the same command again; if that doesn't help, the file at its origin is damaged"
            }
            HubError::NoToken => {
                "make a token that may write at huggingface.co/settings/tokens and give it in HF_TOKEN"
            }
        };
        Some(text.into())
    }
}
