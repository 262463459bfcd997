//! The command line. One file for each verb: parse, call, print.
//!
//! The result goes to stdout, as text or with `--json` as JSON; progress, notes and errors go to stderr. Exit codes:
//! 0 done (all asked-for gates passed), 1 a gate failed, 2 usage or manifest error, 3 a gate could not be run here,
//! 4 source unreadable or unsupported, 5 a needed tool or platform is missing.

mod bench;
mod bisect;
mod chat;
mod classify;
mod compile;
mod convert;
mod demo;
mod doctor;
mod explain;
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
mod redact;
mod run;
mod sampling;
mod schema;
mod serve;
mod validate;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use anec::base::{Error, Result};

/// Turns language models into Core ML programs for Apple's Neural Engine, proves what it made, and runs it.
#[derive(Debug, Parser)]
#[command(name = "anec", version, max_term_width = 110, disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Converts weights into a bundle of Core ML packages
    Convert(convert::Args),
    /// Proves what a bundle is: form, agreement with a golden, placement
    Validate(validate::Args),
    /// Finds the op behind a failure: the smallest piece of a program that fails
    Bisect(bisect::Args),
    /// Continues a prompt
    Run(run::Args),
    /// Talks with a model
    Chat(chat::Args),
    /// Measures how fast a bundle runs
    Bench(bench::Args),
    /// Answers requests over HTTP (OpenAI's API) or as JSON lines
    Serve(serve::Args),
    /// Computes the logits after every token
    Logits(logits::Args),
    /// Labels the tokens of a text
    Classify(classify::Args),
    /// Takes private spans out of a text of any length
    Redact(redact::Args),
    /// Measures how well a bundle predicts a text
    Perplexity(perplexity::Args),
    /// Computes a golden from a source's own weights
    Golden(golden::Args),
    /// Converts, checks and runs a small model that is part of anec
    Demo(demo::Args),
    /// Shows what a conversion would emit, without reading weights
    Plan(plan::Args),
    /// Shows what is in a source, a package or a bundle
    Inspect(inspect::Args),
    /// Compiles the packages of a bundle (on a Mac)
    Compile(compile::Args),
    /// Packs a bundle into one reproducible zip file
    Pack(pack::PackArgs),
    /// Unpacks a bundle
    Unpack(pack::UnpackArgs),
    /// Explains a rule, an error code or an exit code
    Explain(explain::Args),
    /// Says what this machine can do, and what is missing for the rest
    Doctor(doctor::Args),
    /// Prints the JSON Schema of a file that anec reads or writes
    Schema(schema::Args),
    /// Lists the built-in manifests, or prints one
    Manifests(manifests::Args),
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
            Verb::Redact(args) => args.run(),
            Verb::Perplexity(args) => args.run(),
            Verb::Golden(args) => args.run(),
            Verb::Demo(args) => args.run(),
            Verb::Plan(args) => args.run(),
            Verb::Inspect(args) => args.run(),
            Verb::Compile(args) => args.run(),
            Verb::Pack(args) => args.run(),
            Verb::Unpack(args) => args.run(),
            Verb::Explain(args) => args.run(),
            Verb::Doctor(args) => args.run(),
            Verb::Schema(args) => args.run(),
            Verb::Manifests(args) => args.run(),
        }
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    match Cli::parse().verb.run() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprint!("{}", explain(&error));
            ExitCode::from(error.fault().exit_code())
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

/// Prints a result. A reader that went away (`anec … | head`) is no error.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let end = if text.ends_with('\n') { "" } else { "\n" };
    let _ = write!(out, "{text}{end}").and_then(|()| out.flush());
}

/// Prints a result as JSON.
fn print_json(value: &impl serde::Serialize) {
    // values here are plain data; none can fail to become JSON
    print(&serde_json::to_string_pretty(value).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn no_verb_has_two_options_of_one_name() {
        Cli::command().debug_assert();
    }
}
