//! Errors of requests, with OpenAI's codes.

use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use anec_base::listing::limited;
use anec_base::{Diagnostic, Error, Fault};
use anec_runtime::RuntimeError;

/// Error of a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Invalid request.
    #[error("{problem}")]
    Invalid {
        /// Description of the problem.
        problem: String,
        /// Field with the problem.
        field: Option<&'static str>,
    },
    /// Prompt and answer that exceed the context. Clients recognize the error by words of OpenAI's and Anthropic's
    /// APIs: "this model's maximum context length is", "prompt is too long".
    #[error(
        "the prompt is too long: this model's maximum context length is {context} tokens, but the request needs \
         {tokens}: {prompt} of the prompt and {more} to generate; shorten the prompt or lower max_tokens"
    )]
    ContextLength {
        /// Size of the context in tokens.
        context: u64,
        /// Number of requested tokens.
        tokens: u64,
        /// Number of prompt tokens.
        prompt: u64,
        /// Number of tokens to generate.
        more: u64,
        /// Field that contains the prompt.
        field: &'static str,
    },
    /// Prompt that exceeds the context however it is tokenized; has the words of [`ServeError::ContextLength`].
    #[error(
        "the prompt is too long: this model's maximum context length is {context} tokens, and the prompt has {bytes} \
         bytes, more than so many tokens can stand for; shorten the prompt"
    )]
    PromptBytes {
        /// Size of the context in tokens.
        context: u64,
        /// Size of the prompt in bytes.
        bytes: usize,
        /// Field that contains the prompt.
        field: &'static str,
    },
    /// Text that exceeds the maximum of a model that reads it whole.
    #[error("this model takes texts of up to {context} tokens, but one has {tokens}; divide it")]
    TextLength {
        /// Maximum number of tokens.
        context: u64,
        /// Number of tokens of the text.
        tokens: u64,
        /// Field that contains the text.
        field: &'static str,
    },
    /// Request of a web page whose origin isn't allowed.
    #[error("pages of `{origin}` may not use this server; its options allow origins (CORS)")]
    ForeignOrigin {
        /// Origin of the page.
        origin: String,
    },
    /// Request under a host name that isn't this machine's, while the server listens on this machine only.
    #[error(
        "this server answers under the names of this machine alone, not as `{host}`; its operator can allow that host"
    )]
    ForeignHost {
        /// Host name of the request.
        host: String,
    },
    /// Body that isn't JSON.
    #[error("the body has to be JSON, with `Content-Type: application/json`; it is `{kind}`")]
    ContentType {
        /// Content type of the body.
        kind: String,
    },
    /// Answer that the client doesn't read.
    #[error("the answer wasn't read in time, and others wait")]
    Unread,
    /// Missing or wrong API key.
    #[error("this server wants an API key: send it as `Authorization: Bearer KEY`")]
    Unauthorized,
    /// Unknown model.
    #[error("there is no model `{name}` here; this server has {own}")]
    NoModel {
        /// Requested name.
        name: String,
        /// Names of the served models.
        own: String,
    },
    /// Unknown response.
    #[error("there is no response `{id}`: it wasn't stored, or was dropped or deleted since")]
    NoResponse {
        /// Requested id.
        id: String,
    },
    /// Unknown path.
    #[error("there is nothing at `{path}`")]
    NoRoute {
        /// Path of the request.
        path: String,
    },
    /// Method that the path doesn't take.
    #[error("`{path}` doesn't take {method}")]
    Method {
        /// Path of the request.
        path: String,
        /// Method of the request.
        method: String,
    },
    /// Body that didn't arrive in time.
    #[error("the request didn't arrive within {seconds} seconds")]
    Slow {
        /// Time limit in seconds.
        seconds: u64,
    },
    /// Body that is too large.
    #[error("the request is larger than the {limit} bytes that this server takes")]
    TooLarge {
        /// Maximum size in bytes.
        limit: usize,
    },
    /// Full queue.
    #[error("the server is busy: {waiting} requests wait already; try again later")]
    Busy {
        /// Number of waiting requests.
        waiting: usize,
    },
    /// Server that is stopping.
    #[error("the server is shutting down")]
    Stopping,
    /// Answer that took too long.
    #[error("the answer wasn't finished within {seconds} seconds")]
    Timeout {
        /// Time limit in seconds.
        seconds: u64,
    },
    /// Address that can't be listened on.
    #[error("can't listen on {address}: {error}")]
    Listen {
        /// Host and port.
        address: String,
        /// Error of the system.
        error: std::io::Error,
    },
    /// Unix socket that can't be listened on.
    #[error("can't listen on {}: {error}", path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the system.
        error: std::io::Error,
    },
    /// Failure of the model.
    #[error("the model failed: {problem}")]
    Model {
        /// Description of the failure.
        problem: String,
    },
}

impl ServeError {
    /// Returns a [`ServeError::Invalid`] about a field.
    pub fn field(field: &'static str, problem: impl Into<String>) -> Self {
        ServeError::Invalid { problem: problem.into(), field: Some(field) }
    }

    /// Returns a [`ServeError::Model`] for a panic; its message is in the log.
    pub fn panicked() -> Self {
        ServeError::Model { problem: "it panicked; see the log".into() }
    }

