//! Types of the family table's rows: the differences between decoders.

use serde::Serialize;

/// Place of query-key norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// No norms.
    None,
    /// On each head, before the rotation.
    PerHead,
    /// On each head with a gain of its own, before the rotation.
    PerHeadOwn,
    /// On each head, after the rotation.
    PerHeadRotated,
    /// Over all heads at once, before the rotation.
    WholeWidth,
}

/// Order of a layer's mixer and feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerForm {
    /// `y = x + mixer(norm(x))`, then `y + network(norm'(y))`
    Sequential,
    /// `x + mixer(n) + network(n)` with one `n = norm(x)` (GPT-J)
    ParallelOneNorm,
    /// `x + mixer(norm(x)) + network(norm'(x))` (GPT-NeoX, arXiv:2204.06745)
    ParallelTwoNorms,
}

/// Rule for the order of a family's layers; sequential if the named form doesn't apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerFormRule {
    /// This form.
    Always(LayerForm),
    /// This form if the key of the configuration is true.
    Key(&'static str, LayerForm),
    /// This form unless the key of the configuration is false.
    Unless(&'static str, LayerForm),
}

/// Kind of norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * w`
    RootMeanSquare,
    /// Layer norm with a bias.
    Layer,
    /// Layer norm without a bias.
    LayerWithoutBias,
}

impl NormKind {
    /// Returns whether the mean is subtracted.
    pub fn is_centred(self) -> bool {
        self != NormKind::RootMeanSquare
    }

    /// Returns whether the norm has a bias.
    pub fn has_bias(self) -> bool {
        self == NormKind::Layer
    }
}

/// Place of a layer's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// `x + f(norm(x))`
    Pre,
    /// `x + norm(f(x))`
    Post,
    /// `x + norm(f(norm(x)))`
    Both,
}

/// Activation of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// GELU approximated with tanh.
    GeluTanh,
    /// Exact GELU.
    Gelu,
}

impl Activation {
    /// Names in configurations.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Activation::Silu => &["silu", "swish"],
            Activation::GeluTanh => &["gelu_pytorch_tanh", "gelu_new"],
            Activation::Gelu => &["gelu"],
        }
    }
}

/// Token mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MixerKind {
    /// Softmax attention.
    Attention,
    /// Compressed convolutional attention.
    Cca,
    /// Gated short convolution.
    ShortConv,
    /// Gated DeltaNet.
    DeltaNet,
    /// Mamba-2.
    Mamba2,
    /// Softmax attention and Mamba-2 side by side, on the same input.
    AttentionAndMamba2,
}

impl MixerKind {
    /// Returns whether the mixer has a mask and a KV cache.
    pub fn attends(self) -> bool {
        matches!(self, MixerKind::Attention | MixerKind::Cca | MixerKind::AttentionAndMamba2)
    }

    /// Returns whether the mixer has a linear recurrence that takes the order of a call's tokens as an input.
    pub fn scans(self) -> bool {
        matches!(self, MixerKind::DeltaNet | MixerKind::Mamba2 | MixerKind::AttentionAndMamba2)
    }

    /// Name in `layer_types`, in families with several kinds of layers.
    pub fn layer_type(self) -> &'static str {
        match self {
            MixerKind::Attention => "full_attention",
            MixerKind::Cca => "hybrid",
            MixerKind::ShortConv => "conv",
            MixerKind::DeltaNet | MixerKind::Mamba2 => "linear_attention",
            MixerKind::AttentionAndMamba2 => "hybrid",
        }
    }
}

/// Function of a router's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterScores {
    /// Sigmoid of each expert.
    Sigmoid,
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the chosen experts: their weights sum to 1.
    ChosenSoftmax,
}

/// Kind of a family's mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixtureKind {
    /// No experts.
    None,
    /// After the first `num_dense_layers`; sigmoid weights, with a selection bias.
    Sigmoid,
    /// In all layers; softmax weights, over the chosen experts if `norm_topk_prob`.
    Softmax,
    /// In all layers; softmax weights over the chosen experts.
    ChosenSoftmax,
    /// In all layers; softmax weights over the chosen experts unless `norm_topk_prob` is false.
    ChosenSoftmaxUnless,
    /// In all layers unless `num_local_experts` is 0; softmax weights over the chosen experts.
    ChosenSoftmaxIfAny,
    /// In all layers; softmax weights over the chosen experts, biases, and gates and ups clamped to `swiglu_limit`.
    Clamped,
    /// In all layers beside a dense network if `enable_moe_block`; softmax weights over the chosen experts.
    BesideDense,
    /// In all layers, with routers that pass on a state of `router_hidden_size`.
    DepthRouted,
}

/// Kind of a family's shared expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedExpertRule {
    /// No shared expert.
    None,
    /// Of width `shared_expert_intermediate_size`, times `sigmoid(w x)`.
    Gated,
    /// Of width `shared_intermediate_size`, with gate and up in one tensor; the only network in models without experts.
    Fused,
}

