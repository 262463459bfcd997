//! Request and answer bodies of OpenAI's API.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use super::conversation::{effort_variables, parse};
use super::engine::Ending;
use super::error::ServeError;
use super::parameters::{MAX_LOGPROBS, Parameters, check_supported};
use super::service::{RequestPrompt, Service, Submission, Times};
use super::tools::{self, Parts, Tools};
use anec_runtime::chat::{Chat, Message};
use anec_runtime::sampling::within;
use anec_runtime::tools::ToolCall;
use anec_runtime::{Finish, GeneratedToken};

/// Body of `POST /v1/chat/completions`.
#[derive(Debug, Deserialize)]
pub struct ChatRequest {
    messages: Vec<Message>,
    #[serde(default)]
    tools: Option<Vec<Json>>,
    tool_choice: Option<Json>,
    parallel_tool_calls: Option<bool>,
    #[serde(default)]
    chat_template_kwargs: Map<String, Json>,
    reasoning_effort: Option<String>,
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
    functions: Option<Json>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
}

/// Body of `POST /v1/completions`.
#[derive(Debug, Deserialize)]
pub struct CompletionRequest {
    prompt: Json,
    /// System message; makes the prompt a user's message after it.
    system: Option<String>,
    /// Whether special tokens spelled out in the prompt become those tokens.
    special_tokens: Option<bool>,
    logprobs: Option<u64>,
    echo: Option<bool>,
    suffix: Option<String>,
    best_of: Option<u64>,
}

/// Fields of both kinds of requests, beside the parameters.
#[derive(Debug, Deserialize)]
struct Common {
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// Kind of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Chat message.
    Chat,
    /// Plain text.
    Completion,
}

/// Form of an answer.
#[derive(Clone, Copy, Debug)]
pub struct AnswerForm {
    /// Kind of the answer.
    pub kind: Kind,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether the last part contains the token usage.
    pub include_usage: bool,
    /// Whether log-probabilities are included.
    pub logprobs: bool,
    /// Whether the text begins with its prompt.
    pub echo: bool,
}

/// Parses a request: one submission for each of its prompts.
///
/// # Errors
/// If a field is wrong or unsupported. Fields that would change the answer are never ignored.
pub fn read(kind: Kind, body: Json, service: &Service) -> Result<(Vec<Submission>, AnswerForm), ServeError> {
    check_supported(&body)?;
    let (common, parameters): (Common, Parameters) = (parse(&body)?, parse(&body)?);
    let (prompts, logprobs, tools, echo) = match kind {
        Kind::Chat => {
            let request: ChatRequest = parse(&body)?;
            let logprobs = request.logprobs()?;
            let (chat, tools) = chat(&request, service)?;
            (vec![RequestPrompt::Chat(chat)], logprobs, tools, false)
        }
        Kind::Completion => {
            let request: CompletionRequest = parse(&body)?;
            let logprobs = match request.logprobs {
                Some(count) => Some(within("logprobs", count, 0, MAX_LOGPROBS)? as usize),
                None => None,
            };
            let echo = request.echo == Some(true);
            (texts(&request)?, logprobs, None, echo)
        }
    };
    if kind == Kind::Chat {
        service.check_template()?;
    }
    let form = AnswerForm {
        kind,
        stream: common.stream.unwrap_or(false),
        include_usage: common.stream_options.is_some_and(|options| options.include_usage),
        logprobs: logprobs.is_some(),
        echo,
    };
    if form.stream && echo {
        return Err(ServeError::field("echo", "`echo` isn't supported with `stream`"));
    }
    let submission = |prompt| Submission {
        prompt,
        parameters: parameters.clone(),
        logprobs,
        tools: tools.clone(),
        scored: echo && logprobs.is_some(),
    };
    Ok((prompts.into_iter().map(submission).collect(), form))
}

/// Parses the conversation of a chat request.
///
/// # Errors
/// If a field of the conversation is wrong.
pub(super) fn conversation(body: Json, service: &Service) -> Result<Chat, ServeError> {
    check_supported(&body)?;
    chat(&parse(&body)?, service).map(|(chat, _)| chat)
}

/// Parses the body of a request.
///
/// # Errors
/// If it isn't a JSON object.
pub(super) fn object(body: &[u8]) -> Result<Json, ServeError> {
    let invalid = |problem: String| ServeError::Invalid { problem, field: None };
    match serde_json::from_slice(body) {
        Ok(object @ Json::Object(_)) => Ok(object),
        Ok(_) => Err(invalid("the body has to be a JSON object".into())),
        Err(error) => Err(invalid(format!("the body isn't JSON: {}", anec_base::json::problem(&error)))),
    }
}

impl ChatRequest {
    fn logprobs(&self) -> Result<Option<usize>, ServeError> {
        let count = within("top_logprobs", self.top_logprobs.unwrap_or(0), 0, MAX_LOGPROBS)? as usize;
        match self.logprobs {
            Some(true) => Ok(Some(count)),
            _ if self.top_logprobs.is_some() => {
                Err(ServeError::field("top_logprobs", "`top_logprobs` needs `logprobs` to be true"))
            }
            _ => Ok(None),
        }
    }
}

