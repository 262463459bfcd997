//! JSON lines over stdin or a Unix socket: one request per line, one answer per line. Accepts the fields of the HTTP
//! API and of earlier runtimes for the Neural Engine, and their short form `ID ID …|MAX`.

use std::sync::Arc;
use std::time::Duration;

use anec_base::json::problem;
use serde::Deserialize;
use serde_json::{Value as Json, json};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::conversation::parse;
use super::engine::Event;
use super::error::ServeError;
use super::fields::names;
use super::openai::finish_reason;
use super::parameters::Parameters;
use super::service::{RequestPrompt, Service, Submission, Text, TextCollector, Times, next_event, whole};
use anec_runtime::chat::{Chat, Message};

/// Name of the protocol.
pub const PROTOCOL: &str = "anec-jsonl-v1";

/// Fields that only lines have, beside the parameters.
#[derive(Debug, Deserialize)]
struct LineFields {
    /// Identifier returned with the answer.
    #[allow(dead_code, reason = "read before the other fields, whose errors need it")]
    id: Option<Json>,
    messages: Option<Vec<Message>>,
    prompt: Option<String>,
    system: Option<String>,
    #[serde(alias = "prompt_ids", alias = "ids")]
    tokens: Option<Vec<u32>>,
    /// Whether the tokens begin a new text; `false` appends them to the previous one.
    reset: Option<bool>,
    /// Whether the text is also sent in parts, each on a line with `delta`.
    #[allow(dead_code, reason = "checked here, read with the identifier")]
    stream: Option<bool>,
}

/// Returns the line that announces readiness.
pub fn ready(transport: &str, path: Option<&std::path::Path>) -> String {
    let request = [names::<LineFields>(), names::<Parameters>()].concat();
    let fields = json!({
        "request": request,
        "response": ["ok", "id", "text", "output", "generated_ids", "finish_reason", "timing", "cache_seq_len", "error"],
    });
    let mut about = json!({"protocol": PROTOCOL, "transport": transport, "fields": fields});
    if let Some(path) = path {
        about["path"] = json!(path);
    }
    format!("READY {about}\n")
}

/// Answers requests to the end of the input. `limit` is the maximum number of bytes per line; a line that has begun
/// must arrive within `read_timeout`, if there is one.
///
/// # Errors
/// If an answer can't be written.
pub async fn serve(
    service: Arc<Service>,
    reader: impl AsyncBufRead + Unpin,
    mut writer: impl AsyncWrite + Unpin,
    limit: usize,
    read_timeout: Option<Duration>,
) -> std::io::Result<()> {
    let mut reader = reader;
    // tokens of earlier requests, for requests that continue them
    let mut history: Vec<u32> = Vec::new();
    loop {
        let mut line = Vec::new();
        if reader.fill_buf().await?.is_empty() {
            return Ok(());
        }
        let mut limited = (&mut reader).take(limit as u64 + 1);
        let read = limited.read_until(b'\n', &mut line);
        match read_timeout {
            Some(time) => match tokio::time::timeout(time, read).await {
                Ok(read) => read?,
                Err(_) => {
                    let error = ServeError::Slow { seconds: time.as_secs() };
                    writer.write_all(failed(None, &error).as_bytes()).await?;
                    return writer.flush().await;
                }
            },
            None => read.await?,
        };
        if line.len() > limit {
            let error = ServeError::TooLarge { limit };
            writer.write_all(failed(None, &error).as_bytes()).await?;
            // the rest of this line can't be told from the next one
            return writer.flush().await;
        }
        if !line.iter().all(u8::is_ascii_whitespace) {
            let answer = match short_form(&line) {
                Some((ids, most)) => short_answer(&service, ids, most).await,
                None => long_answer(&service, line, &mut history, &mut writer).await?,
            };
            writer.write_all(answer.as_bytes()).await?;
            writer.flush().await?;
        }
    }
}

