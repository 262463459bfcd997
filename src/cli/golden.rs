//! `anec golden`

use std::path::PathBuf;

use serde_json::json;

use super::input;
use super::usage::UsageError;
use super::{print, print_json, progress};
use anec::GoldenBuilder;
use anec::base::Result;
use anec::convert::files;
use anec::validate::prompts::TextSet;

/// Texts or tokens of the golden.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct GoldenInput {
    /// Token ids
    #[arg(long, alias = "tokens", value_delimiter = ',', value_name = "ID,ID,…")]
    ids: Option<Vec<u32>>,
    /// Prompt
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Built-in texts: a short one, or 2,500 tokens for judging quantization (1.5 GB for a vocabulary of 150,000
    /// tokens)
    #[arg(long, value_enum, value_name = "NAME")]
    texts: Option<TextsName>,
}

/// Built-in texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TextsName {
    /// One text of a few hundred tokens
    Short,
    /// Prose, code, data, other languages, dialogue, and texts that start with a space
    Long,
}

impl TextsName {
    fn set(self) -> TextSet {
        match self {
            TextsName::Short => TextSet::Short,
            TextsName::Long => TextSet::Long,
        }
    }
}

/// Compute a golden for `anec validate --golden` from the source's own weights in f32
///
/// The golden shows what quantization and fp16 cost. It can't show an error in the graph, because the same graph
/// computes it (its metadata says so): tools/export_golden.py computes one with transformers. The weights pass
/// through a temporary fp16 bundle beside the file.
#[derive(Debug, clap::Args)]
pub struct GoldenArgs {
    #[command(flatten)]
    source: input::Input,
    #[command(flatten)]
    input: GoldenInput,
    /// Output file [default: the manifest's `golden`]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Include the hidden states between the layers
    #[arg(long)]
    hidden: bool,
    /// Include N greedily generated tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    greedy: usize,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl GoldenArgs {
    pub(super) fn run(self) -> Result<u8> {
        let manifest = self.source.manifest()?;
        let Some(out) = self.out.or_else(|| manifest.golden.clone()) else {
            let problem = "no file to write: neither --out nor the manifest names one";
            return Err(UsageError::new(problem, "give --out FILE, or the key `golden` in the manifest").into());
        };
        let builder = GoldenBuilder::new(manifest)
            .hidden(self.hidden)
            .greedy(self.greedy)
            .beside(&out)
            .progress(progress::bytes());
        let golden = match self.input {
            GoldenInput { texts: Some(texts), .. } => builder.compute_texts(texts.set().texts())?,
            GoldenInput { ids: Some(ids), .. } => builder.compute(ids)?,
            GoldenInput { prompt, .. } => builder.compute(prompt.unwrap_or_default())?,
        };
        let written = files::write(&out, &golden.to_bytes())?;
        if self.json {
            print_json(&json!({
                "out": out,
                "positions": golden.tokens.len(),
                "vocab_size": golden.vocab_size,
                "greedy": golden.greedy.map(|greedy| greedy.ids),
                "metadata": golden.metadata,
            }));
        } else {
            let size = anec::report::bytes(written.bytes);
            print(&format!("{}: {} positions, {size}, {}", out.display(), golden.tokens.len(), golden.reference()));
        }
        Ok(0)
    }
}
