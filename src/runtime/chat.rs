//! Chat templates: Jinja as Hugging Face transformers renders it.

mod budget;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anec_base::FileError;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use serde_json::{Map, Value as Json};

use super::error::RuntimeError;
use super::tokenizer::Tokenizer;
use anec_base::clock;
use anec_bundle::Bundle;

/// A message of a conversation, as OpenAI's API and transformers have it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// What is said. A list of text parts, as the API allows it, is read as their texts one after the other.
    #[serde(default, deserialize_with = "text_of_parts")]
    pub content: Option<String>,
    /// Whatever else there is for the template to use: `tool_calls`, `name`, …
    #[serde(flatten)]
    pub more: Map<String, Json>,
}

impl Message {
    /// A message that is only text.
    pub fn new(role: &str, content: &str) -> Self {
        Message { role: role.to_owned(), content: Some(content.to_owned()), more: Map::new() }
    }
}

fn text_of_parts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
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
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (kind, _) => {
            let kind = kind.unwrap_or("nothing");
            Err(D::Error::custom(format!("a content part of type `{kind}`: only text is understood")))
        }
    };
    parts.iter().map(text).collect::<Result<String, _>>().map(Some)
}

/// A conversation that the model is to go on with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// What was said.
    pub messages: Vec<Message>,
    /// Functions that the model can call, each as a JSON object of the API: `{"type": "function", "function": {…}}`.
    pub tools: Vec<Json>,
    /// Variables for the template, such as `enable_thinking`.
    pub variables: Map<String, Json>,
}

impl Chat {
    /// A conversation without tools.
    pub fn new(messages: Vec<Message>) -> Self {
        Chat { messages, ..Chat::default() }
    }

    /// Messages and tools as templates expect them.
    fn to_json(&self, place: ToolsPlace) -> Json {
        let mut messages = serde_json::json!(self.messages);
        // the API has the arguments of a call as JSON in a string, templates want them as what they are
        let calls = messages.as_array_mut().into_iter().flatten().filter_map(|message| message.get_mut("tool_calls"));
        for call in calls.filter_map(Json::as_array_mut).flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && let Some(Ok(parsed @ Json::Object(_))) = arguments.as_str().map(serde_json::from_str)
            {
                *arguments = parsed;
            }
        }
        let tools = if self.tools.is_empty() { Json::Null } else { serde_json::json!(self.tools) };
        if place == ToolsPlace::SystemMessage
            && !self.tools.is_empty()
            && let Some(messages) = messages.as_array_mut()
        {
            if messages.first().is_none_or(|first| first["role"] != "system") {
                messages.insert(0, serde_json::json!({"role": "system", "content": ""}));
            }
            let functions: Vec<&Json> = self.tools.iter().map(|tool| tool.get("function").unwrap_or(tool)).collect();
            messages[0]["tools"] = serde_json::json!(functions).to_string().into();
        }
        serde_json::json!({"messages": messages, "tools": tools})
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

/// Where a template expects the tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToolsPlace {
    /// In the variable `tools`.
    Variable,
    /// As JSON in the field `tools` of the system's message: Phi-4-mini.
    SystemMessage,
    /// Nowhere.
    None,
}

impl ToolsPlace {
    fn of(source: &str, variables: &std::collections::HashSet<String>) -> Self {
        if variables.contains("tools") {
            return ToolsPlace::Variable;
        }
        let field = ["message['tools']", "message[\"tools\"]", "message.tools"];
        match field.iter().any(|field| source.contains(field)) {
            true => ToolsPlace::SystemMessage,
            false => ToolsPlace::None,
        }
    }
}

/// A model's chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    tools: ToolsPlace,
    bos_token: String,
    eos_token: String,
}

/// Most bytes of a template's source.
const MAX_SOURCE: usize = 128 << 10;
/// Stack for parsing a template: its parser and compiler recurse along chains of operators, so along the source.
const PARSER_STACK: usize = 256 << 20;
/// Most bytes of a rendered conversation, and of a value as JSON.
const MAX_RENDERED: usize = 64 << 20;

/// Name of the template in its environment.
const NAME: &str = "chat_template";

