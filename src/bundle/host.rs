//! Tensors that the host uses: embedding and rotary tables.

use crate::FileDigest;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Tensors that the host uses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostFacts {
    /// File of the host's tensors.
    pub file: FileDigest,
    /// Name of the embedding table in the file, `[vocab_size, hidden_size]` fp16; multipliers are already applied.
    pub embedding: String,
    /// Columns of the embedding, of learned positions and of token types if they have fewer than `hidden_size`. The
    /// other channels of the first function's hidden states are 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_size: Option<u64>,
    /// Name of the table of learned positions, f32 `[positions, hidden_size]`, if there is one. The row of a token's
    /// position is added to its embedding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positions: Option<String>,
    /// Name of the table of token types, f32 `[types, hidden_size]`, if there is one. The row of a token's type is
    /// added to its embedding: 0 for a text, 1 for the second text of a pair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_types: Option<String>,
    /// Name of the table of attention biases by distance, f32 `[2 r + 1, heads]`, if there is one. Row `r + d` is added
    /// to the scores of a token for the token `d` positions after it; beyond `r`, the first or last row is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_bias: Option<String>,
    /// Name of the table of per-layer embeddings, fp16 `[vocab_size, layers * width]`, if there is one: a token's
    /// vectors for all layers, in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_layer_embedding: Option<String>,
    /// Rotary tables.
    pub rope: Vec<RopeTable>,
    /// Name of the orthogonal matrix `Q` that rotates hidden states, f32 `[hidden_size, hidden_size]`, if they are
    /// rotated. Functions and the embedding contain rows of the model's hidden states times `Q`; multiplying by `Q`'s
    /// transpose restores them. Only needed for inspecting hidden states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotation: Option<String>,
}

/// Rotary table: host tensors of cosines and sines, f32 `[rows, rope_dim / 2]`, with the attention factor multiplied
/// in. Scalings that depend on the length of the text have several variants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RopeTable {
    /// Name by which inputs refer to the table.
    pub table: String,
    /// Variants by length, ascending. A text of n tokens (prompt and continuation) uses the first whose `max_length` is
    /// at least n, for all its positions.
    pub variants: Vec<RopeVariant>,
}

/// Variant of a rotary table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RopeVariant {
    /// Longest text that the variant is for.
    pub max_length: u64,
    /// Host tensor of the cosines.
    pub cos: String,
    /// Host tensor of the sines.
    pub sin: String,
}
