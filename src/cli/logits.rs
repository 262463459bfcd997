//! `anec logits`

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::json;

use super::model::{Input, Runner};
use super::{print, print_json};
use anec::base::Result;
use anec::convert::files;
use anec::runtime::classify::windows::Windows;
use anec::runtime::{Chunking, ForwardOptions, Hidden};
use anec::validate::TensorFile;

/// Compute the logits of every position and write them to a safetensors file
///
/// The file has `tokens` i32 [tokens], `logits` f32 [tokens, vocabulary] and, with --hidden, `hidden.N` f32 [tokens,
/// hidden_size]: the input of layer N; the last one is the output of the last layer. A token classifier has one logit
/// per label, and its calls are windows.
#[derive(Debug, clap::Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    runner: Runner,
    #[command(flatten)]
    input: Input,
    /// Output file
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Tokens per call; several numbers are used in turn [default: the largest call]
    #[arg(long, value_delimiter = ',', value_name = "T,T,…")]
    chunk: Vec<u64>,
    /// Include the hidden states between the layers
    #[arg(long)]
    hidden: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl LogitsArgs {
    pub(super) fn run(self) -> Result<u8> {
        let model = self.runner.load()?;
        let tokens = self.input.tokens(&model)?;
        let hidden = if self.hidden { Hidden::BetweenLayers } else { Hidden::No };
        let window = self.chunk.first().copied();
        let chunking = if self.chunk.is_empty() { Chunking::Largest } else { Chunking::Pattern(self.chunk) };
        let answer = match model.bundle().model.band() {
            Some(_) => Windows::new(&model, window, hidden)?.label(&tokens)?,
            None => {
                let ask = ForwardOptions::all(chunking).recording(hidden);
                model.start(tokens.len() as u64)?.forward(&tokens, &ask)?
            }
        };
        let facts = &model.bundle().model;
        let precision = self.runner.precision();
        let about = [
            ("bundle", model.bundle().name.as_str()),
            ("precision", precision.as_str()),
            ("version", env!("CARGO_PKG_VERSION")),
        ];
        let mut file = TensorFile::new(about.map(|(key, value)| (key.into(), value.into())).into());
        file.integers("tokens", &tokens);
        file.matrix("logits", facts.head_rows() as usize, &answer.logits);
        for (number, values) in answer.hidden.iter().enumerate() {
            file.matrix(&format!("hidden.{number}"), facts.hidden_size as usize, values);
        }
        let written = files::write(&self.out, &file.to_bytes())?;
        let best: Vec<u32> =
            answer.logits.chunks_exact(facts.head_rows() as usize).map(anec::runtime::sampling::argmax).collect();
        if self.json {
            let mut about: BTreeMap<&str, serde_json::Value> =
                about.into_iter().map(|(key, value)| (key, json!(value))).collect();
            about.insert("out", json!(self.out));
            about.insert("positions", json!(tokens.len()));
            about.insert("vocab_size", json!(facts.head_rows()));
            about.insert("argmax", json!(best));
            print_json(&about);
        } else {
            let size = anec::report::bytes(written.bytes);
            print(&format!("{}: logits of {} positions, {size}", self.out.display(), tokens.len()));
        }
        Ok(0)
    }
}
