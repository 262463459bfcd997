//! The command line. One file for each verb: parse, call, print.
//!
//! The result goes to stdout, as text or with `--json` as JSON; progress, notes and errors go to stderr. Exit codes:
//! 0 done (all asked-for gates passed), 1 a gate failed, 2 usage or manifest error, 3 a gate could not be run here,
//! 4 source unreadable or unsupported, 5 a needed tool or platform is missing.

mod bench;
mod bisect;
mod cache;
mod chat;
mod classify;
mod compile;
mod completions;
mod convert;
mod demo;
mod demo_model;
mod doctor;
#[cfg(test)]
mod documented;
mod draft;
mod embed;
mod explain;
mod export;
mod golden;
mod input;
mod inspect;
mod logits;
mod manifests;
mod model;
mod pack;
mod perplexity;
mod plan;
mod progress;
mod quant;
mod redact;
mod run;
mod sampling;
mod schema;
mod serve;
mod share;
mod usage;
mod validate;

use std::borrow::Cow;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{Parser, Subcommand};

use anec::base::{Error, FileError, Result};
use usage::ThreadError;

/// Turns language models into Core ML programs for Apple's Neural Engine, proves what it made, and runs it.
#[derive(Debug, Parser)]
#[command(name = "anec", version, max_term_width = 110, disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
    /// Threads that compute [default: one for each processor]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

impl Cli {
    /// Does what was asked; gives the exit code.
    fn run(self) -> Result<u8> {
        if let Some(threads) = self.threads {
            // the executor takes as many as rayon has
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.into());
            pool.build_global().map_err(std::io::Error::other).map_err(ThreadError)?;
        }
        self.verb.run()
    }
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Converts weights into a bundle of Core ML packages
    Convert(convert::ConvertArgs),
    /// Proves what a bundle is: form, agreement with a golden, placement
    Validate(validate::ValidateArgs),
    /// Finds the op behind a failure: the smallest piece of a program that fails
    Bisect(bisect::BisectArgs),
    /// Continues a prompt
    Run(run::RunArgs),
    /// Talks with a model
    Chat(chat::ChatArgs),
    /// Measures how fast a bundle runs
    Bench(bench::BenchArgs),
    /// Answers requests over HTTP (OpenAI's API) or as JSON lines
    Serve(serve::ServeArgs),
    /// Computes the logits after every token
    Logits(logits::LogitsArgs),
    /// Labels the tokens of a text, or the whole of it
    Classify(classify::ClassifyArgs),
    /// Gives texts vectors
    Embed(embed::EmbedArgs),
    /// Takes private spans out of a text of any length
    Redact(redact::RedactArgs),
    /// Measures how well a bundle predicts a text
    Perplexity(perplexity::PerplexityArgs),
    /// Computes a golden from a source's own weights
    Golden(golden::GoldenArgs),
    /// Converts, checks and runs a small model that is part of anec
    Demo(demo::DemoArgs),
    /// Shows what a conversion would emit, without reading weights
    Plan(plan::PlanArgs),
    /// Measures what number formats cost, role by role and layer by layer, and chooses them under a budget
    Quant(quant::QuantArgs),
    /// Shows what is in a source, a package or a bundle
    Inspect(inspect::InspectArgs),
    /// Lists the bundles that were made for `anec run hf:owner/name` and its like
    Ls(cache::ListArgs),
    /// Removes them
    Rm(cache::RemoveArgs),
    /// Compiles the packages of a bundle (on a Mac)
    Compile(compile::CompileArgs),
    /// Uploads a bundle to the Hugging Face hub, with a model card
    Push(share::PushArgs),
    /// Downloads a bundle from the Hugging Face hub
    Pull(share::PullArgs),
    /// Writes a bundle in the layout of other runtimes
    Export(export::ExportArgs),
    /// Packs a bundle into one reproducible zip file
    Pack(pack::PackArgs),
    /// Unpacks a bundle
    Unpack(pack::UnpackArgs),
    /// Explains a rule, an error code or an exit code
    Explain(explain::ExplainArgs),
    /// Says what this machine can do, and what is missing for the rest
    Doctor(doctor::DoctorArgs),
    /// Prints what completes anec's commands in a shell
    Completions(completions::CompletionsArgs),
    /// Writes the manual pages
    Man(completions::ManArgs),
    /// Prints the JSON Schema of a file that anec reads or writes
    Schema(schema::SchemaArgs),
    /// Lists the built-in manifests, or prints one
    Manifests(manifests::ManifestsArgs),
}

