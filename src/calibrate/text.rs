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
    if !bundle.tokenizer.contains_key("tokenizer") && calibration.text == CalibrationText::Builtin {
        // a multiplicative walk (Knuth's constant) reaches everywhere
        let vocabulary = bundle.model.vocab_size.max(1);
        let all: Vec<u32> =
            (0..calibration.tokens).map(|i| (i.wrapping_mul(2_654_435_761) % vocabulary) as u32).collect();
        return Ok(all.chunks(window).map(<[u32]>::to_vec).collect());
    }
    let tokenizer = Tokenizer::of(bundle, folder)?;
    let (parts, path) = read(&calibration.text)?;
    let begin = tokenizer.encode("")?;
    let (mut windows, mut left) = (Vec::new(), usize::try_from(calibration.tokens).unwrap_or(usize::MAX));
    for part in parts {
        let tokens = tokenizer.encode_rest(&part)?;
        for tokens in tokens.chunks(window.saturating_sub(begin.len()).max(1)) {
            let mut window = [&begin[..], tokens].concat();
            window.truncate(left);
            left -= window.len();
            if window.len() > begin.len() {
                windows.push(window);
            }
        }
    }
    if windows.is_empty() {
        return Err(CalibrateError::NoTokens(path).into());
    }
    Ok(windows)
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
    let starts = starts(calibration, bundle, folder)?;
    let tokens = calibration.tokens - starts.iter().map(|start| start.len() as u64).sum::<u64>();
    let mut texts = windows(&Calibration { tokens, ..calibration.clone() }, bundle, folder, window)?;
    texts.extend(starts);
    Ok(texts)
}

/// Texts of the most frequent tokens, one each, behind what the tokenizer lets texts begin with; none where it lets them begin with
/// anything, for there they gain nothing.
fn starts(calibration: &Calibration, bundle: &Bundle, folder: &Path) -> Result<Vec<Vec<u32>>> {
    if !bundle.tokenizer.contains_key("tokenizer") {
        return Ok(Vec::new());
    }
    let tokenizer = Tokenizer::of(bundle, folder)?;
    let begin = tokenizer.encode("")?;
    if begin.is_empty() {
        return Ok(Vec::new());
    }
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for part in read(&calibration.text)?.0 {
        tokenizer.encode_rest(&part)?.into_iter().for_each(|token| *counts.entry(token).or_default() += 1);
    }
    let mut tokens: Vec<(u32, usize)> = counts.into_iter().collect();
    tokens.sort_by_key(|(token, count)| (Reverse(*count), *token));
    let most = usize::try_from(calibration.tokens / STARTS).unwrap_or(usize::MAX) / begin.len();
    Ok(tokens.iter().take(most).map(|(token, _)| [&begin[..], &[*token]].concat()).collect())
}

/// The parts of a text, and where it is.
fn read(text: &CalibrationText) -> Result<(Vec<String>, PathBuf)> {
    Ok(match text {
        CalibrationText::Builtin => (parts().into_iter().map(str::to_owned).collect(), PathBuf::from("builtin")),
        CalibrationText::File(path) => (vec![input::read_text(path, MOST)?], path.clone()),
    })
}
