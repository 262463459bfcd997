//! Embeddings and classification of whole texts.
//!
//! ```text
//! vector = normalize(W pool(states) + b)          embedding
//! logits = head(pool(states))                     classification
//! ```

use std::sync::Arc;

use super::classify::windows::Windows;
use super::encoded_text::EncodedText;
use super::error::RuntimeError;
use super::forward::{Chunking, ForwardOptions};
use super::host::HostProduct;
use super::model::LoadedModel;
use super::tokenizer::Tokenizer;
use anec_base::Result;
use anec_bundle::{Pooling, ProjectionActivation, TextEmbedding};
use ndarray::ArrayView1;

/// Text that is ready to become a vector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedText {
    /// Tokens, with those of the prompt.
    pub tokens: EncodedText,
    /// Number of first tokens that a mean leaves out.
    pub skipped: usize,
    /// Number of tokens that were cut off at the end.
    pub cut: usize,
}

impl From<EncodedText> for PreparedText {
    fn from(tokens: EncodedText) -> Self {
        PreparedText { tokens, ..PreparedText::default() }
    }
}

/// Computes embeddings of texts.
pub struct Embedder {
    model: Arc<LoadedModel>,
    settings: TextEmbedding,
    projections: Vec<HostProduct>,
}

impl Embedder {
    /// Creates an embedder; `pooling` overrides the bundle's.
    ///
    /// # Errors
    /// If the model is no embedding model.
    pub fn new(model: &Arc<LoadedModel>, pooling: Option<Pooling>) -> Result<Self> {
        let Some(facts) = model.bundle().model.embedding() else {
            return Err(RuntimeError::NoEmbedding { path: model.folder().to_owned() }.into());
        };
        Ok(Embedder {
            model: model.clone(),
            settings: TextEmbedding { pooling: pooling.unwrap_or(facts.pooling), ..facts.clone() },
            projections: model.host().projections(),
        })
    }

    /// Returns the model.
    pub fn model(&self) -> &Arc<LoadedModel> {
        &self.model
    }

    /// Returns the number of elements of an embedding.
    pub fn dimension(&self) -> usize {
        let hidden_size = self.model.bundle().model.hidden_size as usize;
        let all = self.projections.last().map_or(hidden_size, |projection| projection.weight.nrows());
        self.settings.texts.dimensions.map_or(all, |kept| all.min(kept as usize))
    }

    /// Returns the final hidden states of a text, `[tokens, hidden_size]`.
    ///
    /// # Errors
    /// If the text has no tokens, is too long, names tokens that don't exist, or a function fails.
    pub fn states(&self, text: &EncodedText) -> Result<Vec<f32>> {
        states(&self.model, text)
    }

    /// Prepares a text as the model's own library does: the prompt of the name `prompt`, or the default one, stands
    /// before it, and its end is cut off if it is too long. With `special`, special tokens spelled out in the text
    /// become those tokens.
    ///
    /// # Errors
    /// If there is no such prompt, or the tokenizer fails.
    pub fn prepare(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        prompt: Option<&str>,
        special: bool,
    ) -> Result<PreparedText, RuntimeError> {
        let settings = &self.settings.texts;
        let prompt = match prompt.or(settings.default_prompt.as_deref()) {
            None => "",
            Some(name) => settings.prompts.get(name).ok_or_else(|| RuntimeError::UnknownPrompt {
                name: name.into(),
                known: settings.prompts.keys().cloned().collect(),
            })?,
        };
        let spelt = |text: &str| if settings.lowercase { text.to_lowercase() } else { text.to_owned() };
        let longest = self.model.longest_text().unwrap_or(self.model.context());
        let most = settings.max_tokens.map_or(longest, |most| most.min(longest));
        let mut whole = spelt(&format!("{prompt}{text}"));
        // more bytes than that many tokens can stand for needn't be tokenized
        whole
            .truncate(whole.floor_char_boundary(usize::try_from(tokenizer.most_bytes(most + 1)).unwrap_or(usize::MAX)));
        let (tokens, cut) = tokenizer.encode_within(&whole, special, most as usize)?;
        let skipped = match settings.skips_prompt && !prompt.is_empty() {
            false => 0,
            true => {
                let prompt = tokenizer.encode_within(&spelt(prompt), special, most as usize)?.0.ids;
                prompt.len() - usize::from(prompt.last().is_some_and(|last| tokenizer.is_special(*last)))
            }
        };
        Ok(PreparedText { tokens, skipped, cut })
    }

    /// Returns the embedding of tokens.
    ///
    /// # Errors
    /// Returns any error of [`Embedder::states`].
    pub fn embed(&self, text: &EncodedText) -> Result<Vec<f32>> {
        self.vector(text, 0)
    }

