//! Error bodies of APIs other than OpenAI's, by route.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use serde_json::{Value as Json, json};

use super::error::ServeError;

/// Returns the body of an error in the form of the API that a path belongs to; `None` for OpenAI's form.
fn form_of(path: &str) -> Option<fn(&ServeError) -> Json> {
    match path {
        _ if path.starts_with("/api/") => Some(ollama),
        "/v1/messages" | "/v1/messages/count_tokens" => Some(anthropic),
        _ => None,
    }
}

/// Gives error responses the form of the API that the path belongs to.
pub(super) async fn convert(request: Request, next: Next) -> Response {
    let form = form_of(request.uri().path());
    let mut response = next.run(request).await;
    let Some(error) = response.extensions_mut().remove::<Arc<ServeError>>() else { return response };
    let Some(form) = form else { return response };
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response.map(|_| Body::from(form(&error).to_string()))
}

/// Returns the body of an error in Ollama's API.
pub(super) fn ollama(error: &ServeError) -> Json {
    json!({"error": error.message()})
}

/// Returns the body of an error in Anthropic's API.
pub(super) fn anthropic(error: &ServeError) -> Json {
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message()}})
}
