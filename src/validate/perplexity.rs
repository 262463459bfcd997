//! Perplexity of a text, `exp(-mean(log p(token | tokens before)))`.
//!
//! The mean is over tokens, or over words: `exp(total / words)`, which allows comparing models with different
//! tokenizers. Words are separated by white space, as for lm-eval's `word_perplexity`.

use std::sync::Arc;

use serde::Serialize;

use anec_base::Result;
use anec_kernels::distance::log_sum_exp;
use anec_runtime::{Chunking, ForwardOptions, LoadedModel, RuntimeError};

/// Perplexity of a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Perplexity {
    /// Perplexity; NaN if a logit was NaN.
    pub perplexity: f64,
    /// Mean negative log likelihood of a token, in nats.
    pub loss: f64,
    /// Number of predicted tokens.
    pub tokens: usize,
}

/// Number of words, separated by white space.
pub fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

/// Word perplexity from the sum of the tokens' negative log likelihoods in nats. Infinite without words.
pub fn word_perplexity(total: f64, words: usize) -> f64 {
    (total / words as f64).exp()
}

/// Computes the perplexity of a model on a text. Texts longer than `window` (or the context) are divided into windows;
/// the first token of each isn't predicted. Returns `None` if no token is predicted.
///
/// # Errors
/// If a token doesn't exist or a function fails.
pub fn perplexity(model: &Arc<LoadedModel>, tokens: &[u32], window: usize) -> Result<Option<Perplexity>> {
    if model.bundle().model.embedding().is_some() {
        return Err(RuntimeError::GivesVectors { path: model.folder().to_owned() }.into());
    }
    let window = window.min(model.context() as usize).max(2);
    let vocabulary = model.bundle().model.vocab_size as usize;
    let (mut sum, mut count) = (0.0, 0);
    for text in tokens.chunks(window).filter(|text| text.len() > 1) {
        // the successor of the last token is unknown
        let (given, predicted) = (&text[..text.len() - 1], &text[1..]);
        let logits = model.start(text.len() as u64)?.forward(given, &ForwardOptions::all(Chunking::Largest))?.logits;
        for (row, token) in logits.chunks_exact(vocabulary).zip(predicted) {
            let Some(loss) = loss(row, *token) else { continue };
            sum += loss;
            count += 1;
        }
    }
    let loss = sum / count as f64;
    Ok((count > 0).then(|| Perplexity { perplexity: loss.exp(), loss, tokens: count }))
}

/// Negative log likelihood of a token in nats, from a row of logits; `None` if the row is too short.
pub fn loss(row: &[f32], token: u32) -> Option<f64> {
    Some(log_sum_exp(row) - f64::from(*row.get(token as usize)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_runtime::fake::{self, FakeOptions};

    #[test]
    fn perplexity_matches_the_reference() {
        let text = [3u32, 1, 4, 1, 5, 2, 6, 5, 3];
        let (_, logits) = fake::reference(&text, text.len() as u64);
        let nll: f64 = (0..text.len() - 1)
            .map(|t| {
                let row = &logits[t * fake::VOCAB..(t + 1) * fake::VOCAB];
                let total: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
                -(f64::from(row[text[t + 1] as usize]).exp() / total).ln()
            })
            .sum();
        let (model, _) = fake::model(&FakeOptions::default());
        let found = perplexity(&model, &text, 64).unwrap().unwrap();
        assert_eq!(found.tokens, 8);
        assert!((found.loss - nll / 8.0).abs() < 1e-9, "{found:?}");
        assert!((found.perplexity - (nll / 8.0).exp()).abs() < 1e-9);
    }

    #[test]
    fn a_text_of_one_token_has_none() {
        let (model, _) = fake::model(&FakeOptions::default());
        assert_eq!(perplexity(&model, &[3], 64).unwrap(), None);
    }
}
