//! Progress on stderr: bars, hidden unless it is a terminal, or lines of JSON for programs that run this one.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use anec::base::{Progress, ProgressEvent};

/// Variable of the environment that asks for lines of JSON by the value `json`.
const FORM: &str = "ANEC_PROGRESS";

/// Minimum time between two lines of a stage.
const INTERVAL: Duration = Duration::from_millis(100);

/// Progress bar of bytes with the remaining time. `ProgressEvent::Total` sets its length.
pub fn bytes() -> Progress {
    bar("{msg:28!} {bar:32} {bytes:>10} of {total_bytes}  {bytes_per_sec}  {eta} left", "")
}

/// Progress bar that counts `what`.
pub fn counting(what: &'static str) -> Progress {
    bar("{msg:28!} {bar:32} {pos} of {len}  {elapsed}", what)
}

fn bar(template: &str, message: &'static str) -> Progress {
    if std::env::var_os(FORM).is_some_and(|form| form == "json") {
        return lines(message);
    }
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(message);
    Progress::new(move |event| match event {
        ProgressEvent::Stage(name) => bar.set_message(name.to_owned()),
        ProgressEvent::Total(count) => bar.set_length(count),
        ProgressEvent::Advanced(count) => bar.inc(count),
        ProgressEvent::Reached(count) => bar.set_position(count),
        ProgressEvent::Note(line) => bar.suspend(|| eprintln!("note: {}", super::visible(line))),
        ProgressEvent::Finished => bar.finish_and_clear(),
        _ => {}
    })
}

/// Content of a line.
struct Line {
    stage: String,
    done: u64,
    total: u64,
    printed: Option<Instant>,
}

/// Progress as lines `{"progress": {"stage": …, "done": …, "total": …}}`; notes stay lines of text.
fn lines(message: &str) -> Progress {
    let line = Mutex::new(Line { stage: message.into(), done: 0, total: 0, printed: None });
    Progress::new(move |event| {
        let mut line = line.lock().unwrap_or_else(PoisonError::into_inner);
        let urgent = matches!(event, ProgressEvent::Stage(_) | ProgressEvent::Finished);
        match event {
            ProgressEvent::Stage(name) => line.stage = name.to_owned(),
            ProgressEvent::Total(count) => line.total = count,
            ProgressEvent::Advanced(count) => line.done += count,
            ProgressEvent::Reached(count) => line.done = count,
            ProgressEvent::Note(text) => return eprintln!("note: {}", super::visible(text)),
            _ => {}
        }
        if urgent || line.printed.is_none_or(|printed| printed.elapsed() >= INTERVAL) {
            line.printed = Some(Instant::now());
            let progress = json!({"stage": line.stage, "done": line.done, "total": line.total});
            eprintln!("{}", json!({"progress": progress}));
        }
    })
}
