//! Perplexity: how well a model predicts a text, `exp(-mean(log p(token | tokens before)))`.
//!
//! The mean is over tokens, or over words: `exp(total / words)`, which models with different tokenizers can be compared
//! by. Words are divided by white space, as by lm-eval's `word_perplexity`.

use std::sync::Arc;

use serde::Serialize;

use anec_base::Result;
use anec_kernels::distance::log_sum_exp;
use anec_runtime::{Chunking, ForwardOptions, LoadedModel, RuntimeError};

/// What a model makes of a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Perplexity {
    /// The perplexity; NaN if a logit was none.
    pub perplexity: f64,
    /// Mean negative log likelihood of a token, in nats.
    pub loss: f64,
    /// Tokens that were predicted.
    pub tokens: usize,
}

/// Words of a text: what white space divides.
pub fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

/// Perplexity by words, of the sum of the tokens' negative log likelihoods in nats. Infinite without words.
pub fn word_perplexity(total: f64, words: usize) -> f64 {
    (total / words as f64).exp()
}

/// The perplexity of a model on a text. A text longer than `window` (or the context) is divided into windows; the first
/// token of each isn't predicted. Nothing where no token has one before it.
///
/// # Errors
/// When a token doesn't exist or a function fails.
pub fn perplexity(model: &Arc<LoadedModel>, tokens: &[u32], window: usize) -> Result<Option<Perplexity>> {
    if model.bundle().model.embedding().is_some() {
        return Err(RuntimeError::GivesVectors { path: model.folder().to_owned() }.into());
    }
    let window = window.min(model.context() as usize).max(2);
    let vocabulary = model.bundle().model.vocab_size as usize;
    let (mut sum, mut count) = (0.0, 0);
    for text in tokens.chunks(window).filter(|text| text.len() > 1) {
        // the logits of the last token predict what nobody knows
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

/// Negative log likelihood of a token, in nats, by a row of logits; nothing if the row doesn't have it.
pub fn loss(row: &[f32], token: u32) -> Option<f64> {
    Some(log_sum_exp(row) - f64::from(*row.get(token as usize)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_runtime::fake::{self, FakeOptions};

    #[test]
    fn it_is_what_the_reference_gives() {
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
