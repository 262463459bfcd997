//! What the host computes with: the embedding and the rotary tables.

use crate::FileDigest;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the host computes with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostFacts {
    /// File of the host's tensors.
    pub file: FileDigest,
    /// Name of the embedding table in it, `[vocab_size, hidden_size]` fp16; multipliers are already applied.
    pub embedding: String,
    /// Name of the table of learned positions, f32 `[positions, hidden_size]`, if there is one: the row of a token's
    /// position is added to its embedding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positions: Option<String>,
    /// Name of the table of token types, f32 `[types, hidden_size]`, if there is one: the row of a token's type is added
    /// to its embedding, 0 for a text, 1 for the second of a pair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_types: Option<String>,
    /// Name of the table of what layers are told of tokens, fp16 `[vocab_size, layers * width]`, if there is one: the vectors of a
    /// token for all layers, one after another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_layer_embedding: Option<String>,
    /// Rotary tables.
    pub rope: Vec<RopeTable>,
    /// Name of the orthogonal matrix `Q` by which hidden states are rotated, f32 `[hidden_size, hidden_size]`, if they
    /// are. What functions and the embedding have is a row of the model's hidden states times `Q`, so that its product with
    /// `Q`'s transpose gives them back. Nothing but a look at hidden states needs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotation: Option<String>,
}

/// A rotary table: host tensors of cosines and sines, f32 `[rows, rope_dim / 2]`, with the attention factor multiplied in.
/// A scaling that depends on the length of the text has several variants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RopeTable {
    /// Which table an input asks for.
    pub table: String,
    /// Variants by length, ascending: a text of n tokens (prompt and continuation) uses the first whose `max_length`
    /// is at least n, for all its positions.
    pub variants: Vec<RopeVariant>,
}

/// One variant of a rotary table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RopeVariant {
    /// Longest text it is for.
    pub max_length: u64,
    /// Host tensor of the cosines.
    pub cos: String,
    /// Host tensor of the sines.
    pub sin: String,
}
