//! Rows of families with parallel attention and feed-forward network.

use crate::row::{Activation, Bias, DecoderFamily, LLAMA, LayerForm, LayerFormRule, NormKind, QkNorm, WindowRule};

/// Phi-1, Phi-1.5 and Phi-2.
pub(super) const PHI: DecoderFamily = DecoderFamily {
    name: "phi",
    gguf: &["phi2"],
    gguf_interleaved: false,
    key_names: &[("rms_norm_eps", "layer_norm_eps")],
    tensor_names: &[
        ("self_attn.o_proj", "self_attn.dense"),
        ("self_attn.q_norm", "self_attn.q_layernorm"),
        ("self_attn.k_norm", "self_attn.k_layernorm"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
        ("norm", "final_layernorm"),
    ],
    form: LayerFormRule::Always(LayerForm::ParallelOneNorm),
    norm: NormKind::Layer,
    qk_norm: QkNorm::PerHead,
    qk_norm_if: Some("qk_layernorm"),
    plain_mlp: true,
    qkv_bias: Bias::Always,
    output_bias: Bias::Always,
    mlp_bias: Bias::Always,
    head_bias: Bias::Always,
    activation: Activation::GeluTanh,
    partial_rotary: Some(0.5),
    default_rms_norm_eps: 1e-5,
    ..LLAMA
};

/// Command R.
pub(super) const COHERE: DecoderFamily = DecoderFamily {
    name: "cohere",
    gguf: &["command-r"],
    qk_norm: QkNorm::PerHeadOwn,
    qk_norm_if: Some("use_qk_norm"),
    default_rope_theta: 500_000.0,
    ..COMMAND
};

/// Command R7B and Command A: layers with a window rotate, full-attention layers don't.
pub(super) const COHERE2: DecoderFamily = DecoderFamily {
    name: "cohere2",
    gguf: &["cohere2"],
    default_sizes: &[("sliding_window", 4096)],
    window: WindowRule::Pattern(4),
    rope_in_windows: true,
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
    ..COMMAND
};

/// Base of both Command rows.
const COMMAND: DecoderFamily = DecoderFamily {
    rotates_neighbours: true,
    key_names: &[("rms_norm_eps", "layer_norm_eps")],
    form: LayerFormRule::Always(LayerForm::ParallelOneNorm),
    norm: NormKind::LayerWithoutBias,
    mlp_bias: Bias::Never,
    logit_scale: Some(0.0625),
    default_tie_word_embeddings: true,
    default_rms_norm_eps: 1e-5,
    ..LLAMA
};

/// GPT-NeoX, Pythia.
pub(super) const GPT_NEOX: DecoderFamily = DecoderFamily {
    name: "gpt_neox",
    gguf: &["gptneox"],
    gguf_interleaved: false,
    key_names: &[
        ("rms_norm_eps", "layer_norm_eps"),
        ("rope_theta", "rotary_emb_base"),
        ("partial_rotary_factor", "rotary_pct"),
    ],
    tensor_names: &[
        ("embed_tokens", "embed_in"),
        ("self_attn.qkv_proj", "attention.query_key_value"),
        ("self_attn.o_proj", "attention.dense"),
        ("mlp.up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ("norm", "final_layer_norm"),
        ("lm_head", "embed_out"),
    ],
    unused_tensors: &[
        ("gpt_neox.layers.*.attention.bias", "masks are computed"),
        ("gpt_neox.layers.*.attention.masked_bias", "masks are computed"),
        ("gpt_neox.layers.*.attention.rotary_emb.inv_freq", "rotary frequencies are computed"),
    ],
    form: LayerFormRule::Unless("use_parallel_residual", LayerForm::ParallelTwoNorms),
    norm: NormKind::Layer,
    fused: true,
    fused_by_head: true,
    plain_mlp: true,
    qkv_bias: Bias::Unless("attention_bias"),
    output_bias: Bias::Unless("attention_bias"),
    mlp_bias: Bias::Always,
    activation: Activation::Gelu,
    partial_rotary: Some(0.25),
    default_rms_norm_eps: 1e-5,
    // of training
    neutral_keys: &["classifier_dropout", "hidden_dropout"],
    ..LLAMA
};

/// StableLM; the largest models have parallel layers.
pub(super) const STABLELM: DecoderFamily = DecoderFamily {
    name: "stablelm",
    gguf: &["stablelm"],
    gguf_interleaved: false,
    key_names: &[("rms_norm_eps", "layer_norm_eps")],
    tensor_names: &[("self_attn.q_norm", "self_attn.q_layernorm"), ("self_attn.k_norm", "self_attn.k_layernorm")],
    form: LayerFormRule::Key("use_parallel_residual", LayerForm::ParallelOneNorm),
    norm: NormKind::Layer,
    qk_norm: QkNorm::PerHeadOwn,
    qk_norm_if: Some("qk_layernorm"),
    qkv_bias: Bias::Key("use_qkv_bias"),
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    partial_rotary: Some(0.25),
    default_rms_norm_eps: 1e-5,
    neutral_keys: &["hidden_dropout"],
    ..LLAMA
};
