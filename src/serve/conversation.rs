//! Parts of a conversation that several APIs have, converted to those of chat templates.

use anec_base::json::read_value;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json, json};

use super::error::ServeError;
use super::fields::names;
use super::service::{Service, THINKING_VARIABLES, Thinking};

/// Parses the fields of a type from a request, which may have others.
///
/// # Errors
/// If a field is missing or has the wrong type.
pub(super) fn parse<T: DeserializeOwned>(body: &Json) -> Result<T, ServeError> {
    read_value(body).map_err(|error| {
        let field = names::<T>().iter().copied().find(|name| error.field() == Some(*name));
        ServeError::Invalid { problem: error.to_string(), field }
    })
}

/// Returns a call of an earlier answer, in the form of chat templates. Arguments are an object, or its JSON as a text.
pub(super) fn earlier_call(id: &str, name: &str, arguments: impl Into<Json>) -> Json {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments.into()}})
}

/// Returns the parts of an earlier answer beside its text, in the form of chat templates.
pub(super) fn beside_text(reasoning: &str, calls: Vec<Json>) -> Map<String, Json> {
    let reasoning = (!reasoning.is_empty()).then(|| ("reasoning_content".to_owned(), json!(reasoning)));
    let calls = (!calls.is_empty()).then(|| ("tool_calls".to_owned(), json!(calls)));
    reasoning.into_iter().chain(calls).collect()
}

/// Returns an offered function in the form of chat completions; its schema is the field `parameters` of `tool`.
pub(super) fn offered(tool: &Json, parameters: &str) -> Json {
    let description = tool["description"].as_str().unwrap_or_default();
    let function = json!({"name": tool["name"], "description": description, "parameters": tool[parameters]});
    json!({"type": "function", "function": function})
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

/// Returns the template variables of a reasoning effort, as the field `field` requests. "none" disables the reasoning.
///
/// # Errors
/// If the model can't be kept from reasoning.
pub(super) fn effort_variables(
    service: &Service,
    field: &'static str,
    effort: &str,
) -> Result<Map<String, Json>, ServeError> {
    let mut variables = match (effort, service.thinking()) {
        ("none", _) => thinking(service, field, false)?,
        (_, Thinking::Optional) => thinking(service, field, true)?,
        _ => Map::new(),
    };
    variables.insert("reasoning_effort".into(), json!(effort));
    Ok(variables)
}
