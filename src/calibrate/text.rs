//! Tokens that a model is calibrated on.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anec_base::{Result, input};
use anec_bundle::Bundle;
use anec_manifest::{Calibration, CalibrationText};
use anec_runtime::Tokenizer;

use super::CalibrateError;

/// Built-in text, so that codes don't depend on the machine. It shares nothing with the texts that models are evaluated
/// on.
const TEXT: &str = include_str!("text.txt");

/// Maximum size of a text in bytes.
const MOST: u64 = 1 << 28;

/// At most one token in `STARTS` is a text of its own.
const STARTS: u64 = 8;

/// Returns the parts of the built-in text, one per kind.
pub fn parts() -> Vec<&'static str> {
    let parts = TEXT.split("%% ").skip(1);
    parts.filter_map(|part| part.split_once('\n')).map(|(_, text)| text.trim_end_matches('\n')).collect()
}

/// Returns the tokens of a calibration text in windows, which the model processes as separate texts: each begins with
/// the tokenizer's prefix. A bundle without a tokenizer gets tokens from all over its vocabulary instead of the
/// built-in text.
///
/// # Errors
/// Returns an error if the text can't be read or has no tokens, or if the manifest names one and there is no tokenizer.
pub fn windows(calibration: &Calibration, bundle: &Bundle, folder: &Path, window: usize) -> Result<Vec<Vec<u32>>> {
    match CalibrationTokens::of(calibration, bundle, folder)? {
        None => Ok(walk(calibration, bundle, window)),
        Some(text) => text.windows(calibration.tokens, window),
    }
}

/// Returns [`windows`] with single-token texts in place of the last tokens: the first tokens of a text have the largest
/// hidden states, and long windows have few of them.
///
/// # Errors
/// Returns any error from [`windows`].
pub fn windows_and_starts(
    calibration: &Calibration,
    bundle: &Bundle,
    folder: &Path,
    window: usize,
) -> Result<Vec<Vec<u32>>> {
    let Some(text) = CalibrationTokens::of(calibration, bundle, folder)? else {
        return Ok(walk(calibration, bundle, window));
    };
    let starts = text.starts(calibration.tokens);
    let tokens = calibration.tokens - starts.iter().map(|start| start.len() as u64).sum::<u64>();
    let mut texts = text.windows(tokens, window)?;
    texts.extend(starts);
    Ok(texts)
}

/// Returns tokens from all over the vocabulary.
fn walk(calibration: &Calibration, bundle: &Bundle, window: usize) -> Vec<Vec<u32>> {
    // multiplicative hashing (Knuth's constant) covers the vocabulary evenly
    let vocabulary = bundle.model.vocab_size.max(1);
    let all: Vec<u32> = (0..calibration.tokens).map(|i| (i.wrapping_mul(2_654_435_761) % vocabulary) as u32).collect();
    all.chunks(window).map(<[u32]>::to_vec).collect()
}

/// Calibration text, tokenized.
struct CalibrationTokens {
    /// Tokens that the tokenizer puts before a text.
    begin: Vec<u32>,
    parts: Vec<Vec<u32>>,
    path: PathBuf,
}

impl CalibrationTokens {
    /// Tokenizes the text; `None` if there is no tokenizer and the manifest names no text.
    fn of(calibration: &Calibration, bundle: &Bundle, folder: &Path) -> Result<Option<Self>> {
        if !bundle.tokenizer.contains_key("tokenizer") && calibration.text == CalibrationText::Builtin {
            return Ok(None);
        }
        let tokenizer = Tokenizer::of(bundle, folder)?;
        let (parts, path) = match &calibration.text {
            CalibrationText::Builtin => (parts().into_iter().map(str::to_owned).collect(), PathBuf::from("builtin")),
            CalibrationText::File(path) => (vec![input::read_text(path, MOST)?], path.clone()),
        };
        let begin = tokenizer.encode("")?;
        let parts = parts.iter().map(|part| tokenizer.encode_rest(part)).collect::<Result<_, _>>()?;
        Ok(Some(CalibrationTokens { begin, parts, path }))
    }

    /// Returns the first `most` tokens, in windows.
    fn windows(&self, most: u64, window: usize) -> Result<Vec<Vec<u32>>> {
        let (mut windows, mut left) = (Vec::new(), usize::try_from(most).unwrap_or(usize::MAX));
        for part in &self.parts {
            for tokens in part.chunks(window.saturating_sub(self.begin.len()).max(1)) {
                let mut window = [&self.begin[..], tokens].concat();
                window.truncate(left);
                left -= window.len();
                if window.len() > self.begin.len() {
                    windows.push(window);
                }
            }
        }
        if windows.is_empty() {
            return Err(CalibrateError::NoTokens(self.path.clone()).into());
        }
        Ok(windows)
    }

    /// Returns texts of the tokenizer's prefix and one token each, for the most frequent tokens. Empty if the tokenizer
    /// has no prefix, where they don't help. `most` is the total number of tokens.
    fn starts(&self, most: u64) -> Vec<Vec<u32>> {
        if self.begin.is_empty() {
            return Vec::new();
        }
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        self.parts.iter().flatten().for_each(|token| *counts.entry(*token).or_default() += 1);
        let mut tokens: Vec<(u32, usize)> = counts.into_iter().collect();
        tokens.sort_by_key(|(token, count)| (Reverse(*count), *token));
        let most = usize::try_from(most / STARTS).unwrap_or(usize::MAX) / self.begin.len();
        tokens.iter().take(most).map(|(token, _)| [&self.begin[..], &[*token]].concat()).collect()
    }
}
