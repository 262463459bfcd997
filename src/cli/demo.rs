//! `anec demo`

use std::path::PathBuf;
use std::sync::Arc;

use anec::base::FileError;

use serde_json::json;

use super::demo_model::{unpack, validate};
use super::run::{show, write};
use super::{print, print_json, progress};
use anec::Converter;
use anec::base::Result;
use anec::convert::Outcome;
use anec::exec::Precision;
use anec::manifest::Manifest;
use anec::report;
use anec::runtime::sampling::Sampling;
use anec::runtime::{GenerationRequest, LoadedModel, RuntimeError, Tokenizer};

/// Convert, verify and run a small built-in model
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Keep the bundle in this folder
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Prompt
    #[arg(long, value_name = "TEXT", default_value = "It was a fine morning, and")]
    prompt: String,
    /// Sampling seed
    #[arg(long, value_name = "N", default_value_t = SEED)]
    seed: u64,
    /// Show every package and every check
    #[arg(long, conflicts_with = "json")]
    details: bool,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

/// Seed whose continuation reads well.
const SEED: u64 = 2;
/// Number of generated tokens: a paragraph.
const TOKENS: usize = 120;

impl DemoArgs {
    pub(super) fn run(self) -> Result<u8> {
        let folder = tempfile::tempdir().map_err(FileError::of(std::env::temp_dir(), "create a folder in"))?;
        let source = folder.path().join("model");
        unpack(&source)?;
        // check the prompt before converting
        let prompt = Tokenizer::open(&source.join("tokenizer.json"))?.encode(&self.prompt)?;
        if prompt.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        let out = self.out.clone().unwrap_or_else(|| folder.path().join("demo.anec"));

        let manifest = Manifest::open("manifests/demo.yaml", &[])?;
        let context = manifest.context.all().last().copied().unwrap_or(0);
        if prompt.len() as u64 >= context {
            return Err(RuntimeError::ContextFull { tokens: prompt.len() as u64, context }.into());
        }
        let outcome = Converter::new(manifest)
            .source(source.display().to_string())
            .out(&out)
            .progress(progress::bytes())
            .convert()?;
        if let (Outcome::Written(written), false) = (&outcome, self.json) {
            let show = if self.details { report::conversion } else { report::conversion_summary };
            print(&show(&written.path, &written.bundle, &written.report));
        }

        let report = validate(&out)?;
        if !self.json {
            print(&if self.details { report::gates(&report) } else { report::gates_summary(&report) });
        }

        let model = &LoadedModel::on_cpu(&out, Precision::F32)?;
        let tokenizer = Arc::new(Tokenizer::of(model.bundle(), &out)?);
        let request = GenerationRequest {
            prompt,
            max_tokens: TOKENS,
            sampling: Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, seed: self.seed, ..Sampling::default() },
            stops: model.end_tokens(),
            ..GenerationRequest::default()
        };
        if !self.json {
            print("");
            eprint!("{}", self.prompt);
        }
        let (generation, text) = write(request.start(model)?, Some(&tokenizer), &[], |text| self.json || show(text))?;
        if !self.json {
            print("");
        }
        if self.json {
            print_json(&json!({
                "bundle": self.out,
                "gates": report,
                "prompt": self.prompt,
                "text": text,
                "generation": generation,
            }));
        }
        Ok(report.exit_code(false))
    }
}
