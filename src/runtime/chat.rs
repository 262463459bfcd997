//! Chat templates: Jinja as Hugging Face transformers renders it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anec_base::input;
use anec_base::json::problem;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value as Json, json};

use super::error::RuntimeError;
use super::jinja::Template;
use super::tokenizer::Tokenizer;
use anec_bundle::Bundle;

/// Message of a conversation, as OpenAI's API and transformers define it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Role of the speaker: `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// Text of the message. A list of text parts is read as their concatenation.
    #[serde(default, deserialize_with = "text_of_parts")]
    pub content: Option<String>,
    /// Other fields for the template: `tool_calls`, `name`, …
    #[serde(flatten)]
    pub more: Map<String, Json>,
}

impl Message {
    /// Creates a message with text alone.
    pub fn new(role: &str, content: &str) -> Self {
        Message { role: role.to_owned(), content: Some(content.to_owned()), more: Map::new() }
    }
}

fn text_of_parts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "`content` has to be a text, or a list of text parts")]
    enum Content {
        Text(String),
        Parts(Vec<Json>),
    }
    let parts = match Option::<Content>::deserialize(deserializer)? {
        None => return Ok(None),
        Some(Content::Text(text)) => return Ok(Some(text)),
        Some(Content::Parts(parts)) => parts,
    };
    let text = |part: &Json| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text" | "input_text" | "output_text"), Some(text)) => Ok(text.to_owned()),
        (kind, _) => {
            let kind = kind.unwrap_or("nothing");
            Err(D::Error::custom(format!("a content part of type `{kind}`: only text is understood")))
        }
    };
    parts.iter().map(text).collect::<Result<String, _>>().map(Some)
}

/// Conversation for a model to continue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// Messages so far.
    pub messages: Vec<Message>,
    /// Functions that the model can call, each as a JSON object of the API: `{"type": "function", "function": {…}}`.
    pub tools: Vec<Json>,
    /// Variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Json>,
    /// Whether the model continues the text of the last message instead of answering it.
    pub continues_last: bool,
}

impl Chat {
    /// Creates a conversation without tools.
    pub fn new(messages: Vec<Message>) -> Self {
        Chat { messages, ..Chat::default() }
    }

    /// Returns messages and tools in the form that templates expect.
    fn to_json(&self, place: ToolsPlace) -> Json {
        let mut messages = json!(self.messages);
        // the API has the arguments of a call as JSON in a string, templates expect an object
        let calls = messages.as_array_mut().into_iter().flatten().filter_map(|message| message.get_mut("tool_calls"));
        for call in calls.filter_map(Json::as_array_mut).flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && let Some(Ok(parsed @ Json::Object(_))) = arguments.as_str().map(serde_json::from_str)
            {
                *arguments = parsed;
            }
        }
        let tools = if self.tools.is_empty() { Json::Null } else { json!(self.tools) };
        if place == ToolsPlace::SystemMessage
            && !self.tools.is_empty()
            && let Some(messages) = messages.as_array_mut()
        {
            if messages.first().is_none_or(|first| first["role"] != "system") {
                messages.insert(0, json!({"role": "system", "content": ""}));
            }
            let functions: Vec<&Json> = self.tools.iter().map(|tool| tool.get("function").unwrap_or(tool)).collect();
            messages[0]["tools"] = json!(functions).to_string().into();
        }
        json!({"messages": messages, "tools": tools})
    }
}

/// Calls `visit` with every string within a JSON value, in a fixed order.
fn for_each_string(value: &mut Json, visit: &mut impl FnMut(&mut String)) {
    match value {
        Json::String(text) => visit(text),
        Json::Array(items) => items.iter_mut().for_each(|item| for_each_string(item, visit)),
        Json::Object(fields) => fields.values_mut().for_each(|field| for_each_string(field, visit)),
        _ => {}
    }
}

/// Place where a template expects the tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToolsPlace {
    /// The variable `tools`.
    Variable,
    /// The field `tools` of the system message, as JSON: Phi-4-mini.
    SystemMessage,
    /// None.
    None,
}

/// Chat template of a model.
pub struct ChatTemplate {
    template: Template,
    source: String,
    bos_token: String,
    eos_token: String,
    tools: OnceLock<ToolsPlace>,
    /// Whether the template writes messages of the role `developer`.
    developer: OnceLock<bool>,
    /// Template for conversations with tools, if there is another.
    with_tools: Option<Box<ChatTemplate>>,
}

/// Text whose presence in a rendering shows that a template uses a value.
const PROBE: &str = "anec_probe";
/// Maximum size of a template's file in bytes.
const MAX_TEMPLATE: u64 = 16 << 20;
/// Maximum number of messages that are checked for being left out.
const MAX_CHECKED: usize = 16;

