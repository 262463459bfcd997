//! Sizes: contexts, tokens per call, layers per package, pieces of the LM head.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One context length or several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a number of tokens, or a list of numbers: 2048, [512, 2048]")]
pub enum Contexts {
    /// One context length.
    One(u64),
    /// Several context lengths, with one function for each.
    Several(Vec<u64>),
}

impl Contexts {
    /// All context lengths, ascending and distinct.
    pub fn all(&self) -> Vec<u64> {
        let mut all = match self {
            Contexts::One(n) => vec![*n],
            Contexts::Several(list) => list.clone(),
        };
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Numbers of tokens per call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Lengths {
    /// Every number from the first to the second, in one function with a flexible dimension (RangeDim).
    Range([u64; 2]),
    /// One function for each number, with shared weights.
    Fixed(Vec<u64>),
}

impl Default for Lengths {
    fn default() -> Self {
        Lengths::Range([1, 4])
    }
}

impl Lengths {
    /// Largest number of tokens of one call.
    pub fn largest(&self) -> u64 {
        match self {
            Lengths::Range([_, upper]) => *upper,
            Lengths::Fixed(sizes) => sizes.iter().copied().max().unwrap_or(1),
        }
    }
}

/// Division of the layers into packages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Shards {
    /// Maximum weight bytes of a package, in units of 1,000,000 bytes.
    pub max_mb: f64,
    /// Explicit layer ranges `[first, end)`, instead of `max_mb`; they must tile the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<[usize; 2]>>,
    /// Maximum number of experts per package, where `experts` puts them in separate packages. The sum over a package's
    /// experts has the channels of all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_experts: Option<u64>,
    /// Whether each layer is divided into a package of its attention and one of its feed-forward network.
    #[serde(skip_serializing_if = "LayerDivision::is_none")]
    pub divide: LayerDivision,
}

/// Division of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum LayerDivision {
    /// A layer is in one package.
    #[default]
    None,
    /// Two packages per layer: one of the token mixer (attention or its equivalent), one of the feed-forward network. A
    /// layer whose experts are in separate packages has no feed-forward package.
    AttentionMlp,
}

impl LayerDivision {
    /// Whether this is [`LayerDivision::None`].
    pub fn is_none(&self) -> bool {
        *self == LayerDivision::None
    }
}

impl Default for Shards {
    fn default() -> Self {
        Shards { max_mb: 250.0, layers: None, max_experts: None, divide: LayerDivision::None }
    }
}

/// LM head.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LmHead {
    /// Number of pieces, or `none`: the head is in one function with all layers.
    pub split: HeadSplit,
    /// Whether each piece outputs the index and the value of its largest logit instead of the logits.
    pub argmax: bool,
    /// Number of largest logits whose indices and values each piece outputs instead of the logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u64>,
    /// Whether pieces with `argmax` or `top_k` also output the logits.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub logits: bool,
}

impl LmHead {
    /// Outputs of the head's functions.
    pub fn outputs(&self) -> HeadOutputs {
        let largest = self.top_k.map(Largest::TopK).or(self.argmax.then_some(Largest::Argmax));
        HeadOutputs { logits: self.logits || largest.is_none(), largest }
    }
}

/// Outputs of a function of the LM head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadOutputs {
    /// Whether the logits are an output.
    pub logits: bool,
    /// Form in which the largest logits are outputs, if they are.
    pub largest: Option<Largest>,
}

impl Default for HeadOutputs {
    fn default() -> Self {
        HeadOutputs { logits: true, largest: None }
    }
}

/// Form of the largest logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Largest {
    /// Index and value of the largest one, by reductions.
    Argmax,
    /// Indices and values of this many, by one `topk`.
    TopK(u64),
}

/// Number of LM-head pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", expecting = "expected `auto`, `none` or a number of pieces")]
pub enum HeadSplit {
    /// Fewest pieces that keep each under the shard limit.
    #[default]
    Auto,
    /// No package of its own: one function has all layers and the head, so that a token takes one call.
    None,
    /// Given number of pieces; the last may be smaller.
    #[serde(untagged)]
    Pieces(u64),
}
