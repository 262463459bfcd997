//! What a runtime must know of the model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a runtime must know of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelFacts {
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Number of layers.
    pub num_layers: usize,
    /// Rows of the embedding and of the LM head.
    pub vocab_size: u64,
    /// Hidden states between functions, the embedding's among them, are the model's times this, a power of two by which
    /// fp16 can hold them.
    #[serde(default = "unscaled")]
    pub hidden_scale: f64,
    /// Context lengths for which there are functions, ascending.
    pub contexts: Vec<u64>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u64>,
    /// Token that begins a text, if the model wants one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u64>,
    /// What the model is for.
    #[serde(default, skip_serializing_if = "Task::is_text_generation")]
    pub task: Task,
}

fn unscaled() -> f64 {
    1.0
}

impl ModelFacts {
    /// What the model is as a token classifier, if it is one.
    pub fn classification(&self) -> Option<&Classification> {
        match &self.task {
            Task::TextGeneration => None,
            Task::TokenClassification(classification) => Some(classification),
        }
    }

    /// Rows of the head: tokens, or labels.
    pub fn head_rows(&self) -> u64 {
        self.classification().map_or(self.vocab_size, |classification| classification.label_set.labels.len() as u64)
    }
}

/// What a model is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Task {
    /// It continues a text: the head gives a logit for each token of the vocabulary.
    #[default]
    TextGeneration,
    /// It labels every token of a text: the head gives a logit for each label.
    TokenClassification(Classification),
}

impl Task {
    fn is_text_generation(&self) -> bool {
        *self == Task::TextGeneration
    }
}

/// How a text is labelled.
///
/// The functions have no states. A function of n layers sees `n * band` tokens on each side of a token, so that a call
/// with a part of a text gives the right hidden states for all its tokens but that many at each end that isn't an end of
/// the text. A text of any length is labelled exactly in windows: each function, from the first to the last, is called
/// with windows that overlap by twice that much, at rotary positions from 0 on (rotation is relative).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Classification {
    /// The labels, and what they come from.
    #[serde(flatten)]
    pub label_set: LabelSet,
    /// Tokens of the largest call: longer texts go through in windows.
    pub window: u64,
    /// Tokens at each inner end of a window whose results don't count, in the function with the most layers.
    pub halo: u64,
    /// Tokens that one window of that function advances: `window - 2 * halo`, and 0 where only texts up to `window`
    /// tokens can be labelled.
    pub stride: u64,
}

/// The labels of a token classifier, and what they come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LabelSet {
    /// Labels, in the order of the head's rows.
    pub labels: Vec<String>,
    /// How far a token sees in one layer, on each side.
    pub band: u64,
}
