//! Request of a generation.

use super::model::LoadedModel;
use super::sampling::Sampling;

/// Prompt and options of a generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationRequest {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Maximum number of generated tokens.
    pub max_tokens: usize,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Tokens that end the text; they aren't part of it.
    pub stops: Vec<u32>,
    /// Length of the n-gram whose repetition ends the text; 0 for none.
    pub stop_repeat_ngram: usize,
    /// Biases added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Number of alternatives returned with each token's log-probability; `None` for no log-probabilities.
    pub logprobs: Option<usize>,
    /// Maximum number of tokens drafted from the text's past and verified in one call; 0 for none. The text is the same
    /// either way.
    pub speculation: usize,
}

impl GenerationRequest {
    /// Returns the number of tokens of prompt and continuation, as far as they fit.
    pub fn length(&self, model: &LoadedModel) -> u64 {
        let prompt = self.prompt.len() as u64;
        prompt.saturating_add(self.max_tokens as u64).min(model.context()).max(prompt)
    }

    /// Adds the biases to a row of logits.
    pub(super) fn add_biases(&self, logits: &mut [f32]) {
        for (token, bias) in &self.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
    }
}
