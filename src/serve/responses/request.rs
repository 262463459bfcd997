//! Requests of OpenAI's API of responses.

use anec_base::json::read_value;
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use super::store::ConversationStore;
use crate::conversation::{beside_text, earlier_call, effort_variables, offered, parse};
use crate::error::ServeError;
use crate::parameters::{Parameters, check_fields};
use crate::service::{RequestPrompt, Service, Submission};
use crate::tools::Tools;
use anec_runtime::chat::{Chat, Message};

/// Parsed request for an answer.
pub(super) struct AnswerRequest {
    /// Text to generate.
    pub submission: Submission,
    /// Fields of the response that repeat those of the request.
    pub response: Json,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Messages to store with the answer; `None` if it isn't stored.
    pub kept: Option<Vec<Message>>,
}

/// Body of `POST /v1/responses`.
#[derive(Debug, Deserialize)]
struct ResponseRequest {
    input: Input,
    instructions: Option<String>,
    max_output_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    tools: Option<Vec<Json>>,
    tool_choice: Option<Json>,
    parallel_tool_calls: Option<bool>,
    text: Option<TextConfig>,
    reasoning: Option<ReasoningConfig>,
    previous_response_id: Option<String>,
    stream: Option<bool>,
    store: Option<bool>,
    metadata: Option<Json>,
    include: Option<Vec<String>>,
}

/// Text, or a list of items.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`input` has to be a text, or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Json>),
}

#[derive(Debug, Deserialize)]
struct TextConfig {
    format: Option<Json>,
    verbosity: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ReasoningConfig {
    effort: Option<String>,
}

/// Unsupported fields, with the values that change nothing.
const UNSUPPORTED: [(&str, &[&str]); 6] = [
    ("background", &["false"]),
    ("conversation", &[]),
    ("max_tool_calls", &[]),
    ("prompt", &[]),
    ("top_logprobs", &["0"]),
    ("truncation", &["\"disabled\""]),
];

/// Parses a request. Earlier messages come from `conversations`.
///
/// # Errors
/// If a field is wrong or unsupported, or the previous response is unknown.
pub(super) fn read(
    body: Json,
    service: &Service,
    conversations: &ConversationStore,
) -> Result<AnswerRequest, ServeError> {
    check_fields(&body, &UNSUPPORTED)?;
    let request: ResponseRequest = parse(&body)?;
    service.check_template()?;
    if request.max_output_tokens.is_some_and(|count| count < 1) {
        return Err(ServeError::field("max_output_tokens", "`max_output_tokens` has to be 1 or more"));
    }
    if request.include.iter().flatten().any(|part| part.contains("logprobs")) {
        return Err(ServeError::field("include", "`include`: log-probabilities aren't supported"));
    }
    if request.text.as_ref().and_then(|text| text.verbosity.as_ref()).is_some_and(|verbosity| verbosity != "medium") {
        return Err(ServeError::field("text", "`text.verbosity` can only be \"medium\""));
    }
    let mut messages = match &request.previous_response_id {
        None => Vec::new(),
        Some(id) => conversations.get(id).ok_or_else(|| {
            let problem = format!("`previous_response_id`: {id:?} is unknown, wasn't stored, or was dropped since");
            ServeError::field("previous_response_id", problem)
        })?,
    };
    match &request.input {
        Input::Text(text) => messages.push(Message::new("user", text)),
        Input::Items(items) => items.iter().try_for_each(|item| add_item(item, &mut messages))?,
    }
    if messages.is_empty() {
        return Err(ServeError::field("input", "`input` is empty"));
    }
    let offered = request.tools.iter().flatten().map(function).collect::<Result<Vec<_>, _>>()?;
    let choice = request.tool_choice.as_ref().map(tool_choice).transpose()?;
    let tools = Tools::read(&offered, choice.as_ref(), request.parallel_tool_calls)?;
    let parameters = Parameters {
        max_tokens: request.max_output_tokens,
        temperature: request.temperature,
        top_p: request.top_p,
        response_format: request.text.as_ref().and_then(|text| text.format.as_ref()).map(response_format),
        ..Parameters::default()
    };
    let response = request.response();
    let kept = (request.store != Some(false)).then(|| messages.clone());
    let instructions = request.instructions.as_ref().map(|text| Message::new("system", text));
    let chat = Chat {
        messages: instructions.into_iter().chain(messages).collect(),
        tools: if tools.is_some() { offered } else { Vec::new() },
        variables: request.variables(service)?,
        continues_last: false,
    };
    let prompt = RequestPrompt::Chat(chat);
    let submission = Submission { prompt, parameters, logprobs: None, tools, scored: false };
    Ok(AnswerRequest { submission, response, stream: request.stream == Some(true), kept })
}

impl ResponseRequest {
    /// Returns the fields of the response that repeat those of the request.
    fn response(&self) -> Json {
        let format = self.text.as_ref().and_then(|text| text.format.clone());
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_ref());
        json!({
            "object": "response", "status": "in_progress", "background": false, "error": null,
            "incomplete_details": null, "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata.clone().unwrap_or_else(|| json!({})), "output": [],
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": effort, "summary": null},
            "store": self.store.unwrap_or(true), "temperature": self.temperature,
            "text": {"format": format.unwrap_or_else(|| json!({"type": "text"}))},
            "tool_choice": self.tool_choice.clone().unwrap_or_else(|| json!("auto")),
            "tools": self.tools.clone().unwrap_or_default(), "top_p": self.top_p, "truncation": "disabled",
            "usage": null,
        })
    }

