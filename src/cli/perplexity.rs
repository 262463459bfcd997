//! `anec perplexity`

use std::path::PathBuf;

use anec::base::input::read_text;

use serde_json::json;

use super::{MOST_TEXT, print, print_json};
use anec::base::Result;
use anec::bundle::Bundle;
use anec::candidates;
use anec::exec::Precision;
use anec::report::table::table;
use anec::runtime::{RuntimeError, Tokenizer};
use anec::validate::perplexity::{word_perplexity, words};
use anec::validate::{Candidate, Perplexity, perplexity, prompts};

/// Measures how well a bundle predicts a text: exp of the mean negative log likelihood of its tokens, and by words.
///
/// By words, the sum over the tokens is divided by the number of words that white space divides the text into, as lm-eval
/// does: models with different tokenizers can be compared by it.
///
/// Several precisions, and another bundle of the same model (--against, one without quantization, say), are compared.
#[derive(Debug, clap::Args)]
pub struct PerplexityArgs {
    /// Folder of the bundle
    bundle: PathBuf,
    /// Text; prose, code and numbers of anec's own if not given
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Most tokens of the text
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..))]
    positions: u32,
    /// Tokens that are seen at a time
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..))]
    window: u32,
    /// Precisions: f32, i16, f16, ane (simulated), ane-without-EFFECT+EFFECT
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values_t = [Precision::F32])]
    precision: Vec<Precision>,
    /// Another bundle, with which the first is compared
    #[arg(long, value_name = "DIR")]
    against: Option<PathBuf>,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

impl PerplexityArgs {
    pub(super) fn run(self) -> Result<u8> {
        let text = match &self.text {
            None => prompts::text().to_owned(),
            Some(path) => read_text(path, MOST_TEXT)?,
        };
        // the text is compared, so both get the tokens of the first bundle's tokenizer
        let tokenizer = Tokenizer::of(&Bundle::read(&self.bundle)?, &self.bundle)?;
        let mut tokens = tokenizer.encode(&text)?;
        if let Some(other) = &self.against
            && Tokenizer::of(&Bundle::read(other)?, other)?.encode(&text)? != tokens
        {
            let (one, other) = (self.bundle.clone(), other.clone());
            return Err(RuntimeError::UnlikeTokenizers { one, other }.into());
        }
        tokens.truncate(self.positions as usize);
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
