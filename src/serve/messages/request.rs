//! Requests of Anthropic's API.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use crate::conversation::{beside_text, earlier_call, offered, parse, thinking};
use crate::error::ServeError;
use crate::parameters::{MAX_STOPS, Parameters, Stop, check_fields};
use crate::service::{RequestPrompt, Service, Submission, Thinking};
use crate::tools::Tools;
use anec_runtime::chat::{Chat, Message};

/// Prefix of ids of calls. Chat templates get ids without it, because some require nine letters or digits.
pub(super) const CALL_PREFIX: &str = "toolu_";

/// Parsed request for an answer.
pub(super) struct AnswerRequest {
    /// Text to generate.
    pub submission: Submission,
    /// Strings that end the text.
    pub stops: Vec<String>,
    /// Whether the answer is streamed.
    pub stream: bool,
}

/// Body of `POST /v1/messages`.
#[derive(Debug, Deserialize)]
struct MessagesRequest {
    messages: Vec<InputMessage>,
    max_tokens: Option<i64>,
    system: Option<Content>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    tools: Option<Vec<Json>>,
    tool_choice: Option<ToolChoice>,
    thinking: Option<ThinkingConfig>,
    context_management: Option<Json>,
    output_config: Option<OutputConfig>,
    /// Older place of the format.
    output_format: Option<Json>,
}

#[derive(Debug, Deserialize)]
struct InputMessage {
    role: String,
    content: Content,
}

/// Text, or a list of content blocks.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, or a list of content blocks")]
enum Content {
    Text(String),
    Blocks(Vec<Json>),
}

#[derive(Debug, Deserialize)]
struct ToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ThinkingConfig {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Default, Deserialize)]
struct OutputConfig {
    effort: Option<String>,
    format: Option<Json>,
}

/// Unsupported fields, with the values that change nothing.
const UNSUPPORTED: [(&str, &[&str]); 2] = [("mcp_servers", &["[]"]), ("container", &[])];

/// Parses a request for an answer.
///
/// # Errors
/// If a field is wrong or unsupported.
pub(super) fn read(body: Json, service: &Service) -> Result<AnswerRequest, ServeError> {
    let request = MessagesRequest::read(body, service)?;
    let Some(max_tokens) = request.max_tokens.filter(|count| *count > 0) else {
        return Err(ServeError::field("max_tokens", "`max_tokens` is required, and has to be 1 or more"));
    };
    let (chat, tools) = request.chat(service)?;
    let stops = request.stop_sequences.clone().unwrap_or_default();
    if stops.len() > MAX_STOPS {
        let problem = format!("`stop_sequences` has {} strings, at most {MAX_STOPS} are taken", stops.len());
        return Err(ServeError::field("stop_sequences", problem));
    }
    let parameters = Parameters {
        max_tokens: Some(max_tokens),
        temperature: request.temperature,
        top_k: request.top_k,
        top_p: request.top_p,
        stop: Some(Stop::Several(stops.clone())),
        response_format: request.response_format()?,
        ..Parameters::default()
    };
    let prompt = RequestPrompt::Chat(chat);
    let submission = Submission { prompt, parameters, logprobs: None, tools, scored: false };
    Ok(AnswerRequest { submission, stops, stream: request.stream == Some(true) })
}

/// Parses the prompt of a request whose tokens are counted.
///
/// # Errors
/// If a field is wrong or unsupported.
pub(super) fn prompt(body: Json, service: &Service) -> Result<RequestPrompt, ServeError> {
    let (chat, _) = MessagesRequest::read(body, service)?.chat(service)?;
    Ok(RequestPrompt::Chat(chat))
}

impl MessagesRequest {
    fn read(body: Json, service: &Service) -> Result<Self, ServeError> {
        check_fields(&body, &UNSUPPORTED)?;
        let request: Self = parse(&body)?;
        service.check_template()?;
        // chat templates leave out earlier thinking in any case
        let edits = request.context_management.as_ref().and_then(|management| management["edits"].as_array());
        let clears_thinking =
            |edit: &Json| edit["type"].as_str().is_some_and(|kind| kind.starts_with("clear_thinking"));
        match edits.into_iter().flatten().all(clears_thinking) {
            true => Ok(request),
            false => {
                let problem = "`context_management` can only clear thinking";
                Err(ServeError::field("context_management", problem))
            }
        }
    }

