//! Parts of a conversation that several APIs have, converted to those of chat templates.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json, json};

use super::error::ServeError;
use super::service::{Service, THINKING_VARIABLES, Thinking};

/// Parses a request.
///
/// # Errors
/// If a field is missing or has the wrong type.
pub(super) fn parse<T: DeserializeOwned>(body: Json) -> Result<T, ServeError> {
    serde_json::from_value(body)
        .map_err(|error| ServeError::Invalid { problem: format!("the body: {error}"), field: None })
}

/// Returns a call of an earlier answer, in the form of chat templates.
pub(super) fn earlier_call(id: &str, name: &str, arguments: Map<String, Json>) -> Json {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// Returns the template variables that enable or disable reasoning, as the field `field` requests.
///
/// # Errors
/// If the model doesn't reason but is requested to, or can't be kept from it.
pub(super) fn thinking(service: &Service, field: &'static str, thinks: bool) -> Result<Map<String, Json>, ServeError> {
    match (service.thinking(), thinks) {
        (Thinking::Never, true) => Err(ServeError::field(field, format!("`{field}`: this model doesn't think"))),
        (Thinking::Always, false) => Err(ServeError::field(field, format!("`{field}`: this model always thinks"))),
        (Thinking::Optional, _) => {
            Ok(THINKING_VARIABLES.into_iter().map(|name| (name.to_owned(), thinks.into())).collect())
        }
        _ => Ok(Map::new()),
    }
}