fn chat(request: &ChatRequest, service: &Service) -> Result<(Chat, Option<Tools>), ServeError> {
    if request.messages.is_empty() {
        return Err(ServeError::field("messages", "`messages` is empty"));
    }
    if request.functions.is_some() {
        return Err(ServeError::field("functions", "`functions` isn't supported; use `tools`"));
    }
    let offered = request.tools.as_deref().unwrap_or_default();
    let tools = Tools::read(offered, request.tool_choice.as_ref(), request.parallel_tool_calls)?;
    let continues_last = request.continue_final_message == Some(true);
    if continues_last && request.add_generation_prompt == Some(true) {
        let problem =
            "a message is continued or answered: set one of `continue_final_message` and `add_generation_prompt`";
        return Err(ServeError::field("continue_final_message", problem));
    }
    let mut variables = match &request.reasoning_effort {
        Some(effort) => effort_variables(service, "reasoning_effort", effort)?,
        None => Map::new(),
    };
    variables.extend(request.chat_template_kwargs.clone());
    if request.add_generation_prompt == Some(false) {
        variables.insert("add_generation_prompt".into(), json!(false));
    }
    let tool_list = if tools.is_some() { offered.to_vec() } else { Vec::new() };
    Ok((Chat { messages: request.messages.clone(), tools: tool_list, variables, continues_last }, tools))
}

/// Maximum number of prompts of a completion.
const MAX_PROMPTS: usize = 256;

fn texts(request: &CompletionRequest) -> Result<Vec<RequestPrompt>, ServeError> {
    if request.best_of.is_some_and(|best| best > 1) {
        return Err(ServeError::field("best_of", "`best_of` isn't supported"));
    }
    let wrong = |problem: &str| ServeError::field("prompt", format!("`prompt` {problem}"));
    let ids = |items: &[Json]| -> Result<RequestPrompt, ServeError> {
        let ids: Option<Vec<u32>> = items.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
        ids.map(RequestPrompt::Ids).ok_or_else(|| wrong("has to be texts or lists of token ids"))
    };
    let suffix = request.suffix.as_deref().filter(|suffix| !suffix.is_empty());
    let text = |text: &str| match (&request.system, suffix) {
        (Some(_), Some(_)) => Err(ServeError::field("suffix", "`suffix` and `system` exclude each other")),
        (Some(system), None) => {
            Ok(RequestPrompt::Chat(Chat::new(vec![Message::new("system", system), Message::new("user", text)])))
        }
        (None, Some(suffix)) => Ok(RequestPrompt::Middle { prefix: text.to_owned(), suffix: suffix.to_owned() }),
        (None, None) => {
            Ok(RequestPrompt::Text { text: text.to_owned(), special: request.special_tokens == Some(true) })
        }
    };
    let prompts = match &request.prompt {
        Json::String(one) => vec![text(one)?],
        Json::Array(items) if items.iter().all(Json::is_u64) && !items.is_empty() => vec![ids(items)?],
        Json::Array(items) => {
            let one = |item: &Json| match item {
                Json::String(one) => text(one),
                Json::Array(items) => ids(items),
                _ => Err(wrong("has to be texts or lists of token ids")),
            };
            items.iter().map(one).collect::<Result<Vec<_>, _>>()?
        }
        _ => return Err(wrong("has to be a text, a list of texts, or lists of token ids")),
    };
    match prompts.len() {
        0 => Err(wrong("is empty")),
        count if count > MAX_PROMPTS => {
            Err(wrong(&format!("has {count} texts; a request may have up to {MAX_PROMPTS}")))
        }
        _ => Ok(prompts),
    }
}

/// Fields that all parts of an answer share.
pub struct Head {
    /// Kind of the answer.
    pub kind: Kind,
    /// Id of the answer.
    pub id: String,
    /// Start time in seconds since 1970.
    pub created: u64,
    /// Name of the model.
    pub model: String,
    /// Identifier of the model's files.
    pub fingerprint: String,
}

impl Head {
    /// Returns a whole answer.
    pub fn answer(&self, choices: Vec<Json>, usage: Json, times: &Times) -> Json {
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices, "usage": usage, "anec": times,
        })
    }

    /// Returns a part of an answer.
    pub fn chunk(&self, choices: Vec<Json>) -> Json {
        let object = match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices,
        })
    }
}

/// Returns a text of a whole answer with its calls.
pub fn choice(
    head: &Head,
    index: usize,
    Parts { text, reasoning, calls }: Parts,
    finish: Finish,
    logprobs: Json,
) -> Json {
    let finish = finish_reason(finish, !calls.is_empty());
    match head.kind {
        Kind::Chat => {
            let mut message = json!({"role": "assistant", "content": text, "refusal": null});
            if let Some(reasoning) = reasoning {
                message["reasoning_content"] = json!(reasoning);
            }
            if !calls.is_empty() {
                if text.is_empty() {
                    message["content"] = Json::Null;
                }
                let calls = calls.iter().enumerate().map(|(number, call)| tools::call(call, &head.id, index, number));
                message["tool_calls"] = calls.collect();
            }
            json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
        }
        Kind::Completion => json!({
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish,
        }),
    }
}