    /// Returns the conversation and the functions that the answer may call.
    fn chat(&self, service: &Service) -> Result<(Chat, Option<Tools>), ServeError> {
        let offered = self.tools.iter().flatten().map(function).collect::<Result<Vec<_>, _>>()?;
        let (choice, parallel) = self.tool_choice()?;
        let tools = Tools::read(&offered, choice.as_ref(), parallel)?;
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            let text = texts_of(system, "system")?;
            messages.extend((!text.is_empty()).then(|| Message::new("system", &text)));
        }
        let mut names = BTreeMap::new();
        for message in &self.messages {
            match message.role.as_str() {
                "user" => user_messages(&message.content, &names, &mut messages)?,
                "assistant" => messages.push(assistant_message(&message.content, &mut names)?),
                role => {
                    let problem = format!("`messages` has the role {role:?}; known are \"user\" and \"assistant\"");
                    return Err(ServeError::field("messages", problem));
                }
            }
        }
        let Some(last) = messages.last().filter(|_| !self.messages.is_empty()) else {
            return Err(ServeError::field("messages", "`messages` is empty"));
        };
        let continues_last = last.role == "assistant";
        let is_text =
            !last.more.contains_key("tool_calls") && last.content.as_ref().is_some_and(|text| !text.is_empty());
        if continues_last && !is_text {
            let problem = "the last message can be continued only if it is a text of the assistant";
            return Err(ServeError::field("messages", problem));
        }
        let tool_list = if tools.is_some() { offered } else { Vec::new() };
        Ok((Chat { messages, tools: tool_list, variables: self.variables(service)?, continues_last }, tools))
    }

    /// Returns the choice of a tool in OpenAI's form, and whether several calls are allowed.
    fn tool_choice(&self) -> Result<(Option<Json>, Option<bool>), ServeError> {
        let Some(choice) = &self.tool_choice else { return Ok((None, None)) };
        let word = match (choice.kind.as_str(), &choice.name) {
            ("auto", _) => json!("auto"),
            ("any", _) => json!("required"),
            ("none", _) => json!("none"),
            ("tool", Some(name)) => json!({"type": "function", "function": {"name": name}}),
            _ => {
                let problem = "`tool_choice` has the type \"auto\", \"any\", \"none\", or \"tool\" with a `name`";
                return Err(ServeError::field("tool_choice", problem));
            }
        };
        Ok((Some(word), choice.disable_parallel_tool_use.map(|disabled| !disabled)))
    }

    /// Returns the template variables of `thinking`, which is disabled by default, and of the effort.
    fn variables(&self, service: &Service) -> Result<Map<String, Json>, ServeError> {
        let optional = service.thinking() == Thinking::Optional;
        let mut variables = match self.thinking.as_ref().map(|thinking| thinking.kind.as_str()) {
            Some("enabled") => thinking(service, "thinking", true)?,
            Some("disabled") => thinking(service, "thinking", false)?,
            Some("adaptive") if optional => thinking(service, "thinking", true)?,
            None if optional => thinking(service, "thinking", false)?,
            Some("adaptive") | None => Map::new(),
            Some(_) => {
                let problem = "`thinking` has the type \"enabled\", \"disabled\" or \"adaptive\"";
                return Err(ServeError::field("thinking", problem));
            }
        };
        if let Some(effort) = self.output_config.as_ref().and_then(|config| config.effort.as_ref()) {
            variables.insert("reasoning_effort".into(), json!(effort));
        }
        Ok(variables)
    }

    /// Returns the form of the answer in OpenAI's terms.
    fn response_format(&self) -> Result<Option<Json>, ServeError> {
        let format = self.output_config.as_ref().and_then(|config| config.format.as_ref());
        match format.or(self.output_format.as_ref()) {
            None => Ok(None),
            Some(format) if format["type"] == "json_schema" && format["schema"].is_object() => {
                Ok(Some(json!({"type": "json_schema", "json_schema": {"schema": format["schema"]}})))
            }
            Some(_) => {
                let problem = "`output_config.format` has the type \"json_schema\", with a `schema`";
                Err(ServeError::field("output_config", problem))
            }
        }
    }
}

/// Returns a tool in OpenAI's form.
fn function(tool: &Json) -> Result<Json, ServeError> {
    if let Some(kind) = tool["type"].as_str().filter(|kind| *kind != "custom") {
        let problem = format!("a tool of type {kind:?} in `tools`: only custom tools are supported");
        return Err(ServeError::field("tools", problem));
    }
    match tool["name"].is_string() && tool["input_schema"].is_object() {
        true => Ok(offered(tool, "input_schema")),
        false => Err(ServeError::field("tools", "each of `tools` needs a `name` and an `input_schema`")),
    }
}

/// Returns the error for a content block that can't be read.
fn unsupported(block: &Json, place: &'static str) -> ServeError {
    let problem = match block["type"].as_str() {
        Some(kind) => format!("a content block of type {kind:?} in `{place}` is malformed or isn't supported"),
        None => format!("a content block in `{place}` without a type"),
    };
    ServeError::field(place, problem)
}

/// Returns the text of a text block.
fn text_of<'a>(block: &'a Json, place: &'static str) -> Result<&'a str, ServeError> {
    let text = block["text"].as_str().filter(|_| block["type"] == "text");
    text.ok_or_else(|| unsupported(block, place))
}

/// Returns the texts of a content without other blocks, one per line.
fn texts_of(content: &Content, place: &'static str) -> Result<String, ServeError> {
    match content {
        Content::Text(text) => Ok(text.clone()),
        Content::Blocks(blocks) => {
            let texts = blocks.iter().map(|block| text_of(block, place)).collect::<Result<Vec<_>, _>>()?;
            Ok(texts.join("\n"))
        }
    }
}

