//! How verbs that write text choose its tokens, and when they stop.

use clap::Args;

use anec::runtime::{GenerationRequest, LoadedModel, RuntimeError, Sampling};

/// How tokens are chosen, and where the text ends.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Most tokens to add
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// 0 takes the most likely token each time; higher is bolder
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Only the N most likely tokens; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    top_k: usize,
    /// Only the most likely tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Only tokens with at least this share of the most likely one's probability
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    min_p: f32,
    /// Makes tokens that the prompt or the text has less likely; 1 for not
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    repetition_penalty: f32,
    /// Taken off the logit of tokens that the text has
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Taken off the logit of a token for each time that the text has it
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Seed: equal seeds give equal texts
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Ends the text before this string; can be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Ends the text when its last N tokens stood in it before; 0 for never
    #[arg(long, value_name = "N", default_value_t = 0)]
    stop_repeat_ngram: usize,
    /// Goes on after tokens that end a text
    #[arg(long)]
    ignore_eos: bool,
    /// Guesses up to N tokens from the text's own past and checks them in one call; the text stays the same
    #[arg(long, value_name = "N", default_value_t = 0)]
    speculation: usize,
}

impl SamplingArgs {
    /// How tokens are chosen.
    ///
    /// # Errors
    /// When a number is out of its range.
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

    /// The request for the continuation of `prompt`.
    ///
    /// # Errors
    /// When a number is out of its range.
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

    /// Strings that end the text.
    pub fn stops(&self) -> &[String] {
        &self.stop
    }
}
