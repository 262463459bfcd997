//! Properties of the model that a runtime needs.

use std::collections::BTreeMap;

use anec_manifest::PairPrompt;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Properties of the model that a runtime needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelFacts {
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Number of layers.
    pub num_layers: usize,
    /// Rows of the embedding and of the LM head.
    pub vocab_size: u64,
    /// Power of two that scales hidden states between functions, and the embedding, so that fp16 can represent them.
    #[serde(default = "unscaled")]
    pub hidden_scale: f64,
    /// Context lengths for which there are functions, ascending.
    pub contexts: Vec<u64>,
    /// Token ids that end a text.
    pub eos_token_ids: Vec<u64>,
    /// Token id that begins a text, if the model expects one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u64>,
    /// Task of the model.
    #[serde(default, skip_serializing_if = "Task::is_text_generation")]
    pub task: Task,
}

fn unscaled() -> f64 {
    1.0
}

impl ModelFacts {
    /// Token classification, if that is the task.
    pub fn classification(&self) -> Option<&Classification> {
        match &self.task {
            Task::TokenClassification(classification) => Some(classification),
            _ => None,
        }
    }

    /// Text embedding, if that is the task.
    pub fn embedding(&self) -> Option<&TextEmbedding> {
        match &self.task {
            Task::TextEmbedding(embedding) => Some(embedding),
            _ => None,
        }
    }

    /// Sequence classification, if that is the task.
    pub fn sequence_classification(&self) -> Option<&SequenceClassification> {
        match &self.task {
            Task::SequenceClassification(classification) => Some(classification),
            _ => None,
        }
    }

    /// Number of outputs per token: logits of the vocabulary or the labels; the hidden size for text embeddings.
    pub fn head_rows(&self) -> u64 {
        match &self.task {
            Task::TextGeneration => self.vocab_size,
            Task::TokenClassification(classification) => classification.label_set.labels.len() as u64,
            Task::SequenceClassification(classification) => classification.labels.len() as u64,
            Task::TextEmbedding(_) => self.hidden_size,
        }
    }

    /// Whether the model has head functions. Text embeddings come from the functions of the last layers.
    pub fn has_head(&self) -> bool {
        self.embedding().is_none()
    }

    /// Number of tokens that a token sees on each side in one layer of a bidirectional model without states.
    /// [`WHOLE_TEXT`] if it sees all of them, so that a text must fit into a call. `None` for causal models.
    pub fn band(&self) -> Option<u64> {
        match &self.task {
            Task::TextGeneration => None,
            Task::TokenClassification(classification) => Some(classification.label_set.band),
            Task::SequenceClassification(classification) => (!classification.causal).then_some(WHOLE_TEXT),
            Task::TextEmbedding(embedding) => embedding.bidirectional.then_some(WHOLE_TEXT),
        }
    }
}

/// Task of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Task {
    /// Continues a text: the head returns a logit for each token of the vocabulary.
    #[default]
    TextGeneration,
    /// Labels every token of a text: the head returns a logit for each label.
    TokenClassification(Classification),
    /// Computes a vector of a text. There is no head; the functions of the last layers return the final hidden states.
    TextEmbedding(TextEmbedding),
    /// Classifies a text, or a pair of texts: the head returns a logit for each label, from a pooled hidden state.
    SequenceClassification(SequenceClassification),
}

impl Task {
    fn is_text_generation(&self) -> bool {
        *self == Task::TextGeneration
    }
}

/// How the hidden states of a text become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// Mean over the tokens.
    Mean,
    /// First token.
    Cls,
    /// Last token.
    Last,
}

/// How a text becomes a vector: its final hidden states are pooled, projected, and divided by their length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TextEmbedding {
    /// Whether tokens see both sides. Then functions have no states, and a text must fit into a call.
    pub bidirectional: bool,
    /// How the tokens' hidden states become one vector.
    pub pooling: Pooling,
    /// Projections of the pooled state, in order; computed by the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub projections: Vec<Projection>,
    /// Whether the vector is divided by its Euclidean length.
    pub normalize: bool,
    /// Preparation of texts.
    #[serde(flatten)]
    pub texts: TextPreparation,
}

/// Preparation of texts before they become vectors, as sentence-transformers does it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TextPreparation {
    /// Texts that stand before the input, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub prompts: BTreeMap<String, String>,
    /// Name of the prompt that is used if a request names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_prompt: Option<String>,
    /// Whether a mean leaves out the tokens of the prompt.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skips_prompt: bool,
    /// Whether texts are made lower case before they are tokenized.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lowercase: bool,
    /// Maximum number of tokens of a text, special ones included; the end of a longer text is cut off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u64>,
    /// Number of elements of the vector that are kept, if not all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dimensions: Option<u64>,
}

/// `activation(W x + b)`, computed by the host in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Projection {
    /// Host tensor `W`, f32 `[rows, columns]`.
    pub weight: String,
    /// Host tensor `b`, f32 `[1, rows]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<String>,
    /// Activation function.
    pub activation: ProjectionActivation,
}

/// Activation function of a projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProjectionActivation {
    /// Identity.
    Identity,
    /// Hyperbolic tangent.
    Tanh,
}

/// How a text, or a pair of texts, is classified: its final hidden states are pooled, and the head is called with the
/// pooled state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SequenceClassification {
    /// Labels, in the order of the head's rows.
    pub labels: Vec<String>,
    /// How the tokens' hidden states become one vector.
    pub pooling: Pooling,
    /// Whether tokens see only those before them. Then functions have states as those of a model that continues texts,
    /// and the head is called with the last token's hidden state.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub causal: bool,
    /// Prompt that joins the two texts of a pair. Without one, the tokenizer joins them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<PairPrompt>,
}

/// How a text is labelled.
///
/// If layers see the whole text, a text must fit into a call of the functions, and `halo` and `stride` are 0.
/// Otherwise:
///
/// Functions have no states. A function of n layers sees `n * band` tokens on each side of a token. A call with a part
/// of a text therefore gives exact hidden states except for that many tokens at each end that isn't an end of the text.
/// Texts of any length are labelled exactly in overlapping windows: each function, from first to last, is called with
/// windows that overlap by twice that much, at rotary positions from 0 on (rotation is relative).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Classification {
    /// Labels and attention span.
    #[serde(flatten)]
    pub label_set: LabelSet,
    /// Tokens of the largest call. Longer texts are processed in windows.
    pub window: u64,
    /// Tokens at each inner end of a window whose results are discarded, in the function with the most layers.
    pub halo: u64,
    /// Tokens that one window of that function advances: `window - 2 * halo`, or 0 if only texts up to `window` tokens
    /// can be labelled.
    pub stride: u64,
}

/// Labels of a token classifier and its attention span.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LabelSet {
    /// Labels, in the order of the head's rows.
    pub labels: Vec<String>,
    /// Number of tokens that a token sees on each side in one layer; absent in `bundle.json` if it is [`WHOLE_TEXT`].
    #[serde(default = "whole_text", skip_serializing_if = "is_whole_text")]
    pub band: u64,
}

/// Band of a layer that sees the whole text.
pub const WHOLE_TEXT: u64 = u64::MAX;

fn whole_text() -> u64 {
    WHOLE_TEXT
}

fn is_whole_text(band: &u64) -> bool {
    *band == WHOLE_TEXT
}
