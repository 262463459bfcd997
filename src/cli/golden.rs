//! `anec golden`

use std::path::PathBuf;

use serde_json::json;

use super::input;
use super::{print, print_json, progress};
use anec::GoldenBuilder;
use anec::base::Result;
use anec::convert::files;
use anec::validate::prompts::TextSet;

/// What the golden is of.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct GoldenInput {
    /// Token ids
    #[arg(long, value_delimiter = ',', value_name = "ID,ID,…")]
    tokens: Option<Vec<u32>>,
    /// Text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Texts of anec's own: a short one, or many of 2,500 tokens, by which the quality of a quantized model is judged; the
    /// logits of a vocabulary of 150,000 tokens then take 1.5 GB
    #[arg(long, value_enum, value_name = "NAME")]
    texts: Option<TextsName>,
}

/// Texts of anec's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TextsName {
    /// A few hundred tokens in one piece
    Short,
    /// Prose, code, data, other languages, talk, and starts after a lone blank
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

/// Computes a golden for `anec validate --golden`, from the source's weights, not quantized, in f32.
///
/// Such a golden shows what quantization and fp16 cost. It can't show that a graph is wrong, because the same graph made
/// it, and its metadata says so: tools/export_golden.py computes one with transformers. The weights go through a
/// bundle of fp16 weights beside the file, which is removed afterwards.
#[derive(Debug, clap::Args)]
pub struct GoldenArgs {
    #[command(flatten)]
    source: input::Input,
    #[command(flatten)]
    input: GoldenInput,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Adds the hidden states between the layers
    #[arg(long)]
    hidden: bool,
    /// Adds the N most likely tokens that follow, one after the other
    #[arg(long, value_name = "N", default_value_t = 0)]
    greedy: usize,
    /// Prints what was written as JSON
    #[arg(long)]
    json: bool,
}

impl GoldenArgs {
    pub(super) fn run(self) -> Result<u8> {
        let builder = GoldenBuilder::new(self.source.manifest()?)
            .hidden(self.hidden)
            .greedy(self.greedy)
            .beside(&self.out)
            .progress(progress::bytes());
        let golden = match self.input {
            GoldenInput { texts: Some(texts), .. } => builder.compute_texts(texts.set().texts())?,
            GoldenInput { tokens: Some(tokens), .. } => builder.compute(tokens)?,
            GoldenInput { prompt, .. } => builder.compute(prompt.unwrap_or_default())?,
        };
        let written = files::write(&self.out, &golden.to_bytes())?;
        if self.json {
            print_json(&json!({
                "out": self.out,
                "positions": golden.tokens.len(),
                "vocab_size": golden.vocab_size,
                "greedy": golden.greedy.map(|greedy| greedy.ids),
                "metadata": golden.metadata,
            }));
        } else {
            let size = anec::report::bytes(written.bytes);
            print(&format!(
                "{}: {} positions, {size}, {}",
                self.out.display(),
                golden.tokens.len(),
                golden.reference()
            ));
        }
        Ok(0)
    }
}