/// Presence of a projection's bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// Never.
    Never,
    /// Always.
    Always,
    /// If this key of the configuration is true.
    Key(&'static str),
    /// Unless this key of the configuration is false.
    Unless(&'static str),
}

/// Presence of a soft cap, `cap tanh(x / cap)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Softcap {
    /// Never.
    Never,
    /// By its key of the configuration, with a default.
    Key(Option<f64>),
}

/// Layers with a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRule {
    /// No layer.
    None,
    /// Every layer if `sliding_window` is a number, with a default.
    Every(Option<u64>),
    /// Every layer if `use_sliding_window`.
    EveryIfUsed,
    /// If `use_sliding_window`, layers from `max_window_layers` on, or by `layer_types`.
    FromLayer,
    /// If `use_sliding_window`, layers without rotation, or by `layer_types`.
    WithoutRope,
    /// All layers except every Nth (`sliding_window_pattern`, with a default), or by `layer_types`.
    Pattern(u64),
    /// As [`Pattern`](WindowRule::Pattern) if `sliding_window` is a number; none if it is null.
    PatternOrNone(u64),
    /// By `layer_types`; none without that key.
    Types,
}

/// Patterns of unused tensors' names in transformers, with the reason.
pub type UnusedTensors = &'static [(&'static str, &'static str)];

/// A row of the table.
#[derive(Debug)]
pub struct DecoderFamily {
    /// Name, which is transformers' `model_type`.
    pub name: &'static str,
    /// Model types of multimodal configurations whose `text_config` is of this family.
    pub wrappers: &'static [&'static str],
    /// `general.architecture` values in GGUF files.
    pub gguf: &'static [&'static str],
    /// What the configuration calls keys that have another name elsewhere: (name elsewhere, name here).
    pub key_names: &'static [(&'static str, &'static str)],
    /// What transformers calls tensors that have another name elsewhere: (name elsewhere, name here).
    pub tensor_names: &'static [(&'static str, &'static str)],
    /// What GGUF calls them: (transformers' name elsewhere, GGUF's name).
    pub gguf_names: &'static [(&'static str, &'static str)],
    /// Tensors of published files that the model has no part in.
    pub unused_tensors: UnusedTensors,
    /// Sizes that a configuration may leave out because the class has a default for them.
    pub default_sizes: &'static [(&'static str, u64)],
    /// Neighbouring dimensions of a head rotate together, in every file, and not those that are half of them apart.
    pub rotates_neighbours: bool,
    /// In GGUF, the rows of q and k are interleaved for rotation of neighbours and must be put back.
    pub gguf_interleaved: bool,
    /// What mixes tokens in the layers that aren't softmax attention, if there are such; attention of another kind does
    /// so in all layers.
    pub mixer: MixerKind,
    /// `intermediate_size` is a nominal width, of which two thirds are taken and rounded up.
    pub nominal_intermediate_size: bool,
    /// Mixtures of experts.
    pub mixture: MixtureKind,
    /// An expert for all tokens.
    pub shared_expert: SharedExpertRule,
    /// Both sides of every sum with the residual stream have biases and scales, and so has the embedding.
    pub residual_scaling: bool,
    /// Among the scores of attention is one for each head, of no token (arXiv:2309.17453).
    pub sinks: bool,
    /// Queries come with a gate on what attention gives, head by head.
    pub gated_attention: bool,
    /// Query-key norms.
    pub qk_norm: QkNorm,
    /// The key of the configuration without which there are none.
    pub qk_norm_if: Option<&'static str>,
    /// How the mixer and the feed-forward network lie to each other.
    pub form: LayerFormRule,
    /// Place of the norms.
    pub norms: NormPlacement,
    /// What norms are.
    pub norm: NormKind,
    /// Norms multiply by 1 + w. GGUF files hold the sum already.
    pub norm_plus_one: bool,
    /// One tensor holds q, k and v.
    pub fused: bool,
    /// In that, q, k and v of each head lie together; in GGUF those of all heads do.
    pub fused_by_head: bool,
    /// One tensor holds gate and up.
    pub fused_mlp: bool,
    /// The feed-forward network has no gate.
    pub plain_mlp: bool,
    /// Biases of q, k and v.
    pub qkv_bias: Bias,
    /// Bias of the attention's output projection.
    pub output_bias: Bias,
    /// Biases of the feed-forward projections.
    pub mlp_bias: Bias,
    /// Bias of the LM head.
    pub head_bias: Bias,
    /// Activation of the feed-forward network's gate.
    pub activation: Activation,
    /// Older configurations call the approximation with tanh `gelu`.
    pub gelu_is_tanh: bool,
    /// Sliding windows.
    pub window: WindowRule,
    /// What `layer_types` calls layers that attend to everything, and those with a window.
    pub layer_types: [&'static str; 2],
    /// Layers rotate only where `position_embedding_type` is "rope".
    pub rope_by_key: bool,
    /// Some layers don't rotate: `no_rope_layers`, or every `no_rope_layer_interval`th.
    pub layers_without_rope: bool,
    /// Where there are windows, layers that attend to everything don't rotate.
    pub rope_in_windows: bool,
    /// Layers with a window rotate by a table of their own, unscaled: its base where `rope_local_base_freq` is absent.
    pub local_rope: Option<f64>,
    /// Scores are scaled by the root of `query_pre_attn_scalar` instead of the head's width.
    pub query_pre_attn_scalar: bool,
    /// Embeddings are multiplied by the root of their width.
    pub scaled_embedding: bool,
    /// Has `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling`.
    pub multipliers: bool,
    /// Logits are multiplied by `logit_scale`; the value where the key is absent.
    pub logit_scale: Option<f64>,
    /// A `dynamic` scaling with `alpha` is one of the base, whatever the length of the text.
    pub ntk_alpha: bool,
    /// `partial_rotary_factor` where the key is absent, if the family has it.
    pub partial_rotary: Option<f64>,
    /// The class scales RoPE where a configuration doesn't say how: it must.
    pub scaled_rope: bool,
    /// Queries are scaled from `original_max_position_embeddings` on, by `llama_4_scaling_beta`.
    pub late_query_scale: bool,
    /// RoPE has sections for images, which are one for text.
    pub mrope: bool,
    /// `rope_theta` where no key gives it.
    pub default_rope_theta: f64,
    /// `tie_word_embeddings` where the key is absent.
    pub default_tie_word_embeddings: bool,
    /// `rms_norm_eps` where the key is absent.
    pub default_rms_norm_eps: f64,
    /// What hidden states are multiplied by so that fp16 holds them, a power of two; a manifest can
    /// say otherwise. The maths stay the same: see the module `scale`.
    pub hidden_scale: f64,
    /// Whether scores of attention are capped, by `attn_logit_softcapping`.
    pub scores_softcap: Softcap,
    /// Whether logits are capped, by `final_logit_softcapping`.
    pub logits_softcap: Softcap,
    /// Layers of Gemma 4: those that attend to everything have heads of their own size, the last ones look at the keys
    /// and values of others, values are normed, scores aren't scaled, each layer may be told of the tokens and ends
    /// with a factor.
    pub gemma4_layers: bool,
    /// `use_bidirectional_attention` makes it an encoder.
    pub may_be_bidirectional: bool,
    /// Keys that have one harmless value only, which is JSON; 0 and 1 are also false and true.
    pub inert_keys: &'static [(&'static str, &'static str)],
    /// Keys that don't touch the maths, beside [`NEUTRAL_KEYS`](super::table::NEUTRAL_KEYS).
    pub neutral_keys: &'static [&'static str],
}

