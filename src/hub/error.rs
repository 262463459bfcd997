//! Errors of the hub.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault, FileError};

/// The result of talking with the hub.
pub type Result<T, E = HubError> = std::result::Result<T, E>;

/// What can go wrong between here and the hub.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The system refused a file.
    #[error(transparent)]
    Io(#[from] FileError),
    /// The hub answers that there is no such thing.
    #[error("the hub doesn't have {what}, or not for everybody")]
    Absent {
        /// What was asked for.
        what: String,
    },
    /// The hub answers that this user may not.
    #[error("the hub refuses {what}: it may not exist, or its licence must be accepted on its page and HF_TOKEN set")]
    Refused {
        /// What was asked for.
        what: String,
    },
    /// The hub answers that there is one already, or that it changed.
    #[error("the hub has {what} already, or somebody else is changing it")]
    Exists {
        /// What was to be made.
        what: String,
    },
    /// The hub answers something else than what its API says.
    #[error("{what}: {problem}")]
    Answer {
        /// What was asked for.
        what: String,
        /// What came instead.
        problem: String,
    },
    /// The hub can't be reached.
    #[error("can't {action} {what}: {problem}")]
    Unreachable {
        /// `download`, `upload`, `ask for`.
        action: &'static str,
        /// What was asked for.
        what: String,
        /// What the network said.
        problem: String,
    },
    /// A file isn't what the hub or the bundle says it is.
    #[error("{}: its digest is {found}, expected {expected}", path.display())]
    Digest {
        /// The file.
        path: PathBuf,
        /// The digest that it should have.
        expected: String,
        /// The digest that it has.
        found: String,
    },
    /// Something is to be written and nobody says who writes.
    #[error("no token: the hub must know who uploads")]
    NoToken,
}

impl HubError {
    /// Whether the hub answered that there is no such thing, or not for this user, in contrast to not answering.
    pub fn is_absence(&self) -> bool {
        matches!(self, HubError::Absent { .. } | HubError::Refused { .. })
    }

    /// Whether nobody answered.
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
