//! Streamed answers as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::Event as Part;
use futures_util::stream::{self, Stream, StreamExt};
use serde_json::{Value, json};

use super::engine::{Ending, Event};
use super::openai::{self, AnswerForm, Delta, Head, LogprobWriter};
use super::service::{Completion, Service, Times, events};
use anec_runtime::tools::{self, CallReader};
use anec_runtime::{Finish, TextDelta};

/// Returns the parts of an answer. Dropping the stream drops the receivers and cancels the work.
pub fn parts(
    service: Arc<Service>,
    head: Head,
    form: AnswerForm,
    answer: Completion,
) -> impl Stream<Item = Result<Part, Infallible>> {
    let count = answer.receivers.len();
    let texts = answer.receivers.into_iter().enumerate();
    let events = texts.map(|(index, receiver)| events(receiver).map(move |event| (index, event)).boxed());
    let text = |index| Text {
        index,
        first: true,
        likely: LogprobWriter::new(service.clone(), form.kind, form.logprobs),
        calls: answer.calls.clone(),
        called: 0,
    };
    let mut writer = Writer {
        texts: (0..count).map(text).collect(),
        head,
        form,
        endings: Vec::new(),
        prompt_tokens: answer.prompt.len(),
        tokenize: answer.tokenize,
        over: false,
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
    /// Whether nothing was sent yet.
    first: bool,
    likely: LogprobWriter,
    /// Parser of function calls, if functions were offered.
    calls: Option<CallReader>,
    /// Number of calls so far.
    called: usize,
}

impl Text {
    /// Returns the choices of a delta; empty if it adds nothing.
    fn delta(&mut self, head: &Head, delta: &TextDelta) -> Vec<Value> {
        let mut likely = self.likely.of(&delta.tokens);
        let parts = match &mut self.calls {
            Some(reader) => reader.push(&delta.text),
            None if delta.text.is_empty() => Vec::new(),
            None => vec![tools::ToolTextPart::Text(delta.text.clone())],
        };
        let mut choices: Vec<Value> = parts.iter().map(|part| self.part(head, part, likely.take())).collect();
        // a token's text may be incomplete while its role and log-probability are known
        if choices.is_empty() && (self.first || (!likely.is_null() && !delta.tokens.is_empty())) {
            choices.push(self.choice(head, Delta::Text(""), likely));
        }
        choices
    }

    /// Returns the choices of the text's end.
    fn end(&mut self, head: &Head, finish: Finish) -> Vec<Value> {
        let parts = self.calls.as_mut().map(CallReader::finish).unwrap_or_default();
        let mut choices: Vec<Value> = parts.iter().map(|part| self.part(head, part, Value::Null)).collect();
        let reason = openai::finish_reason(finish, self.called > 0);
        choices.push(self.choice(head, Delta::End(reason), Value::Null));
        choices
    }

    fn part(&mut self, head: &Head, part: &tools::ToolTextPart, likely: Value) -> Value {
        match part {
            tools::ToolTextPart::Text(text) => self.choice(head, Delta::Text(text), likely),
            tools::ToolTextPart::Call(call) => {
                let number = self.called;
                self.called += 1;
                self.choice(head, Delta::Call(call, number), likely)
            }
        }
    }

    fn choice(&mut self, head: &Head, delta: Delta, likely: Value) -> Value {
        openai::delta(head, self.index, std::mem::take(&mut self.first), delta, likely)
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
    over: bool,
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
