//! `anec redact`

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anec::base::output::OutputFile;
use anec::base::{FileError, Result};

use serde_json::{Value as Json, json};

use super::model::{Labels, Runner};
use anec::runtime::LoadedModel;
use anec::runtime::classify::bioes::{Biases, Scheme};
use anec::runtime::classify::redact::{Piece, RedactionSummary, Redactor, Span};

/// Size in bytes of a read.
const READ: usize = 1 << 16;

/// Redact private spans in a text of any length: each is replaced by its kind, such as `<PRIVATE_PERSON>`
///
/// The text is processed as a stream in bounded memory. Bytes outside of spans don't change. A summary goes to stderr.
#[derive(Debug, clap::Args)]
pub struct RedactArgs {
    #[command(flatten)]
    runner: Runner,
    /// Text file; `-` or nothing reads stdin
    file: Option<PathBuf>,
    /// Output file [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    labels: Labels,
    /// Kinds of spans to redact, for example private_person,private_email [default: all]
    #[arg(long = "labels", value_delimiter = ',', value_name = "KIND,KIND,…")]
    kinds: Vec<String>,
    /// Print the spans as JSON lines (label, start and end in bytes) instead of the text
    #[arg(long)]
    json: bool,
}

impl RedactArgs {
    pub(super) fn run(self) -> Result<u8> {
        let model = self.runner.open()?;
        let begin = Instant::now();
        let mut redactor = Redactor::new(&model, &self.kinds, self.labels.biases()?, self.labels.window)?;
        let scheme = redactor.scheme().clone();
        let (mut input, name) = self.input()?;
        let mut out = Out::new(self.out.as_ref())?;
        let mut sink = |piece: Piece<'_>| match piece {
            Piece::Kept(_) if self.json => Ok(()),
            Piece::Kept(text) => out.write(text),
            Piece::Span(span) if self.json => out.write(format!("{}\n", entry(span, &scheme)).as_bytes()),
            Piece::Span(span) => out.write(span.placeholder(&scheme).as_bytes()),
        };
        let mut buffer = vec![0; READ];
        let summary = loop {
            match input.read(&mut buffer) {
                Ok(0) => break redactor.finish(&mut sink)?,
                Ok(count) => redactor.push(&buffer[..count], &mut sink)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(FileError::of(name, "read")(error).into()),
            }
        };
        out.finish()?;
        eprintln!("{}", report(&summary, begin.elapsed().as_secs_f64()));
        Ok(0)
    }

    fn input(&self) -> Result<(Box<dyn Read>, PathBuf)> {
        match self.file.as_ref().filter(|file| file.as_os_str() != "-") {
            None => Ok((Box::new(std::io::stdin().lock()), "stdin".into())),
            Some(path) => {
                let file = File::open(path).map_err(FileError::of(path, "read"))?;
                Ok((Box::new(file), path.clone()))
            }
        }
    }
}

/// Label and byte range of a span.
fn entry(span: &Span, scheme: &Scheme) -> Json {
    json!({"label": span.label(scheme), "start": span.range.start, "end": span.range.end})
}

/// Redacts a text; returns it with its spans.
pub(super) fn redact(model: &Arc<LoadedModel>, text: &str) -> Result<(String, Vec<Json>)> {
    let redactor = Redactor::new(model, &[], Biases::default(), None)?;
    let scheme = redactor.scheme().clone();
    let (redacted, spans) = redactor.redact(text)?;
    Ok((redacted, spans.iter().map(|span| entry(span, &scheme)).collect()))
}

/// One-line summary.
fn report(summary: &RedactionSummary, seconds: f64) -> String {
    let total: u64 = summary.spans.values().sum();
    let kinds: Vec<String> = summary.spans.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    let kinds = if kinds.is_empty() { String::new() } else { format!(": {}", kinds.join(", ")) };
    format!(
        "{total} spans in {} tokens{kinds}; {} in {seconds:.1} s, at most {} held at a time",
        summary.tokens,
        anec::report::bytes(summary.bytes),
        anec::report::bytes(summary.most_held as u64),
    )
}

/// Destination of the result.
enum Out {
    Stdout(BufWriter<std::io::StdoutLock<'static>>),
    File(PathBuf, BufWriter<OutputFile>),
}

impl Out {
    fn new(path: Option<&PathBuf>) -> Result<Self> {
        Ok(match path {
            None => Out::Stdout(BufWriter::new(std::io::stdout().lock())),
            Some(path) => Out::File(path.clone(), BufWriter::new(OutputFile::create(path)?)),
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Out::Stdout(out) => out.write_all(bytes).map_err(FileError::of("stdout", "write"))?,
            Out::File(path, out) => out.write_all(bytes).map_err(FileError::of(path.as_path(), "write"))?,
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        match self {
            Out::Stdout(mut out) => Ok(out.flush().map_err(FileError::of("stdout", "write"))?),
            Out::File(path, out) => {
                let file = out.into_inner().map_err(|error| FileError::of(path, "write")(error.into_error()))?;
                Ok(file.commit()?)
            }
        }
    }
}
