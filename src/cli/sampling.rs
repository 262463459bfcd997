//! Options for sampling and stopping.

use clap::Args;

use anec::runtime::sampling::Sampling;
use anec::runtime::{GenerationRequest, LoadedModel, RuntimeError};

/// Options for sampling and stopping.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Sample from the N most likely tokens; 0 disables it
    #[arg(long, value_name = "N", default_value_t = 0)]
    top_k: usize,
    /// Sample from the most likely tokens with this total probability (nucleus)
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Sample from tokens with at least this fraction of the highest probability
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    min_p: f32,
    /// Penalty on tokens of the prompt and the text; 1 disables it
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    repetition_penalty: f32,
    /// Penalty on tokens that occur in the text
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Penalty on tokens for each occurrence in the text
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Sampling seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Stop before this string; repeatable
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Stop when the last N tokens repeat an earlier part; 0 disables it
    #[arg(long, value_name = "N", default_value_t = 0)]
    stop_repeat_ngram: usize,
    /// Continue after end-of-text tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Draft up to N tokens from the text itself and verify them in one call; the output stays the same
    #[arg(long, value_name = "N", default_value_t = 0)]
    speculation: usize,
}

impl SamplingArgs {
    /// Sampling options.
    ///
    /// # Errors
    /// If a number is out of range.
    pub fn sampling(&self) -> Result<Sampling, RuntimeError> {
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
        };
        sampling.check()?;
        Ok(sampling)
    }

    /// Returns the request to continue `prompt`.
    ///
    /// # Errors
    /// If a number is out of range.
    pub fn request(&self, model: &LoadedModel, prompt: Vec<u32>) -> Result<GenerationRequest, RuntimeError> {
        Ok(GenerationRequest {
            prompt,
            max_tokens: self.max_tokens,
            sampling: self.sampling()?,
            stops: if self.ignore_eos { Vec::new() } else { model.end_tokens() },
            stop_repeat_ngram: self.stop_repeat_ngram,
            speculation: self.speculation,
            ..GenerationRequest::default()
        })
    }

    /// Strings that stop the generation.
    pub fn stops(&self) -> &[String] {
        &self.stop
    }
}