/// Parses the short form `ID ID …|MAX`.
fn short_form(line: &[u8]) -> Option<(Vec<u32>, u64)> {
    let line = std::str::from_utf8(line).ok()?;
    let (ids, most) = line.trim().split_once('|').unwrap_or((line.trim(), "50"));
    let ids = ids.split_ascii_whitespace().map(|id| id.parse().ok()).collect::<Option<Vec<u32>>>()?;
    Some((ids, most.trim().parse().ok()?))
}

async fn short_answer(service: &Arc<Service>, ids: Vec<u32>, most: u64) -> String {
    let submission = submission(RequestPrompt::Ids(ids), Parameters::greedy(most));
    let text = match service
        .ask(move |_| Ok((vec![submission], ())))
        .await
        .map(|(mut answers, ())| answers.pop()?.receivers.pop())
    {
        Ok(Some(receiver)) => whole(receiver).await,
        Ok(None) => Err(ServeError::Stopping),
        Err(error) => Err(error),
    };
    match text {
        Err(error) => format!("ERROR: {}\n", error.message()),
        Ok(text) => {
            let ids: Vec<String> = text.ending.generation.ids.iter().map(u32::to_string).collect();
            let timings = text.ending.generation.timings;
            let (prefill, decode) = (timings.prefill_tps, timings.decode_tps);
            let (prompt, count) = (text.ending.prompt_tokens, ids.len());
            format!(
                "OUT: {}\nPERF: prefill={prefill:.1} decode={decode:.1} prompt={prompt} gen={count}\n",
                ids.join(" ")
            )
        }
    }
}

fn submission(prompt: RequestPrompt, parameters: Parameters) -> Submission {
    Submission { prompt, parameters, logprobs: None, tools: None, scored: false }
}

async fn long_answer(
    service: &Arc<Service>,
    line: Vec<u8>,
    history: &mut Vec<u32>,
    writer: &mut (impl AsyncWrite + Unpin),
) -> std::io::Result<String> {
    let line: Json = match serde_json::from_slice(&line) {
        Ok(line @ Json::Object(_)) => line,
        Ok(_) => {
            let error = ServeError::Invalid { problem: "the line has to be a JSON object".into(), field: None };
            return Ok(failed(None, &error));
        }
        Err(error) => {
            let problem = format!("the line isn't JSON: {}", problem(&error));
            return Ok(failed(None, &ServeError::Invalid { problem, field: None }));
        }
    };
    let id = line.get("id").cloned();
    let stream = line.get("stream") == Some(&Json::Bool(true));
    let asked = match prompt(&line, history) {
        Ok((prompt, parameters)) => {
            let submission = submission(prompt, parameters);
            service.ask(move |_| Ok((vec![submission], ()))).await
        }
        Err(error) => Err(error),
    };
    let answer = match asked.map(|(mut answers, ())| answers.pop()) {
        Ok(answer) => answer,
        Err(error) => return Ok(failed(id, &error)),
    };
    let Some((Some(mut receiver), prompt, tokenize)) =
        answer.map(|mut answer| (answer.receivers.pop(), answer.prompt, answer.tokenize))
    else {
        return Ok(failed(id, &ServeError::Stopping));
    };
    let mut collector = TextCollector::default();
    let text = loop {
        let event = next_event(&mut receiver).await;
        if let Event::Delta(delta) = &event
            && stream
            && !delta.text.is_empty()
        {
            let part = json!({"ok": true, "id": id, "delta": delta.text});
            writer.write_all(format!("{part}\n").as_bytes()).await?;
            writer.flush().await?;
        }
        if let Some(text) = collector.push(event) {
            break text;
        }
    };
    Ok(match text {
        Err(error) => failed(id, &error),
        Ok(text) => {
            *history = [prompt, text.ending.generation.ids.clone()].concat();
            let times = Times::of(&text.ending, tokenize);
            format!("{}\n", answered(id, &text, &times, history.len()))
        }
    })
}

