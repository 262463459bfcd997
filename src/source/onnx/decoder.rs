//! Structure of a decoder, read from its graph.

use super::rope::OnnxRope;

/// Placement of query-key norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnnxQkNorm {
    /// On each head, before the rotation.
    PerHead,
    /// On each head, after the rotation.
    PerHeadRotated,
    /// Over all heads at once.
    WholeWidth,
}

/// Placement of a layer's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnnxNormPlacement {
    /// `x + f(norm(x))`
    Pre,
    /// `x + norm(f(x))`
    Post,
    /// `x + norm(f(norm(x)))`
    Both,
}

/// Activation of the gate in a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnnxActivation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// GELU approximated by tanh.
    GeluTanh,
    /// GELU with the error function.
    Gelu,
}

/// Structure of a decoder, beside its weights.
#[derive(Clone, Debug)]
pub struct OnnxDecoder {
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// Whether the LM head is the embedding.
    pub tied: bool,
    /// Epsilon of all norms.
    pub epsilon: f64,
    /// Factor of the embeddings.
    pub embedding_multiplier: f64,
    /// Factor of a block's contribution to the residual stream.
    pub residual_multiplier: f64,
    /// Factor of the logits.
    pub logits_multiplier: f64,
    /// Placement of the norms.
    pub norms: OnnxNormPlacement,
    /// Whether query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether attention's output projections have biases.
    pub output_bias: bool,
    /// Whether feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether the LM head has a bias.
    pub head_bias: bool,
    /// Layers; they differ only in these properties.
    pub layers: Vec<OnnxLayer>,
    /// Rotary tables that layers use. The table for long texts follows that for short ones.
    pub ropes: Vec<Rope>,
}

/// Structure of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct OnnxLayer {
    /// Query heads.
    pub heads: u64,
    /// Key-value heads.
    pub key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Factor of the scores.
    pub scale: f64,
    /// Window in tokens; `None` for all tokens.
    pub window: Option<u64>,
    /// Index of its rotary embedding, if it has one.
    pub rope: Option<usize>,
    /// Query-key norms.
    pub qk_norm: Option<OnnxQkNorm>,
    /// Width of the feed-forward network.
    pub intermediate_size: u64,
    /// Activation of the gate.
    pub activation: OnnxActivation,
}

/// Rotary embedding.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Table; if there are two, the one for short texts.
    pub table: OnnxRope,
    /// Length in tokens above which another table applies, and that table.
    pub long: Option<(u64, OnnxRope)>,
}