    /// Returns the message for clients, of limited length.
    pub fn message(&self) -> String {
        limited(&self.to_string()).into_owned()
    }

    /// Returns the HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            ServeError::Invalid { .. }
            | ServeError::ContextLength { .. }
            | ServeError::PromptBytes { .. }
            | ServeError::TextLength { .. } => StatusCode::BAD_REQUEST,
            ServeError::ForeignOrigin { .. } | ServeError::ForeignHost { .. } => StatusCode::FORBIDDEN,
            ServeError::ContentType { .. } => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ServeError::Unauthorized => StatusCode::UNAUTHORIZED,
            ServeError::NoModel { .. } | ServeError::NoResponse { .. } | ServeError::NoRoute { .. } => {
                StatusCode::NOT_FOUND
            }
            ServeError::Method { .. } => StatusCode::METHOD_NOT_ALLOWED,
            ServeError::Slow { .. } | ServeError::Unread => StatusCode::REQUEST_TIMEOUT,
            ServeError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            ServeError::Busy { .. } => StatusCode::TOO_MANY_REQUESTS,
            ServeError::Stopping => StatusCode::SERVICE_UNAVAILABLE,
            ServeError::Timeout { .. } => StatusCode::GATEWAY_TIMEOUT,
            ServeError::Listen { .. } | ServeError::Socket { .. } | ServeError::Model { .. } => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }

    /// Returns the body in the form of OpenAI's API.
    pub fn body(&self) -> Value {
        let (kind, code) = match self {
            ServeError::Invalid { .. } => ("invalid_request_error", None),
            ServeError::ContextLength { .. } | ServeError::PromptBytes { .. } | ServeError::TextLength { .. } => {
                ("invalid_request_error", Some("context_length_exceeded"))
            }
            ServeError::ForeignOrigin { .. } => ("invalid_request_error", Some("foreign_origin")),
            ServeError::ForeignHost { .. } => ("invalid_request_error", Some("foreign_host")),
            ServeError::ContentType { .. } => ("invalid_request_error", Some("unsupported_media_type")),
            ServeError::Unread => ("invalid_request_error", Some("answer_not_read")),
            ServeError::Unauthorized => ("invalid_request_error", Some("invalid_api_key")),
            ServeError::NoModel { .. } => ("invalid_request_error", Some("model_not_found")),
            ServeError::NoResponse { .. } => ("invalid_request_error", None),
            ServeError::NoRoute { .. } => ("invalid_request_error", Some("unknown_url")),
            ServeError::Method { .. } => ("invalid_request_error", Some("method_not_supported")),
            ServeError::Slow { .. } => ("invalid_request_error", Some("request_timeout")),
            ServeError::TooLarge { .. } => ("invalid_request_error", Some("request_too_large")),
            ServeError::Busy { .. } => ("rate_limit_error", Some("queue_full")),
            ServeError::Stopping => ("server_error", Some("shutting_down")),
            ServeError::Timeout { .. } => ("server_error", Some("timeout")),
            ServeError::Listen { .. } | ServeError::Socket { .. } | ServeError::Model { .. } => ("server_error", None),
        };
        let field = match self {
            ServeError::Invalid { field, .. } => *field,
            ServeError::ContextLength { field, .. }
            | ServeError::PromptBytes { field, .. }
            | ServeError::TextLength { field, .. } => Some(*field),
            ServeError::NoModel { .. } => Some("model"),
            ServeError::NoResponse { .. } => Some("id"),
            _ => None,
        };
        json!({"error": {"message": self.message(), "type": kind, "param": field, "code": code}})
    }
}

impl IntoResponse for ServeError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        let headers = response.headers_mut();
        match &self {
            ServeError::Busy { .. } => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            ServeError::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        // routes of other APIs have other bodies
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

/// Maps errors of the runtime: usage errors are the client's, others the server's.
impl From<RuntimeError> for ServeError {
    fn from(error: RuntimeError) -> Self {
        match error {
            RuntimeError::OutOfRange { field, .. } => ServeError::field(field, error.to_string()),
            RuntimeError::UnknownPrompt { .. } => ServeError::field("prompt_name", advised(&error.into())),
            error => Error::from(error).into(),
        }
    }
}

/// Returns an error with its advice.
fn advised(error: &Error) -> String {
    match error.help() {
        Some(help) => format!("{error}; {help}"),
        None => error.to_string(),
    }
}

impl From<Error> for ServeError {
    fn from(error: Error) -> Self {
        let problem = advised(&error);
        match error.fault() {
            Fault::Usage => ServeError::Invalid { problem, field: None },
            Fault::Source | Fault::Platform => ServeError::Model { problem },
        }
    }
}

impl Diagnostic for ServeError {
    fn fault(&self) -> Fault {
        match self {
            ServeError::Listen { .. } | ServeError::Socket { .. } => Fault::Platform,
            _ => Fault::Usage,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            ServeError::Listen { .. } => "choose another address or port",
            ServeError::Socket { .. } => "choose another path, in a writable folder",
            _ => return None,
        };
        Some(help.into())
    }
}
