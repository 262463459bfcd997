//! Rows of families with layers whose token mixer isn't attention alone.

use super::QWEN_EXPERTS;
use crate::row::*;

/// GGUF names of Qwen3.5 and Qwen3-Next that other families don't have.
const QWEN_HYBRID_GGUF: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("linear_attn.in_proj_qkvz", "ssm_in"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
];

/// GGUF names of Mamba-2's tensors.
const MAMBA2_GGUF: &[(&str, &str)] = &[
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.dt_bias", "ssm_dt.bias"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.out_proj", "ssm_out"),
];

/// Tensor names of LFM2.
const LFM2_TENSORS: &[(&str, &str)] = &[
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("norm", "embedding_norm"),
];

/// GGUF names of LFM2.
const LFM2_GGUF: &[(&str, &str)] = &[
    ("norm", "token_embd_norm"),
    ("conv.conv", "shortconv.conv"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
];

/// Granite 4.
pub(super) const GRANITEMOEHYBRID: DecoderFamily = DecoderFamily {
    name: "granitemoehybrid",
    names: SourceNames {
        published: &["*.input_linear.weight"],
        gguf: &["granitehybrid"],
        keys: &[
            ("num_experts", "num_local_experts"),
            ("moe_intermediate_size", "intermediate_size"),
            ("layer_types", "layers_block_type"),
        ],
        tensors: &[
            ("feed_forward.gate", "block_sparse_moe.router.layer"),
            ("feed_forward.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("feed_forward.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            ("mlp.shared_expert.gate_up_proj", "shared_mlp.input_linear"),
            ("mlp.shared_expert.down_proj", "shared_mlp.output_linear"),
            ("mlp.gate_up_proj", "shared_mlp.input_linear"),
            ("mlp.down_proj", "shared_mlp.output_linear"),
        ],
        gguf_tensors: MAMBA2_GGUF,
        default_sizes: &[("shared_intermediate_size", 1024)],
        inert_keys: &[("normalization_function", "\"rmsnorm\"")],
        // of training, of kernel chunk sizes, or of a RoPE that isn't there
        neutral_keys: &["mamba_chunk_size", "output_router_logits", "router_aux_loss_coef", "init_method"],
        ..NAMES
    },
    attention: AttentionRules { mixer: MixerKind::Mamba2, output_bias: Bias::Key("attention_bias"), ..ATTENTION },
    rope: RopeRules { layers: RopeLayers::ByKey, pairs: RopePairs::NeighboursInGguf, ..ROPE },
    network: NetworkRules {
        mixture: MixtureKind::ChosenSoftmaxIfAny,
        shared_expert: SharedExpertRule::Fused,
        fused: true,
        ..NETWORK
    },
    residual: ResidualRules { multipliers: true, ..RESIDUAL },
    ..FAMILY
};

/// Falcon-H1.
pub(super) const FALCON_H1: DecoderFamily = DecoderFamily {
    name: "falcon_h1",
    names: SourceNames {
        gguf_flags: &[TensorFlag { key: "mamba_rms_norm", tensor: "blk.0.ssm_norm.weight", present: true }],
        gguf: &["falcon-h1"],
        tensors: &[
            ("post_attention_layernorm", "pre_ff_layernorm"),
            ("mlp.gate_proj", "feed_forward.gate_proj"),
            ("mlp.up_proj", "feed_forward.up_proj"),
            ("mlp.down_proj", "feed_forward.down_proj"),
            ("norm", "final_layernorm"),
        ],
        gguf_tensors: MAMBA2_GGUF,
        inert_keys: &[("mamba_use_mlp", "1")],
        // of training, of kernel chunk sizes, of return values, or redundant
        neutral_keys: &[
            "mamba_chunk_size",
            "mamba_expand",
            "mlp_expansion_factor",
            "num_logits_to_keep",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "time_step_rank",
        ],
        ..NAMES
    },
    attention: AttentionRules { mixer: MixerKind::AttentionAndMamba2, ..ATTENTION },
    norms: NormRules { eps: 1e-5, ..NORMS },
    network: NetworkRules { bias: Bias::Key("mlp_bias"), ..NETWORK },
    ..FAMILY
};

/// LFM2.
pub(super) const LFM2: DecoderFamily = DecoderFamily {
    name: "lfm2",
    names: SourceNames {
        gguf: &["lfm2"],
        keys: &[
            ("intermediate_size", "block_ff_dim"),
            ("rms_norm_eps", "norm_eps"),
            ("tie_word_embeddings", "tie_embedding"),
        ],
        tensors: LFM2_TENSORS,
        gguf_tensors: LFM2_GGUF,
        inert_keys: &[("block_use_swiglu", "1"), ("use_pos_enc", "1")],
        // of the initialisation, or redundant
        neutral_keys: &[
            "block_dim",
            "block_mlp_init_scale",
            "block_norm_eps",
            "block_out_init_scale",
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "num_heads",
            "theta",
        ],
        ..NAMES
    },
    attention: AttentionRules {
        mixer: MixerKind::ShortConv,
        qk_norm: QkNorm::PerHead,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        ..ATTENTION
    },
    rope: RopeRules { theta: 1_000_000.0, ..ROPE },
    norms: NormRules { eps: 1e-5, ..NORMS },
    network: NetworkRules { nominal_width: true, ..NETWORK },
    residual: ResidualRules { tied: true, ..RESIDUAL },
    ..FAMILY
};

/// LFM2 with experts.
pub(super) const LFM2_MOE: DecoderFamily = DecoderFamily {
    name: "lfm2_moe",
    names: SourceNames {
        gguf: &["lfm2moe"],
        keys: &[("rms_norm_eps", "norm_eps"), ("tie_word_embeddings", "tie_embedding")],
        tensors: LFM2_TENSORS,
        gguf_tensors: LFM2_GGUF,
        // GGUF: the router's scores are sigmoids
        inert_keys: &[("expert_gating_func", "2")],
        neutral_keys: &["output_router_logits"],
        ..NAMES
    },
    attention: AttentionRules {
        mixer: MixerKind::ShortConv,
        qk_norm: QkNorm::PerHead,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        ..ATTENTION
    },
    rope: RopeRules { theta: 1_000_000.0, ..ROPE },
    norms: NormRules { eps: 1e-5, ..NORMS },
    network: NetworkRules { mixture: MixtureKind::Sigmoid, ..NETWORK },
    residual: ResidualRules { tied: true, ..RESIDUAL },
    ..FAMILY
};

/// Qwen3.5.
pub(super) const QWEN3_5: DecoderFamily = DecoderFamily {
    name: "qwen3_5_text",
    names: SourceNames {
        wrappers: &["qwen3_5"],
        gguf: &["qwen35"],
        gguf_tensors: QWEN_HYBRID_GGUF,
        unused: NEXT_TOKENS,
        // of training, and of multi-token prediction
        inert_keys: &[("attn_output_gate", "1"), ("mlp_only_layers", "[]"), ("output_gate_type", "\"swish\"")],
        neutral_keys: &["mamba_ssm_dtype", "mtp_num_hidden_layers"],
        ..NAMES
    },
    attention: AttentionRules { mixer: MixerKind::DeltaNet, gated: true, qk_norm: QkNorm::PerHead, ..ATTENTION },
    rope: RopeRules { partial: Some(0.25), sections: true, ..ROPE },
    norms: NormRules { plus_one: true, ..NORMS },
    ..FAMILY
};

/// Qwen3-Next.
pub(super) const QWEN3_NEXT: DecoderFamily = DecoderFamily {
    name: "qwen3_next",
    names: SourceNames {
        published: &["*.in_proj_qkvz.weight", "*.in_proj_ba.weight"],
        gguf: &["qwen3next"],
        tensors: QWEN_EXPERTS,
        gguf_tensors: QWEN_HYBRID_GGUF,
        unused: NEXT_TOKENS,
        default_sizes: &[("head_dim", 256)],
        // every layer has experts in the published models
        inert_keys: &[("decoder_sparse_step", "1"), ("mlp_only_layers", "[]")],
        neutral_keys: &["intermediate_size", "output_router_logits", "router_aux_loss_coef"],
        ..NAMES
    },
    attention: AttentionRules { mixer: MixerKind::DeltaNet, gated: true, qk_norm: QkNorm::PerHead, ..ATTENTION },
    rope: RopeRules { partial: Some(0.25), ..ROPE },
    norms: NormRules { plus_one: true, ..NORMS },
    network: NetworkRules {
        mixture: MixtureKind::ChosenSoftmaxUnless,
        shared_expert: SharedExpertRule::Gated,
        ..NETWORK
    },
    ..FAMILY
};

/// Qwen3.5 with experts.
pub(super) const QWEN3_5_MOE: DecoderFamily = DecoderFamily {
    name: "qwen3_5_moe_text",
    names: SourceNames {
        published: &["*.experts.gate_up_proj"],
        wrappers: &["qwen3_5_moe"],
        gguf: &["qwen35moe"],
        tensors: QWEN_EXPERTS,
        gguf_tensors: QWEN_HYBRID_GGUF,
        unused: NEXT_TOKENS,
        default_sizes: &[("head_dim", 256)],
        inert_keys: &[("attn_output_gate", "1"), ("mlp_only_layers", "[]"), ("output_gate_type", "\"swish\"")],
        // of training, and of multi-token prediction
        neutral_keys: &["mamba_ssm_dtype", "mtp_num_hidden_layers", "output_router_logits", "router_aux_loss_coef"],
        ..NAMES
    },
    attention: AttentionRules { mixer: MixerKind::DeltaNet, gated: true, qk_norm: QkNorm::PerHead, ..ATTENTION },
    rope: RopeRules { partial: Some(0.25), sections: true, ..ROPE },
    norms: NormRules { plus_one: true, ..NORMS },
    network: NetworkRules { mixture: MixtureKind::ChosenSoftmax, shared_expert: SharedExpertRule::Gated, ..NETWORK },
    ..FAMILY
};

/// ZAYA1.
pub(super) const ZAYA: DecoderFamily = DecoderFamily {
    name: "zaya",
    names: SourceNames {
        published: &["*.experts.gate_up_proj"],
        gguf: &[],
        tensors: &[
            ("self_attn.q_proj", "self_attn.qkv_proj.q_proj"),
            ("self_attn.k_proj", "self_attn.qkv_proj.k_proj"),
            ("feed_forward.experts", "mlp.experts"),
        ],
        default_sizes: &[
            ("head_dim", 128),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 2),
            ("max_position_embeddings", 131_072),
        ],
        inert_keys: &[("num_experts_per_tok", "1")],
        neutral_keys: &["output_router_logits"],
        ..NAMES
    },
    attention: AttentionRules {
        mixer: MixerKind::Cca,
        window: WindowRule::Types,
        layer_types: ["hybrid", "hybrid_sliding"],
        ..ATTENTION
    },
    rope: RopeRules { local_theta: Some(10000.0), partial: Some(0.5), theta: 5_000_000.0, ..ROPE },
    norms: NormRules { eps: 1e-5, ..NORMS },
    network: NetworkRules { mixture: MixtureKind::DepthRouted, bias: Bias::Key("mlp_bias"), ..NETWORK },
    residual: ResidualRules { head_bias: Bias::Key("lm_head_bias"), scaling: true, tied: true, ..RESIDUAL },
    ..FAMILY
};
