//! Chat templates: Jinja as Hugging Face transformers renders it.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::clock;
use super::error::RuntimeError;
use super::tokenizer::Tokenizer;
use crate::convert::bundle::Bundle;

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// A model's chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

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
        let source = std::fs::read_to_string(&path).map_err(RuntimeError::io(&path, "read"))?;
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
    /// When it can't be parsed.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, RuntimeError> {
        let mut environment = Environment::new();
        // trim_blocks and lstrip_blocks: as transformers sets up Jinja
        environment.set_syntax(
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|error| failure(&error))?,
        );
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| clock::strftime(&format, clock::now()));
        environment.add_template_owned(NAME, without_generation_marks(source)).map_err(|error| failure(&error))?;
        Ok(ChatTemplate { environment, bos_token: bos_token.to_owned(), eos_token: eos_token.to_owned() })
    }

    /// The conversation as the text that the model continues with its answer.
    ///
    /// # Errors
    /// When the template refuses the conversation.
    pub fn render(&self, messages: &[Message]) -> Result<String, RuntimeError> {
        let context = serde_json::json!({
            "messages": messages,
            "tools": null,
            "documents": null,
            "add_generation_prompt": true,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        });
        let template = self.environment.get_template(NAME).map_err(|error| failure(&error))?;
        template.render(Value::from(Serde(&context))).map_err(|error| failure(&error))
    }

    /// The tokens of the conversation. With `literal`, special tokens that are written out in the messages are letters.
    ///
    /// # Errors
    /// When the template refuses the conversation or the tokenizer fails.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message], literal: bool) -> Result<Vec<u32>, RuntimeError> {
        if !literal {
            return tokenizer.encode_rest(&self.render(messages)?);
        }
        let texts: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
        tokenizer.encode_around(&texts, |texts| {
            let with = |(message, content): (&Message, &String)| Message {
                role: message.role.clone(),
                content: content.clone(),
            };
            self.render(&messages.iter().zip(texts).map(with).collect::<Vec<_>>())
        })
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
    let bytes = std::fs::read(path).map_err(RuntimeError::io(path, "read"))?;
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
    let mut out = Vec::new();
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
    String::from_utf8(out).map(Value::from).map_err(|error| invalid(error.to_string()))
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