impl ChatTemplate {
    /// The chat template of a bundle.
    ///
    /// # Errors
    /// When it has none, or one that can't be parsed.
    pub fn of(bundle: &Bundle, folder: &Path, tokenizer: &Tokenizer) -> Result<Self, RuntimeError> {
        let Some(file) = bundle.tokenizer.get("chat_template") else {
            return Err(RuntimeError::NoChatTemplate { path: folder.to_owned() });
        };
        let path = folder.join(file);
        let source = std::fs::read_to_string(&path).map_err(FileError::of(&path, "read"))?;
        let config = match bundle.tokenizer.get("tokenizer_config") {
            Some(file) => read_json(&folder.join(file))?,
            None => Json::Null,
        };
        let model = &bundle.model;
        let spelt = |id: Option<u64>| id.and_then(|id| tokenizer.token(u32::try_from(id).ok()?));
        let bos = named_token(&config["bos_token"]).or_else(|| spelt(model.bos_token_id));
        let eos = named_token(&config["eos_token"]).or_else(|| spelt(model.eos_token_ids.first().copied()));
        Self::new(&source, &bos.unwrap_or_default(), &eos.unwrap_or_default())
    }

    /// A template with the tokens that begin and end a text, as they are spelt.
    ///
    /// # Errors
    /// When it is too large or can't be parsed.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, RuntimeError> {
        if source.len() > MAX_SOURCE {
            let problem = format!("it has {} bytes, and at most {MAX_SOURCE} are parsed", source.len());
            return Err(RuntimeError::ChatTemplate { problem });
        }
        let broken = |problem: &str| RuntimeError::ChatTemplate { problem: problem.into() };
        std::thread::scope(|scope| {
            let parser = std::thread::Builder::new().stack_size(PARSER_STACK);
            let parsing = parser.spawn_scoped(scope, || Self::parse(source, bos_token, eos_token));
            let parsing = parsing.map_err(|error| broken(&format!("no thread to parse it: {error}")))?;
            parsing.join().unwrap_or_else(|_| Err(broken("it can't be parsed")))
        })
    }

    fn parse(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, RuntimeError> {
        // trim_blocks and lstrip_blocks: as transformers sets up Jinja
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(|error| failure(&error))?;
        let unfolded = budget::without_folding(&without_generation_marks(source), &syntax);
        // what it is compiled in; each rendering has an environment of its own
        let mut environment = Environment::empty();
        environment.set_syntax(syntax);
        environment
            .add_template_owned(NAME, unfolded.map_err(|error| failure(&error))?)
            .map_err(|error| failure(&error))?;
        let template = environment.get_template(NAME).map_err(|error| failure(&error))?;
        let tools = ToolsPlace::of(source, &template.undeclared_variables(false));
        let source = source.to_owned();
        Ok(ChatTemplate {
            environment,
            source,
            tools,
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
        })
    }

    /// The template as it is written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether tools reach the model.
    pub fn takes_tools(&self) -> bool {
        self.tools != ToolsPlace::None
    }

    /// The conversation as the text that the model continues with its answer.
    ///
    /// # Errors
    /// When the template refuses the conversation.
    pub fn render(&self, chat: &Chat) -> Result<String, RuntimeError> {
        self.render_json(chat.to_json(self.tools), &chat.variables)
    }

    fn render_json(&self, chat: Json, variables: &Map<String, Json>) -> Result<String, RuntimeError> {
        let mut context = serde_json::json!({
            "documents": null,
            "add_generation_prompt": true,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        });
        if let (Json::Object(context), Json::Object(chat)) = (&mut context, chat) {
            context.extend(variables.clone());
            context.extend(chat);
        }
        let template = self.environment.get_template(NAME).map_err(|error| failure(&error))?;
        let mut bytes = 0;
        for_each_string(&mut context, &mut |text| bytes += text.len() as u64);
        let own_filters = [("tojson", Value::from_function(to_json))];
        let own_functions =
            [("raise_exception", Value::from_function(raise)), ("strftime_now", Value::from_function(strftime))];
        let broken = |problem: String| RuntimeError::ChatTemplate { problem };
        // the engine's arithmetic of ranges and slices panics at the ends of the integers
        let rendered = catch_unwind(AssertUnwindSafe(|| {
            budget::render(&template, Value::from(Serde(&context)), bytes, &own_filters, &own_functions)
        }));
        match rendered {
            Ok(Ok(text)) if text.len() > MAX_RENDERED => {
                Err(broken(format!("it writes more than {MAX_RENDERED} bytes")))
            }
            Ok(Ok(text)) => Ok(text),
            Ok(Err(error)) => Err(failure(&error)),
            Err(_) => Err(broken("it can't be rendered".to_owned())),
        }
    }

    /// The tokens of the conversation. Special tokens that are written out in it are letters: only the template's own
    /// count.
    ///
    /// # Errors
    /// When the template refuses the conversation or the tokenizer fails.
    pub fn encode(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<Vec<u32>, RuntimeError> {
        self.encode_within(tokenizer, chat, u64::MAX)
    }

    /// As [`ChatTemplate::encode`], but a conversation that can't fit into a context is refused before the work of
    /// tokenizing it.
    ///
    /// # Errors
    /// As [`ChatTemplate::encode`], and [`RuntimeError::TextTooLong`].
    pub fn encode_within(&self, tokenizer: &Tokenizer, chat: &Chat, context: u64) -> Result<Vec<u32>, RuntimeError> {
        let mut json = chat.to_json(self.tools);
        let mut texts = Vec::new();
        for_each_string(&mut json, &mut |text| texts.push(text.clone()));
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        tokenizer.encode_around(&texts, |texts| {
            let mut texts = texts.iter();
            for_each_string(&mut json, &mut |text| {
                if let Some(hidden) = texts.next() {
                    text.clone_from(hidden);
                }
            });
            let text = self.render_json(json, &chat.variables)?;
            tokenizer.check_length(&text, context)?;
            Ok(text)
        })
    }
}

/// `raise_exception`: how a template refuses a conversation.
fn raise(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// `strftime_now`: the time in the form of Python's `strftime`.
fn strftime(format: String) -> String {
    clock::strftime(&format, clock::now())
}

/// What is written, up to a limit.
#[derive(Default)]
struct Limited {
    bytes: Vec<u8>,
}

impl std::io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_RENDERED {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn failure(error: &minijinja::Error) -> RuntimeError {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let problem = match error.line() {
        Some(line) => format!("line {line}: {detail}"),
        None => detail,
    };
    RuntimeError::ChatTemplate { problem }
}

/// A token in `tokenizer_config.json` is its text, or an object with its `content`.
fn named_token(value: &Json) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

fn read_json(path: &Path) -> Result<Json, RuntimeError> {
    let bytes = std::fs::read(path).map_err(FileError::of(path, "read"))?;
    serde_json::from_slice(&bytes).map_err(|error| RuntimeError::bundle(path, format!("it isn't JSON: {error}")))
}

/// `{% generation %}` marks what an assistant said, for training; it adds nothing to the text.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::new();
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let end = start + length + 2;
        let inside = &rest[start + 2..end - 2];
        let word = inside.trim_matches(['-', '+']).trim();
        if word == "generation" || word == "endgeneration" {
            // an empty block in its place keeps the whitespace control
            let (open, close) = (inside.starts_with('-'), inside.ends_with('-'));
            out.push_str(&rest[..start]);
            out.push_str(if open { "{%- " } else { "{% " });
            out.push_str(if word == "generation" { "if true" } else { "endif" });
            out.push_str(if close { " -%}" } else { " %}" });
        } else {
            out.push_str(&rest[..end]);
        }
        rest = &rest[end..];
    }
    out + rest
}

/// `tojson` as transformers defines it: Python's `json.dumps` without escaping of non-ASCII characters.
fn to_json(value: Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let invalid = |error: String| minijinja::Error::new(ErrorKind::BadSerialization, error);
    let mut json = serde_json::to_value(&value).map_err(|error| invalid(error.to_string()))?;
    if sort_keys == Some(true) {
        json.sort_all_objects();
    }
    let mut out = Limited::default();
    let written = match (indent, separators) {
        (Some(indent), _) => {
            let indent = vec![b' '; indent.min(16)];
            json.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&indent)))
        }
        (None, separators) => {
            let (item, key) = match separators.as_deref() {
                Some([item, key]) => (item.clone(), key.clone()),
                _ => (", ".into(), ": ".into()),
            };
            json.serialize(&mut Serializer::with_formatter(&mut out, Separators { item, key }))
        }
    };
    written.map_err(|error| invalid(error.to_string()))?;
    String::from_utf8(out.bytes).map(Value::from).map_err(|error| invalid(error.to_string()))
}

/// One line, with what stands between items and after keys.
struct Separators {
    item: String,
    key: String,
}

impl Formatter for Separators {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(self.item.as_bytes()) }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(self.item.as_bytes()) }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
}

#[cfg(test)]
mod limits;
#[cfg(test)]
mod tests;
