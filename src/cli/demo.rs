//! `anec demo`

use std::path::PathBuf;
use std::sync::Arc;

use anec::base::FileError;

use serde_json::{Value as Json, json};

use super::demo_model::{LANGUAGE, REDACTION};
use super::run::{show, write};
use super::{print, print_json, progress, redact};
use anec::Converter;
use anec::base::Result;
use anec::convert::Outcome;
use anec::exec::Precision;
use anec::report;
use anec::runtime::sampling::Sampling;
use anec::runtime::{GenerationRequest, LoadedModel, RuntimeError, Tokenizer};

/// Convert, verify and run a small built-in model
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Keep the bundle in this folder
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Redact a text with a classifier of private spans, instead of generating text
    #[arg(long)]
    redact: bool,
    /// Prompt, or the text to redact [default: It was a fine morning, and; a letter]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Sampling seed
    #[arg(long, value_name = "N", default_value_t = SEED, conflicts_with = "redact")]
    seed: u64,
    /// Show every package and every check
    #[arg(long, conflicts_with = "json")]
    details: bool,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

/// Default prompt.
const PROMPT: &str = "It was a fine morning, and";
/// Default text to redact.
const LETTER: &str = include_str!("../../demo/redact/letter.txt");
/// Seed whose continuation reads well.
const SEED: u64 = 2;
/// Number of generated tokens: a paragraph.
const TOKENS: usize = 120;

impl DemoArgs {
    pub(super) fn run(self) -> Result<u8> {
        let demo = if self.redact { &REDACTION } else { &LANGUAGE };
        let text = self.prompt.as_deref().unwrap_or(if self.redact { LETTER.trim_end() } else { PROMPT });
        let folder = tempfile::tempdir().map_err(FileError::of(std::env::temp_dir(), "create a folder in"))?;
        let source = folder.path().join("model");
        demo.unpack(&source)?;
        let manifest = demo.manifest()?;
        // check the prompt before converting
        let prompt = Tokenizer::open(&source.join("tokenizer.json"))?.encode(text)?;
        if prompt.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        let context = manifest.context.all().last().copied().unwrap_or(0);
        if !self.redact && prompt.len() as u64 >= context {
            return Err(RuntimeError::ContextFull { tokens: prompt.len() as u64, context }.into());
        }

        let out = self.out.clone().unwrap_or_else(|| folder.path().join("demo.anec"));
        let outcome = Converter::new(manifest)
            .source(source.display().to_string())
            .out(&out)
            .progress(progress::bytes())
            .convert()?;
        if let (Outcome::Written(written), false) = (&outcome, self.json) {
            let show = if self.details { report::conversion } else { report::conversion_summary };
            print(&show(&written.path, &written.bundle, &written.report));
        }
        let report = demo.validate(&out)?;
        if !self.json {
            print(&if self.details { report::gates(&report) } else { report::gates_summary(&report) });
            print("");
        }

        let model = LoadedModel::on_cpu(&out, Precision::F32)?;
        let mut result = if self.redact { self.redact(&model, text)? } else { self.generate(&model, text, prompt)? };
        if self.json {
            result["bundle"] = json!(self.out);
            result["gates"] = json!(report);
            result["prompt"] = json!(text);
            print_json(&result);
        }
        Ok(report.exit_code(false))
    }

    /// Continues the prompt.
    fn generate(&self, model: &Arc<LoadedModel>, text: &str, prompt: Vec<u32>) -> Result<Json> {
        let tokenizer = Arc::new(Tokenizer::of(model.bundle(), model.folder())?);
        let request = GenerationRequest {
            prompt,
            max_tokens: TOKENS,
            sampling: Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, seed: self.seed, ..Sampling::default() },
            stops: model.end_tokens(),
            ..GenerationRequest::default()
        };
        if !self.json {
            eprint!("{text}");
        }
        let (generation, text) = write(request.start(model)?, Some(&tokenizer), &[], |text| self.json || show(text))?;
        if !self.json {
            print("");
        }
        Ok(json!({"text": text, "generation": generation}))
    }

    /// Redacts the text.
    fn redact(&self, model: &Arc<LoadedModel>, text: &str) -> Result<Json> {
        let (redacted, spans) = redact::redact(model, text)?;
        if !self.json {
            eprintln!("{}\n", text.trim_end());
            print(redacted.trim_end());
        }
        Ok(json!({"text": redacted, "spans": spans}))
    }
}
