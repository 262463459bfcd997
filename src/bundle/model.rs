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
            Task::TokenClassification(classification) => Some(classification),
            _ => None,
        }
    }

    /// How it makes vectors of texts, if that is what it is for.
    pub fn embedding(&self) -> Option<&TextEmbedding> {
        match &self.task {
            Task::TextEmbedding(embedding) => Some(embedding),
            _ => None,
        }
    }

    /// How it classifies whole texts, if that is what it is for.
    pub fn sequence_classification(&self) -> Option<&SequenceClassification> {
        match &self.task {
            Task::SequenceClassification(classification) => Some(classification),
            _ => None,
        }
    }

    /// What the model gives for a token: a logit for each token of the vocabulary, or for each label; a model that gives
    /// vectors gives its hidden states.
    pub fn head_rows(&self) -> u64 {
        match &self.task {
            Task::TextGeneration => self.vocab_size,
            Task::TokenClassification(classification) => classification.label_set.labels.len() as u64,
            Task::SequenceClassification(classification) => classification.labels.len() as u64,
            Task::TextEmbedding(_) => self.hidden_size,
        }
    }

    /// Whether functions of a head follow those of the layers. Where vectors are wanted the last layers' give them.
    pub fn has_head(&self) -> bool {
        self.embedding().is_none()
    }

    /// How far a token sees in one layer, on each side, where texts are looked at in both directions and nothing is carried
    /// from call to call; `u64::MAX` where it sees all of the text, so that a text has to fit into a call.
    pub fn band(&self) -> Option<u64> {
        match &self.task {
            Task::TextGeneration => None,
            Task::TokenClassification(classification) => Some(classification.label_set.band),
            Task::SequenceClassification(_) => Some(u64::MAX),
            Task::TextEmbedding(embedding) => embedding.bidirectional.then_some(u64::MAX),
        }
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
    /// It gives a text a vector: there is no head, the functions of the last layers give the final hidden states.
    TextEmbedding(TextEmbedding),
    /// It classifies a text, or a pair of texts: the head gives a logit for each label, of a pooled hidden state.
    SequenceClassification(SequenceClassification),
}

impl Task {
    fn is_text_generation(&self) -> bool {
        *self == Task::TextGeneration
    }
}

/// How the hidden states of a text become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// That of the first token.
    Cls,
    /// That of the last token.
    Last,
}

/// How a text becomes a vector: its final hidden states are pooled, projected, and divided by their length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TextEmbedding {
    /// Tokens see those on both sides: functions have no states, and a text has to fit into a call.
    pub bidirectional: bool,
    /// How the tokens' hidden states become one.
    pub pooling: Pooling,
    /// Projections of the pooled state, which the host computes, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub projections: Vec<Projection>,
    /// The vector is divided by its Euclidean length.
    pub normalize: bool,
}

/// `activation(W x + b)`, computed by the host in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Projection {
    /// Host tensor `W`, f32 `[rows, columns]`.
    pub weight: String,
    /// Host tensor `b`, f32 `[1, rows]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<String>,
    /// What follows.
    pub activation: ProjectionActivation,
}

/// What follows a projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProjectionActivation {
    /// Nothing.
    Identity,
    /// The hyperbolic tangent.
    Tanh,
}

/// How a text, or a pair of texts, is classified: its final hidden states are pooled, and the head is called with that one
/// state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SequenceClassification {
    /// Labels, in the order of the head's rows.
    pub labels: Vec<String>,
    /// How the tokens' hidden states become one.
    pub pooling: Pooling,
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
