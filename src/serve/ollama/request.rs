//! Requests of Ollama's API.

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use super::answer::Kind;
use crate::conversation::{beside_text, earlier_call, parse, thinking};
use crate::error::ServeError;
use crate::parameters::{MAX_LOGPROBS, Parameters, Stop, check_fields};
use crate::service::{RequestPrompt, Service, Submission};
use crate::tools::Tools;
use anec_runtime::chat::{Chat, Message};
use anec_runtime::sampling::within;

/// Parsed request for an answer.
pub(super) struct AnswerRequest {
    /// Text to generate.
    pub submission: Submission,
    /// Whether the answer is streamed.
    pub stream: bool,
}

/// Body of `POST /api/chat`.
#[derive(Debug, Deserialize)]
struct ChatRequest {
    messages: Vec<ChatMessage>,
    tools: Option<Vec<Json>>,
}

/// Body of `POST /api/generate`.
#[derive(Debug, Deserialize)]
struct GenerateRequest {
    prompt: String,
    system: Option<String>,
    suffix: Option<String>,
    /// Whether the prompt is continued as it is, without the chat template.
    raw: Option<bool>,
}

/// Fields of both kinds of requests.
#[derive(Debug, Deserialize)]
struct Common {
    stream: Option<bool>,
    think: Option<Json>,
    format: Option<Json>,
    options: Option<Options>,
    logprobs: Option<bool>,
    /// Number of alternatives of each token, for `logprobs`.
    top_logprobs: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct ChatMessage {
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    images: Option<Vec<Json>>,
    tool_calls: Option<Vec<CallEntry>>,
    #[serde(alias = "name")]
    tool_name: Option<String>,
    tool_call_id: Option<String>,
}

#[derive(Debug, Deserialize)]
struct CallEntry {
    id: Option<String>,
    function: FunctionEntry,
}

#[derive(Debug, Deserialize)]
struct FunctionEntry {
    name: String,
    #[serde(default)]
    arguments: Map<String, Json>,
}

/// Sampling and length of a text.
#[derive(Debug, Default, Deserialize)]
struct Options {
    num_predict: Option<i64>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<Stop>,
}

/// Unsupported fields of a request, with the values that change nothing.
const UNSUPPORTED: [(&str, &[&str]); 5] =
    [("images", &["[]"]), ("context", &["[]"]), ("template", &["\"\""]), ("adapters", &["[]"]), ("steps", &["0"])];

/// Unsupported options, with the values that change nothing. Penalties apply to the whole text.
const UNSUPPORTED_OPTIONS: [(&str, &[&str]); 6] = [
    ("repeat_last_n", &["-1"]),
    ("mirostat", &["0", "0.0"]),
    ("tfs_z", &["1", "1.0"]),
    ("typical_p", &["1", "1.0"]),
    ("penalize_newline", &["true"]),
    ("draft_num_predict", &["0"]),
];

/// Returns whether a request only asks for the model to be loaded: it has no prompt.
pub(super) fn only_loads(kind: Kind, body: &Json) -> bool {
    let is_empty = |field: &str| match body.get(field) {
        None | Some(Json::Null) => true,
        Some(Json::String(text)) => text.is_empty(),
        Some(Json::Array(items)) => items.is_empty(),
        Some(_) => false,
    };
    match kind {
        Kind::Chat => is_empty("messages"),
        Kind::Text => is_empty("prompt") && is_empty("suffix") && is_empty("images"),
    }
}

/// Parses a request.
///
/// # Errors
/// If a field is wrong or unsupported.
pub(super) fn read(kind: Kind, body: Json, service: &Service) -> Result<AnswerRequest, ServeError> {
    check_fields(&body, &UNSUPPORTED)?;
    check_options(&body, service)?;
    let common: Common = parse(&body)?;
    match kind {
        Kind::Chat => {
            let ChatRequest { messages, tools } = parse(&body)?;
            service.check_template()?;
            let offered = tools.unwrap_or_default();
            let tools = Tools::read(&offered, None, None)?;
            let chat = Chat { tools: offered, ..Chat::new(chat_messages(messages)?) };
            common.request(RequestPrompt::Chat(chat), tools, service)
        }
        Kind::Text => {
            let GenerateRequest { prompt, system, suffix, raw } = parse(&body)?;
            let given = |text: Option<String>| text.filter(|text| !text.is_empty());
            let (system, suffix) = (given(system), given(suffix));
            let raw = raw == Some(true);
            let prompt = match (system, suffix) {
                (Some(_), _) if raw => {
                    return Err(ServeError::field("system", "`raw` and `system` exclude each other"));
                }
                (Some(_), Some(_)) => {
                    return Err(ServeError::field("suffix", "`suffix` and `system` exclude each other"));
                }
                (_, Some(suffix)) => RequestPrompt::Middle { prefix: prompt, suffix },
                (None, None) if raw => RequestPrompt::Text { text: prompt, special: true },
                (None, None) if service.lacks_template() => RequestPrompt::Text { text: prompt, special: false },
                (system, None) => {
                    let system = system.map(|system| Message::new("system", &system));
                    let messages = system.into_iter().chain([Message::new("user", &prompt)]);
                    RequestPrompt::Chat(Chat::new(messages.collect()))
                }
            };
            common.request(prompt, None, service)
        }
    }
}

/// Checks the `options` of a request.
///
/// # Errors
/// If an option isn't supported, or the context is smaller than `num_ctx`.
pub(super) fn check_options(body: &Json, service: &Service) -> Result<(), ServeError> {
    let Some(options) = body.get("options").filter(|options| !options.is_null()) else { return Ok(()) };
    check_fields(options, &UNSUPPORTED_OPTIONS)?;
    if options["num_predict"].as_i64().is_some_and(|count| count < -2) {
        return Err(ServeError::field("num_predict", "`num_predict` has to be -2 or more"));
    }
    let context = service.context();
    match options.get("num_ctx").filter(|wanted| !wanted.is_null()) {
        Some(wanted) if wanted.as_u64().is_none_or(|wanted| wanted > context) => {
            let problem = format!("`num_ctx` is {wanted}, but this model's context has {context} tokens");
            Err(ServeError::field("num_ctx", problem))
        }
        _ => Ok(()),
    }
}

impl Common {
    fn request(
        self,
        mut prompt: RequestPrompt,
        tools: Option<Tools>,
        service: &Service,
    ) -> Result<AnswerRequest, ServeError> {
        let variables = think(self.think.as_ref(), service)?;
        if let RequestPrompt::Chat(chat) = &mut prompt {
            chat.variables = variables;
        }
        let mut parameters = self.options.unwrap_or_default().parameters();
        parameters.response_format = response_format(self.format)?;
        let alternatives = within("top_logprobs", self.top_logprobs.unwrap_or(0), 0, MAX_LOGPROBS)? as usize;
        let logprobs = (self.logprobs == Some(true)).then_some(alternatives);
        let submission = Submission { prompt, parameters, logprobs, tools, scored: false };
        Ok(AnswerRequest { submission, stream: self.stream.unwrap_or(true) })
    }
}

impl Options {
    fn parameters(self) -> Parameters {
        Parameters {
            // -2 fills the context, which is the default
            max_tokens: self.num_predict.filter(|count| *count != -2),
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            // a negative seed is random
            seed: self.seed.filter(|seed| *seed >= 0),
            stop: self.stop,
            ..Parameters::default()
        }
    }
}

/// Returns the template variables of `think`: a boolean, or a level for models that have some.
fn think(value: Option<&Json>, service: &Service) -> Result<Map<String, Json>, ServeError> {
    match value {
        None | Some(Json::Null) => Ok(Map::new()),
        Some(Json::Bool(thinks)) => thinking(service, "think", *thinks),
        Some(Json::String(level)) if ["low", "medium", "high"].contains(&level.as_str()) => {
            let mut variables = thinking(service, "think", true)?;
            variables.insert("reasoning_effort".into(), json!(level));
            Ok(variables)
        }
        Some(_) => Err(ServeError::field("think", "`think` has to be true, false, \"low\", \"medium\" or \"high\"")),
    }
}

/// Returns the form of an answer in OpenAI's terms.
fn response_format(format: Option<Json>) -> Result<Option<Json>, ServeError> {
    match format {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(word)) if word.is_empty() => Ok(None),
        Some(Json::String(word)) if word == "json" => Ok(Some(json!({"type": "json_object"}))),
        Some(schema @ Json::Object(_)) => Ok(Some(json!({"type": "json_schema", "json_schema": {"schema": schema}}))),
        Some(_) => Err(ServeError::field("format", "`format` has to be \"json\" or a JSON Schema")),
    }
}

