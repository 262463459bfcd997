//! What is asked of a generation.

use super::model::LoadedModel;
use super::sampling::Sampling;

/// What to continue, and how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationRequest {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Most tokens to add.
    pub max_tokens: usize,
    /// How they are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text; they aren't part of it.
    pub stops: Vec<u32>,
    /// Ends the text when its last tokens, this many, occurred in it before; 0 for never.
    pub stop_repeat_ngram: usize,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Return log-probabilities, with this many alternatives per token.
    pub logprobs: Option<usize>,
    /// Most tokens that are drafted from the text's past and verified in one call; 0 for none. The text is the same either
    /// way.
    pub speculation: usize,
}

impl GenerationRequest {
    /// Tokens of prompt and continuation, as far as they fit.
    pub fn length(&self, model: &LoadedModel) -> u64 {
        let prompt = self.prompt.len() as u64;
        prompt.saturating_add(self.max_tokens as u64).min(model.context()).max(prompt)
    }

    /// Adds what is added to the logits of tokens.
    pub(super) fn add_biases(&self, logits: &mut [f32]) {
        for (token, bias) in &self.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
    }
}
