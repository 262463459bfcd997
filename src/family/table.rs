//! Family table: the differences between decoder families, declared.
//!
//! A port of a decoder is a row with fields of the module `row`. The source of each row is the family's modeling file
//! in transformers; GGUF fields follow llama.cpp's converter.

mod gemma;
mod hybrid;
mod parallel;

use super::row::{
    ATTENTION, Activation, AttentionRules, Bias, DecoderFamily, FAMILY, MixtureKind, NAMES, NETWORK, NORMS,
    NetworkRules, NormKind, NormPlacement, NormRules, QkNorm, QkvLayout, RESIDUAL, ROPE, ResidualRules, RopeLayers,
    RopePairs, RopeRules, SharedExpertRule, SourceNames, WindowRule,
};

/// OpenAI's privacy filter, for the RoPE reader; it is no decoder.
pub const OPENAI_PRIVACY_FILTER: DecoderFamily = DecoderFamily {
    name: "openai_privacy_filter",
    names: SourceNames {
        gguf: &[],
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
        ..NAMES
    },
    rope: RopeRules { scaled: true, theta: 150_000.0, ..ROPE },
    norms: NormRules { eps: 1e-5, ..NORMS },
    network: NetworkRules { bias: Bias::Key("mlp_bias"), ..NETWORK },
    ..FAMILY
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
    DecoderFamily {
        name: "llama",
        names: SourceNames { gguf: &["llama"], ..NAMES },
        rope: RopeRules { pairs: RopePairs::NeighboursInGguf, ..ROPE },
        network: NetworkRules { bias: Bias::Key("mlp_bias"), ..NETWORK },
        ..FAMILY
    },
    // llama.cpp has no architecture for Mistral: its GGUF files say `llama`, and omit the window
    DecoderFamily {
        name: "mistral",
        names: SourceNames {
            prefixes: ["model.", "language_model.model."],
            wrappers: &["mistral3"],
            gguf: &["llama"],
            ..NAMES
        },
        attention: AttentionRules {
            qkv_bias: Bias::Never,
            output_bias: Bias::Never,
            window: WindowRule::Every(Some(4096)),
            ..ATTENTION
        },
        rope: RopeRules { pairs: RopePairs::NeighboursInGguf, ..ROPE },
        ..FAMILY
    },
    DecoderFamily {
        name: "ministral3",
        names: SourceNames {
            prefixes: ["model.", "language_model.model."],
            wrappers: &["mistral3"],
            gguf: &["mistral3"],
            default_sizes: &[("head_dim", 128)],
            ..NAMES
        },
        attention: AttentionRules {
            qkv_bias: Bias::Never,
            output_bias: Bias::Never,
            window: WindowRule::Every(None),
            late_query_scale: true,
            ..ATTENTION
        },
        rope: RopeRules { scaled: true, theta: 1_000_000.0, pairs: RopePairs::NeighboursInGguf, ..ROPE },
        norms: NormRules { eps: 1e-5, ..NORMS },
        ..FAMILY
    },
    DecoderFamily {
        name: "qwen2",
        names: SourceNames { gguf: &["qwen2"], ..NAMES },
        attention: AttentionRules {
            qkv_bias: Bias::Always,
            output_bias: Bias::Never,
            window: WindowRule::FromLayer,
            ..ATTENTION
        },
        ..FAMILY
    },
    DecoderFamily {
        name: "qwen3",
        names: SourceNames { gguf: &["qwen3"], ..NAMES },
        attention: AttentionRules { qk_norm: QkNorm::PerHead, window: WindowRule::FromLayer, ..ATTENTION },
        ..FAMILY
    },
    DecoderFamily {
        name: "qwen3_vl_text",
        names: SourceNames {
            wrappers: &["qwen3_vl"],
            gguf: &["qwen3vl"],
            default_sizes: &[("head_dim", 128)],
            ..NAMES
        },
        attention: AttentionRules { qk_norm: QkNorm::PerHead, ..ATTENTION },
        rope: RopeRules { sections: true, theta: 500_000.0, ..ROPE },
        ..FAMILY
    },
    DecoderFamily {
        name: "ernie4_5",
        names: SourceNames { gguf: &["ernie4_5"], default_sizes: &[("head_dim", 128)], ..NAMES },
        attention: AttentionRules { qkv_bias: Bias::Key("use_bias"), output_bias: Bias::Key("use_bias"), ..ATTENTION },
        rope: RopeRules { theta: 500_000.0, pairs: RopePairs::Neighbours, ..ROPE },
        norms: NormRules { eps: 1e-5, ..NORMS },
        network: NetworkRules { bias: Bias::Key("use_bias"), ..NETWORK },
        residual: ResidualRules { tied: true, ..RESIDUAL },
        ..FAMILY
    },
    DecoderFamily {
        name: "phi3",
        names: SourceNames {
            gguf: &["phi3"],
            // in the configuration of Phi-4-mini, without effect
            inert_keys: &[
                ("attention_bias", "0"),
                ("mlp_bias", "0"),
                ("full_attn_mod", "1"),
                ("interpolate_factor", "1"),
            ],
            ..NAMES
        },
        attention: AttentionRules {
            qkv: QkvLayout::Fused,
            qkv_bias: Bias::Never,
            output_bias: Bias::Never,
            window: WindowRule::Every(None),
            ..ATTENTION
        },
        rope: RopeRules { partial: Some(1.0), ..ROPE },
        norms: NormRules { eps: 1e-5, ..NORMS },
        network: NetworkRules { fused: true, ..NETWORK },
        residual: ResidualRules {
            // transformers doesn't read the key; if it is true, the tensor must exist
            head_bias: Bias::Key("lm_head_bias"),
            ..RESIDUAL
        },
        ..FAMILY
    },
    DecoderFamily {
        name: "seed_oss",
        names: SourceNames {
            gguf: &["seed_oss"],
            gguf_tensors: &[("post_attention_layernorm", "post_attention_norm")],
            default_sizes: &[("head_dim", 128)],
            // of training
            neutral_keys: &["residual_dropout"],
            ..NAMES
        },
        attention: AttentionRules {
            qkv_bias: Bias::Unless("attention_bias"),
            output_bias: Bias::Key("attention_out_bias"),
            ..ATTENTION
        },
        network: NetworkRules { bias: Bias::Key("mlp_bias"), ..NETWORK },
        ..FAMILY
    },
    DecoderFamily {
        name: "smollm3",
        names: SourceNames { gguf: &["smollm3"], ..NAMES },
        attention: AttentionRules { window: WindowRule::WithoutRope, ..ATTENTION },
        rope: RopeRules { layers: RopeLayers::Listed, theta: 2_000_000.0, pairs: RopePairs::NeighboursInGguf, ..ROPE },
        network: NetworkRules { bias: Bias::Key("mlp_bias"), ..NETWORK },
        residual: ResidualRules { tied: true, ..RESIDUAL },
        ..FAMILY
    },
    DecoderFamily {
        name: "granite",
        names: SourceNames { gguf: &["granite"], ..NAMES },
        rope: RopeRules { pairs: RopePairs::NeighboursInGguf, ..ROPE },
        network: NetworkRules { bias: Bias::Key("mlp_bias"), ..NETWORK },
        residual: ResidualRules { multipliers: true, ..RESIDUAL },
        ..FAMILY
    },
    DecoderFamily {
        name: "granitemoe",
        names: SourceNames {
            published: &["*.input_linear.weight"],
            gguf: &["granitemoe"],
            keys: &[("num_experts", "num_local_experts"), ("moe_intermediate_size", "intermediate_size")],
            tensors: &[
                ("feed_forward.gate", "block_sparse_moe.router.layer"),
                ("feed_forward.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
                ("feed_forward.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            ],
            neutral_keys: &["output_router_logits", "router_aux_loss_coef"],
            ..NAMES
        },
        rope: RopeRules { pairs: RopePairs::NeighboursInGguf, ..ROPE },
        network: NetworkRules { mixture: MixtureKind::ChosenSoftmax, ..NETWORK },
        residual: ResidualRules { multipliers: true, ..RESIDUAL },
        ..FAMILY
    },
    hybrid::GRANITEMOEHYBRID,
    hybrid::FALCON_H1,
    DecoderFamily {
        name: "exaone4",
        names: SourceNames {
            gguf: &["exaone4"],
            gguf_tensors: POST_NORMS,
            default_sizes: &[("sliding_window", 4096)],
            ..NAMES
        },
        attention: AttentionRules {
            qk_norm: QkNorm::PerHead,
            qkv_bias: Bias::Never,
            output_bias: Bias::Never,
            window: WindowRule::PatternOrNone(4),
            ..ATTENTION
        },
        rope: RopeRules { layers: RopeLayers::Windowed, ..ROPE },
        norms: NormRules { placement: NormPlacement::Post, eps: 1e-5, ..NORMS },
        ..FAMILY
    },
    DecoderFamily {
        name: "glm4",
        names: SourceNames {
            gguf: &["glm4"],
            tensors: &[
                ("post_attention_layernorm", "post_self_attn_layernorm"),
                ("pre_feedforward_layernorm", "post_attention_layernorm"),
                ("post_feedforward_layernorm", "post_mlp_layernorm"),
            ],
            gguf_tensors: POST_NORMS,
            default_sizes: &[("head_dim", 128)],
            ..NAMES
        },
        attention: AttentionRules { qkv_bias: Bias::Unless("attention_bias"), output_bias: Bias::Never, ..ATTENTION },
        rope: RopeRules { partial: Some(0.5), pairs: RopePairs::Neighbours, ..ROPE },
        norms: NormRules { placement: NormPlacement::Both, eps: 1.562_5e-7, ..NORMS },
        network: NetworkRules { fused: true, ..NETWORK },
        ..FAMILY
    },
    DecoderFamily {
        name: "starcoder2",
        names: SourceNames {
            gguf: &["starcoder2"],
            keys: &[("rms_norm_eps", "norm_epsilon")],
            tensors: &[("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")],
            inert_keys: &[("mlp_type", "\"default\""), ("norm_type", "\"layer_norm\""), ("scale_attn_weights", "1")],
            // of training, of precision, or redundant
            neutral_keys: &[
                "attention_softmax_in_fp32",
                "embedding_dropout",
                "layer_norm_epsilon",
                "residual_dropout",
                "scale_attention_softmax_in_fp32",
            ],
            ..NAMES
        },
        attention: AttentionRules {
            qkv_bias: Bias::Unless("use_bias"),
            output_bias: Bias::Unless("use_bias"),
            window: WindowRule::Every(None),
            ..ATTENTION
        },
        norms: NormRules { kind: NormKind::Layer, eps: 1e-5, ..NORMS },
        network: NetworkRules {
            plain: true,
            bias: Bias::Unless("use_bias"),
            activation: Activation::GeluTanh,
            ..NETWORK
        },
        residual: ResidualRules { tied: true, ..RESIDUAL },
        ..FAMILY
    },
    DecoderFamily {
        name: "gpt2",
        names: SourceNames {
            gguf: &["gpt2"],
            keys: &[
                ("hidden_act", "activation_function"),
                ("hidden_size", "n_embd"),
                ("intermediate_size", "n_inner"),
                ("max_position_embeddings", "n_positions"),
                ("num_attention_heads", "n_head"),
                ("num_hidden_layers", "n_layer"),
                ("rms_norm_eps", "layer_norm_epsilon"),
            ],
            tensors: &[
                ("embed_tokens", "wte"),
                ("embed_positions", "wpe"),
                ("input_layernorm", "ln_1"),
                ("self_attn.qkv_proj", "attn.c_attn"),
                ("self_attn.o_proj", "attn.c_proj"),
                ("post_attention_layernorm", "ln_2"),
                ("mlp.up_proj", "mlp.c_fc"),
                ("mlp.down_proj", "mlp.c_proj"),
                ("norm", "ln_f"),
            ],
            layers: "h",
            transposed: true,
            prefixes: ["transformer.", "model.language_model."],
            unused: &[("*h.*.attn.bias", "masks are computed"), ("*h.*.attn.masked_bias", "masks are computed")],
            inert_keys: &[
                ("add_cross_attention", "0"),
                ("scale_attn_by_inverse_layer_idx", "0"),
                ("scale_attn_weights", "1"),
            ],
            // of training, of precision, of absent heads, or redundant
            neutral_keys: &[
                "attn_pdrop",
                "embd_pdrop",
                "n_ctx",
                "reorder_and_upcast_attn",
                "resid_pdrop",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            ],
            ..NAMES
        },
        attention: AttentionRules {
            qkv: QkvLayout::Fused,
            qkv_bias: Bias::Always,
            output_bias: Bias::Always,
            ..ATTENTION
        },
        rope: RopeRules { layers: RopeLayers::None, ..ROPE },
        norms: NormRules { kind: NormKind::Layer, eps: 1e-5, ..NORMS },
        network: NetworkRules {
            plain: true,
            fourfold: true,
            bias: Bias::Always,
            activation: Activation::GeluTanh,
            ..NETWORK
        },
        residual: ResidualRules { positions: true, tied: true, ..RESIDUAL },
        ..FAMILY
    },
    parallel::PHI,
    parallel::COHERE,
    parallel::COHERE2,
    parallel::GPT_NEOX,
    parallel::STABLELM,
    DecoderFamily {
        name: "olmo2",
        names: SourceNames { gguf: &["olmo2"], gguf_tensors: POST_NORMS, ..NAMES },
        attention: AttentionRules { qk_norm: QkNorm::WholeWidth, ..ATTENTION },
        norms: NormRules { placement: NormPlacement::Post, eps: 1e-5, ..NORMS },
        ..FAMILY
    },
    // only full-attention layers are scaled; the others keep the class's base. GGUF files have the architecture of OLMo
    // 2, with windows
    DecoderFamily {
        name: "olmo3",
        names: SourceNames {
            gguf: &["olmo2"],
            gguf_tensors: POST_NORMS,
            default_sizes: &[("sliding_window", 4096)],
            ..NAMES
        },
        attention: AttentionRules { qk_norm: QkNorm::WholeWidth, window: WindowRule::Pattern(4), ..ATTENTION },
        rope: RopeRules { local_theta: Some(500_000.0), theta: 500_000.0, ..ROPE },
        norms: NormRules { placement: NormPlacement::Post, eps: 1e-5, ..NORMS },
        ..FAMILY
    },
    gemma::GEMMA,
    gemma::GEMMA2,
    gemma::GEMMA3,
    gemma::GEMMA4,
    gemma::GEMMA4_UNIFIED,
    gemma::EMBEDDING_GEMMA2,
    DecoderFamily {
        name: "hunyuan_v1_dense",
        names: SourceNames {
            gguf: &["hunyuan-dense"],
            tensors: &[
                ("self_attn.q_norm", "self_attn.query_layernorm"),
                ("self_attn.k_norm", "self_attn.key_layernorm"),
            ],
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
            ..NAMES
        },
        attention: AttentionRules { qk_norm: QkNorm::PerHeadRotated, ..ATTENTION },
        rope: RopeRules { ntk_alpha: true, ..ROPE },
        norms: NormRules { eps: 1e-5, ..NORMS },
        ..FAMILY
    },
    hybrid::LFM2,
    hybrid::LFM2_MOE,
    hybrid::QWEN3_5,
    DecoderFamily {
        name: "qwen2_moe",
        names: SourceNames {
            gguf: &["qwen2moe"],
            tensors: QWEN_EXPERTS,
            // every layer has experts in the published models, and none has a window
            inert_keys: &[("decoder_sparse_step", "1"), ("mlp_only_layers", "[]"), ("use_sliding_window", "0")],
            neutral_keys: &[
                "intermediate_size",
                "max_window_layers",
                "output_router_logits",
                "router_aux_loss_coef",
                "sliding_window",
            ],
            ..NAMES
        },
        attention: AttentionRules { qkv_bias: Bias::Unless("qkv_bias"), output_bias: Bias::Never, ..ATTENTION },
        network: NetworkRules { mixture: MixtureKind::Softmax, shared_expert: SharedExpertRule::Gated, ..NETWORK },
        ..FAMILY
    },
    DecoderFamily {
        name: "qwen3_moe",
        names: SourceNames {
            gguf: &["qwen3moe"],
            keys: &[("num_experts", "num_local_experts")],
            tensors: QWEN_EXPERTS,
            default_sizes: &[("sliding_window", 4096)],
            // every layer has experts in all published models
            inert_keys: &[("decoder_sparse_step", "1"), ("mlp_only_layers", "[]")],
            // of training, and of the dense models' windows
            neutral_keys: &["max_window_layers", "output_router_logits", "router_aux_loss_coef"],
            ..NAMES
        },
        attention: AttentionRules { qk_norm: QkNorm::PerHead, window: WindowRule::EveryIfUsed, ..ATTENTION },
        network: NetworkRules { mixture: MixtureKind::Softmax, ..NETWORK },
        ..FAMILY
    },
    DecoderFamily {
        name: "qwen3_vl_moe_text",
        names: SourceNames {
            published: &["*.experts.gate_up_proj"],
            wrappers: &["qwen3_vl_moe"],
            gguf: &["qwen3vlmoe"],
            keys: &[("num_experts", "num_local_experts")],
            tensors: QWEN_EXPERTS,
            // every layer has experts in all published models
            inert_keys: &[("decoder_sparse_step", "1"), ("mlp_only_layers", "[]"), ("norm_topk_prob", "1")],
            neutral_keys: &["output_router_logits", "router_aux_loss_coef"],
            ..NAMES
        },
        attention: AttentionRules { qk_norm: QkNorm::PerHead, ..ATTENTION },
        rope: RopeRules { sections: true, theta: 500_000.0, ..ROPE },
        network: NetworkRules { mixture: MixtureKind::ChosenSoftmax, ..NETWORK },
        ..FAMILY
    },
    hybrid::QWEN3_NEXT,
    hybrid::QWEN3_5_MOE,
    DecoderFamily {
        name: "olmoe",
        names: SourceNames {
            gguf: &["olmoe"],
            keys: &[("moe_intermediate_size", "intermediate_size")],
            tensors: QWEN_EXPERTS,
            neutral_keys: &["output_router_logits", "router_aux_loss_coef"],
            ..NAMES
        },
        attention: AttentionRules { qk_norm: QkNorm::WholeWidth, clips: true, ..ATTENTION },
        norms: NormRules { eps: 1e-5, ..NORMS },
        network: NetworkRules { mixture: MixtureKind::Softmax, ..NETWORK },
        ..FAMILY
    },
    DecoderFamily {
        name: "gpt_oss",
        names: SourceNames {
            published: &["*.gate_up_proj_blocks"],
            gguf: &["gpt-oss"],
            keys: &[("num_experts", "num_local_experts"), ("moe_intermediate_size", "intermediate_size")],
            tensors: &[("feed_forward.gate", "mlp.router"), ("feed_forward.experts", "mlp.experts")],
            gguf_tensors: &[("post_attention_layernorm", "post_attention_norm")],
            default_sizes: &[("head_dim", 64), ("sliding_window", 128)],
            neutral_keys: &[
                // of training
                "output_router_logits",
                "router_aux_loss_coef",
                // of other runtimes, one of them redundant
                "experts_per_token",
                "initial_context_length",
            ],
            ..NAMES
        },
        attention: AttentionRules {
            sinks: true,
            qkv_bias: Bias::Unless("attention_bias"),
            output_bias: Bias::Unless("attention_bias"),
            window: WindowRule::Pattern(2),
            ..ATTENTION
        },
        rope: RopeRules { scaled: true, theta: 150_000.0, ..ROPE },
        norms: NormRules { eps: 1e-5, ..NORMS },
        network: NetworkRules { mixture: MixtureKind::Clamped, bias: Bias::Key("mlp_bias"), ..NETWORK },
        residual: ResidualRules {
            // published measurements of the larger model: hidden states reach 45,000, then exceed fp16
            hidden_scale: 1.0 / 16.0,
            ..RESIDUAL
        },
        ..FAMILY
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
    "_num_labels",
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
