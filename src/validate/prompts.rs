//! The text that a model is tried on where none is given: prose, code, numbers, other scripts.

use std::path::Path;

use anec_base::Result;
use anec_bundle::Bundle;
use anec_runtime::Tokenizer;

/// Built into the binary, so that results don't depend on where it is run.
const TEXT: &str = include_str!("validators/prompts.txt");

/// The text itself.
pub fn text() -> &'static str {
    TEXT
}

/// Up to `count` tokens of the text for a bundle, again and again if it is short, no more than its context holds. A
/// bundle without a tokenizer gets tokens from all over its vocabulary.
///
/// # Errors
/// When the bundle's tokenizer can't be read.
pub fn tokens(bundle: &Bundle, folder: &Path, count: usize) -> Result<Vec<u32>> {
    let context = bundle.model.contexts.iter().min().copied().unwrap_or(1);
    let count = count.min(usize::try_from(context).unwrap_or(usize::MAX));
    if bundle.tokenizer.contains_key("tokenizer") {
        let tokens = Tokenizer::of(bundle, folder)?.encode(TEXT)?;
        if !tokens.is_empty() {
            return Ok(tokens.iter().copied().cycle().take(count).collect());
        }
    }
    // a multiplicative walk (Knuth's constant) reaches everywhere
    let vocabulary = bundle.model.vocab_size.max(1);
    Ok((0..count as u64).map(|i| (i.wrapping_mul(2_654_435_761) % vocabulary) as u32).collect())
}
