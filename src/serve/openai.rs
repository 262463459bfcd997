//! Bodies of requests and answers as OpenAI's API has them.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use super::engine::Ending;
use super::error::ServeError;
use super::parameters::{MOST_LOGPROBS, Parameters, within};
use super::service::{Prompt, Service, Text, Times};
use crate::runtime::chat::{Chat, Message};
use crate::runtime::{Choice, Finish};

/// `POST /v1/chat/completions`
#[derive(Debug, Deserialize)]
pub struct ChatRequest {
    model: Option<String>,
    messages: Vec<Message>,
    #[serde(default)]
    tools: Option<Vec<Json>>,
    tool_choice: Option<Json>,
    #[serde(default)]
    chat_template_kwargs: Map<String, Json>,
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
    functions: Option<Json>,
    #[serde(flatten)]
    common: Common,
}

/// `POST /v1/completions`
#[derive(Debug, Deserialize)]
pub struct CompletionRequest {
    model: Option<String>,
    prompt: Json,
    /// Makes the prompt a user's message after this one.
    system: Option<String>,
    /// Special tokens that are written out in the prompt count as such.
    special_tokens: Option<bool>,
    logprobs: Option<u64>,
    echo: Option<bool>,
    suffix: Option<String>,
    best_of: Option<u64>,
    #[serde(flatten)]
    common: Common,
}

/// What both have.
#[derive(Debug, Deserialize)]
struct Common {
    #[serde(default)]
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[serde(flatten)]
    parameters: Parameters,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// Which of the two kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Messages.
    Chat,
    /// Texts.
    Completion,
}

/// A request that was understood.
pub struct Asked {
    /// What is continued.
    pub prompt: Prompt,
    /// How.
    pub parameters: Parameters,
    /// How likely tokens are is wanted, with this many alternatives.
    pub logprobs: Option<usize>,
    /// The answer comes in parts.
    pub stream: bool,
    /// The last part says how many tokens there were.
    pub include_usage: bool,
    /// Kind of the answer.
    pub kind: Kind,
}

/// Reads a request.
///
/// # Errors
/// When it isn't JSON, or something in it is wrong or not supported: what would change the answer isn't passed over.
pub fn read(kind: Kind, body: &[u8], service: &Service) -> Result<Asked, ServeError> {
    let invalid = |error: serde_json::Error| ServeError::Invalid { problem: format!("the body: {error}"), field: None };
    let (model, prompt, logprobs, common) = match kind {
        Kind::Chat => {
            let request: ChatRequest = serde_json::from_slice(body).map_err(invalid)?;
            let logprobs = request.logprobs()?;
            let model = request.model.clone();
            (model, Prompt::Chat(chat(&request)?), logprobs, request.common)
        }
        Kind::Completion => {
            let request: CompletionRequest = serde_json::from_slice(body).map_err(invalid)?;
            let logprobs = match request.logprobs {
                Some(count) => Some(within("logprobs", count, 0, MOST_LOGPROBS)? as usize),
                None => None,
            };
            let model = request.model.clone();
            (model, text(&request)?, logprobs, request.common)
        }
    };
    if let Some(name) = model.filter(|name| *name != service.name) {
        return Err(ServeError::NoModel { name, own: service.name.clone() });
    }
    Ok(Asked {
        prompt,
        parameters: common.parameters,
        logprobs,
        stream: common.stream.unwrap_or(false),
        include_usage: common.stream_options.is_some_and(|options| options.include_usage),
        kind,
    })
}

impl ChatRequest {
    fn logprobs(&self) -> Result<Option<usize>, ServeError> {
        let count = within("top_logprobs", self.top_logprobs.unwrap_or(0), 0, MOST_LOGPROBS)? as usize;
        match self.logprobs {
            Some(true) => Ok(Some(count)),
            _ if self.top_logprobs.is_some() => {
                Err(ServeError::field("top_logprobs", "`top_logprobs` needs `logprobs` to be true"))
            }
            _ => Ok(None),
        }
    }
}

fn chat(request: &ChatRequest) -> Result<Chat, ServeError> {
    if request.messages.is_empty() {
        return Err(ServeError::field("messages", "`messages` is empty"));
    }
    if request.functions.is_some() {
        return Err(ServeError::field("functions", "`functions` isn't supported; use `tools`"));
    }
    // a tool can be offered; the text isn't made to call it
    let tools = match request.tool_choice.as_ref().map(|choice| choice.as_str()) {
        None | Some(Some("auto")) => request.tools.clone().unwrap_or_default(),
        Some(Some("none")) => Vec::new(),
        Some(_) => {
            return Err(ServeError::field("tool_choice", "`tool_choice` can be \"auto\" or \"none\""));
        }
    };
    Ok(Chat { messages: request.messages.clone(), tools, variables: request.chat_template_kwargs.clone() })
}

