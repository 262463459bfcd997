//! The family table: what each decoder family does differently, declared.
//!
//! A port of another decoder is a row here, made of what the module `row` can say. The source of each row is the family's
//! modeling file in transformers; the GGUF columns follow llama.cpp's converter.

mod parallel;

use super::row::{
    Activation, Bias, DecoderFamily, LLAMA, MixerKind, MixtureKind, NEXT_TOKENS, NormKind, NormPlacement, QkNorm,
    SharedExpertRule, Softcap, WindowRule,
};

/// OpenAI's privacy filter: no decoder, but its rotary embedding is read as one's.
pub const OPENAI_PRIVACY_FILTER: DecoderFamily = DecoderFamily {
    name: "openai_privacy_filter",
    gguf: &[],
    gguf_interleaved: false,
    scaled_rope: true,
    default_rope_theta: 150_000.0,
    default_rms_norm_eps: 1e-5,
    neutral_keys: &[
        // of training
        "classifier_dropout",
        "output_router_logits",
        "router_aux_loss_coef",
        // how much text other runtimes take at a time
        "default_n_ctx",
        "initial_context_length",
        // gpt-oss's, without effect: experts have their own activation, and there is no LM head to tie
        "hidden_act",
        "tie_word_embeddings",
    ],
    ..LLAMA
};

/// What GGUF calls norms after the blocks, and the one before the feed-forward network beside them.
const POST_NORMS: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// What GGUF calls the tensors of Gemma 4.
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

/// What Qwen3-MoE and OLMoE call those of experts.
const QWEN_EXPERTS: &[(&str, &str)] = &[
    ("feed_forward.gate", "mlp.gate"),
    ("feed_forward.experts", "mlp.experts"),
    ("w1", "gate_proj"),
    ("w2", "down_proj"),
    ("w3", "up_proj"),
];

/// What Qwen3.5 and Qwen3-Next call in GGUF what others don't have.
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

/// What GGUF calls the tensors of Mamba-2.
const MAMBA2_GGUF: &[(&str, &str)] = &[
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.dt_bias", "ssm_dt.bias"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.out_proj", "ssm_out"),
];

/// What LFM2 calls its tensors.
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

