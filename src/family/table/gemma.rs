//! Rows of Gemma.

use super::POST_NORMS;
use crate::row::{Activation, Bias, DecoderFamily, LLAMA, MixtureKind, NormPlacement, QkNorm, Softcap, WindowRule};

/// GGUF names of Gemma 4.
const GEMMA4_GGUF: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
];

/// Base of both Gemma 4 rows.
const GEMMA4_BASE: DecoderFamily = DecoderFamily {
    qk_norm: QkNorm::PerHead,
    norms: NormPlacement::Both,
    mlp_bias: Bias::Never,
    activation: Activation::GeluTanh,
    window: WindowRule::Pattern(6),
    local_rope: Some(10000.0),
    scaled_embedding: true,
    default_rope_theta: 1_000_000.0,
    default_tie_word_embeddings: true,
    logits_softcap: Softcap::Key(None),
    gemma4_layers: true,
    ..LLAMA
};

/// Gemma 1.
pub(super) const GEMMA: DecoderFamily = DecoderFamily {
    name: "gemma",
    gguf: &["gemma"],
    gguf_interleaved: false,
    default_sizes: &[("head_dim", 256)],
    norm_plus_one: true,
    mlp_bias: Bias::Never,
    activation: Activation::GeluTanh,
    gelu_is_tanh: true,
    scaled_embedding: true,
    default_tie_word_embeddings: true,
    // as in its successors
    hidden_scale: 1.0 / 16.0,
    inert_keys: &[("use_bidirectional_attention", "0")],
    // transformers doesn't read it
    neutral_keys: &["hidden_activation"],
    ..LLAMA
};

/// Gemma 2.
pub(super) const GEMMA2: DecoderFamily = DecoderFamily {
    name: "gemma2",
    gguf: &["gemma2"],
    gguf_interleaved: false,
    key_names: &[("hidden_act", "hidden_activation")],
    gguf_names: POST_NORMS,
    default_sizes: &[("head_dim", 256), ("sliding_window", 4096)],
    norms: NormPlacement::Both,
    norm_plus_one: true,
    mlp_bias: Bias::Never,
    activation: Activation::GeluTanh,
    window: WindowRule::Pattern(2),
    query_pre_attn_scalar: true,
    scaled_embedding: true,
    // softmax(50 tanh(q k / 50)), and 30 tanh(logits / 30)
    scores_softcap: Softcap::Key(Some(50.0)),
    logits_softcap: Softcap::Key(Some(30.0)),
    default_tie_word_embeddings: true,
    hidden_scale: 1.0 / 16.0,
    ..LLAMA
};

/// Gemma 3.
pub(super) const GEMMA3: DecoderFamily = DecoderFamily {
    name: "gemma3_text",
    wrappers: &["gemma3"],
    gguf: &["gemma3", "gemma-embedding"],
    gguf_interleaved: false,
    key_names: &[("hidden_act", "hidden_activation")],
    gguf_names: POST_NORMS,
    default_sizes: &[
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("vocab_size", 262_208),
        ("max_position_embeddings", 131_072),
        ("sliding_window", 4096),
    ],
    qk_norm: QkNorm::PerHead,
    norms: NormPlacement::Both,
    norm_plus_one: true,
    mlp_bias: Bias::Never,
    activation: Activation::GeluTanh,
    window: WindowRule::Pattern(6),
    local_rope: Some(10000.0),
    query_pre_attn_scalar: true,
    scaled_embedding: true,
    default_rope_theta: 1_000_000.0,
    default_tie_word_embeddings: true,
    logits_softcap: Softcap::Key(None),
    may_be_bidirectional: true,
    // the smallest model's hidden states reach 104,000, those of larger ones more
    hidden_scale: 1.0 / 16.0,
    // transformers reads it without effect
    neutral_keys: &["attn_logit_softcapping"],
    ..LLAMA
};

/// Gemma 4.
pub(super) const GEMMA4: DecoderFamily = DecoderFamily {
    name: "gemma4_text",
    wrappers: &["gemma4"],
    gguf: &["gemma4"],
    gguf_interleaved: false,
    key_names: &[("hidden_act", "hidden_activation"), ("num_experts_per_tok", "top_k_experts")],
    tensor_names: &[("feed_forward.gate", "router.proj"), ("feed_forward.experts", "experts")],
    gguf_names: GEMMA4_GGUF,
    default_sizes: &[
        ("hidden_size", 2304),
        ("intermediate_size", 9216),
        ("num_hidden_layers", 30),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("vocab_size", 262_144),
        ("max_position_embeddings", 131_072),
        ("sliding_window", 512),
        ("vocab_size_per_layer_input", 262_144),
        ("hidden_size_per_layer_input", 256),
    ],
    mixture: MixtureKind::BesideDense,
    ..GEMMA4_BASE
};

/// Gemma 4 without encoders of images and sound: neither experts nor per-layer embeddings.
pub(super) const GEMMA4_UNIFIED: DecoderFamily = DecoderFamily {
    name: "gemma4_unified_text",
    wrappers: &["gemma4_unified"],
    gguf: &[],
    key_names: &[("hidden_act", "hidden_activation")],
    default_sizes: &[
        ("hidden_size", 2304),
        ("intermediate_size", 9216),
        ("num_hidden_layers", 30),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("vocab_size", 262_144),
        ("max_position_embeddings", 262_144),
        ("sliding_window", 1024),
    ],
    ..GEMMA4_BASE
};
