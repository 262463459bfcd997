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
use anec_base::Result;
use anec_bundle::{Pooling, ProjectionActivation};
use ndarray::ArrayView1;

/// Computes embeddings of texts.
pub struct Embedder {
    model: Arc<LoadedModel>,
    pooling: Pooling,
    normalize: bool,
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
            pooling: pooling.unwrap_or(facts.pooling),
            normalize: facts.normalize,
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
        self.projections.last().map_or(hidden_size, |projection| projection.weight.nrows())
    }

    /// Returns the final hidden states of a text, `[tokens, hidden_size]`.
    ///
    /// # Errors
    /// If the text has no tokens, is too long, names tokens that don't exist, or a function fails.
    pub fn states(&self, text: &EncodedText) -> Result<Vec<f32>> {
        states(&self.model, text)
    }

    /// Returns the embedding of a text.
    ///
    /// # Errors
    /// Returns any error of [`Embedder::states`].
    pub fn embed(&self, text: &EncodedText) -> Result<Vec<f32>> {
        let states = self.states(text)?;
        let mut vector = pool(&states, self.model.bundle().model.hidden_size as usize, self.pooling);
        for projection in &self.projections {
            vector = projection.apply(&vector);
        }
        if self.normalize {
            let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            // as in the reference: a zero vector stays zero
            let factor = (1.0 / length.max(1e-12)) as f32;
            vector.iter_mut().for_each(|value| *value *= factor);
        }
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

/// Returns the logits of the labels of a text, or of a pair of texts.
///
/// # Errors
/// If the model doesn't classify texts; any error of [`Embedder::states`].
pub fn classify(model: &Arc<LoadedModel>, text: &EncodedText) -> Result<Vec<f32>> {
    let Some(classification) = model.bundle().model.sequence_classification() else {
        return Err(RuntimeError::NoTextLabels { path: model.folder().to_owned() }.into());
    };
    let states = states(model, text)?;
    let pooled = pool(&states, model.bundle().model.hidden_size as usize, classification.pooling);
    model.session(1)?.force_head(&pooled)
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
