//! Built-in texts for tests: prose, code, numbers, several scripts.

use std::path::Path;

use anec_base::Result;
use anec_bundle::Bundle;
use anec_runtime::Tokenizer;

/// Part of the binary, so that results are the same everywhere.
const TEXT: &str = include_str!("prompts.txt");

/// Short text.
pub fn text() -> &'static str {
    TEXT
}

/// Separate texts of many kinds for judging the quality of quantized models: prose, code, data, other languages,
/// dialogue, and starts after a single blank, where models are most sensitive. About 2,500 tokens.
const TEXTS: &str = include_str!("texts.txt");

/// Set of built-in texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextSet {
    /// A few hundred tokens in one piece.
    Short,
    /// Texts of many kinds.
    Long,
}

impl TextSet {
    /// Names and contents of the texts, without trailing line breaks.
    pub fn texts(self) -> Vec<(&'static str, &'static str)> {
        match self {
            TextSet::Short => vec![("prompts", TEXT.trim_end())],
            TextSet::Long => divided(TEXTS),
        }
    }
}

/// Sections of a file, each after a line `%% name`.
fn divided(file: &str) -> Vec<(&str, &str)> {
    let parts = file.split("%% ").skip(1);
    parts.filter_map(|part| part.split_once('\n')).map(|(name, text)| (name, text.trim_end_matches('\n'))).collect()
}

/// Returns up to `count` tokens of the short text for a bundle, repeated if necessary, at most what its context holds.
/// Without a tokenizer, tokens are spread over the vocabulary.
///
/// # Errors
/// If the bundle's tokenizer can't be read.
pub fn tokens(bundle: &Bundle, folder: &Path, count: usize) -> Result<Vec<u32>> {
    let context = bundle.model.contexts.iter().min().copied().unwrap_or(1);
    let count = count.min(usize::try_from(context).unwrap_or(usize::MAX));
    if bundle.tokenizer.contains_key("tokenizer") {
        let tokens = Tokenizer::of(bundle, folder)?.encode(TEXT)?;
        if !tokens.is_empty() {
            return Ok(tokens.iter().copied().cycle().take(count).collect());
        }
    }
    // a multiplicative walk (Knuth's constant) covers the vocabulary
    let vocabulary = bundle.model.vocab_size.max(1);
    Ok((0..count as u64).map(|i| (i.wrapping_mul(2_654_435_761) % vocabulary) as u32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_of_many_kinds() {
        let texts = TextSet::Long.texts();
        let names: Vec<&str> = texts.iter().map(|(name, _)| *name).collect();
        for name in ["prose", "python", "c", "rust", "json", "chinese", "french", "german", "markdown", "chat"] {
            assert!(names.contains(&name), "{name}");
        }
        let blank = texts.iter().filter(|(_, text)| text.starts_with(' '));
        assert_eq!(blank.count(), 7);
        assert!(texts.iter().all(|(_, text)| !text.is_empty() && !text.contains("%% ")));
        let bytes: usize = texts.iter().map(|(_, text)| text.len()).sum();
        assert!(bytes > 9000, "{bytes}");
        assert_eq!(TextSet::Short.texts()[0].1, text().trim_end());
    }
}
