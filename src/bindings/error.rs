//! Errors, grouped by what an app can do about them.

use anec::base::{Error, Fault};
use anec::runtime::RuntimeError;

/// Error with its remedy.
#[derive(Debug, thiserror::Error, uniffi::Error)]
#[non_exhaustive]
pub enum AnecError {
    /// Folder without a bundle.
    #[error("{message}")]
    NoBundle {
        /// Description of the problem and its place.
        message: String,
        /// Remedy; empty if the message contains it.
        help: String,
    },
    /// Damaged bundle file, or one of another version: get the bundle again.
    #[error("{message}")]
    DamagedBundle {
        /// Description of the problem and its place.
        message: String,
        /// Remedy; empty if the message contains it.
        help: String,
    },
    /// Ability that the model lacks: text generation, embeddings, labels, a tokenizer or a chat template.
    #[error("{message}")]
    OtherTask {
        /// Description of the problem and its place.
        message: String,
        /// Remedy; empty if the message contains it.
        help: String,
    },
    /// Text that exceeds the context.
    #[error("{message}")]
    TextTooLong {
        /// Description of the problem and its place.
        message: String,
        /// Remedy; empty if the message contains it.
        help: String,
    },
    /// Invalid argument: an option out of range, a grammar that can't be parsed.
    #[error("{message}")]
    WrongArgument {
        /// Description of the problem and its place.
        message: String,
        /// Remedy; empty if the message contains it.
        help: String,
    },
    /// Refusal of the system: no Core ML, no memory, no disk space.
    #[error("{message}")]
    System {
        /// Description of the problem and its place.
        message: String,
        /// Remedy; empty if the message contains it.
        help: String,
    },
    /// Failure of an app's listener.
    #[error("the app's listener failed: {message}")]
    Listener {
        /// Message of the listener's language.
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
