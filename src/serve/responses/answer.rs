//! Answers of OpenAI's API of responses.

use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::store::ConversationStore;
use crate::answer::{EventWriter, WholeAnswer};
use crate::conversation::beside_text;
use crate::engine::Ending;
use crate::error::ServeError;
use crate::openai::finish_reason;
use crate::tools;
use anec_runtime::chat::Message;
use anec_runtime::reasoning::AnswerPart;
use anec_runtime::tools::CallPiece;

/// Writer of answers. An answer is a list of items: reasoning, a message, function calls.
pub(super) struct Writer {
    /// Response so far.
    response: Json,
    /// Item in progress, with its text so far.
    open: Option<(Item, String)>,
    /// Function call in progress.
    call: Option<OpenCall>,
    /// Items that have ended.
    output: Vec<Json>,
    /// Number of events so far.
    sequence: u64,
    /// Store of the conversation with the messages before the answer.
    kept: Option<(Arc<ConversationStore>, Vec<Message>)>,
    /// Text so far.
    text: String,
    /// Reasoning so far.
    reasoning: String,
    /// Calls so far, in the form of chat templates.
    calls: Vec<Json>,
}

/// Function call in progress.
struct OpenCall {
    /// Id of the item.
    item: String,
    /// Id of the call.
    id: String,
    name: String,
    /// Arguments so far.
    arguments: String,
}

impl OpenCall {
    fn item(&self, status: &str) -> Json {
        json!({
            "id": self.item, "type": "function_call", "status": status, "call_id": self.id, "name": self.name,
            "arguments": self.arguments,
        })
    }
}

/// Kind of an item with text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item {
    Message,
    Reasoning,
}

impl Item {
    fn prefix(self) -> &'static str {
        match self {
            Item::Message => "msg_",
            Item::Reasoning => "rs_",
        }
    }

    /// Returns the content part with a text.
    fn part(self, text: &str) -> Json {
        match self {
            Item::Message => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
            Item::Reasoning => json!({"type": "reasoning_text", "text": text}),
        }
    }

    /// Returns the item with its content.
    fn item(self, id: &str, content: Vec<Json>, status: &str) -> Json {
        match self {
            Item::Message => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            Item::Reasoning => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
        }
    }

    /// Returns the type of events about the text.
    fn event(self, what: &str) -> String {
        match self {
            Item::Message => format!("response.output_text.{what}"),
            Item::Reasoning => format!("response.reasoning_text.{what}"),
        }
    }
}

impl Writer {
    /// Begins an answer; `response` has the fields that all its events share.
    pub(super) fn new(response: Json, kept: Option<(Arc<ConversationStore>, Vec<Message>)>) -> Self {
        Writer {
            response,
            open: None,
            call: None,
            output: Vec::new(),
            sequence: 0,
            kept,
            text: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
        }
    }

    /// Returns a whole answer.
    pub(super) fn whole(&mut self, WholeAnswer { parts, ending, .. }: WholeAnswer) -> Json {
        let reasoning = parts.reasoning.filter(|text| !text.is_empty()).map(AnswerPart::Reasoning);
        let text = (!parts.text.is_empty()).then_some(AnswerPart::Text(parts.text));
        for part in reasoning.into_iter().chain(text).chain(parts.calls.into_iter().map(AnswerPart::Call)) {
            self.part(part);
        }
        self.end(&ending);
        self.response.clone()
    }

