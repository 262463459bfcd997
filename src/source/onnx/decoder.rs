//! What a graph says of its decoder, beside the weights.

use super::rope::OnnxRope;

/// Where query-key norms sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnnxQkNorm {
    /// On each head, before the rotation.
    PerHead,
    /// On each head, after the rotation.
    PerHeadRotated,
    /// Over all heads at once.
    WholeWidth,
}

/// Where the norms of a layer sit.
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
    /// GELU by its approximation with tanh.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
}

/// What a graph says about its decoder, beside the weights.
#[derive(Clone, Debug)]
pub struct OnnxDecoder {
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// The LM head is the embedding.
    pub tied: bool,
    /// Epsilon of all norms.
    pub epsilon: f64,
    /// Multiplied to the embeddings.
    pub embedding_multiplier: f64,
    /// Multiplied to what a block adds to the residual stream.
    pub residual_multiplier: f64,
    /// Multiplied to the logits.
    pub logits_multiplier: f64,
    /// Place of the norms.
    pub norms: OnnxNormPlacement,
    /// Biases on query, key and value projections.
    pub qkv_bias: bool,
    /// Biases on attention's output projections.
    pub output_bias: bool,
    /// Biases on the feed-forward projections.
    pub mlp_bias: bool,
    /// Bias of the LM head.
    pub head_bias: bool,
    /// The layers, which differ in these only.
    pub layers: Vec<OnnxLayer>,
    /// The rotary tables that layers use. A table for long texts follows its own for short ones.
    pub ropes: Vec<Rope>,
}

/// What a graph says about a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct OnnxLayer {
    /// Query heads.
    pub heads: u64,
    /// Key-value heads.
    pub key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Multiplied to the scores.
    pub scale: f64,
    /// Tokens that it sees, if not all.
    pub window: Option<u64>,
    /// Which of the rotary embeddings it uses, if any.
    pub rope: Option<usize>,
    /// Query-key norms.
    pub qk_norm: Option<OnnxQkNorm>,
    /// Width of the feed-forward network.
    pub intermediate_size: u64,
    /// Activation of its gate.
    pub activation: OnnxActivation,
}

/// A rotary embedding.
#[derive(Clone, Debug)]
pub struct Rope {
    /// The table, of short texts where there is another.
    pub table: OnnxRope,
    /// The table of texts longer than so many tokens.
    pub long: Option<(u64, OnnxRope)>,
}