fn text(request: &CompletionRequest) -> Result<Prompt, ServeError> {
    for (field, set) in [
        ("echo", request.echo == Some(true)),
        ("suffix", request.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty())),
        ("best_of", request.best_of.is_some_and(|best| best > 1)),
    ] {
        if set {
            return Err(ServeError::field(field, format!("`{field}` isn't supported")));
        }
    }
    let wrong = || ServeError::field("prompt", "`prompt` has to be one text, or one list of token ids");
    let ids = |items: &[Json]| -> Option<Vec<u32>> {
        items.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
    };
    let text = match &request.prompt {
        Json::String(text) => text.clone(),
        Json::Array(items) => match items.as_slice() {
            [Json::String(text)] => text.clone(),
            [Json::Array(items)] => return ids(items).map(Prompt::Ids).ok_or_else(wrong),
            items => return ids(items).map(Prompt::Ids).ok_or_else(wrong),
        },
        _ => return Err(wrong()),
    };
    Ok(match &request.system {
        Some(system) => Prompt::Chat(Chat::new(vec![Message::new("system", system), Message::new("user", &text)])),
        None => Prompt::Text { text, special: request.special_tokens == Some(true) },
    })
}

/// What all parts of an answer have.
pub struct Head {
    /// Kind of the answer.
    pub kind: Kind,
    /// Its name.
    pub id: String,
    /// When it began, in seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
}

impl Head {
    /// A whole answer.
    pub fn answer(&self, choices: Vec<Json>, usage: Json, times: &Times) -> Json {
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices, "usage": usage, "anec": times,
        })
    }

    /// A part of an answer.
    pub fn chunk(&self, choices: Vec<Json>) -> Json {
        let object = match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
        })
    }
}

/// A text of a whole answer.
pub fn choice(kind: Kind, index: usize, text: &Text, logprobs: Json) -> Json {
    let finish = finish_reason(text.ending.generation.finish);
    match kind {
        Kind::Chat => json!({
            "index": index,
            "message": {"role": "assistant", "content": text.text, "refusal": null},
            "logprobs": logprobs,
            "finish_reason": finish,
        }),
        Kind::Completion => json!({
            "index": index, "text": text.text, "logprobs": logprobs, "finish_reason": finish,
        }),
    }
}

/// A part of a text. The first of a message says who speaks; the last has no text and says why it ended.
pub fn delta(kind: Kind, index: usize, first: bool, text: &str, logprobs: Json, finish: Option<Finish>) -> Json {
    let finish = finish.map(finish_reason);
    match kind {
        Kind::Chat => {
            let mut delta = Map::new();
            if first {
                delta.insert("role".into(), json!("assistant"));
            }
            if finish.is_none() {
                delta.insert("content".into(), json!(text));
            }
            json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})
        }
        Kind::Completion => json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}),
    }
}

/// Why a text ended, in the API's words.
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop | Finish::Repetition | Finish::Interrupted => "stop",
        Finish::Length | Finish::Context => "length",
    }
}

/// How many tokens there were.
pub fn usage<'a>(prompt_tokens: usize, endings: impl Iterator<Item = &'a Ending>) -> Json {
    let (mut completion, mut cached) = (0, 0);
    for ending in endings {
        completion += ending.generation.ids.len();
        cached = cached.max(ending.generation.timings.cached_tokens);
    }
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

/// Says how likely tokens are, in the form of either kind of answer. For texts it knows how long they are so far.
pub struct Likelihoods {
    service: Arc<Service>,
    kind: Kind,
    wanted: bool,
    /// Characters of the tokens so far.
    offset: usize,
}

impl Likelihoods {
    /// At the beginning of a text; nothing is said unless `wanted`.
    pub fn new(service: Arc<Service>, kind: Kind, wanted: bool) -> Self {
        Likelihoods { service, kind, wanted, offset: 0 }
    }

    /// Of the next tokens.
    pub fn of(&mut self, tokens: &[Choice]) -> Json {
        if !self.wanted {
            return Json::Null;
        }
        let known: Vec<_> =
            tokens.iter().filter_map(|choice| choice.logprobs.as_ref().map(|logprobs| (choice.id, logprobs))).collect();
        match self.kind {
            Kind::Chat => {
                let entry = |token: u32, logprob: f32| {
                    let (text, bytes) = self.service.spell(token);
                    json!({"token": text, "logprob": logprob, "bytes": bytes})
                };
                let content = known.iter().map(|(id, logprobs)| {
                    let mut content = entry(*id, logprobs.logprob);
                    content["top_logprobs"] =
                        logprobs.top.iter().map(|(token, logprob)| entry(*token, *logprob)).collect();
                    content
                });
                json!({"content": content.collect::<Vec<_>>(), "refusal": null})
            }
            Kind::Completion => {
                let (mut texts, mut logprobs, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
                for (id, likely) in known {
                    let text = self.service.spell(id).0;
                    offsets.push(self.offset);
                    self.offset += text.chars().count();
                    texts.push(text);
                    logprobs.push(likely.logprob);
                    let top = likely.top.iter().map(|(token, logprob)| (self.service.spell(*token).0, json!(logprob)));
                    tops.push(top.collect::<Map<_, _>>());
                }
                json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
            }
        }
    }
}