    /// Returns the embedding of a text.
    ///
    /// # Errors
    /// Returns any error of [`Embedder::states`].
    pub fn embed_prepared(&self, text: &PreparedText) -> Result<Vec<f32>> {
        self.vector(&text.tokens, text.skipped)
    }

    /// Returns the embedding of tokens; a mean leaves out the first `skipped` ones.
    fn vector(&self, text: &EncodedText, skipped: usize) -> Result<Vec<f32>> {
        let states = self.states(text)?;
        let width = self.model.bundle().model.hidden_size as usize;
        let first = if self.settings.pooling == Pooling::Mean { skipped.min(states.len() / width) * width } else { 0 };
        let mut vector = pool(&states[first..], width, self.settings.pooling);
        for projection in &self.projections {
            vector = projection.apply(&vector);
        }
        if self.settings.normalize {
            let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            // as in the reference: a zero vector stays zero
            let factor = (1.0 / length.max(1e-12)) as f32;
            vector.iter_mut().for_each(|value| *value *= factor);
        }
        vector.truncate(self.dimension());
        Ok(vector)
    }
}

impl HostProduct {
    fn apply(&self, vector: &[f32]) -> Vec<f32> {
        let mut out = self.weight.dot(&ArrayView1::from(vector)).to_vec();
        if let Some(bias) = &self.bias {
            out.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
        match self.activation {
            ProjectionActivation::Identity => {}
            ProjectionActivation::Tanh => out.iter_mut().for_each(|value| *value = value.tanh()),
        }
        out
    }
}

/// Tokenizes a text or a pair of texts for [`classify`]. With `special`, special tokens spelled out in the texts become
/// those tokens.
///
/// # Errors
/// If the tokenizer fails.
pub fn text_or_pair(
    model: &LoadedModel,
    tokenizer: &Tokenizer,
    text: &str,
    second: Option<&str>,
    special: bool,
) -> Result<EncodedText, RuntimeError> {
    let prompt = model.bundle().model.sequence_classification().and_then(|found| found.prompt.as_ref());
    let Some((prompt, second)) = prompt.zip(second) else { return tokenizer.encode_whole(text, second, special) };
    let mut ids = tokenizer.encode(&prompt.before)?;
    ids.extend(tokenizer.encode_rest_literal(&prompt.filled(text, second))?);
    ids.extend(tokenizer.encode_rest(&prompt.after)?);
    Ok(ids.into())
}

/// Returns the logits of the labels of a text, or of a pair of texts.
///
/// # Errors
/// If the model doesn't classify texts; any error of [`Embedder::states`].
pub fn classify(model: &Arc<LoadedModel>, text: &EncodedText) -> Result<Vec<f32>> {
    let Some(classification) = model.bundle().model.sequence_classification() else {
        return Err(RuntimeError::NoTextLabels { path: model.folder().to_owned() }.into());
    };
    if classification.causal {
        return Ok(model.session(text.ids.len() as u64)?.forward(&text.ids, &ForwardOptions::last())?.logits);
    }
    let states = states(model, text)?;
    let pooled = pool(&states, model.bundle().model.hidden_size as usize, classification.pooling);
    let mut logits = Vec::new();
    model.session(1)?.force_head(&pooled, &mut logits)?;
    Ok(logits)
}

fn states(model: &Arc<LoadedModel>, text: &EncodedText) -> Result<Vec<f32>> {
    match model.bundle().model.band() {
        Some(_) => Windows::of_texts(model)?.states(text),
        None => {
            let mut session = model.session(text.ids.len() as u64)?;
            Ok(session.forward(&text.ids, &ForwardOptions::all(Chunking::Largest))?.logits)
        }
    }
}

/// Pools states `[tokens, width]` to one.
fn pool(states: &[f32], width: usize, pooling: Pooling) -> Vec<f32> {
    let count = states.len() / width;
    match pooling {
        Pooling::Cls => states[..width].to_vec(),
        Pooling::Last => states[(count - 1) * width..].to_vec(),
        Pooling::Mean => {
            let count = count.max(1);
            let mut sums = vec![0f64; width];
            for row in states.chunks_exact(width) {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
            }
            sums.into_iter().map(|sum| (sum / count as f64) as f32).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_pooled_by_their_mean_or_by_one_of_them() {
        let states = [1.0, 2.0, 3.0, 4.0, 8.0, 0.0];
        assert_eq!(pool(&states, 2, Pooling::Mean), [4.0, 2.0]);
        assert_eq!(pool(&states, 2, Pooling::Cls), [1.0, 2.0]);
        assert_eq!(pool(&states, 2, Pooling::Last), [8.0, 0.0]);
    }
}
