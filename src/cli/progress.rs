//! Progress bars on stderr; hidden unless it is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

use anec::base::{Progress, ProgressEvent};

/// Progress bar of bytes with the remaining time. `ProgressEvent::Total` sets its length.
pub fn bytes() -> Progress {
    bar("{msg:28!} {bar:32} {bytes:>10} of {total_bytes}  {bytes_per_sec}  {eta} left", "")
}

/// Progress bar that counts `what`.
pub fn counting(what: &'static str) -> Progress {
    bar("{msg:28!} {bar:32} {pos} of {len}  {elapsed}", what)
}

fn bar(template: &str, message: &'static str) -> Progress {
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
        ProgressEvent::Note(line) => bar.suspend(|| eprintln!("note: {line}")),
        ProgressEvent::Finished => bar.finish_and_clear(),
        _ => {}
    })
}