/// Returns messages in the form of chat templates. Calls get ids, because some templates need them.
fn chat_messages(messages: Vec<ChatMessage>) -> Result<Vec<Message>, ServeError> {
    let mut calls = 0;
    // ids of calls without a result so far, with the function's name
    let mut open: Vec<(String, String)> = Vec::new();
    let mut converted = Vec::with_capacity(messages.len());
    for message in messages {
        if message.images.is_some_and(|images| !images.is_empty()) {
            return Err(ServeError::field("images", "`images` aren't supported: only text is understood"));
        }
        let mut entries = Vec::new();
        for CallEntry { id, function } in message.tool_calls.into_iter().flatten() {
            let id = id.filter(|id| !id.is_empty()).unwrap_or_else(|| format!("call{calls:05}"));
            calls += 1;
            entries.push(earlier_call(&id, &function.name, function.arguments));
            open.push((id, function.name));
        }
        let mut more = beside_text(message.thinking.as_deref().unwrap_or_default(), entries);
        if message.role == "tool" {
            let is_answered = |(id, name): &(String, String)| match (&message.tool_call_id, &message.tool_name) {
                (Some(wanted), _) => id == wanted,
                (None, Some(wanted)) => name == wanted,
                (None, None) => true,
            };
            let call = open.iter().position(is_answered).map(|index| open.remove(index));
            let (id, name) = call.unzip();
            more.extend(message.tool_call_id.or(id).map(|id| ("tool_call_id".to_owned(), json!(id))));
            more.extend(message.tool_name.or(name).map(|name| ("name".to_owned(), json!(name))));
        }
        converted.push(Message { role: message.role, content: message.content, more });
    }
    Ok(converted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(messages: Json) -> Result<Vec<Message>, ServeError> {
        chat_messages(parse(&messages)?)
    }

    #[test]
    fn results_belong_to_their_calls() {
        let call = |name: &str| json!({"function": {"name": name, "arguments": {"a": 1}}});
        let found = messages(json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call("f"), call("g")]},
            {"role": "tool", "content": "2", "tool_name": "g"},
            {"role": "tool", "content": "1"},
        ]))
        .unwrap();
        assert_eq!(found[1].more["reasoning_content"], "Hm.");
        assert_eq!(found[1].more["tool_calls"][1]["id"], found[2].more["tool_call_id"]);
        assert_eq!(found[1].more["tool_calls"][0]["id"], found[3].more["tool_call_id"]);
        assert_eq!((&found[3].more["name"], &found[0].more), (&json!("f"), &Map::new()));
        let ids = ["call00000", "call00001"].map(Json::from);
        assert_eq!([0, 1].map(|call| found[1].more["tool_calls"][call]["id"].clone()), ids);
    }

    #[test]
    fn images_are_refused() {
        assert!(messages(json!([{"role": "user", "content": "Hi", "images": []}])).is_ok());
        let error = messages(json!([{"role": "user", "content": "Hi", "images": ["AAAA"]}])).unwrap_err();
        assert!(error.to_string().starts_with("`images`"), "{error}");
    }

    #[test]
    fn formats_are_a_word_or_a_schema() {
        assert_eq!(response_format(Some(json!(""))).unwrap(), None);
        assert_eq!(response_format(Some(json!("json"))).unwrap(), Some(json!({"type": "json_object"})));
        let schema = json!({"type": "integer"});
        let format = response_format(Some(schema.clone())).unwrap().unwrap();
        assert_eq!(format["json_schema"]["schema"], schema);
        assert!(response_format(Some(json!("yaml"))).is_err() && response_format(Some(json!([]))).is_err());
    }

    #[test]
    fn requests_without_a_prompt_load_the_model() {
        assert!(only_loads(Kind::Chat, &json!({"model": "demo", "messages": []})));
        assert!(only_loads(Kind::Text, &json!({"model": "demo"})));
        assert!(!only_loads(Kind::Text, &json!({"prompt": "Hi"})) && !only_loads(Kind::Text, &json!({"prompt": 1})));
    }
}
