//! Rows of families with parallel attention and feed-forward network.

use crate::row::*;

/// Phi-1, Phi-1.5 and Phi-2.
pub(super) const PHI: DecoderFamily = DecoderFamily {
    name: "phi",
    names: SourceNames {
        gguf_flags: &[TensorFlag { key: "qk_layernorm", tensor: "blk.0.attn_q_norm.weight", present: true }],
        gguf: &["phi2"],
        keys: &[("rms_norm_eps", "layer_norm_eps")],
        tensors: &[
            ("self_attn.o_proj", "self_attn.dense"),
            ("self_attn.q_norm", "self_attn.q_layernorm"),
            ("self_attn.k_norm", "self_attn.k_layernorm"),
            ("mlp.up_proj", "mlp.fc1"),
            ("mlp.down_proj", "mlp.fc2"),
            ("norm", "final_layernorm"),
        ],
        ..NAMES
    },
    attention: AttentionRules {
        qk_norm: QkNorm::PerHead,
        qk_norm_key: Some("qk_layernorm"),
        qkv_bias: Bias::Always,
        output_bias: Bias::Always,
        ..ATTENTION
    },
    rope: RopeRules { partial: Some(0.5), ..ROPE },
    norms: NormRules { kind: NormKind::Layer, eps: 1e-5, ..NORMS },
    network: NetworkRules { plain: true, bias: Bias::Always, activation: Activation::GeluTanh, ..NETWORK },
    residual: ResidualRules {
        form: LayerFormRule::Always(LayerForm::ParallelOneNorm),
        head_bias: Bias::Always,
        ..RESIDUAL
    },
    ..FAMILY
};

/// Command R.
pub(super) const COHERE: DecoderFamily = DecoderFamily {
    name: "cohere",
    names: SourceNames {
        gguf_flags: &[TensorFlag { key: "use_qk_norm", tensor: "blk.0.attn_q_norm.weight", present: true }],
        gguf: &["command-r"],
        ..COMMAND.names
    },
    attention: AttentionRules { qk_norm: QkNorm::PerHeadOwn, qk_norm_key: Some("use_qk_norm"), ..COMMAND.attention },
    rope: RopeRules { theta: 500_000.0, ..COMMAND.rope },
    ..COMMAND
};

/// Command R7B and Command A: layers with a window rotate, full-attention layers don't.
pub(super) const COHERE2: DecoderFamily = DecoderFamily {
    name: "cohere2",
    names: SourceNames {
        gguf: &["cohere2"],
        default_sizes: &[("sliding_window", 4096)],
        // published configurations state the class's fixed behaviour
        inert_keys: &[
            ("order_of_interleaved_layers", "\"local_attn_first\""),
            ("position_embedding_type", "\"rope_gptj\""),
            ("rotary_pct", "1.0"),
            ("use_embedding_sharing", "1"),
            ("use_gated_activation", "1"),
            ("use_parallel_block", "1"),
            ("use_parallel_embedding", "1"),
        ],
        // the period of layers, redundant
        neutral_keys: &["layer_switch"],
        ..COMMAND.names
    },
    attention: AttentionRules { window: WindowRule::Pattern(4), ..COMMAND.attention },
    rope: RopeRules { layers: RopeLayers::Windowed, ..COMMAND.rope },
    ..COMMAND
};

/// Base of both Command rows.
const COMMAND: DecoderFamily = DecoderFamily {
    names: SourceNames { keys: &[("rms_norm_eps", "layer_norm_eps")], ..NAMES },
    rope: RopeRules { pairs: RopePairs::Neighbours, ..ROPE },
    norms: NormRules { kind: NormKind::LayerWithoutBias, eps: 1e-5, ..NORMS },
    residual: ResidualRules {
        form: LayerFormRule::Always(LayerForm::ParallelOneNorm),
        logit_scale: Some(0.0625),
        tied: true,
        ..RESIDUAL
    },
    ..FAMILY
};

/// GPT-NeoX, Pythia.
pub(super) const GPT_NEOX: DecoderFamily = DecoderFamily {
    name: "gpt_neox",
    names: SourceNames {
        prefixes: ["gpt_neox.", "model.language_model."],
        published: &["embed_out.weight"],
        gguf: &["gptneox"],
        keys: &[
            ("rms_norm_eps", "layer_norm_eps"),
            ("rope_theta", "rotary_emb_base"),
            ("partial_rotary_factor", "rotary_pct"),
        ],
        tensors: &[
            ("embed_tokens", "embed_in"),
            ("self_attn.qkv_proj", "attention.query_key_value"),
            ("self_attn.o_proj", "attention.dense"),
            ("mlp.up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
            ("norm", "final_layer_norm"),
            ("lm_head", "embed_out"),
        ],
        unused: &[
            ("gpt_neox.layers.*.attention.bias", "masks are computed"),
            ("gpt_neox.layers.*.attention.masked_bias", "masks are computed"),
            ("gpt_neox.layers.*.attention.rotary_emb.inv_freq", "rotary frequencies are computed"),
        ],
        // of training
        neutral_keys: &["classifier_dropout", "hidden_dropout"],
        ..NAMES
    },
    attention: AttentionRules {
        qkv: QkvLayout::FusedByHead,
        qkv_bias: Bias::Unless("attention_bias"),
        output_bias: Bias::Unless("attention_bias"),
        ..ATTENTION
    },
    rope: RopeRules { partial: Some(0.25), ..ROPE },
    norms: NormRules { kind: NormKind::Layer, eps: 1e-5, ..NORMS },
    network: NetworkRules { plain: true, bias: Bias::Always, activation: Activation::Gelu, ..NETWORK },
    residual: ResidualRules {
        form: LayerFormRule::Unless("use_parallel_residual", LayerForm::ParallelTwoNorms),
        ..RESIDUAL
    },
    ..FAMILY
};

/// StableLM; the largest models have parallel layers.
pub(super) const STABLELM: DecoderFamily = DecoderFamily {
    name: "stablelm",
    names: SourceNames {
        gguf_flags: &[
            TensorFlag { key: "qk_layernorm", tensor: "blk.0.attn_q_norm.weight", present: true },
            // some files state it for layers that aren't parallel: a layer with a second norm reads through it
            TensorFlag { key: "use_parallel_residual", tensor: "blk.0.ffn_norm.weight", present: false },
        ],
        gguf: &["stablelm"],
        keys: &[("rms_norm_eps", "layer_norm_eps")],
        tensors: &[("self_attn.q_norm", "self_attn.q_layernorm"), ("self_attn.k_norm", "self_attn.k_layernorm")],
        neutral_keys: &["hidden_dropout"],
        ..NAMES
    },
    attention: AttentionRules {
        qk_norm: QkNorm::PerHeadOwn,
        qk_norm_key: Some("qk_layernorm"),
        qkv_bias: Bias::Key("use_qkv_bias"),
        output_bias: Bias::Never,
        ..ATTENTION
    },
    rope: RopeRules { partial: Some(0.25), ..ROPE },
    norms: NormRules { kind: NormKind::Layer, eps: 1e-5, ..NORMS },
    residual: ResidualRules {
        form: LayerFormRule::Key("use_parallel_residual", LayerForm::ParallelOneNorm),
        ..RESIDUAL
    },
    ..FAMILY
};