    /// Returns an event with its number.
    fn event(&mut self, kind: &str, fields: Json) -> Json {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        if let (Json::Object(event), Json::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        self.sequence += 1;
        event
    }

    /// Returns the id of the next item.
    fn item_id(&self, prefix: &str) -> String {
        let id = self.response["id"].as_str().unwrap_or_default();
        format!("{prefix}{}_{}", id.trim_start_matches("resp_"), self.output.len())
    }

    /// Returns an event about the content of the item in progress.
    fn content_event(&mut self, item: Item, kind: &str, more: (&str, Json)) -> Json {
        let mut fields = json!({
            "item_id": self.item_id(item.prefix()), "output_index": self.output.len(), "content_index": 0,
        });
        fields[more.0] = more.1;
        if kind.starts_with("response.output_text") {
            fields["logprobs"] = json!([]);
        }
        self.event(kind, fields)
    }

    /// Returns the events that precede text of an item of this kind.
    fn open(&mut self, item: Item) -> Vec<Json> {
        if self.open.as_ref().is_some_and(|(open, _)| *open == item) {
            return Vec::new();
        }
        let mut events = self.close("completed");
        self.open = Some((item, String::new()));
        let added = item.item(&self.item_id(item.prefix()), Vec::new(), "in_progress");
        let fields = json!({"output_index": self.output.len(), "item": added});
        events.push(self.event("response.output_item.added", fields));
        events.push(self.content_event(item, "response.content_part.added", ("part", item.part(""))));
        events
    }

    /// Returns the events of the end of the item in progress.
    fn close(&mut self, status: &str) -> Vec<Json> {
        let Some((item, text)) = self.open.take() else { return self.close_call(status) };
        let part = item.part(&text);
        let done = item.item(&self.item_id(item.prefix()), vec![part.clone()], status);
        let mut events = vec![
            self.content_event(item, &item.event("done"), ("text", json!(text))),
            self.content_event(item, "response.content_part.done", ("part", part)),
        ];
        events.push(self.item_done(done));
        events
    }

    fn item_done(&mut self, item: Json) -> Json {
        let fields = json!({"output_index": self.output.len(), "item": item});
        self.output.push(item);
        self.event("response.output_item.done", fields)
    }

    /// Returns the events of more text.
    fn more_text(&mut self, item: Item, more: &str) -> Vec<Json> {
        let mut events = self.open(item);
        if let Some((_, text)) = &mut self.open {
            text.push_str(more);
        }
        events.push(self.content_event(item, &item.event("delta"), ("delta", json!(more))));
        events
    }

    /// Returns the events of a piece of a function call.
    fn piece(&mut self, piece: CallPiece) -> Vec<Json> {
        match piece {
            CallPiece::Begin(name) => {
                let mut events = self.close("completed");
                let index = self.output.len();
                let call = OpenCall {
                    item: self.item_id("fc_"),
                    id: tools::call_id(self.response["id"].as_str().unwrap_or_default(), 0, index),
                    name,
                    arguments: String::new(),
                };
                let fields = json!({"output_index": index, "item": call.item("in_progress")});
                events.push(self.event("response.output_item.added", fields));
                self.call = Some(call);
                events
            }
            CallPiece::Arguments(more) => {
                let Some(call) = &mut self.call else { return Vec::new() };
                call.arguments.push_str(&more);
                let fields = json!({"item_id": call.item, "output_index": self.output.len(), "delta": more});
                vec![self.event("response.function_call_arguments.delta", fields)]
            }
            CallPiece::End => self.close("completed"),
        }
    }

    /// Returns the events of the end of the function call in progress.
    fn close_call(&mut self, status: &str) -> Vec<Json> {
        let Some(call) = self.call.take() else { return Vec::new() };
        if status == "completed" {
            self.calls.push(tools::begun_call(&call.name, &call.id, &call.arguments));
        }
        let fields = json!({
            "item_id": call.item, "output_index": self.output.len(), "name": call.name, "arguments": call.arguments,
        });
        vec![self.event("response.function_call_arguments.done", fields), self.item_done(call.item(status))]
    }

    /// Stores the response, and the conversation with it.
    fn keep(&mut self) {
        let Some((store, mut messages)) = self.kept.take() else { return };
        let more = beside_text(&self.reasoning, std::mem::take(&mut self.calls));
        messages.push(Message { more, ..Message::new("assistant", &self.text) });
        store.insert(self.response["id"].as_str().unwrap_or_default(), messages, self.response.clone());
    }
}

impl EventWriter for Writer {
    const IN_PIECES: bool = true;

    fn begin(&mut self) -> Vec<Json> {
        let response = self.response.clone();
        ["response.created", "response.in_progress"].map(|kind| self.event(kind, json!({"response": response}))).into()
    }

    fn part(&mut self, part: AnswerPart) -> Vec<Json> {
        match part {
            AnswerPart::Text(text) => {
                self.text.push_str(&text);
                self.more_text(Item::Message, &text)
            }
            AnswerPart::Reasoning(text) => {
                self.reasoning.push_str(&text);
                self.more_text(Item::Reasoning, &text)
            }
            AnswerPart::Call(call) => CallPiece::of(call).into_iter().flat_map(|piece| self.piece(piece)).collect(),
            AnswerPart::Piece(piece) => self.piece(piece),
        }
    }

    fn end(&mut self, ending: &Ending) -> Vec<Json> {
        let generation = &ending.generation;
        let status = match finish_reason(generation.finish, false) {
            "length" => "incomplete",
            _ => "completed",
        };
        let mut events = self.close(status);
        if status == "incomplete" {
            self.response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        self.response["status"] = json!(status);
        self.response["output"] = json!(self.output);
        self.response["usage"] = json!({
            "input_tokens": ending.prompt_tokens,
            "input_tokens_details": {"cached_tokens": generation.timings.cached_tokens},
            "output_tokens": generation.ids.len(), "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": ending.prompt_tokens + generation.ids.len(),
        });
        self.keep();
        let response = self.response.clone();
        events.push(self.event(&format!("response.{status}"), json!({"response": response})));
        events
    }

    fn fail(&mut self, error: &ServeError) -> Json {
        let body = error.body()["error"].take();
        let code = if error.status().is_server_error() { "server_error" } else { "invalid_prompt" };
        self.response["status"] = json!("failed");
        self.response["output"] = json!(self.output);
        self.response["error"] = json!({"code": code, "message": body["message"]});
        let response = self.response.clone();
        self.event("response.failed", json!({"response": response}))
    }
}
