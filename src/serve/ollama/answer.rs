//! Answers of Ollama's API.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value as Json, json};

use crate::answer::{EventWriter, WholeAnswer};
use crate::engine::Ending;
use crate::error::ServeError;
use crate::openai::{finish_reason, token_logprobs};
use crate::service::Service;
use crate::tools;
use anec_base::clock::strftime;
use anec_runtime::GeneratedToken;
use anec_runtime::reasoning::AnswerPart;
use anec_runtime::tools::ToolCall;

/// Kind of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Chat message.
    Chat,
    /// Plain text.
    Text,
}

/// Fields that all parts of an answer share.
pub(super) struct AnswerHead {
    /// Kind of the answer.
    pub kind: Kind,
    /// Id of the answer, from which ids of calls are derived.
    pub id: String,
    /// Name of the model.
    pub model: String,
    /// Model whose tokens have log-probabilities in the answer, if the request asks for them.
    pub logprobs: Option<Arc<Service>>,
}

/// Content of a part of an answer.
#[derive(Default)]
struct Content {
    text: String,
    thinking: String,
    calls: Vec<Json>,
    /// Log-probabilities of the part's tokens.
    logprobs: Vec<Json>,
}

impl AnswerHead {
    /// Returns the answer to a request that only loads or unloads the model.
    pub(super) fn without_text(&self, reason: &str) -> Json {
        let mut answer = self.chunk(Content::default(), true);
        answer["done_reason"] = json!(reason);
        answer
    }

    /// Returns a whole answer.
    pub(super) fn whole(&self, WholeAnswer { parts, tokens, ending, tokenize }: WholeAnswer) -> Json {
        let calls = parts.calls.iter().enumerate().map(|(number, call)| self.call(call, number)).collect();
        let thinking = parts.reasoning.unwrap_or_default();
        let content = Content { text: parts.text, thinking, calls, logprobs: self.likely(&tokens) };
        self.end(content, &ending, tokenize)
    }

    /// Returns the log-probabilities of tokens, if they are asked for.
    fn likely(&self, tokens: &[GeneratedToken]) -> Vec<Json> {
        self.logprobs.as_ref().map(|service| token_logprobs(service, tokens)).unwrap_or_default()
    }

    fn chunk(&self, content: Content, done: bool) -> Json {
        let mut chunk = json!({"model": self.model, "created_at": now(), "done": done});
        if !content.logprobs.is_empty() {
            chunk["logprobs"] = json!(content.logprobs);
        }
        match self.kind {
            Kind::Text => {
                chunk["response"] = json!(content.text);
                if !content.thinking.is_empty() {
                    chunk["thinking"] = json!(content.thinking);
                }
            }
            Kind::Chat => {
                let mut message = json!({"role": "assistant", "content": content.text});
                if !content.thinking.is_empty() {
                    message["thinking"] = json!(content.thinking);
                }
                if !content.calls.is_empty() {
                    message["tool_calls"] = json!(content.calls);
                }
                chunk["message"] = message;
            }
        }
        chunk
    }

    /// Returns the last part of an answer. The loading time is the time before the prompt is computed, because the
    /// model is already loaded.
    fn end(&self, content: Content, ending: &Ending, tokenize: Duration) -> Json {
        let mut chunk = self.chunk(content, true);
        let timings = ending.generation.timings;
        let before = tokenize + ending.queued;
        let prompt = seconds(timings.ttft_ms / 1e3);
        let text = seconds(timings.elapsed_s).saturating_sub(prompt);
        chunk["done_reason"] = json!(finish_reason(ending.generation.finish, false));
        chunk["prompt_eval_count"] = json!(ending.prompt_tokens);
        chunk["eval_count"] = json!(ending.generation.ids.len());
        for (name, duration) in [
            ("total_duration", before + prompt + text),
            ("load_duration", before),
            ("prompt_eval_duration", prompt),
            ("eval_duration", text),
        ] {
            chunk[name] = json!(duration.as_nanos() as u64);
        }
        chunk
    }

    fn call(&self, call: &ToolCall, number: usize) -> Json {
        let id = tools::call(call, &self.id, 0, number)["id"].take();
        json!({"id": id, "function": {"index": number, "name": call.name, "arguments": call.arguments}})
    }
}

/// Writer of streamed answers.
pub(super) struct Writer {
    head: AnswerHead,
    tokenize: Duration,
    /// Number of calls so far.
    called: usize,
    /// Log-probabilities of tokens that no part of the answer has yet.
    logprobs: Vec<Json>,
}

impl Writer {
    /// Begins an answer whose prompt took `tokenize` to tokenize.
    pub(super) fn new(head: AnswerHead, tokenize: Duration) -> Self {
        Writer { head, tokenize, called: 0, logprobs: Vec::new() }
    }
}

impl EventWriter for Writer {
    const IN_PIECES: bool = false;

    fn begin(&mut self) -> Vec<Json> {
        Vec::new()
    }

    fn tokens(&mut self, tokens: &[GeneratedToken]) {
        self.logprobs.extend(self.head.likely(tokens));
    }

    fn part(&mut self, part: AnswerPart) -> Vec<Json> {
        let mut content = Content { logprobs: std::mem::take(&mut self.logprobs), ..Content::default() };
        match part {
            AnswerPart::Text(text) => content.text = text,
            AnswerPart::Reasoning(thinking) => content.thinking = thinking,
            AnswerPart::Call(call) => {
                self.called += 1;
                content.calls.push(self.head.call(&call, self.called - 1));
            }
            AnswerPart::Piece(_) => return Vec::new(),
        }
        vec![self.head.chunk(content, false)]
    }

    fn end(&mut self, ending: &Ending) -> Vec<Json> {
        let content = Content { logprobs: std::mem::take(&mut self.logprobs), ..Content::default() };
        vec![self.head.end(content, ending, self.tokenize)]
    }

    fn fail(&mut self, error: &ServeError) -> Json {
        crate::error_form::ollama(error)
    }
}

/// Returns a time as RFC 3339, in UTC.
pub(super) fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:09}Z", strftime("%FT%T", since.as_secs()), since.subsec_nanos())
}

fn now() -> String {
    timestamp(SystemTime::now())
}

/// Returns a duration; invalid numbers give zero.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_parts_of_their_own() {
        let head = AnswerHead { kind: Kind::Chat, id: "1".into(), model: "demo".into(), logprobs: None };
        let mut writer = Writer::new(head, Duration::ZERO);
        let call = ToolCall { name: "f".into(), arguments: serde_json::from_str(r#"{"a": 1}"#).unwrap() };
        let parts = [(); 2].map(|()| writer.part(AnswerPart::Call(call.clone())).pop().unwrap());
        for (number, part) in parts.iter().enumerate() {
            let call = &part["message"]["tool_calls"][0];
            assert_eq!(call["function"], json!({"index": number, "name": "f", "arguments": {"a": 1}}));
            assert_eq!((&part["message"]["content"], &part["done"]), (&json!(""), &json!(false)));
        }
        let id = |part: &Json| part["message"]["tool_calls"][0]["id"].clone();
        assert_ne!(id(&parts[0]), id(&parts[1]));
    }

    #[test]
    fn times_are_rfc_3339() {
        let time = UNIX_EPOCH + Duration::new(1_709_251_199, 5_000);
        assert_eq!(timestamp(time), "2024-02-29T23:59:59.000005000Z");
    }
}
