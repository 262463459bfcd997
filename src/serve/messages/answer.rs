//! Answers of Anthropic's API.

use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::request::CALL_PREFIX;
use crate::answer::{EventWriter, WholeAnswer};
use crate::engine::Ending;
use crate::error::ServeError;
use crate::tools;
use anec_runtime::reasoning::AnswerPart;
use anec_runtime::tools::CallPiece;
use anec_runtime::{Finish, Tokenizer};

/// Fields that all parts of an answer share.
pub(super) struct AnswerHead {
    /// Id of the answer.
    pub id: String,
    /// Name of the model.
    pub model: String,
    /// Tokenizer that finds the string that ended a text.
    pub tokenizer: Arc<Tokenizer>,
    /// Strings that end the text.
    pub stops: Vec<String>,
}

/// Returns an event that only keeps the connection open.
pub(super) fn ping() -> Json {
    json!({"type": "ping"})
}

/// Returns the token usage; cached tokens of the prompt are counted apart.
fn usage(prompt: usize, cached: usize, output: usize) -> Json {
    json!({
        "input_tokens": prompt.saturating_sub(cached), "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached, "output_tokens": output,
    })
}

fn usage_of(ending: &Ending) -> Json {
    let generation = &ending.generation;
    usage(ending.prompt_tokens, generation.timings.cached_tokens, generation.ids.len())
}

impl AnswerHead {
    /// Returns a whole answer.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub(super) fn whole(&self, WholeAnswer { parts, ending, .. }: WholeAnswer) -> Result<Json, ServeError> {
        let mut content = Vec::new();
        if let Some(reasoning) = parts.reasoning.filter(|reasoning| !reasoning.is_empty()) {
            content.push(json!({"type": "thinking", "thinking": reasoning, "signature": ""}));
        }
        if !parts.text.is_empty() {
            content.push(json!({"type": "text", "text": parts.text}));
        }
        for (number, call) in parts.calls.iter().enumerate() {
            content.push(self.call(&call.name, number, json!(call.arguments)));
        }
        let (reason, stop) = self.stop_reason(&ending, !parts.calls.is_empty())?;
        let mut message = self.message(content, usage_of(&ending));
        (message["stop_reason"], message["stop_sequence"]) = (json!(reason), json!(stop));
        Ok(message)
    }

    fn message(&self, content: Vec<Json>, usage: Json) -> Json {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": null, "stop_sequence": null, "usage": usage,
        })
    }

    fn call(&self, name: &str, number: usize, input: Json) -> Json {
        let id = format!("{CALL_PREFIX}{}", tools::call_id(&self.id, 0, number));
        json!({"type": "tool_use", "id": id, "name": name, "input": input})
    }

    /// Returns the reason of the end, and the string that caused it.
    fn stop_reason(&self, ending: &Ending, called: bool) -> Result<(&'static str, Option<&str>), ServeError> {
        let generation = &ending.generation;
        Ok(match generation.finish {
            Finish::Length | Finish::Context => ("max_tokens", None),
            _ if called => ("tool_use", None),
            _ if self.stops.is_empty() => ("end_turn", None),
            _ => {
                let text = self.tokenizer.decode(&generation.ids, false)?;
                let found = self.stops.iter().filter(|stop| !stop.is_empty());
                let first = found.filter_map(|stop| Some((text.find(stop.as_str())?, stop))).min();
                first.map_or(("end_turn", None), |(_, stop)| ("stop_sequence", Some(stop.as_str())))
            }
        })
    }
}

/// Kind of a content block in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    Call,
}

/// Writer of streamed answers.
pub(super) struct Writer {
    head: AnswerHead,
    prompt_tokens: usize,
    /// Content block that hasn't ended.
    open: Option<Block>,
    /// Number of content blocks that have ended.
    blocks: usize,
    /// Number of calls so far.
    called: usize,
}

impl Writer {
    /// Begins an answer to a prompt.
    pub(super) fn new(head: AnswerHead, prompt_tokens: usize) -> Self {
        Writer { head, prompt_tokens, open: None, blocks: 0, called: 0 }
    }

    fn start(&self, block: Json) -> Json {
        json!({"type": "content_block_start", "index": self.blocks, "content_block": block})
    }

    fn delta(&self, delta: Json) -> Json {
        json!({"type": "content_block_delta", "index": self.blocks, "delta": delta})
    }

    /// Returns the end of the last content block.
    fn stop(&mut self) -> Json {
        self.open = None;
        self.blocks += 1;
        json!({"type": "content_block_stop", "index": self.blocks - 1})
    }

    /// Returns the end of the content block in progress, if there is one.
    fn close(&mut self) -> Vec<Json> {
        self.open.is_some().then(|| self.stop()).into_iter().collect()
    }

    /// Returns the events that precede a delta of a block of this kind, which begins with `content`.
    fn open(&mut self, block: Block, content: Json) -> Vec<Json> {
        if self.open == Some(block) {
            return Vec::new();
        }
        let mut events = self.close();
        self.open = Some(block);
        events.push(self.start(content));
        events
    }

    /// Returns the events of a piece of a call.
    fn piece(&mut self, piece: CallPiece) -> Vec<Json> {
        match piece {
            CallPiece::Begin(name) => {
                self.called += 1;
                self.open(Block::Call, self.head.call(&name, self.called - 1, json!({})))
            }
            CallPiece::Arguments(more) => {
                vec![self.delta(json!({"type": "input_json_delta", "partial_json": more}))]
            }
            CallPiece::End => self.close(),
        }
    }
}

impl EventWriter for Writer {
    const IN_PIECES: bool = true;

    fn begin(&mut self) -> Vec<Json> {
        let message = self.head.message(Vec::new(), usage(self.prompt_tokens, 0, 0));
        vec![json!({"type": "message_start", "message": message}), ping()]
    }

    fn part(&mut self, part: AnswerPart) -> Vec<Json> {
        match part {
            AnswerPart::Text(text) => {
                let mut events = self.open(Block::Text, json!({"type": "text", "text": ""}));
                events.push(self.delta(json!({"type": "text_delta", "text": text})));
                events
            }
            AnswerPart::Reasoning(thinking) => {
                let mut events =
                    self.open(Block::Thinking, json!({"type": "thinking", "thinking": "", "signature": ""}));
                events.push(self.delta(json!({"type": "thinking_delta", "thinking": thinking})));
                events
            }
            AnswerPart::Call(call) => CallPiece::of(call).into_iter().flat_map(|piece| self.piece(piece)).collect(),
            AnswerPart::Piece(piece) => self.piece(piece),
        }
    }

    fn end(&mut self, ending: &Ending) -> Vec<Json> {
        let mut events = self.close();
        match self.head.stop_reason(ending, self.called > 0) {
            Ok((reason, stop)) => {
                let delta = json!({"stop_reason": reason, "stop_sequence": stop});
                events.push(json!({"type": "message_delta", "delta": delta, "usage": usage_of(ending)}));
                events.push(json!({"type": "message_stop"}));
            }
            Err(error) => events.push(self.fail(&error)),
        }
        events
    }

    fn fail(&mut self, error: &ServeError) -> Json {
        crate::error_form::anthropic(error)
    }
}
