//! Errors, by what an app can do about them.

use anec::base::{Error, Fault};
use anec::runtime::RuntimeError;

/// What went wrong, and what helps.
#[derive(Debug, thiserror::Error, uniffi::Error)]
#[non_exhaustive]
pub enum AnecError {
    /// There is no bundle in the folder.
    #[error("{message}")]
    NoBundle {
        /// What is wrong, and where.
        message: String,
        /// What helps; empty if the message says it.
        help: String,
    },
    /// A file of the bundle is damaged, or of another version: get the bundle again.
    #[error("{message}")]
    DamagedBundle {
        /// What is wrong, and where.
        message: String,
        /// What helps; empty if the message says it.
        help: String,
    },
    /// The model isn't for this: it continues no texts, gives no vectors or has no labels, tokenizer or chat template.
    #[error("{message}")]
    OtherTask {
        /// What is wrong, and where.
        message: String,
        /// What helps; empty if the message says it.
        help: String,
    },
    /// The text doesn't fit into the context.
    #[error("{message}")]
    TextTooLong {
        /// What is wrong, and where.
        message: String,
        /// What helps; empty if the message says it.
        help: String,
    },
    /// An argument is wrong: an option is out of its range, a grammar can't be read.
    #[error("{message}")]
    WrongArgument {
        /// What is wrong, and where.
        message: String,
        /// What helps; empty if the message says it.
        help: String,
    },
    /// The system refused: there is no Core ML, no memory, no room on the disk.
    #[error("{message}")]
    System {
        /// What is wrong, and where.
        message: String,
        /// What helps; empty if the message says it.
        help: String,
    },
    /// A listener of the app failed.
    #[error("the app's listener failed: {message}")]
    Listener {
        /// What the listener's language says of it.
        message: String,
    },
}

impl From<Error> for AnecError {
    fn from(error: Error) -> Self {
        let (message, help) = (error.to_string(), error.help().unwrap_or_default());
        let inner: &(dyn std::error::Error + 'static) = error.inner();
        match (inner.downcast_ref::<RuntimeError>(), error.fault()) {
            (Some(RuntimeError::NoBundle { .. }), _) => AnecError::NoBundle { message, help },
            (Some(RuntimeError::ContextFull { .. } | RuntimeError::TextTooLong { .. }), _) => {
                AnecError::TextTooLong { message, help }
            }
            (Some(other), _) if is_of_another_task(other) => AnecError::OtherTask { message, help },
            (_, Fault::Source) => AnecError::DamagedBundle { message, help },
            (_, Fault::Platform) => AnecError::System { message, help },
            (_, Fault::Usage) => AnecError::WrongArgument { message, help },
        }
    }
}

fn is_of_another_task(error: &RuntimeError) -> bool {
    matches!(
        error,
        RuntimeError::LabelsTokens { .. }
            | RuntimeError::LabelsTexts { .. }
            | RuntimeError::GivesVectors { .. }
            | RuntimeError::NoEmbedding { .. }
            | RuntimeError::NoLabels { .. }
            | RuntimeError::NoTextLabels { .. }
            | RuntimeError::NoTokenizer { .. }
            | RuntimeError::NoChatTemplate { .. }
    )
}

impl From<uniffi::UnexpectedUniFFICallbackError> for AnecError {
    fn from(error: uniffi::UnexpectedUniFFICallbackError) -> Self {
        AnecError::Listener { message: error.reason }
    }
}
