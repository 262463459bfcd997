//! Family table: the differences between decoder families, declared.
//!
//! A port of a decoder is a row with fields of the module `row`. The source of each row is the family's modeling file
//! in transformers; GGUF fields follow llama.cpp's converter.

mod gemma;
mod hybrid;
mod parallel;

use super::row::{
    Activation, Bias, DecoderFamily, LLAMA, MixtureKind, NormKind, NormPlacement, QkNorm, SharedExpertRule, WindowRule,
};

/// OpenAI's privacy filter, for the RoPE reader; it is no decoder.
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
        // of other runtimes' chunk sizes
        "default_n_ctx",
        "initial_context_length",
        // of gpt-oss, without effect: experts have their own activation, and there is no LM head
        "hidden_act",
        "tie_word_embeddings",
    ],
    ..LLAMA
};

/// GGUF names of norms after the blocks, and of the norm before the feed-forward network beside them.
const POST_NORMS: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Names of experts in Qwen3-MoE and OLMoE.
const QWEN_EXPERTS: &[(&str, &str)] = &[
    ("feed_forward.gate", "mlp.gate"),
    ("feed_forward.experts", "mlp.experts"),
    ("w1", "gate_proj"),
    ("w2", "down_proj"),
    ("w3", "up_proj"),
];

/// All rows.
pub const DECODERS: &[DecoderFamily] = &[
    LLAMA,
    // llama.cpp has no architecture for Mistral: its GGUF files say `llama`, and omit the window
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
        rotates_neighbours: true,
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
        // transformers doesn't read the key; if it is true, the tensor must exist
        head_bias: Bias::Key("lm_head_bias"),
        window: WindowRule::Every(None),
        partial_rotary: Some(1.0),
        default_rms_norm_eps: 1e-5,
        // in the configuration of Phi-4-mini, without effect
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
    hybrid::GRANITEMOEHYBRID,
    hybrid::FALCON_H1,
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
        rotates_neighbours: true,
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
        // of training, of precision, or redundant
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
    // only full-attention layers are scaled; the others keep the class's base. GGUF files have the architecture of OLMo
    // 2, with windows
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
    gemma::GEMMA,
    gemma::GEMMA2,
    gemma::GEMMA3,
    gemma::GEMMA4,
    gemma::GEMMA4_UNIFIED,
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
        // published configurations also describe other models of the vendor
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
    hybrid::LFM2,
    hybrid::LFM2_MOE,
    hybrid::QWEN3_5,
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
        // every layer has experts in the published models, and none has a window
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
    hybrid::QWEN3_NEXT,
    hybrid::QWEN3_5_MOE,
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
        // published measurements of the larger model: hidden states reach 45,000, then exceed fp16
        hidden_scale: 1.0 / 16.0,
        neutral_keys: &[
            // of training
            "output_router_logits",
            "router_aux_loss_coef",
            // of other runtimes, one of them redundant
            "experts_per_token",
            "initial_context_length",
        ],
        ..LLAMA
    },
    hybrid::ZAYA,
];

/// Model types that can't be rows, with the reason as a part of a sentence.
pub const UNSUPPORTED: &[(&str, &str)] = &[
    ("gemma3n", ALTERNATING_UPDATES),
    ("gemma3n_text", ALTERNATING_UPDATES),
    ("gemma4_assistant", READS_ITS_TARGET),
    ("gemma4_unified_assistant", READS_ITS_TARGET),
];

const ALTERNATING_UPDATES: &str = "its layers carry several residual streams at once (alternating updates) and sparse activations, which no block has";

const READS_ITS_TARGET: &str = "it drafts for a Gemma 4 whose last hidden state, keys and values it reads: it has none of its own, and \
                                those are in the states of another model; n-gram lookup drafts for any model";

/// Keys of a `config.json` that don't affect inference.
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
