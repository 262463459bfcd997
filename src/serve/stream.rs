//! Streamed answers as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::Event as Part;
use futures_util::stream::{self, Stream, StreamExt};
use serde_json::{Value, json};

use super::engine::{Ending, Event};
use super::models::Lease;
use super::openai::{self, AnswerForm, Delta, Head, Kind, LogprobWriter};
use super::service::{Completion, Times, events};
use anec_runtime::reasoning::{AnswerPart, AnswerReader};
use anec_runtime::tools::CallPiece;
use anec_runtime::{Finish, TextDelta};

/// Returns the parts of an answer, and keeps its model in use. Dropping the stream cancels the work.
pub(super) fn parts(
    model: Lease,
    head: Head,
    form: AnswerForm,
    answer: Vec<Completion>,
) -> impl Stream<Item = Result<Part, Infallible>> {
    let warnings = answer.iter().flat_map(|answer| answer.warnings.clone()).collect();
    let prompt_tokens = answer.iter().map(|answer| answer.prompt.len()).sum();
    let tokenize = answer.iter().map(|answer| answer.tokenize).sum();
    let readers: Vec<_> = answer
        .iter()
        .flat_map(|answer| answer.receivers.iter().map(|_| answer.reader.clone().map(AnswerReader::in_pieces)))
        .collect();
    let texts = answer.into_iter().flat_map(|answer| answer.receivers).enumerate();
    let events = texts.map(|(index, receiver)| events(receiver).map(move |event| (index, event)).boxed());
    let text = |(index, reader)| Text {
        index,
        first: form.kind == Kind::Chat,
        likely: LogprobWriter::new(model.clone(), form.kind, form.logprobs),
        reader,
        called: 0,
    };
    let mut writer = Writer {
        texts: readers.into_iter().enumerate().map(text).collect(),
        head,
        form,
        endings: Vec::new(),
        prompt_tokens,
        tokenize,
        warnings,
        over: false,
        _model: model,
    };
    stream::select_all(events)
        .map(move |(index, event)| writer.write(index, event))
        // nothing follows the end of the last text
        .take_while(|parts| std::future::ready(!parts.is_empty()))
        .flat_map(|parts| stream::iter(parts.into_iter().map(Ok)))
}

/// Text in progress.
struct Text {
    index: usize,
    /// Whether the role hasn't been sent yet.
    first: bool,
    likely: LogprobWriter,
    /// Parser of the parts of an answer to a conversation.
    reader: Option<AnswerReader>,
    /// Number of calls so far.
    called: usize,
}

impl Text {
    /// Returns the choices of a delta; empty if it adds nothing.
    fn delta(&mut self, head: &Head, delta: &TextDelta) -> Vec<Value> {
        let mut likely = self.likely.of(&delta.tokens);
        let parts = match &mut self.reader {
            Some(reader) => reader.push(&delta.text),
            None if delta.text.is_empty() => Vec::new(),
            None => vec![AnswerPart::Text(delta.text.clone())],
        };
        let mut choices = self.role(head);
        let role = choices.len();
        choices.extend(parts.iter().filter_map(|part| self.part(head, part, &mut likely)));
        // a token's text may be incomplete while its log-probability is known
        if choices.len() == role && !likely.is_null() && !delta.tokens.is_empty() {
            choices.push(openai::delta(head, self.index, Delta::Text(""), likely));
        }
        choices
    }

    /// Returns the choice with the role, once.
    fn role(&mut self, head: &Head) -> Vec<Value> {
        let first = std::mem::take(&mut self.first);
        first.then(|| openai::delta(head, self.index, Delta::Role, Value::Null)).into_iter().collect()
    }

    /// Returns the choices of the text's end.
    fn end(&mut self, head: &Head, finish: Finish) -> Vec<Value> {
        let parts = self.reader.as_mut().map(AnswerReader::finish).unwrap_or_default();
        let mut choices = self.role(head);
        choices.extend(parts.iter().filter_map(|part| self.part(head, part, &mut Value::Null)));
        let reason = openai::finish_reason(finish, self.called > 0);
        choices.push(openai::delta(head, self.index, Delta::End(reason), Value::Null));
        choices
    }

    /// Returns the choice of a part, with log-probabilities that no other has yet.
    fn part(&mut self, head: &Head, part: &AnswerPart, likely: &mut Value) -> Option<Value> {
        let delta = match part {
            AnswerPart::Text(text) => Delta::Text(text),
            AnswerPart::Reasoning(text) => Delta::Reasoning(text),
            AnswerPart::Call(call) => {
                self.called += 1;
                Delta::Call(call, self.called - 1)
            }
            AnswerPart::Piece(CallPiece::Begin(name)) => {
                self.called += 1;
                Delta::BeginCall(name, self.called - 1)
            }
            AnswerPart::Piece(CallPiece::Arguments(more)) => Delta::Arguments(more, self.called.saturating_sub(1)),
            AnswerPart::Piece(CallPiece::End) => return None,
        };
        Some(openai::delta(head, self.index, delta, likely.take()))
    }
}

/// Converts events to parts of an answer.
struct Writer {
    head: Head,
    form: AnswerForm,
    texts: Vec<Text>,
    endings: Vec<Ending>,
    prompt_tokens: usize,
    tokenize: Duration,
    warnings: Vec<String>,
    over: bool,
    /// Model in use.
    _model: Lease,
}

impl Writer {
    /// Returns the parts of an event: at least a comment, or nothing after the end.
    fn write(&mut self, index: usize, event: Event) -> Vec<Part> {
        if self.over {
            return Vec::new();
        }
        let choices = match event {
            Event::Delta(delta) => self.texts[index].delta(&self.head, &delta),
            Event::End(ending) => {
                let choices = self.texts[index].end(&self.head, ending.generation.finish);
                self.endings.push(*ending);
                choices
            }
            Event::Failed(error) => {
                self.over = true;
                return vec![data(&error.body()), done()];
            }
        };
        if choices.is_empty() {
            return vec![Part::default().comment("")];
        }
        let ended = self.endings.len();
        let mut parts: Vec<Value> = choices.into_iter().map(|choice| self.head.chunk(vec![choice])).collect();
        if self.form.include_usage {
            parts.iter_mut().for_each(|part| part["usage"] = Value::Null);
        }
        if ended == self.texts.len() {
            self.over = true;
            let times = self.endings.first().map(|ending| Times::of(ending, self.tokenize));
            if let Some(last) = parts.last_mut() {
                last["anec"] = json!(times);
                if !self.warnings.is_empty() {
                    last["anec"]["warnings"] = json!(self.warnings);
                }
            }
            if self.form.include_usage {
                let mut part = self.head.chunk(Vec::new());
                part["usage"] = openai::usage(self.prompt_tokens, self.endings.iter());
                parts.push(part);
            }
            return parts.iter().map(data).chain([done()]).collect();
        }
        parts.iter().map(data).collect()
    }
}

fn data(value: &Value) -> Part {
    Part::default().data(value.to_string())
}

fn done() -> Part {
    Part::default().data("[DONE]")
}