/// What GGUF calls them.
const LFM2_GGUF: &[(&str, &str)] = &[
    ("norm", "token_embd_norm"),
    ("conv.conv", "shortconv.conv"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
];

/// What both rows of Gemma 4 begin with.
const GEMMA4: DecoderFamily = DecoderFamily {
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

/// All rows.
pub const DECODERS: &[DecoderFamily] = &[
    LLAMA,
    // llama.cpp has no architecture of its own for Mistral: its GGUF files say `llama`, and drop the window.
    DecoderFamily {
        name: "mistral",
        wrappers: &["mistral3"],
        gguf: &["llama"],
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        window: WindowRule::Every(Some(4096)),
        ..LLAMA
    },
    DecoderFamily {
        name: "ministral3",
        wrappers: &["mistral3"],
        gguf: &["mistral3"],
        default_sizes: &[("head_dim", 128)],
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        window: WindowRule::Every(None),
        scaled_rope: true,
        late_query_scale: true,
        default_rope_theta: 1_000_000.0,
        default_rms_norm_eps: 1e-5,
        ..LLAMA
    },
    DecoderFamily {
        name: "qwen2",
        gguf: &["qwen2"],
        gguf_interleaved: false,
        qkv_bias: Bias::Always,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        window: WindowRule::FromLayer,
        ..LLAMA
    },
    DecoderFamily {
        name: "qwen3",
        gguf: &["qwen3"],
        gguf_interleaved: false,
        qk_norm: QkNorm::PerHead,
        mlp_bias: Bias::Never,
        window: WindowRule::FromLayer,
        ..LLAMA
    },
    DecoderFamily {
        name: "qwen3_vl_text",
        wrappers: &["qwen3_vl"],
        gguf: &["qwen3vl"],
        gguf_interleaved: false,
        default_sizes: &[("head_dim", 128)],
        qk_norm: QkNorm::PerHead,
        mlp_bias: Bias::Never,
        mrope: true,
        default_rope_theta: 500_000.0,
        ..LLAMA
    },
    DecoderFamily {
        name: "ernie4_5",
        gguf: &["ernie4_5"],
        neighbours_rotate: true,
        default_sizes: &[("head_dim", 128)],
        qkv_bias: Bias::Key("use_bias"),
        output_bias: Bias::Key("use_bias"),
        mlp_bias: Bias::Key("use_bias"),
        default_rope_theta: 500_000.0,
        default_tie_word_embeddings: true,
        default_rms_norm_eps: 1e-5,
        ..LLAMA
    },
    DecoderFamily {
        name: "phi3",
        gguf: &["phi3"],
        gguf_interleaved: false,
        fused: true,
        fused_mlp: true,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        // transformers doesn't read the key; where it is true, the tensor must be there
        head_bias: Bias::Key("lm_head_bias"),
        window: WindowRule::Every(None),
        partial_rotary: Some(1.0),
        default_rms_norm_eps: 1e-5,
        // written by the Phi-4-mini configuration, without effect there
        inert_keys: &[("attention_bias", "0"), ("mlp_bias", "0"), ("full_attn_mod", "1"), ("interpolate_factor", "1")],
        ..LLAMA
    },
    DecoderFamily {
        name: "smollm3",
        gguf: &["smollm3"],
        window: WindowRule::WithoutRope,
        layers_without_rope: true,
        default_rope_theta: 2_000_000.0,
        default_tie_word_embeddings: true,
        ..LLAMA
    },
    DecoderFamily { name: "granite", gguf: &["granite"], multipliers: true, ..LLAMA },
    DecoderFamily {
        name: "granitemoe",
        gguf: &["granitemoe"],
        key_names: &[("num_experts", "num_local_experts"), ("moe_intermediate_size", "intermediate_size")],
        tensor_names: &[
            ("feed_forward.gate", "block_sparse_moe.router.layer"),
            ("feed_forward.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("feed_forward.experts.down_proj", "block_sparse_moe.output_linear.weight"),
        ],
        mixture: MixtureKind::ChosenSoftmax,
        mlp_bias: Bias::Never,
        multipliers: true,
        neutral_keys: &["output_router_logits", "router_aux_loss_coef"],
        ..LLAMA
    },
    DecoderFamily {
        name: "granitemoehybrid",
        gguf: &["granitehybrid"],
        key_names: &[
            ("num_experts", "num_local_experts"),
            ("moe_intermediate_size", "intermediate_size"),
            ("layer_types", "layers_block_type"),
        ],
        tensor_names: &[
            ("feed_forward.gate", "block_sparse_moe.router.layer"),
            ("feed_forward.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("feed_forward.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            ("mlp.shared_expert.gate_up_proj", "shared_mlp.input_linear"),
            ("mlp.shared_expert.down_proj", "shared_mlp.output_linear"),
            ("mlp.gate_up_proj", "shared_mlp.input_linear"),
            ("mlp.down_proj", "shared_mlp.output_linear"),
        ],
        gguf_names: MAMBA2_GGUF,
        default_sizes: &[("shared_intermediate_size", 1024)],
        mixer: MixerKind::Mamba2,
        mixture: MixtureKind::ChosenSoftmaxIfAny,
        shared_expert: SharedExpertRule::Fused,
        fused_mlp: true,
        output_bias: Bias::Key("attention_bias"),
        mlp_bias: Bias::Never,
        rope_if_said: true,
        multipliers: true,
        inert_keys: &[("normalization_function", "\"rmsnorm\"")],
        // of training, of how much text kernels take at a time, or of a RoPE that isn't there
        neutral_keys: &["mamba_chunk_size", "output_router_logits", "router_aux_loss_coef", "init_method"],
        ..LLAMA
    },
    DecoderFamily {
        name: "falcon_h1",
        gguf: &["falcon-h1"],
        gguf_interleaved: false,
        tensor_names: &[
            ("post_attention_layernorm", "pre_ff_layernorm"),
            ("mlp.gate_proj", "feed_forward.gate_proj"),
            ("mlp.up_proj", "feed_forward.up_proj"),
            ("mlp.down_proj", "feed_forward.down_proj"),
            ("norm", "final_layernorm"),
        ],
        gguf_names: MAMBA2_GGUF,
        mixer: MixerKind::AttentionAndMamba2,
        default_rms_norm_eps: 1e-5,
        inert_keys: &[("mamba_use_mlp", "1")],
        // of training, of how much text kernels take at a time, of what a call returns, or said twice
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
        ..LLAMA
    },
    DecoderFamily {
        name: "exaone4",
        gguf: &["exaone4"],
        gguf_interleaved: false,
        gguf_names: POST_NORMS,
        default_sizes: &[("sliding_window", 4096)],
        qk_norm: QkNorm::PerHead,
        norms: NormPlacement::Post,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        window: WindowRule::PatternOrNone(4),
        rope_in_windows: true,
        default_rms_norm_eps: 1e-5,
        ..LLAMA
    },
    DecoderFamily {
        name: "glm4",
        gguf: &["glm4"],
        neighbours_rotate: true,
        tensor_names: &[
            ("post_attention_layernorm", "post_self_attn_layernorm"),
            ("pre_feedforward_layernorm", "post_attention_layernorm"),
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
        ],
        gguf_names: POST_NORMS,
        default_sizes: &[("head_dim", 128)],
        norms: NormPlacement::Both,
        fused_mlp: true,
        qkv_bias: Bias::Unless("attention_bias"),
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        partial_rotary: Some(0.5),
        default_rms_norm_eps: 1.562_5e-7,
        ..LLAMA
    },
    DecoderFamily {
        name: "starcoder2",
        gguf: &["starcoder2"],
        gguf_interleaved: false,
        key_names: &[("rms_norm_eps", "norm_epsilon")],
        tensor_names: &[("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")],
        norm: NormKind::Layer,
        plain_mlp: true,
        qkv_bias: Bias::Unless("use_bias"),
        output_bias: Bias::Unless("use_bias"),
        mlp_bias: Bias::Unless("use_bias"),
        activation: Activation::GeluTanh,
        window: WindowRule::Every(None),
        default_tie_word_embeddings: true,
        default_rms_norm_eps: 1e-5,
        inert_keys: &[("mlp_type", "\"default\""), ("norm_type", "\"layer_norm\""), ("scale_attn_weights", "1")],
        // of training, of precision, or said twice
        neutral_keys: &[
            "attention_softmax_in_fp32",
            "embedding_dropout",
            "layer_norm_epsilon",
            "residual_dropout",
            "scale_attention_softmax_in_fp32",
        ],
        ..LLAMA
    },
    parallel::PHI,
    parallel::COHERE,
    parallel::COHERE2,
    parallel::GPT_NEOX,
    parallel::STABLELM,
    DecoderFamily {
        name: "olmo2",
        gguf: &["olmo2"],
        gguf_interleaved: false,
        qk_norm: QkNorm::WholeWidth,
        norms: NormPlacement::Post,
        gguf_names: POST_NORMS,
        mlp_bias: Bias::Never,
        default_rms_norm_eps: 1e-5,
        ..LLAMA
    },
    // only the layers that attend to everything are scaled; the others keep the class's base. Its GGUF files are of OLMo 2's
    // architecture, and have windows.
    DecoderFamily {
        name: "olmo3",
        gguf: &["olmo2"],
        gguf_interleaved: false,
        gguf_names: POST_NORMS,
        qk_norm: QkNorm::WholeWidth,
        norms: NormPlacement::Post,
        mlp_bias: Bias::Never,
        window: WindowRule::Pattern(4),
        local_rope: Some(500_000.0),
        default_sizes: &[("sliding_window", 4096)],
        default_rope_theta: 500_000.0,
        default_rms_norm_eps: 1e-5,
        ..LLAMA
    },
    DecoderFamily {
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
        // as its successors
        hidden_scale: 1.0 / 16.0,
        inert_keys: &[("use_bidirectional_attention", "0")],
        // what transformers doesn't read
        neutral_keys: &["hidden_activation"],
        ..LLAMA
    },
    DecoderFamily {
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
    },
    DecoderFamily {
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
        may_look_both_ways: true,
        // the smallest model's hidden states reach 104,000, those of larger ones more
        hidden_scale: 1.0 / 16.0,
        // transformers reads it, and computes without it
        neutral_keys: &["attn_logit_softcapping"],
        ..LLAMA
    },
    DecoderFamily {
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
        ..GEMMA4
    },
    // Gemma 4 without encoders of images and sound: neither experts nor vectors of tokens for layers
    DecoderFamily {
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
        ..GEMMA4
    },
    DecoderFamily {
        name: "hunyuan_v1_dense",
        gguf: &["hunyuan-dense"],
        gguf_interleaved: false,
        tensor_names: &[
            ("self_attn.q_norm", "self_attn.query_layernorm"),
            ("self_attn.k_norm", "self_attn.key_layernorm"),
        ],
        qk_norm: QkNorm::PerHeadRotated,
        mlp_bias: Bias::Never,
        ntk_alpha: true,
        default_rms_norm_eps: 1e-5,
        // published configurations describe other models of the vendor, too
        inert_keys: &[
            ("mlp_bias", "0"),
            ("norm_type", "\"rms\""),
            ("num_experts", "1"),
            ("use_cla", "0"),
            ("use_qk_norm", "1"),
            ("use_rotary_pos_emb", "1"),
        ],
        neutral_keys: &[
            "attention_head_dim",
            "cla_share_factor",
            "class_num",
            "dense_list",
            "eod_token_id",
            "im_end_id",
            "im_newline_id",
            "im_start_id",
            "mask_init_id",
            "org_vocab_size",
            "pad_id",
            "pool_type",
            "text_end_id",
            "text_start_id",
        ],
        ..LLAMA
    },
    DecoderFamily {
        name: "lfm2",
        gguf: &["lfm2"],
        gguf_interleaved: false,
        key_names: &[
            ("intermediate_size", "block_ff_dim"),
            ("rms_norm_eps", "norm_eps"),
            ("tie_word_embeddings", "tie_embedding"),
        ],
        tensor_names: LFM2_TENSORS,
        gguf_names: LFM2_GGUF,
        mixer: MixerKind::ShortConv,
        nominal_intermediate_size: true,
        qk_norm: QkNorm::PerHead,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        default_rope_theta: 1_000_000.0,
        default_tie_word_embeddings: true,
        default_rms_norm_eps: 1e-5,
        inert_keys: &[("block_use_swiglu", "1"), ("use_pos_enc", "1")],
        // of the initialisation, or said twice
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
        ..LLAMA
    },
    DecoderFamily {
        name: "lfm2_moe",
        gguf: &["lfm2moe"],
        gguf_interleaved: false,
        key_names: &[("rms_norm_eps", "norm_eps"), ("tie_word_embeddings", "tie_embedding")],
        tensor_names: LFM2_TENSORS,
        gguf_names: LFM2_GGUF,
        mixer: MixerKind::ShortConv,
        mixture: MixtureKind::Sigmoid,
        qk_norm: QkNorm::PerHead,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        default_rope_theta: 1_000_000.0,
        default_tie_word_embeddings: true,
        default_rms_norm_eps: 1e-5,
        // GGUF: the router's outputs go through a sigmoid
        inert_keys: &[("expert_gating_func", "2")],
        neutral_keys: &["output_router_logits"],
        ..LLAMA
    },
    DecoderFamily {
        name: "qwen3_5_text",
        wrappers: &["qwen3_5"],
        gguf: &["qwen35"],
        gguf_interleaved: false,
        gguf_names: QWEN_HYBRID_GGUF,
        unused_tensors: NEXT_TOKENS,
        mixer: MixerKind::DeltaNet,
        gated_attention: true,
        qk_norm: QkNorm::PerHead,
        norm_plus_one: true,
        mlp_bias: Bias::Never,
        partial_rotary: Some(0.25),
        mrope: true,
        // of training, and of the prediction of several tokens at once
        inert_keys: &[("attn_output_gate", "1"), ("mlp_only_layers", "[]"), ("output_gate_type", "\"swish\"")],
        neutral_keys: &["mamba_ssm_dtype", "mtp_num_hidden_layers"],
        ..LLAMA
    },
    DecoderFamily {
        name: "qwen2_moe",
        gguf: &["qwen2moe"],
        gguf_interleaved: false,
        tensor_names: QWEN_EXPERTS,
        mixture: MixtureKind::Softmax,
        shared_expert: SharedExpertRule::Gated,
        qkv_bias: Bias::Unless("qkv_bias"),
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        // every layer has experts in the published models, and none a window
        inert_keys: &[("decoder_sparse_step", "1"), ("mlp_only_layers", "[]"), ("use_sliding_window", "0")],
        neutral_keys: &[
            "intermediate_size",
            "max_window_layers",
            "output_router_logits",
            "router_aux_loss_coef",
            "sliding_window",
        ],
        ..LLAMA
    },
    DecoderFamily {
        name: "qwen3_moe",
        gguf: &["qwen3moe"],
        gguf_interleaved: false,
        key_names: &[("num_experts", "num_local_experts")],
        tensor_names: QWEN_EXPERTS,
        mixture: MixtureKind::Softmax,
        qk_norm: QkNorm::PerHead,
        mlp_bias: Bias::Never,
        window: WindowRule::EveryIfUsed,
        default_sizes: &[("sliding_window", 4096)],
        // every layer has experts in all published models
        inert_keys: &[("decoder_sparse_step", "1"), ("mlp_only_layers", "[]")],
        // of training, and of the dense models' windows
        neutral_keys: &["max_window_layers", "output_router_logits", "router_aux_loss_coef"],
        ..LLAMA
    },
    DecoderFamily {
        name: "qwen3_vl_moe_text",
        wrappers: &["qwen3_vl_moe"],
        gguf: &["qwen3vlmoe"],
        gguf_interleaved: false,
        key_names: &[("num_experts", "num_local_experts")],
        tensor_names: QWEN_EXPERTS,
        mixture: MixtureKind::ChosenSoftmax,
        qk_norm: QkNorm::PerHead,
        mlp_bias: Bias::Never,
        mrope: true,
        default_rope_theta: 500_000.0,
        // every layer has experts in all published models
        inert_keys: &[("decoder_sparse_step", "1"), ("mlp_only_layers", "[]"), ("norm_topk_prob", "1")],
        neutral_keys: &["output_router_logits", "router_aux_loss_coef"],
        ..LLAMA
    },
    DecoderFamily {
        name: "qwen3_next",
        gguf: &["qwen3next"],
        gguf_interleaved: false,
        tensor_names: QWEN_EXPERTS,
        gguf_names: QWEN_HYBRID_GGUF,
        unused_tensors: NEXT_TOKENS,
        default_sizes: &[("head_dim", 256)],
        mixer: MixerKind::DeltaNet,
        mixture: MixtureKind::ChosenSoftmaxUnless,
        shared_expert: SharedExpertRule::Gated,
        gated_attention: true,
        qk_norm: QkNorm::PerHead,
        norm_plus_one: true,
        mlp_bias: Bias::Never,
        partial_rotary: Some(0.25),
        // every layer has experts in the published models
        inert_keys: &[("decoder_sparse_step", "1"), ("mlp_only_layers", "[]")],
        neutral_keys: &["intermediate_size", "output_router_logits", "router_aux_loss_coef"],
        ..LLAMA
    },
    DecoderFamily {
        name: "qwen3_5_moe_text",
        wrappers: &["qwen3_5_moe"],
        gguf: &["qwen35moe"],
        gguf_interleaved: false,
        tensor_names: QWEN_EXPERTS,
        gguf_names: QWEN_HYBRID_GGUF,
        unused_tensors: NEXT_TOKENS,
        default_sizes: &[("head_dim", 256)],
        mixer: MixerKind::DeltaNet,
        mixture: MixtureKind::ChosenSoftmax,
        shared_expert: SharedExpertRule::Gated,
        gated_attention: true,
        qk_norm: QkNorm::PerHead,
        norm_plus_one: true,
        mlp_bias: Bias::Never,
        partial_rotary: Some(0.25),
        mrope: true,
        inert_keys: &[("attn_output_gate", "1"), ("mlp_only_layers", "[]"), ("output_gate_type", "\"swish\"")],
        // of training, and of the prediction of several tokens at once
        neutral_keys: &["mamba_ssm_dtype", "mtp_num_hidden_layers", "output_router_logits", "router_aux_loss_coef"],
        ..LLAMA
    },
    DecoderFamily {
        name: "olmoe",
        gguf: &["olmoe"],
        gguf_interleaved: false,
        key_names: &[("moe_intermediate_size", "intermediate_size")],
        tensor_names: QWEN_EXPERTS,
        mixture: MixtureKind::Softmax,
        qk_norm: QkNorm::WholeWidth,
        mlp_bias: Bias::Never,
        default_rms_norm_eps: 1e-5,
        neutral_keys: &["output_router_logits", "router_aux_loss_coef"],
        ..LLAMA
    },
    DecoderFamily {
        name: "gpt_oss",
        gguf: &["gpt-oss"],
        gguf_interleaved: false,
        key_names: &[("num_experts", "num_local_experts"), ("moe_intermediate_size", "intermediate_size")],
        tensor_names: &[("feed_forward.gate", "mlp.router"), ("feed_forward.experts", "mlp.experts")],
        gguf_names: &[("post_attention_layernorm", "post_attention_norm")],
        default_sizes: &[("head_dim", 64), ("sliding_window", 128)],
        mixture: MixtureKind::Clamped,
        sinks: true,
        qkv_bias: Bias::Unless("attention_bias"),
        output_bias: Bias::Unless("attention_bias"),
        window: WindowRule::Pattern(2),
        scaled_rope: true,
        default_rope_theta: 150_000.0,
        default_rms_norm_eps: 1e-5,
        // published measurements of the larger model: hidden states reach 45,000, then more than fp16 holds
        hidden_scale: 1.0 / 16.0,
        neutral_keys: &[
            // of training
            "output_router_logits",
            "router_aux_loss_coef",
            // of other runtimes, one of them said twice
            "experts_per_token",
            "initial_context_length",
        ],
        ..LLAMA
    },
    DecoderFamily {
        name: "zaya",
        gguf: &[],
        tensor_names: &[
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
        mixer: MixerKind::Cca,
        mixture: MixtureKind::DepthRouted,
        head_bias: Bias::Key("lm_head_bias"),
        residual_scaling: true,
        window: WindowRule::Types,
        layer_types: ["hybrid", "hybrid_sliding"],
        local_rope: Some(10000.0),
        partial_rotary: Some(0.5),
        default_rope_theta: 5_000_000.0,
        default_tie_word_embeddings: true,
        default_rms_norm_eps: 1e-5,
        inert_keys: &[("num_experts_per_tok", "1")],
        neutral_keys: &["output_router_logits"],
        ..LLAMA
    },
];

/// Model types that no row can say, and why, as a part of a sentence.
pub const UNSUPPORTED: &[(&str, &str)] = &[
    ("gemma3n", ALTERNATING_UPDATES),
    ("gemma3n_text", ALTERNATING_UPDATES),
    ("gemma4_assistant", READS_ITS_TARGET),
    ("gemma4_unified_assistant", READS_ITS_TARGET),
];

const ALTERNATING_UPDATES: &str = "its layers carry several residual streams at once (alternating updates) and sparse activations, which no block has";

const READS_ITS_TARGET: &str = "it drafts for a Gemma 4 whose last hidden state, keys and values it reads: it has none of its own, and \
                                those are in the states of another model; n-gram lookup drafts for any model";

/// Keys of a `config.json` that don't touch the maths of inference.
pub const NEUTRAL_KEYS: &[&str] = &[
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "_attn_implementation",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "max_length",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "prefix",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];