impl DecoderFamily {
    /// Whether no layer has a feed-forward network other than experts.
    pub fn has_only_experts(&self) -> bool {
        self.mixture == MixtureKind::DepthRouted || self.shared_expert == SharedExpertRule::Gated
    }

    /// Whether published files have a layer that guesses the token after the next.
    pub fn predicts_tokens(&self) -> bool {
        self.unused_tensors == NEXT_TOKENS
    }
}

/// What all rows begin with.
pub(crate) const LLAMA: DecoderFamily = DecoderFamily {
    name: "llama",
    wrappers: &[],
    gguf: &["llama"],
    key_names: &[],
    tensor_names: &[],
    gguf_names: &[],
    unused_tensors: &[],
    default_sizes: &[],
    rotates_neighbours: false,
    gguf_interleaved: true,
    mixer: MixerKind::Attention,
    nominal_intermediate_size: false,
    mixture: MixtureKind::None,
    shared_expert: SharedExpertRule::None,
    residual_scaling: false,
    sinks: false,
    gated_attention: false,
    qk_norm: QkNorm::None,
    qk_norm_if: None,
    form: LayerFormRule::Always(LayerForm::Sequential),
    norms: NormPlacement::Pre,
    norm: NormKind::RootMeanSquare,
    norm_plus_one: false,
    fused: false,
    fused_by_head: false,
    fused_mlp: false,
    plain_mlp: false,
    qkv_bias: Bias::Key("attention_bias"),
    output_bias: Bias::Key("attention_bias"),
    mlp_bias: Bias::Key("mlp_bias"),
    head_bias: Bias::Never,
    activation: Activation::Silu,
    gelu_is_tanh: false,
    window: WindowRule::None,
    layer_types: ["full_attention", "sliding_attention"],
    rope_by_key: false,
    layers_without_rope: false,
    rope_in_windows: false,
    local_rope: None,
    query_pre_attn_scalar: false,
    scaled_embedding: false,
    multipliers: false,
    logit_scale: None,
    ntk_alpha: false,
    partial_rotary: None,
    scaled_rope: false,
    late_query_scale: false,
    mrope: false,
    default_rope_theta: 10000.0,
    default_tie_word_embeddings: false,
    default_rms_norm_eps: 1e-6,
    hidden_scale: 1.0,
    scores_softcap: Softcap::Never,
    logits_softcap: Softcap::Never,
    gemma4_layers: false,
    may_be_bidirectional: false,
    inert_keys: &[],
    neutral_keys: &[],
};

/// A layer that guesses the token after the next.
pub(crate) const NEXT_TOKENS: UnusedTensors = &[("mtp.*", "next-token layer, not part of the model")];