/// Returns the id of a call for chat templates.
fn template_id(id: &str) -> &str {
    id.strip_prefix(CALL_PREFIX).unwrap_or(id)
}

/// Adds a user's texts and results of calls as messages of their own, in their order.
fn user_messages(
    content: &Content,
    names: &BTreeMap<String, String>,
    messages: &mut Vec<Message>,
) -> Result<(), ServeError> {
    let blocks = match content {
        Content::Text(text) => {
            messages.push(Message::new("user", text));
            return Ok(());
        }
        Content::Blocks(blocks) => blocks,
    };
    let mut texts: Vec<&str> = Vec::new();
    for block in blocks {
        let Some(id) = block["tool_use_id"].as_str().filter(|_| block["type"] == "tool_result") else {
            texts.push(text_of(block, "messages")?);
            continue;
        };
        if !texts.is_empty() {
            messages.push(Message::new("user", &std::mem::take(&mut texts).join("\n")));
        }
        let result = match &block["content"] {
            Json::Null => String::new(),
            content => texts_of(&parse(content)?, "messages")?,
        };
        let mut message = Message::new("tool", &result);
        message.more.insert("tool_call_id".into(), json!(template_id(id)));
        message.more.extend(names.get(id).map(|name| ("name".to_owned(), json!(name))));
        messages.push(message);
    }
    if !texts.is_empty() {
        messages.push(Message::new("user", &texts.join("\n")));
    }
    Ok(())
}

/// Returns an earlier answer as a message, and adds the functions of its calls to `names`.
fn assistant_message(content: &Content, names: &mut BTreeMap<String, String>) -> Result<Message, ServeError> {
    let blocks = match content {
        Content::Text(text) => return Ok(Message::new("assistant", text)),
        Content::Blocks(blocks) => blocks,
    };
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for block in blocks {
        match (block["type"].as_str(), block["thinking"].as_str(), block["id"].as_str(), block["name"].as_str()) {
            (Some("thinking"), Some(thinking), ..) => reasoning.push_str(thinking),
            (Some("tool_use"), _, Some(id), Some(name)) => {
                let arguments = block["input"].as_object().ok_or_else(|| unsupported(block, "messages"))?;
                calls.push(earlier_call(template_id(id), name, arguments.clone()));
                names.insert(id.to_owned(), name.to_owned());
            }
            _ => text.push_str(text_of(block, "messages")?),
        }
    }
    Ok(Message { more: beside_text(&reasoning, calls), ..Message::new("assistant", &text) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(blocks: Json) -> Content {
        parse(&blocks).unwrap()
    }

    #[test]
    fn results_are_messages_between_texts() {
        let mut names = BTreeMap::new();
        let call = json!({"type": "tool_use", "id": "toolu_000000001", "name": "f", "input": {"a": 1}});
        let blocks =
            json!([{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So:"}, call]);
        let message = assistant_message(&content(blocks), &mut names).unwrap();
        assert_eq!((message.content.as_deref(), &message.more["reasoning_content"]), (Some("So:"), &json!("Hm.")));
        assert_eq!(message.more["tool_calls"][0]["id"], "000000001");
        let mut messages = Vec::new();
        let blocks = json!([
            {"type": "tool_result", "tool_use_id": "toolu_000000001", "content": [{"type": "text", "text": "2"}]},
            {"type": "text", "text": "And"}, {"type": "text", "text": "then?"},
        ]);
        user_messages(&content(blocks), &names, &mut messages).unwrap();
        let roles: Vec<_> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!((roles, messages[1].content.as_deref()), (vec!["tool", "user"], Some("And\nthen?")));
        assert_eq!(messages[0].more["tool_call_id"], "000000001");
        assert_eq!((messages[0].content.as_deref(), &messages[0].more["name"]), (Some("2"), &json!("f")));
    }

    #[test]
    fn blocks_that_are_no_text_are_refused_by_name() {
        for (blocks, kind) in [
            (json!([{"type": "image", "source": {}}]), "image"),
            (json!([{"type": "document"}]), "document"),
            (json!([{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]), "image"),
            (json!([{"text": "Hi"}]), "without a type"),
        ] {
            let error = user_messages(&content(blocks), &BTreeMap::new(), &mut Vec::new()).unwrap_err().to_string();
            assert!(error.contains(kind) && error.contains("`messages`"), "{error}");
        }
        let blocks = json!([{"type": "redacted_thinking", "data": ""}]);
        let error = assistant_message(&content(blocks), &mut BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains("redacted_thinking"), "{error}");
    }

    #[test]
    fn tools_need_a_schema_and_no_type() {
        let tool = json!({"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}});
        assert_eq!(function(&tool).unwrap()["function"]["parameters"], json!({"type": "object"}));
        assert!(function(&json!({"name": "f"})).is_err());
        let error = function(&json!({"type": "bash_20250124", "name": "bash"})).unwrap_err().to_string();
        assert!(error.contains("bash_20250124"), "{error}");
    }
}
