//! The tokens that a model is calibrated on.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anec_base::{Result, input};
use anec_bundle::Bundle;
use anec_manifest::{Calibration, CalibrationText};
use anec_runtime::Tokenizer;

use super::CalibrateError;

/// Built into the binary, so that codes don't depend on where they are chosen. Nothing of it is in the texts that models
/// are judged by.
const TEXT: &str = include_str!("text.txt");

/// Bytes of a text, at most.
const MOST: u64 = 1 << 28;

/// Of so many tokens one is all of a text, at most.
const STARTS: u64 = 8;

/// The text that anec has, in parts of one kind each.
pub fn parts() -> Vec<&'static str> {
    let parts = TEXT.split("%% ").skip(1);
    parts.filter_map(|part| part.split_once('\n')).map(|(_, text)| text.trim_end_matches('\n')).collect()
}

/// The tokens of a calibration text, in windows that are texts of their own for the model: each begins as the tokenizer
/// lets texts begin. A bundle without a tokenizer gets tokens from all over its vocabulary for the text that anec has.
///
/// # Errors
/// When the text can't be read or has no tokens, or one is named and there is no tokenizer.
pub fn windows(calibration: &Calibration, bundle: &Bundle, folder: &Path, window: usize) -> Result<Vec<Vec<u32>>> {
    match CalibrationTokens::of(calibration, bundle, folder)? {
        None => Ok(walk(calibration, bundle, window)),
        Some(text) => text.windows(calibration.tokens, window),
    }
}

/// As [`windows`], with texts of a single token in place of the last tokens: a text's first tokens have the largest hidden states of
/// all, and long windows bring few of them.
///
/// # Errors
/// As [`windows`].
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

/// Tokens from all over a vocabulary.
fn walk(calibration: &Calibration, bundle: &Bundle, window: usize) -> Vec<Vec<u32>> {
    // a multiplicative walk (Knuth's constant) reaches everywhere
    let vocabulary = bundle.model.vocab_size.max(1);
    let all: Vec<u32> = (0..calibration.tokens).map(|i| (i.wrapping_mul(2_654_435_761) % vocabulary) as u32).collect();
    all.chunks(window).map(<[u32]>::to_vec).collect()
}

/// A calibration text as a bundle's tokenizer divides it.
struct CalibrationTokens {
    /// What the tokenizer lets texts begin with.
    begin: Vec<u32>,
    parts: Vec<Vec<u32>>,
    path: PathBuf,
}

impl CalibrationTokens {
    /// None where there is no tokenizer and no text is named.
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

    /// The first `most` tokens, in windows.
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

    /// Texts of the most frequent tokens, one each, behind what the tokenizer lets texts begin with; none where it lets them begin
    /// with anything, for there they gain nothing. `most` is how many tokens there are in all.
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