impl Verb {
    /// Does it; gives the exit code.
    fn run(self) -> Result<u8> {
        match self {
            Verb::Convert(args) => args.run(),
            Verb::Validate(args) => args.run(),
            Verb::Bisect(args) => args.run(),
            Verb::Run(args) => args.run(),
            Verb::Chat(args) => args.run(),
            Verb::Bench(args) => args.run(),
            Verb::Serve(args) => args.run(),
            Verb::Logits(args) => args.run(),
            Verb::Classify(args) => args.run(),
            Verb::Embed(args) => args.run(),
            Verb::Redact(args) => args.run(),
            Verb::Perplexity(args) => args.run(),
            Verb::Golden(args) => args.run(),
            Verb::Demo(args) => args.run(),
            Verb::Plan(args) => args.run(),
            Verb::Quant(args) => args.run(),
            Verb::Inspect(args) => args.run(),
            Verb::Ls(args) => args.run(),
            Verb::Rm(args) => args.run(),
            Verb::Compile(args) => args.run(),
            Verb::Push(args) => args.run(),
            Verb::Pull(args) => args.run(),
            Verb::Export(args) => args.run(),
            Verb::Pack(args) => args.run(),
            Verb::Unpack(args) => args.run(),
            Verb::Explain(args) => args.run(),
            Verb::Doctor(args) => args.run(),
            Verb::Completions(args) => args.run(),
            Verb::Man(args) => args.run(),
            Verb::Schema(args) => args.run(),
            Verb::Manifests(args) => args.run(),
        }
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    // a file that becomes larger than its limit is then an error of writing it, not the end of this process
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    // what the libraries need; a system that gives none is better told here than by a panic in them
    let threads = std::thread::Builder::new().spawn(|| ()).map(|thread| thread.join().is_ok());
    let run = || -> Result<u8> {
        threads.map_err(ThreadError)?;
        Cli::parse().run().and_then(written)
    };
    match run() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprint!("{}", visible(&explain(&error)));
            ExitCode::from(error.fault().exit_code())
        }
    }
}

/// Bytes of a text that a user names, at most.
const MOST_TEXT: u64 = 64 << 20;

/// What stdout refused first.
static REFUSED: OnceLock<std::io::Error> = OnceLock::new();

/// The exit code, unless a part of the result didn't reach stdout.
fn written(code: u8) -> Result<u8> {
    match REFUSED.get() {
        None => Ok(code),
        Some(error) => {
            let error = error.raw_os_error().map_or_else(|| error.kind().into(), std::io::Error::from_raw_os_error);
            Err(FileError { path: "stdout".into(), action: "write", error }.into())
        }
    }
}

/// An error as the user sees it: what, because of what, and what to do.
fn explain(error: &Error) -> String {
    let mut text = format!("error: {error}\n");
    let mut seen = error.to_string();
    let mut cause = std::error::Error::source(error.inner());
    while let Some(inner) = cause {
        // many messages end with their cause; then it isn't repeated
        let message = inner.to_string();
        if !seen.contains(&message) {
            text.push_str(&format!("  caused by: {message}\n"));
        }
        seen = message;
        cause = inner.source();
    }
    if let Some(help) = error.help() {
        text.push_str(&format!("help: {help}\n"));
    }
    text
}

/// Prints a result.
fn print(text: &str) {
    let end = if text.ends_with('\n') { "" } else { "\n" };
    put(&format!("{}{end}", visible(text)));
}

/// A text whose control characters are seen and not obeyed: names in a source are its author's, and a terminal does what
/// an escape sequence says.
fn visible(text: &str) -> Cow<'_, str> {
    let hidden = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(hidden) {
        return text.into();
    }
    let show = |c: char| if hidden(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(show).collect::<String>().into()
}

/// Writes a piece of the result to stdout; gives whether anybody still reads it. A reader that went away (`anec … | head`) is
/// no error; all else that stdout refuses is told when the verb has ended.
fn put(text: &str) -> bool {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => true,
        Err(error) => {
            if error.kind() != ErrorKind::BrokenPipe {
                let _ = REFUSED.set(error);
            }
            false
        }
    }
}

/// Prints a result as JSON.
fn print_json(value: &impl serde::Serialize) {
    // values here are plain data; none can fail to become JSON
    let text = serde_json::to_string_pretty(value).unwrap_or_default();
    // JSON leaves the control characters above ASCII as they are
    let hidden = |c: char| c.is_control() && !c.is_ascii_control() || c == '\u{7f}';
    put(&text.chars().fold(String::new(), |mut shown, c| {
        if hidden(c) {
            shown.push_str(&format!("\\u{:04x}", c as u32));
        } else {
            shown.push(c);
        }
        shown
    }));
    put("\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_are_seen() {
        assert_eq!(visible("a\tb\nc"), "a\tb\nc");
        assert_eq!(visible("\u{1b}]0;pwn\u{7}\r\u{9b}2J"), "\\u{1b}]0;pwn\\u{7}\\r\\u{9b}2J");
    }
}

#[cfg(test)]
mod arguments {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn no_verb_has_two_options_of_one_name() {
        Cli::command().debug_assert();
    }
}
