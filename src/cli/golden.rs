//! `anec golden`

use std::path::PathBuf;

use serde_json::json;

use super::input;
use super::model::Input;
use super::{print, print_json, progress};
use anec::GoldenBuilder;
use anec::base::Result;
use anec::convert::files;

/// Computes a golden for `anec validate --golden`, from the source's weights, not quantized, in f32.
///
/// Such a golden shows what quantization and fp16 cost. It can't show that a graph is wrong, because the same graph made
/// it, and its metadata says so: validators/export_golden.py computes one with transformers. The weights go through a
/// bundle of fp16 weights beside the file, which is removed afterwards.
#[derive(Debug, clap::Args)]
pub struct GoldenArgs {
    #[command(flatten)]
    source: input::Input,
    #[command(flatten)]
    input: Input,
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
        let golden = GoldenBuilder::new(self.source.manifest()?)
            .hidden(self.hidden)
            .greedy(self.greedy)
            .beside(&self.out)
            .progress(progress::bytes())
            .compute(self.input)?;
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