    /// Returns the template variables of the effort; without effort the model doesn't reason if it can be kept from it.
    fn variables(&self, service: &Service) -> Result<Map<String, Json>, ServeError> {
        match self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_deref()) {
            Some(effort) => effort_variables(service, "reasoning", effort),
            None => Ok(Map::new()),
        }
    }
}

/// Adds an item of the input to the messages. Reasoning and calls belong to the message of the assistant before them.
fn add_item(item: &Json, messages: &mut Vec<Message>) -> Result<(), ServeError> {
    let wrong = |problem: String| ServeError::field("input", problem);
    let text = |key: &str| item[key].as_str();
    match (text("type").unwrap_or("message"), text("call_id"), text("name")) {
        ("message", ..) => {
            let message = json!({"role": item["role"], "content": item["content"]});
            let message: Message =
                read_value(&message).map_err(|error| wrong(format!("a message of `input`: {error}")))?;
            match messages.last_mut().filter(|last| message.role == "assistant" && is_reasoning(last)) {
                Some(reasoning) => reasoning.content = message.content,
                None => messages.push(message),
            }
        }
        ("function_call", Some(id), Some(name)) => {
            let call = earlier_call(id, name, text("arguments").unwrap_or("{}"));
            let answer = assistant(messages);
            match answer.more.get_mut("tool_calls").and_then(Json::as_array_mut) {
                Some(calls) => calls.push(call),
                None => drop(answer.more.insert("tool_calls".into(), json!([call]))),
            }
        }
        ("function_call_output", Some(id), _) => {
            let message = json!({"role": "tool", "content": item["output"], "tool_call_id": id});
            let mut message: Message =
                read_value(&message).map_err(|error| wrong(format!("an output of a function in `input`: {error}")))?;
            let calls =
                messages.iter().rev().filter_map(|message| message.more.get("tool_calls")?.as_array()).flatten();
            let name = calls.into_iter().find(|call| call["id"] == id).map(|call| call["function"]["name"].clone());
            message.more.extend(name.map(|name| ("name".to_owned(), name)));
            messages.push(message);
        }
        ("reasoning", ..) => {
            let parts = item["content"].as_array().into_iter().flatten();
            let reasoning: String = parts.filter_map(|part| part["text"].as_str()).collect();
            if !reasoning.is_empty() {
                let more = beside_text(&reasoning, Vec::new());
                messages.push(Message { more, ..Message::new("assistant", "") });
            }
        }
        (kind, ..) => {
            return Err(wrong(format!("an item of type {kind:?} in `input` is malformed or isn't supported")));
        }
    }
    Ok(())
}

/// Returns whether a message has nothing but reasoning so far.
fn is_reasoning(message: &Message) -> bool {
    message.role == "assistant"
        && message.content.as_deref() == Some("")
        && message.more.contains_key("reasoning_content")
        && !message.more.contains_key("tool_calls")
}

/// Returns the last message if it is the assistant's, or a new one.
fn assistant(messages: &mut Vec<Message>) -> &mut Message {
    if messages.last().is_none_or(|last| last.role != "assistant") {
        messages.push(Message::new("assistant", ""));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// Returns a tool in the form of chat completions.
fn function(tool: &Json) -> Result<Json, ServeError> {
    match tool["type"].as_str() {
        Some("function") => Ok(offered(tool, "parameters")),
        kind => {
            let kind = kind.unwrap_or("nothing");
            Err(ServeError::field("tools", format!("a tool of type {kind:?} in `tools`: only functions are supported")))
        }
    }
}

/// Returns the choice of a tool in the form of chat completions.
fn tool_choice(choice: &Json) -> Result<Json, ServeError> {
    match choice["type"].as_str() {
        Some("function") => Ok(json!({"type": "function", "function": {"name": choice["name"]}})),
        Some(kind) => Err(ServeError::field("tool_choice", format!("`tool_choice` of type {kind:?} isn't supported"))),
        None => Ok(choice.clone()),
    }
}

/// Returns the form of the text in the form of chat completions.
fn response_format(format: &Json) -> Json {
    match format["type"].as_str() {
        Some("json_schema") => {
            let schema = json!({"schema": format["schema"], "strict": format["strict"]});
            json!({"type": "json_schema", "json_schema": schema})
        }
        _ => format.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(items: Json) -> Result<Vec<Message>, ServeError> {
        let mut messages = Vec::new();
        items.as_array().unwrap().iter().try_for_each(|item| add_item(item, &mut messages))?;
        Ok(messages)
    }

    #[test]
    fn items_become_messages() {
        let found = messages(json!([
            {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"a\": 1}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "2", "output": "no"},
        ]))
        .unwrap();
        let roles: Vec<_> = found.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["user", "assistant", "tool"]);
        assert_eq!(
            (found[1].content.as_deref(), &found[1].more["reasoning_content"]),
            (Some("I look."), &json!("Hm."))
        );
        assert_eq!(found[1].more["tool_calls"].as_array().unwrap().len(), 2);
        assert_eq!((&found[2].more["tool_call_id"], &found[2].more["name"]), (&json!("2"), &json!("g")));
    }

    #[test]
    fn items_that_cant_be_read_are_named() {
        for (item, problem) in [
            (json!({"type": "item_reference", "id": "x"}), "item_reference"),
            (json!({"type": "function_call", "name": "f"}), "function_call"),
            (json!({"role": "user", "content": [{"type": "input_image"}]}), "input_image"),
            (json!({"content": "Hi"}), "message"),
        ] {
            let error = messages(json!([item])).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("`input`"), "{error}");
        }
        assert!(function(&json!({"type": "web_search"})).unwrap_err().to_string().contains("web_search"));
        assert!(tool_choice(&json!({"type": "allowed_tools"})).is_err());
    }
}