fn prompt(line: &Json, history: &[u32]) -> Result<(RequestPrompt, Parameters), ServeError> {
    let (request, parameters): (LineFields, Parameters) = (parse(line)?, parse(line)?);
    if parameters.n.is_some_and(|n| n != 1) {
        return Err(ServeError::field("n", "a line has one answer: `n` can only be 1"));
    }
    let system = request.system.map(|system| Message::new("system", &system));
    let prompt = match (request.messages, request.prompt, request.tokens) {
        (Some(messages), None, None) => RequestPrompt::Chat(Chat::new(system.into_iter().chain(messages).collect())),
        (None, Some(text), None) if system.is_some() => {
            RequestPrompt::Chat(Chat::new(system.into_iter().chain([Message::new("user", &text)]).collect()))
        }
        (None, Some(text), None) => RequestPrompt::Text { text, special: false },
        (None, None, Some(tokens)) if tokens.is_empty() => {
            return Err(ServeError::field("tokens", "`tokens` has no tokens"));
        }
        (None, None, Some(tokens)) if request.reset == Some(false) => RequestPrompt::Ids([history, &tokens].concat()),
        (None, None, Some(tokens)) => RequestPrompt::Ids(tokens),
        _ => {
            let problem = "give one of `messages`, `prompt` and `tokens`".to_owned();
            return Err(ServeError::Invalid { problem, field: None });
        }
    };
    Ok((prompt, parameters))
}

fn answered(id: Option<Json>, text: &Text, times: &Times, length: usize) -> Json {
    let generation = &text.ending.generation;
    let timings = generation.timings;
    let mut answer = json!({
        "ok": true,
        "text": text.text,
        "output": generation.ids,
        "generated_ids": generation.ids,
        "finish_reason": finish_reason(generation.finish, false),
        "prompt_tokens": text.ending.prompt_tokens,
        "gen_tokens": generation.ids.len(),
        "prefill_tps": timings.prefill_tps,
        "decode_tps": timings.decode_tps,
        "timing": times,
        "cache_seq_len": length,
    });
    if let Some(id) = id {
        answer["id"] = id;
    }
    answer
}

fn failed(id: Option<Json>, error: &ServeError) -> String {
    let mut answer = json!({"ok": false, "error": error.message(), "code": error.body()["error"]["code"]});
    if let Some(id) = id {
        answer["id"] = id;
    }
    format!("{answer}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_form_is_ids_and_a_number() {
        assert_eq!(short_form(b"1 2 3|7\n"), Some((vec![1, 2, 3], 7)));
        assert_eq!(short_form(b" 4 5 \n"), Some((vec![4, 5], 50)));
        assert_eq!(short_form(b"{\"prompt\": \"a|b\"}"), None);
        assert_eq!(short_form(b"1 x|3"), None);
    }

    #[test]
    fn every_field_of_a_request_is_advertised() {
        let line = ready("stdin", None);
        let about: Json = serde_json::from_str(line.strip_prefix("READY ").unwrap()).unwrap();
        let fields: Vec<&str> =
            about["fields"]["request"].as_array().unwrap().iter().filter_map(Json::as_str).collect();
        for field in ["id", "ids", "prompt_ids", "reset", "n_predict", "max_tokens", "speculation", "presence_penalty"]
        {
            assert!(fields.contains(&field), "{field}: {fields:?}");
        }
    }

    #[test]
    fn a_line_has_one_prompt() {
        let read = |json: Json| prompt(&json, &[1, 2]).map(|(prompt, _)| prompt);
        assert!(
            matches!(read(json!({"prompt_ids": [3], "reset": false})), Ok(RequestPrompt::Ids(ids)) if ids == [1, 2, 3])
        );
        assert!(matches!(read(json!({"tokens": [3]})), Ok(RequestPrompt::Ids(ids)) if ids == [3]));
        assert!(
            matches!(read(json!({"prompt": "x", "system": "s"})), Ok(RequestPrompt::Chat(chat)) if chat.messages.len() == 2)
        );
        assert!(read(json!({"tokens": []})).is_err());
        assert!(read(json!({"prompt": "x", "tokens": [1]})).is_err());
        assert!(read(json!({"prompt": "x", "n": 2})).is_err());
        assert!(read(json!({})).is_err());
    }
}
