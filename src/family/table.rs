//! The family table: what each dense decoder family does differently, declared.
//!
//! A port of another dense decoder is a row here. The source of each row is the family's modeling file in
//! transformers; the GGUF columns follow llama.cpp's converter.

use serde::Serialize;

/// Where query-key norms sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// On each head, before the rotation.
    PerHead,
    /// Over all heads at once, before the rotation.
    WholeWidth,
}

/// Where the norms of a layer sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// `x + f(norm(x))`
    Pre,
    /// `x + norm(f(x))`
    Post,
}

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// Never.
    Never,
    /// Always.
    Always,
    /// Where this key of the configuration is true.
    Key(&'static str),
}

/// Which layers attend through a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRule {
    /// None.
    None,
    /// Every layer, where `sliding_window` is a number; the value where the key is absent.
    Every(Option<u64>),
    /// Where `use_sliding_window`, the layers from `max_window_layers` on, or as `layer_types` says.
    FromLayer,
    /// Where `use_sliding_window`, the layers without rotation, or as `layer_types` says.
    WithoutRope,
}

/// A row of the table.
#[derive(Debug)]
pub struct DecoderFamily {
    /// Name, which is transformers' `model_type`.
    pub name: &'static str,
    /// `general.architecture` values in GGUF files.
    pub gguf: &'static [&'static str],
    /// In GGUF, the rows of q and k are interleaved for rotation of neighbours and must be put back.
    pub gguf_interleaved: bool,
    /// Query-key norms.
    pub qk_norm: QkNorm,
    /// Place of the norms.
    pub norms: NormPlacement,
    /// One tensor holds q, k and v; another gate and up.
    pub fused: bool,
    /// Biases of q, k and v.
    pub qkv_bias: Bias,
    /// Bias of the attention's output projection.
    pub output_bias: Bias,
    /// Biases of the feed-forward projections.
    pub mlp_bias: Bias,
    /// Sliding windows.
    pub window: WindowRule,
    /// Some layers don't rotate: `no_rope_layers`, or every `no_rope_layer_interval`th.
    pub layers_without_rope: bool,
    /// Has `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling`.
    pub multipliers: bool,
    /// Has `partial_rotary_factor`.
    pub partial_rotary: bool,
    /// `rope_theta` where no key gives it.
    pub default_rope_theta: f64,
    /// `tie_word_embeddings` where the key is absent.
    pub default_tie_word_embeddings: bool,
    /// `rms_norm_eps` where the key is absent.
    pub default_rms_norm_eps: f64,
    /// Keys of old configurations that have one harmless value only.
    pub inert_keys: &'static [(&'static str, i64)],
}

const LLAMA: DecoderFamily = DecoderFamily {
    name: "llama",
    gguf: &["llama"],
    gguf_interleaved: true,
    qk_norm: QkNorm::None,
    norms: NormPlacement::Pre,
    fused: false,
    qkv_bias: Bias::Key("attention_bias"),
    output_bias: Bias::Key("attention_bias"),
    mlp_bias: Bias::Key("mlp_bias"),
    window: WindowRule::None,
    layers_without_rope: false,
    multipliers: false,
    partial_rotary: false,
    default_rope_theta: 10000.0,
    default_tie_word_embeddings: false,
    default_rms_norm_eps: 1e-6,
    inert_keys: &[],
};

/// All rows.
pub const DECODERS: &[DecoderFamily] = &[
    LLAMA,
    // llama.cpp has no architecture of its own for Mistral: its GGUF files say `llama`, and drop the window.
    DecoderFamily {
        name: "mistral",
        gguf: &["llama"],
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        window: WindowRule::Every(Some(4096)),
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
        name: "phi3",
        gguf: &["phi3"],
        gguf_interleaved: false,
        fused: true,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        window: WindowRule::Every(None),
        partial_rotary: true,
        default_rms_norm_eps: 1e-5,
        // written by the Phi-4-mini configuration, without effect there
        inert_keys: &[
            ("attention_bias", 0),
            ("mlp_bias", 0),
            ("lm_head_bias", 0),
            ("full_attn_mod", 1),
            ("interpolate_factor", 1),
        ],
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
        name: "olmo2",
        gguf: &["olmo2"],
        gguf_interleaved: false,
        qk_norm: QkNorm::WholeWidth,
        norms: NormPlacement::Post,
        mlp_bias: Bias::Never,
        default_rms_norm_eps: 1e-5,
        ..LLAMA
    },
];

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
