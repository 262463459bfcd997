//! Answers of one text for APIs other than OpenAI's chat completions: whole, or as events of a stream.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use serde_json::Value as Json;

use super::engine::{Ending, Event};
use super::error::ServeError;
use super::models::Lease;
use super::service::{self, Completion};
use super::tools::{Parts, divide};
use anec_runtime::GeneratedToken;
use anec_runtime::reasoning::{AnswerPart, AnswerReader};

/// Converts the parts of a text to the events of an API's stream.
pub(super) trait EventWriter: Send + 'static {
    /// Whether calls come in pieces.
    const IN_PIECES: bool;

    /// Returns the events before the text.
    fn begin(&mut self) -> Vec<Json>;
    /// Takes the tokens of the parts that follow, for APIs that give their log-probabilities.
    fn tokens(&mut self, _: &[GeneratedToken]) {}
    /// Returns the events of a part of the text.
    fn part(&mut self, part: AnswerPart) -> Vec<Json>;
    /// Returns the events of the text's end.
    fn end(&mut self, ending: &Ending) -> Vec<Json>;
    /// Returns the event of a failure; nothing follows.
    fn fail(&mut self, error: &ServeError) -> Json;
}

/// Whole text of an answer.
pub(super) struct WholeAnswer {
    /// Parts of the text.
    pub parts: Parts,
    /// Tokens of the text.
    pub tokens: Vec<GeneratedToken>,
    /// End of the text.
    pub ending: Ending,
    /// Time spent on tokenizing the prompt.
    pub tokenize: Duration,
}

/// Waits for the only text of an answer.
///
/// # Errors
/// If it fails.
pub(super) async fn whole(answer: Completion) -> Result<WholeAnswer, ServeError> {
    let Completion { receivers, tokenize, reader, .. } = answer;
    let receiver = receivers.into_iter().next().ok_or_else(ServeError::panicked)?;
    let text = service::whole(receiver).await?;
    let parts = match reader {
        Some(reader) => divide(reader, &text.text),
        None => Parts { text: text.text, ..Parts::default() },
    };
    Ok(WholeAnswer { parts, tokens: text.tokens, ending: text.ending, tokenize })
}

/// Returns the events of an answer's only text, and keeps its model in use. Dropping the stream cancels the work.
pub(super) fn events<W: EventWriter>(
    model: Lease,
    answer: Completion,
    mut writer: W,
) -> impl Stream<Item = Json> + Send {
    let Completion { receivers, reader, .. } = answer;
    let mut reader = reader.map(|reader| if W::IN_PIECES { reader.in_pieces() } else { reader });
    let begin = writer.begin();
    let texts = receivers.into_iter().take(1).map(|receiver| service::events(receiver).boxed());
    let events = stream::select_all(texts).map(move |event| {
        let _ = &model;
        match event {
            Event::Delta(delta) => {
                writer.tokens(&delta.tokens);
                let parts = match &mut reader {
                    Some(reader) => reader.push(&delta.text),
                    None if delta.text.is_empty() => Vec::new(),
                    None => vec![AnswerPart::Text(delta.text)],
                };
                parts.into_iter().flat_map(|part| writer.part(part)).collect()
            }
            Event::End(ending) => {
                let parts = reader.as_mut().map(AnswerReader::finish).unwrap_or_default();
                let mut events: Vec<Json> = parts.into_iter().flat_map(|part| writer.part(part)).collect();
                events.extend(writer.end(&ending));
                events
            }
            Event::Failed(error) => vec![writer.fail(&error)],
        }
    });
    stream::iter([begin]).chain(events).flat_map(stream::iter)
}

/// Returns a response of newline-delimited JSON.
pub(super) fn json_lines(events: impl Stream<Item = Json> + Send + 'static) -> Response {
    let lines = events.map(|event| Ok::<_, Infallible>(Bytes::from(format!("{event}\n"))));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

/// Returns a response of server-sent events, each with its `type` as its name.
pub(super) fn server_events(events: impl Stream<Item = Json> + Send + 'static, keep_alive: KeepAlive) -> Response {
    let parts = events.map(|event| {
        let name = event["type"].as_str().unwrap_or_default();
        Ok::<_, Infallible>(sse::Event::default().event(name).data(event.to_string()))
    });
    Sse::new(parts).keep_alive(keep_alive).into_response()
}
