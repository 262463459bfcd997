//! Request of a generation.

use super::error::RuntimeError;
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

    /// Returns what needs all logits where the `k` largest are known, apart from a grammar.
    pub(super) fn needs_logits(&self, k: usize) -> Option<&'static str> {
        match () {
            () if self.logprobs.is_some() => Some("log-probabilities need"),
            () if !self.logit_bias.is_empty() => Some("biases of tokens need"),
            () => self.sampling.needs_logits(k),
        }
    }

    /// Checks that the model gives the logits that the request needs; `has_grammar` if a grammar constrains its text.
    ///
    /// # Errors
    /// If it gives only the largest ones.
    pub fn check(&self, model: &LoadedModel, has_grammar: bool) -> Result<(), RuntimeError> {
        let Some(k) = model.largest_logits().filter(|_| !model.gives_logits()) else { return Ok(()) };
        let needs = has_grammar.then_some("a grammar needs").or(self.needs_logits(k));
        needs.map_or(Ok(()), |what| Err(RuntimeError::NoLogits { what, k }))
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
