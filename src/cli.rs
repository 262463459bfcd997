//! The command line: one file for each verb, which parses arguments, calls the library and prints.
//!
//! Results go to stdout, as text or with `--json` as JSON; progress, notes and errors go to stderr. Exit codes:
//! 0 success (all requested gates passed), 1 a gate failed, 2 usage or manifest error, 3 a gate could not run here,
//! 4 source unreadable or unsupported, 5 a required tool or platform is missing.

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
mod doubts;
mod draft;
mod embed;
mod explain;
mod export;
mod gain;
mod golden;
mod granularity;
mod input;
mod inspect;
mod logits;
mod manifests;
mod migrate;
mod model;
mod openai_client;
mod pack;
mod package;
mod perplexity;
mod plan;
mod progress;
mod quant;
mod redact;
mod remedy;
mod run;
mod sampling;
mod schema;
mod serve;
mod share;
mod usage;
mod validate;

use std::borrow::Cow;
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{Parser, Subcommand};

use anec::base::listing::limited;
use anec::base::{Error, FileError, Result};
use anec::runtime::probe;
use usage::ThreadError;

/// Convert language models to Core ML for Apple's Neural Engine, verify the result, and run it
#[derive(Debug, Parser)]
#[command(name = "anec", version, max_term_width = 110, disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
    /// Number of compute threads [default: number of processors]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

impl Cli {
    /// Runs the verb and returns the exit code.
    fn run(self) -> Result<u8> {
        anec::exec::check_instruction_limit().map_err(usage::InstructionError)?;
        if let Some(threads) = self.threads {
            // the executor uses rayon's global pool
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.into());
            pool.build_global().map_err(std::io::Error::other).map_err(ThreadError)?;
        }
        self.verb.run()
    }
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Convert a model to Core ML packages
    Convert(convert::ConvertArgs),
    /// Verify a bundle: structure, numerics, parity with a golden, residency
    Validate(validate::ValidateArgs),
    /// Find the op behind a failure: reduce a program to the smallest part that fails
    Bisect(bisect::BisectArgs),
    /// Generate text from a prompt
    Run(run::RunArgs),
    /// Chat with a model in the terminal
    Chat(chat::ChatArgs),
    /// Measure the speed and memory of a bundle
    Bench(bench::BenchArgs),
    /// Serve models over HTTP (APIs of OpenAI, Anthropic, Ollama), or one as JSON lines
    Serve(serve::ServeArgs),
    /// Compute the logits of every position
    Logits(logits::LogitsArgs),
    /// Classify the tokens of a text, or the whole text
    Classify(classify::ClassifyArgs),
    /// Compute text embeddings
    Embed(embed::EmbedArgs),
    /// Redact private spans in a text of any length
    Redact(redact::RedactArgs),
    /// Measure the perplexity of a bundle on a text
    Perplexity(perplexity::PerplexityArgs),
    /// Compute a golden from the source's own weights
    Golden(golden::GoldenArgs),
    /// Convert, verify and run a small built-in model
    Demo(demo::DemoArgs),
    /// Preview a conversion without reading weights
    Plan(plan::PlanArgs),
    /// Measure the cost of number formats by role and layer, and choose formats under a budget
    Quant(quant::QuantArgs),
    /// Show the contents of a source, a package, an asset of Core AI or a bundle
    Inspect(inspect::InspectArgs),
    /// List cached bundles
    Ls(cache::ListArgs),
    /// Remove cached bundles
    Rm(cache::RemoveArgs),
    /// Compile the packages of a bundle (on a Mac)
    Compile(compile::CompileArgs),
    /// Upload a bundle to the Hugging Face hub, with a model card
    Push(share::PushArgs),
    /// Download a bundle from the Hugging Face hub
    Pull(share::PullArgs),
    /// Export a bundle in the layout of another runtime
    Export(export::ExportArgs),
    /// Turn a Core ML package into an asset of Core AI
    Migrate(migrate::MigrateArgs),
    /// Pack a bundle into one reproducible zip file
    Pack(pack::PackArgs),
    /// Unpack a bundle
    Unpack(pack::UnpackArgs),
    /// Explain a rule, an error code or an exit code
    Explain(explain::ExplainArgs),
    /// Show what this machine can do and what is missing
    Doctor(doctor::DoctorArgs),
    /// Print shell completions
    Completions(completions::CompletionsArgs),
    /// Write manual pages
    Man(completions::ManArgs),
    /// Print the JSON Schema of a file that anec reads or writes
    Schema(schema::SchemaArgs),
    /// List the built-in manifests, or print one
    Manifests(manifests::ManifestsArgs),
}

impl Verb {
    /// Runs the verb and returns the exit code.
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
            Verb::Migrate(args) => args.run(),
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
    if std::env::args_os().nth(1).is_some_and(|argument| argument == probe::ARGUMENT) {
        return ExitCode::from(probe::run());
    }
    if let Ok(program) = std::env::current_exe() {
        probe::set_program(program);
    }
    // with a handler, a file that reaches its size limit is a write error instead of the end of this process
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    // the libraries need threads: report a system that refuses them here, before a library panics
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

/// Largest size in bytes of a text file.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// First error from writing to stdout.
static STDOUT_ERROR: OnceLock<std::io::Error> = OnceLock::new();

/// Returns the exit code, or the first error from writing to stdout.
fn written(code: u8) -> Result<u8> {
    match STDOUT_ERROR.get() {
        None => Ok(code),
        Some(error) => {
            let error = error.raw_os_error().map_or_else(|| error.kind().into(), std::io::Error::from_raw_os_error);
            Err(FileError { path: "stdout".into(), action: "write", error }.into())
        }
    }
}

/// Formats an error for the user: message, causes, help.
fn explain(error: &Error) -> String {
    let mut text = format!("error: {error}\n");
    let mut seen = error.to_string();
    let mut cause = std::error::Error::source(error.inner());
    while let Some(inner) = cause {
        // many messages end with their cause; don't repeat it
        let message = limited(&inner.to_string()).into_owned();
        if !seen.contains(&message) {
            text.push_str(&format!("  caused by: {message}\n"));
        }
        seen = message;
        cause = inner.source();
    }
    if let Some(help) = remedy::help(error) {
        text.push_str(&format!("help: {help}\n"));
    }
    text
}

/// Prints a result.
fn print(text: &str) {
    let end = if text.ends_with('\n') { "" } else { "\n" };
    put(&format!("{}{end}", visible(text)));
}

/// Escapes control characters: names in a source are untrusted, and a terminal executes escape sequences.
fn visible(text: &str) -> Cow<'_, str> {
    let hidden = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(hidden) {
        return text.into();
    }
    let show = |c: char| if hidden(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(show).collect::<String>().into()
}

/// Writes a part of the result to stdout; returns whether to continue. A closed pipe (`anec … | head`) is no error;
/// any other error is reported after the verb ends.
fn put(text: &str) -> bool {
    let mut out = std::io::stdout().lock();
    // what a model writes must not control the terminal
    let text = if out.is_terminal() { visible(text) } else { text.into() };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => true,
        Err(error) => {
            if error.kind() != ErrorKind::BrokenPipe {
                let _ = STDOUT_ERROR.set(error);
            }
            false
        }
    }
}

/// Prints a result as JSON.
fn print_json(value: &impl serde::Serialize) {
    // plain data always serializes
    let text = serde_json::to_string_pretty(value).unwrap_or_default();
    // JSON doesn't escape control characters above ASCII
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
