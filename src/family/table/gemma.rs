//! Rows of Gemma.

use super::POST_NORMS;
use crate::row::*;

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
    attention: AttentionRules { qk_norm: QkNorm::PerHead, window: WindowRule::Pattern(6), ..ATTENTION },
    rope: RopeRules { local_theta: Some(10000.0), theta: 1_000_000.0, ..ROPE },
    norms: NormRules { placement: NormPlacement::Both, ..NORMS },
    network: NetworkRules { activation: Activation::GeluTanh, ..NETWORK },
    residual: ResidualRules { scaled_embedding: true, tied: true, logits_softcap: Softcap::Key(None), ..RESIDUAL },
    layers: LayerStructure::Gemma4,
    ..FAMILY
};

/// Gemma 1.
pub(super) const GEMMA: DecoderFamily = DecoderFamily {
    name: "gemma",
    names: SourceNames {
        gguf: &["gemma"],
        default_sizes: &[("head_dim", 256)],
        inert_keys: &[("use_bidirectional_attention", "0")],
        // transformers doesn't read it
        neutral_keys: &["hidden_activation"],
        ..NAMES
    },
    norms: NormRules { plus_one: true, ..NORMS },
    network: NetworkRules { activation: Activation::GeluTanh, gelu_is_tanh: true, ..NETWORK },
    residual: ResidualRules {
        scaled_embedding: true,
        tied: true,
        // as in its successors
        hidden_scale: 1.0 / 16.0,
        ..RESIDUAL
    },
    ..FAMILY
};

/// Gemma 2.
pub(super) const GEMMA2: DecoderFamily = DecoderFamily {
    name: "gemma2",
    names: SourceNames {
        gguf: &["gemma2"],
        keys: &[("hidden_act", "hidden_activation")],
        gguf_tensors: POST_NORMS,
        default_sizes: &[("head_dim", 256), ("sliding_window", 4096)],
        ..NAMES
    },
    attention: AttentionRules {
        window: WindowRule::Pattern(2),
        query_pre_attn_scalar: true,
        // softmax(50 tanh(q k / 50)), and 30 tanh(logits / 30)
        softcap: Softcap::Key(Some(50.0)),
        ..ATTENTION
    },
    norms: NormRules { placement: NormPlacement::Both, plus_one: true, ..NORMS },
    network: NetworkRules { activation: Activation::GeluTanh, ..NETWORK },
    residual: ResidualRules {
        scaled_embedding: true,
        logits_softcap: Softcap::Key(Some(30.0)),
        tied: true,
        hidden_scale: 1.0 / 16.0,
        ..RESIDUAL
    },
    ..FAMILY
};

/// Gemma 3.
pub(super) const GEMMA3: DecoderFamily = DecoderFamily {
    name: "gemma3_text",
    names: SourceNames {
        prefixes: ["model.", "language_model.model."],
        wrappers: &["gemma3"],
        gguf: &["gemma3", "gemma-embedding"],
        keys: &[("hidden_act", "hidden_activation")],
        gguf_tensors: POST_NORMS,
        default_sizes: &[
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("vocab_size", 262_208),
            ("max_position_embeddings", 131_072),
            ("sliding_window", 4096),
        ],
        // transformers reads it without effect
        neutral_keys: &["attn_logit_softcapping"],
        ..NAMES
    },
    attention: AttentionRules {
        qk_norm: QkNorm::PerHead,
        window: WindowRule::Pattern(6),
        query_pre_attn_scalar: true,
        bidirectional: Bidirectional::ByKey,
        ..ATTENTION
    },
    rope: RopeRules { local_theta: Some(10000.0), theta: 1_000_000.0, ..ROPE },
    norms: NormRules { placement: NormPlacement::Both, plus_one: true, ..NORMS },
    network: NetworkRules { activation: Activation::GeluTanh, ..NETWORK },
    residual: ResidualRules {
        scaled_embedding: true,
        tied: true,
        logits_softcap: Softcap::Key(None),
        // the smallest model's hidden states reach 104,000, those of larger ones more
        hidden_scale: 1.0 / 16.0,
        ..RESIDUAL
    },
    ..FAMILY
};

/// Gemma 4.
pub(super) const GEMMA4: DecoderFamily = DecoderFamily {
    name: "gemma4_text",
    names: SourceNames {
        gguf_flags: &[TensorFlag { key: "attention_k_eq_v", tensor: "blk.{full}.attn_v.weight", present: false }],
        published: &["*.experts.gate_up_proj", "*.layer_scalar"],
        wrappers: &["gemma4"],
        gguf: &["gemma4"],
        keys: &[("hidden_act", "hidden_activation"), ("num_experts_per_tok", "top_k_experts")],
        tensors: &[("feed_forward.gate", "router.proj"), ("feed_forward.experts", "experts")],
        gguf_tensors: GEMMA4_GGUF,
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
        ..GEMMA4_BASE.names
    },
    network: NetworkRules { mixture: MixtureKind::BesideDense, ..GEMMA4_BASE.network },
    ..GEMMA4_BASE
};

/// Gemma 4 without encoders of images and sound: neither experts nor per-layer embeddings.
pub(super) const GEMMA4_UNIFIED: DecoderFamily = DecoderFamily {
    name: "gemma4_unified_text",
    names: SourceNames {
        published: &["*.layer_scalar"],
        wrappers: &["gemma4_unified"],
        gguf: &[],
        keys: &[("hidden_act", "hidden_activation")],
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
        ..GEMMA4_BASE.names
    },
    ..GEMMA4_BASE
};

/// EmbeddingGemma 2, an encoder with the layers of Gemma 4.
pub(super) const EMBEDDING_GEMMA2: DecoderFamily = DecoderFamily {
    name: "embedding_gemma2_text",
    names: SourceNames {
        prefixes: ["", "language_model."],
        published: &["*.layer_scalar"],
        wrappers: &["embedding_gemma2"],
        gguf: &[],
        keys: &[("hidden_act", "hidden_activation")],
        tensors: &[
            ("per_layer_input_gate", "ple_block.per_layer_input_gate"),
            ("per_layer_projection", "ple_block.per_layer_projection"),
            ("post_per_layer_input_norm", "ple_block.post_per_layer_input_norm"),
            ("per_layer_model_projection", "ple.per_layer_model_projection"),
            ("per_layer_projection_norm", "ple.per_layer_projection_norm"),
        ],
        default_sizes: &[
            ("hidden_size", 512),
            ("intermediate_size", 2048),
            ("num_hidden_layers", 24),
            ("num_attention_heads", 4),
            ("num_key_value_heads", 2),
            ("head_dim", 256),
            ("vocab_size", 262_144),
            ("max_position_embeddings", 262_144),
            ("sliding_window", 512),
            ("hidden_size_per_layer_input", 512),
            ("embedding_dim", 768),
        ],
        ..GEMMA4_BASE.names
    },
    attention: AttentionRules { bidirectional: Bidirectional::Always, ..GEMMA4_BASE.attention },
    residual: ResidualRules { logits_softcap: Softcap::Never, ..GEMMA4_BASE.residual },
    layers: LayerStructure::EmbeddingGemma2,
    ..GEMMA4_BASE
};
