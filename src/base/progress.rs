//! Progress on stderr: bytes written and time left, or things done. Silent where stderr is no terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar. Clones are the same bar.
#[derive(Clone)]
pub struct Progress(ProgressBar);

impl Progress {
    /// No bar.
    pub fn hidden() -> Self {
        Progress(ProgressBar::hidden())
    }

    /// A bar on stderr, if that is a terminal. Its length is set once it is known.
    pub fn on_stderr() -> Self {
        let bar = ProgressBar::new(0);
        let template = "{msg:28!} {bar:32} {bytes:>10} of {total_bytes}  {bytes_per_sec}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Progress(bar)
    }

    /// A bar on stderr, if that is a terminal, that counts `what`.
    pub fn counting(what: &'static str) -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{msg:28!} {bar:32} {pos} of {len}  {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what);
        Progress(bar)
    }

    /// Sets how far it is.
    pub fn set(&self, done: u64, of: u64) {
        self.0.set_length(of);
        self.0.set_position(done);
    }

    /// Sets how many bytes there will be.
    pub fn expect(&self, bytes: u64) {
        self.0.set_length(bytes);
    }

    /// Names what is in work.
    pub fn stage(&self, name: &str) {
        self.0.set_message(name.to_owned());
    }

    /// Adds bytes that are done.
    pub fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }

    /// Prints a line above the bar, or plainly where there is none.
    pub fn note(&self, line: &str) {
        self.0.suspend(|| eprintln!("{line}"));
    }
}
