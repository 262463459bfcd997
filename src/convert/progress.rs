//! Progress on stderr: bytes written and time left. Silent where stderr is no terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar that counts bytes. Clones are the same bar.
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
