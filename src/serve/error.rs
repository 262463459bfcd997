//! Errors of requests, with the codes that clients know.

use std::path::PathBuf;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use anec_base::{Diagnostic, Error, Fault};
use anec_runtime::RuntimeError;

/// Why a request isn't answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The request is wrong.
    #[error("{problem}")]
    Invalid {
        /// What is wrong.
        problem: String,
        /// The field that it is about.
        field: Option<&'static str>,
    },
    /// The text doesn't fit into the model's context.
    #[error(
        "this model's context has {context} tokens, but the request needs {tokens}: {prompt} of the prompt and {more} to \
         generate; shorten the prompt or lower max_tokens"
    )]
    ContextLength {
        /// Tokens that fit.
        context: u64,
        /// Tokens that were asked for.
        tokens: u64,
        /// Of them, tokens of the prompt.
        prompt: u64,
        /// And tokens to generate.
        more: u64,
        /// The field that has the prompt.
        field: &'static str,
    },
    /// The prompt is too long, however it is tokenized.
    #[error(
        "this model's context has {context} tokens, and the prompt has {bytes} bytes, more than so many tokens can stand \
         for; shorten the prompt"
    )]
    PromptBytes {
        /// Tokens that fit.
        context: u64,
        /// Bytes of the prompt.
        bytes: usize,
        /// The field that has the prompt.
        field: &'static str,
    },
    /// A text that is looked at in one go is too long.
    #[error("this model takes texts of up to {context} tokens, but one has {tokens}; divide it")]
    TextLength {
        /// Tokens that fit.
        context: u64,
        /// Tokens of the text.
        tokens: u64,
        /// The field that has it.
        field: &'static str,
    },
    /// A web page that isn't allowed to use the server.
    #[error("pages of `{origin}` may not use this server; --cors allows them")]
    ForeignOrigin {
        /// Where the page is from.
        origin: String,
    },
    /// The server listens on this machine only, and was reached under a name that others can give it.
    #[error("this server answers under the names of this machine alone, not as `{host}`")]
    ForeignHost {
        /// The name.
        host: String,
    },
    /// The body is no JSON.
    #[error("the body has to be JSON, with `Content-Type: application/json`; it is `{kind}`")]
    ContentType {
        /// What it is.
        kind: String,
    },
    /// The client doesn't read its answer.
    #[error("the answer wasn't read in time, and others wait")]
    Unread,
    /// No key, or a wrong one.
    #[error("this server wants an API key: send it as `Authorization: Bearer KEY`")]
    Unauthorized,
    /// There is no such model.
    #[error("there is no model `{name}` here; this server has `{own}`")]
    NoModel {
        /// The name that was asked for.
        name: String,
        /// The name of the model that is here.
        own: String,
    },
    /// There is no such path.
    #[error("there is nothing at `{path}`")]
    NoRoute {
        /// The path.
        path: String,
    },
    /// The path doesn't take this method.
    #[error("`{path}` doesn't take {method}")]
    Method {
        /// The path.
        path: String,
        /// The method.
        method: String,
    },
    /// The body didn't arrive in time.
    #[error("the request didn't arrive within {seconds} seconds")]
    Slow {
        /// How long was waited.
        seconds: u64,
    },
    /// The body is too large.
    #[error("the request is larger than the {limit} bytes that this server takes")]
    TooLarge {
        /// Most bytes.
        limit: usize,
    },
    /// The queue is full.
    #[error("the server is busy: {waiting} requests wait already; try again later")]
    Busy {
        /// Requests that wait.
        waiting: usize,
    },
    /// The server is about to end.
    #[error("the server is shutting down")]
    Stopping,
    /// The answer took too long.
    #[error("the answer wasn't finished within {seconds} seconds")]
    Timeout {
        /// How long was waited.
        seconds: u64,
    },
    /// The address can't be listened on.
    #[error("can't listen on {address}: {error}")]
    Listen {
        /// Host and port.
        address: String,
        /// What the system said.
        error: std::io::Error,
    },
    /// The Unix socket can't be listened on.
    #[error("can't listen on {}: {error}", path.display())]
    Socket {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The model failed.
    #[error("the model failed: {problem}")]
    Model {
        /// What it says.
        problem: String,
    },
}

impl ServeError {
    /// A [`ServeError::Invalid`] about a field.
    pub fn field(field: &'static str, problem: impl Into<String>) -> Self {
        ServeError::Invalid { problem: problem.into(), field: Some(field) }
    }

    /// A [`ServeError::Model`] for code that panicked; what it said is in the log.
    pub fn panicked() -> Self {
        ServeError::Model { problem: "it panicked; see the log".into() }
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            ServeError::Invalid { .. }
            | ServeError::ContextLength { .. }
            | ServeError::PromptBytes { .. }
            | ServeError::TextLength { .. } => StatusCode::BAD_REQUEST,
            ServeError::ForeignOrigin { .. } | ServeError::ForeignHost { .. } => StatusCode::FORBIDDEN,
            ServeError::ContentType { .. } => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ServeError::Unauthorized => StatusCode::UNAUTHORIZED,
            ServeError::NoModel { .. } | ServeError::NoRoute { .. } => StatusCode::NOT_FOUND,
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

    /// The body that clients of OpenAI's API expect.
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
            _ => None,
        };
        json!({"error": {"message": self.to_string(), "type": kind, "param": field, "code": code}})
    }
}

impl IntoResponse for ServeError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        let headers = response.headers_mut();
        match self {
            ServeError::Busy { .. } => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            ServeError::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

/// What the runtime says of a request: its own mistakes are the client's, the rest is ours.
impl From<RuntimeError> for ServeError {
    fn from(error: RuntimeError) -> Self {
        match error {
            RuntimeError::OutOfRange { field, .. } => ServeError::field(field, error.to_string()),
            error => Error::from(error).into(),
        }
    }
}

impl From<Error> for ServeError {
    fn from(error: Error) -> Self {
        match error.fault() {
            Fault::Usage => ServeError::Invalid { problem: error.to_string(), field: None },
            Fault::Source | Fault::Platform => ServeError::Model { problem: error.to_string() },
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
            ServeError::Listen { .. } => "choose another --port or --host",
            ServeError::Socket { .. } => "choose another path for --socket, in a folder that may be written to",
            _ => return None,
        };
        Some(help.into())
    }
}