/// Change of a text in a part of an answer.
pub enum Delta<'a> {
    /// Role of the speaker.
    Role,
    /// More text.
    Text(&'a str),
    /// More reasoning.
    Reasoning(&'a str),
    /// Function call and its index within the text.
    Call(&'a ToolCall, usize),
    /// Beginning of a function call: name and index within the text.
    BeginCall(&'a str, usize),
    /// More arguments of the function call with this index within the text.
    Arguments(&'a str, usize),
    /// Reason of the end.
    End(&'static str),
}

/// Returns a part of a text. The last part contains the finish reason.
pub fn delta(head: &Head, index: usize, delta: Delta, logprobs: Json) -> Json {
    let mut fields = Map::new();
    let (mut text, mut finish) = ("", None);
    match delta {
        Delta::Role => {
            fields.insert("role".into(), json!("assistant"));
            fields.insert("content".into(), json!(""));
        }
        Delta::Text(more) => {
            text = more;
            fields.insert("content".into(), json!(more));
        }
        Delta::Reasoning(more) => drop(fields.insert("reasoning_content".into(), json!(more))),
        Delta::Call(call, number) => {
            let mut call = tools::call(call, &head.id, index, number);
            call["index"] = json!(number);
            fields.insert("tool_calls".into(), json!([call]));
        }
        Delta::BeginCall(name, number) => {
            let mut call = tools::begun_call(name, &tools::call_id(&head.id, index, number), "");
            call["index"] = json!(number);
            fields.insert("tool_calls".into(), json!([call]));
        }
        Delta::Arguments(more, number) => {
            let call = json!({"index": number, "function": {"arguments": more}});
            fields.insert("tool_calls".into(), json!([call]));
        }
        Delta::End(reason) => finish = Some(reason),
    }
    match head.kind {
        Kind::Chat => json!({"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish}),
        Kind::Completion => json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}),
    }
}

/// Returns the finish reason in OpenAI's terms. `called` tells whether the text has function calls.
pub fn finish_reason(finish: Finish, called: bool) -> &'static str {
    match finish {
        Finish::Stop | Finish::Repetition | Finish::Interrupted if called => "tool_calls",
        Finish::Stop | Finish::Repetition | Finish::Interrupted => "stop",
        Finish::Length | Finish::Context => "length",
    }
}

/// Returns the token usage.
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

/// Returns the log-probabilities of tokens and of their alternatives; tokens without any are left out.
pub(super) fn token_logprobs(service: &Service, tokens: &[GeneratedToken]) -> Vec<Json> {
    let entry = |token: u32, logprob: f32| {
        let (text, bytes) = service.spell(token);
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    };
    let known = tokens.iter().filter_map(|choice| Some((choice.id, choice.logprobs.as_ref()?)));
    let with_alternatives = known.map(|(id, logprobs)| {
        let mut content = entry(id, logprobs.logprob);
        content["top_logprobs"] = logprobs.top.iter().map(|(token, logprob)| entry(*token, *logprob)).collect();
        content
    });
    with_alternatives.collect()
}

/// Converts log-probabilities to the form of either kind of answer, and counts the text's characters.
pub struct LogprobWriter {
    service: Arc<Service>,
    kind: Kind,
    wanted: bool,
    /// Number of characters of the tokens so far.
    offset: usize,
}

impl LogprobWriter {
    /// Begins a text; `wanted` enables the output.
    pub fn new(service: Arc<Service>, kind: Kind, wanted: bool) -> Self {
        LogprobWriter { service, kind, wanted, offset: 0 }
    }

    /// Returns the log-probabilities of the next tokens.
    pub fn of(&mut self, tokens: &[GeneratedToken]) -> Json {
        if !self.wanted {
            return Json::Null;
        }
        match self.kind {
            Kind::Chat => json!({"content": token_logprobs(&self.service, tokens), "refusal": null}),
            Kind::Completion => {
                let (mut texts, mut logprobs, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
                for GeneratedToken { id, logprobs: likely } in tokens {
                    let text = self.service.spell(*id).0;
                    offsets.push(self.offset);
                    self.offset += text.chars().count();
                    texts.push(text);
                    // nothing precedes the first token of a prompt
                    logprobs.push(likely.as_ref().map(|likely| likely.logprob));
                    let top = |(token, logprob): &(u32, f32)| (self.service.spell(*token).0, json!(logprob));
                    tops.push(likely.as_ref().map(|likely| likely.top.iter().map(top).collect::<Map<_, _>>()));
                }
                json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
            }
        }
    }
}