impl ChatTemplate {
    /// Opens the chat template of a bundle.
    ///
    /// # Errors
    /// If the bundle has none, or it can't be parsed.
    pub fn of(bundle: &Bundle, folder: &Path, tokenizer: &Tokenizer) -> Result<Self, RuntimeError> {
        let read = |what: &str| -> Result<Option<String>, RuntimeError> {
            let path = bundle.tokenizer.get(what).map(|file| folder.join(file));
            let read = |path: PathBuf| input::read_text_file(&path, MAX_TEMPLATE);
            Ok(path.map(read).transpose()?)
        };
        let Some(source) = read("chat_template")? else {
            return Err(RuntimeError::NoChatTemplate { path: folder.to_owned() });
        };
        let config = match bundle.tokenizer.get("tokenizer_config") {
            Some(file) => read_json(&folder.join(file))?,
            None => Json::Null,
        };
        let model = &bundle.model;
        let spelling = |id: Option<u64>| id.and_then(|id| tokenizer.token(u32::try_from(id).ok()?));
        let bos = named_token(&config["bos_token"]).or_else(|| spelling(model.bos_token_id));
        let eos = named_token(&config["eos_token"]).or_else(|| spelling(model.eos_token_ids.first().copied()));
        let (bos, eos) = (bos.unwrap_or_default(), eos.unwrap_or_default());
        let mut template = Self::new(&source, &bos, &eos)?;
        if let Some(source) = read("chat_template_tools")? {
            template.with_tools = Some(Box::new(Self::new(&source, &bos, &eos)?));
        }
        Ok(template)
    }

