//! `anec perplexity`

use std::path::PathBuf;

use anec::base::input::read_text;

use serde_json::json;

use super::{MAX_TEXT_BYTES, print, print_json};
use anec::base::Result;
use anec::bundle::Bundle;
use anec::candidates;
use anec::exec::Precision;
use anec::report::table::table;
use anec::runtime::{RuntimeError, Tokenizer};
use anec::validate::parity::Candidate;
use anec::validate::perplexity::{Perplexity, perplexity, word_perplexity, words};
use anec::validate::prompts;

/// Measure the perplexity of a bundle on a text, by tokens and by words
///
/// Word perplexity divides the negative log-likelihood by the number of words between white space, as lm-eval does, so
/// that models with different tokenizers can be compared.
///
/// Several precisions, and another bundle of the same model (--against), are compared.
#[derive(Debug, clap::Args)]
pub struct PerplexityArgs {
    /// Bundle folder
    bundle: PathBuf,
    /// Text file [default: built-in prose, code and numbers]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Maximum number of tokens of the text
    #[arg(long, alias = "positions", value_name = "N", default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..))]
    max_tokens: u32,
    /// Number of tokens per window
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..))]
    window: u32,
    /// Precisions: f32, i16, i8, f16, ane (simulated), ane-without-EFFECT+EFFECT
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values_t = [Precision::F32])]
    precision: Vec<Precision>,
    /// Bundle to compare with
    #[arg(long, value_name = "DIR")]
    against: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl PerplexityArgs {
    pub(super) fn run(self) -> Result<u8> {
        let text = match &self.text {
            None => prompts::text().to_owned(),
            Some(path) => read_text(path, MAX_TEXT_BYTES)?,
        };
        // both bundles get the same tokens
        let tokenizer = Tokenizer::of(&Bundle::read(&self.bundle)?, &self.bundle)?;
        let mut tokens = tokenizer.encode(&text)?;
        if let Some(other) = &self.against
            && Tokenizer::of(&Bundle::read(other)?, other)?.encode(&text)? != tokens
        {
            let (one, other) = (self.bundle.clone(), other.clone());
            return Err(RuntimeError::UnlikeTokenizers { one, other }.into());
        }
        tokens.truncate(self.max_tokens as usize);
        let words = words(&tokenizer.decode(&tokens, false)?);
        let by_words = |found: &Perplexity| word_perplexity(found.loss * found.tokens as f64, words);
        let mut measured = Vec::new();
        for folder in [Some(&self.bundle), self.against.as_ref()].into_iter().flatten() {
            for Candidate { name, model, .. } in candidates(folder, &self.precision)? {
                let found = perplexity(&model, &tokens, self.window as usize)?.ok_or(RuntimeError::NoTokens)?;
                measured.push((format!("{}, {name}", folder.display()), found));
            }
        }
        let base = measured.last().map_or(1.0, |(_, last)| last.perplexity);
        if self.json {
            let rows = measured.iter().map(|(name, found)| {
                json!({
                    "model": name,
                    "perplexity": found.perplexity,
                    "loss": found.loss,
                    "tokens": found.tokens,
                    "word_perplexity": by_words(found),
                    "words": words,
                })
            });
            print_json(&rows.collect::<Vec<_>>());
        } else {
            let rows = measured.iter().map(|(name, found)| {
                vec![
                    name.clone(),
                    format!("{:.4}", found.perplexity),
                    format!("{:+.2} %", 100.0 * (found.perplexity / base - 1.0)),
                    found.tokens.to_string(),
                    format!("{:.4}", by_words(found)),
                    words.to_string(),
                ]
            });
            let head = ["model", ">perplexity", ">against the last", ">tokens", ">by words", ">words"];
            print(&table(&head, rows));
        }
        Ok(0)
    }
}