    /// Parses a template. `bos_token` and `eos_token` are the spellings of the tokens that begin and end a text.
    ///
    /// # Errors
    /// If it is too large or can't be parsed.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, RuntimeError> {
        Ok(ChatTemplate {
            template: Template::new(source).map_err(failure)?,
            source: source.to_owned(),
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            tools: OnceLock::new(),
            developer: OnceLock::new(),
            with_tools: None,
        })
    }

    /// Returns the template for a conversation: another one if there are tools.
    fn of_chat(&self, chat: &Chat) -> &Self {
        match &self.with_tools {
            Some(template) if !chat.tools.is_empty() => template,
            _ => self,
        }
    }

    /// Returns the source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns whether tools reach the model.
    pub fn takes_tools(&self) -> bool {
        self.tools_place() != ToolsPlace::None || self.with_tools.is_some()
    }

    /// Finds the place of the tools by rendering a conversation with a tool.
    fn tools_place(&self) -> ToolsPlace {
        *self.tools.get_or_init(|| {
            let function = json!({
                "name": PROBE, "description": PROBE,
                "parameters": {"type": "object", "properties": {}, "required": []},
            });
            let mut chat = Chat::new(vec![Message::new("user", "Hi")]);
            chat.tools.push(json!({"type": "function", "function": function}));
            let reaches = |place| {
                // some templates list tools only below a system message
                [false, true].into_iter().any(|system| {
                    let mut chat = chat.clone();
                    if system {
                        chat.messages.insert(0, Message::new("system", "Hi"));
                    }
                    self.render_json(chat.to_json(place), &chat).is_ok_and(|text| text.contains(PROBE))
                })
            };
            let places = [ToolsPlace::Variable, ToolsPlace::SystemMessage];
            places.into_iter().find(|place| reaches(*place)).unwrap_or(ToolsPlace::None)
        })
    }

    /// Returns the conversation with roles that the template knows.
    fn with_known_roles<'c>(&self, chat: &'c Chat) -> std::borrow::Cow<'c, Chat> {
        if !chat.messages.iter().any(|message| message.role == "developer") {
            return std::borrow::Cow::Borrowed(chat);
        }
        let knows = *self.developer.get_or_init(|| {
            let probe = Chat::new(vec![Message::new("developer", PROBE), Message::new("user", "Hi")]);
            self.render_json(probe.to_json(ToolsPlace::None), &probe).is_ok_and(|text| text.contains(PROBE))
        });
        let mut chat = chat.clone();
        // OpenAI's newer name of the system's role
        chat.messages.iter_mut().filter(|message| !knows && message.role == "developer").for_each(|message| {
            message.role = "system".into();
        });
        std::borrow::Cow::Owned(chat)
    }

    /// Renders the conversation as the text that the model continues.
    ///
    /// # Errors
    /// If the template refuses the conversation, or leaves out a message.
    pub fn render(&self, chat: &Chat) -> Result<String, RuntimeError> {
        let template = self.of_chat(chat);
        let chat = template.with_known_roles(chat);
        let text = template.render_json(chat.to_json(template.tools_place()), &chat)?;
        template.check_messages(&chat, &text)?;
        Ok(text)
    }

    fn render_json(&self, json: Json, chat: &Chat) -> Result<String, RuntimeError> {
        let mut variables = json!({
            "documents": null,
            "add_generation_prompt": !chat.continues_last,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        });
        let last = json["messages"].as_array().and_then(|messages| messages.last()?["content"].as_str());
        let last = last.filter(|_| chat.continues_last).map(str::to_owned);
        if let (Json::Object(variables), Json::Object(json)) = (&mut variables, json) {
            variables.extend(chat.variables.clone());
            variables.extend(json);
        }
        let mut text = self.template.render(&variables).map_err(failure)?;
        if let Some(last) = last {
            // up to the end of the last message, with as much of its white space as the template keeps
            let Some(start) = text.rfind(last.trim()) else {
                let problem = "it changes the last message, so its text can't be continued";
                return Err(RuntimeError::ChatTemplate { problem: problem.into() });
            };
            let whole = last.trim_start().len();
            let kept = if text[start..].starts_with(last.trim_start()) { whole } else { last.trim().len() };
            text.truncate(start + kept);
        }
        Ok(text)
    }

    /// Checks that no message is left out of a rendered text.
    fn check_messages(&self, chat: &Chat, text: &str) -> Result<(), RuntimeError> {
        let is_missing = |message: &Message| {
            let content = message.content.as_deref().unwrap_or_default().trim();
            // templates drop the reasoning of earlier answers
            message.role != "assistant" && !content.is_empty() && !text.contains(content)
        };
        let suspects = chat.messages.iter().enumerate().filter(|(_, message)| is_missing(message));
        for (index, message) in suspects.take(MAX_CHECKED) {
            // a template may also rewrite a text: it is left out if its words make no difference
            let mut other = chat.clone();
            other.messages[index].content = Some(PROBE.to_owned());
            if self.render_json(other.to_json(self.tools_place()), &other).is_ok_and(|other| other == text) {
                let problem = format!("it leaves out message {} of the role `{}`", index + 1, message.role);
                return Err(RuntimeError::ChatTemplate { problem });
            }
        }
        Ok(())
    }

    /// Tokenizes the conversation. Special tokens spelled out in messages are plain text; only the template's own
    /// count.
    ///
    /// # Errors
    /// If the template refuses the conversation, or the tokenizer fails.
    pub fn encode(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<Vec<u32>, RuntimeError> {
        self.encode_within(tokenizer, chat, u64::MAX)
    }

    /// Tokenizes the conversation as [`ChatTemplate::encode`] does, but checks first that it can fit into a context.
    ///
    /// # Errors
    /// Returns any error of [`ChatTemplate::encode`], and [`RuntimeError::TextTooLong`].
    pub fn encode_within(&self, tokenizer: &Tokenizer, chat: &Chat, context: u64) -> Result<Vec<u32>, RuntimeError> {
        let template = self.of_chat(chat);
        let chat = template.with_known_roles(chat);
        let chat = &*chat;
        // before the work of rendering: templates keep all but the reasoning of earlier answers
        let kept = chat.messages.iter().filter(|message| message.role == "user");
        for content in kept.filter_map(|message| message.content.as_deref()) {
            tokenizer.check_length(content, context)?;
        }
        let mut json = chat.to_json(template.tools_place());
        let mut texts = Vec::new();
        for_each_string(&mut json, &mut |text| texts.push(text.clone()));
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        tokenizer.encode_around(&texts, |hidden| {
            let is_plain = hidden.iter().zip(&texts).all(|(hidden, text)| hidden == text);
            let mut hidden = hidden.iter();
            for_each_string(&mut json, &mut |text| {
                if let Some(hidden) = hidden.next() {
                    text.clone_from(hidden);
                }
            });
            let text = template.render_json(json, chat)?;
            match is_plain {
                true => template.check_messages(chat, &text)?,
                false => drop(self.render(chat)?),
            }
            tokenizer.check_length(&text, context)?;
            Ok(text)
        })
    }
}

fn failure(error: super::jinja::Error) -> RuntimeError {
    RuntimeError::ChatTemplate { problem: error.to_string() }
}

/// Returns a token of `tokenizer_config.json`: its text, or an object with its `content`.
fn named_token(value: &Json) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

fn read_json(path: &Path) -> Result<Json, RuntimeError> {
    let bytes = input::read_file(path, input::MOST_JSON)?;
    serde_json::from_slice(&bytes)
        .map_err(|error| RuntimeError::bundle(path, format!("it isn't JSON: {}", problem(&error))))
}

#[cfg(test)]
mod tests;
