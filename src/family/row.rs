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

/// A row of the table: the differences between a family and plain pre-norm decoders with RoPE and gated networks.
#[derive(Debug)]
pub struct DecoderFamily {
    /// Name: transformers' `model_type`.
    pub name: &'static str,
    /// Names of architectures, keys and tensors.
    pub names: SourceNames,
    /// Token mixers.
    pub attention: AttentionRules,
    /// Rotary embedding.
    pub rope: RopeRules,
    /// Norms.
    pub norms: NormRules,
    /// Feed-forward networks.
    pub network: NetworkRules,
    /// Residual stream, from the embedding to the logits.
    pub residual: ResidualRules,
    /// Structure of the layers.
    pub layers: LayerStructure,
}

/// Names of a family's architectures, keys and tensors in sources.
#[derive(Debug)]
pub struct SourceNames {
    /// Model types of multimodal configurations whose `text_config` is of this family.
    pub wrappers: &'static [&'static str],
    /// Values of `general.architecture` in GGUF files.
    pub gguf: &'static [&'static str],
    /// Keys with other names in this family: (usual name, name here).
    pub keys: &'static [(&'static str, &'static str)],
    /// Tensors with other names in transformers: (usual name, name here).
    pub tensors: &'static [(&'static str, &'static str)],
    /// Tensors with other names in GGUF: (usual name in transformers, name in GGUF).
    pub gguf_tensors: &'static [(&'static str, &'static str)],
    /// Name of the list of layers in transformers.
    pub layers: &'static str,
    /// Whether projections of layers are stored as `[in, out]`, as transformers' `Conv1D` has them. GGUF files contain
    /// `[out, in]`.
    pub transposed: bool,
    /// Prefixes of tensors in published checkpoints: of text models, and within multimodal models.
    pub prefixes: [&'static str; 2],
    /// Patterns of tensors that published checkpoints have in place of the usual ones, for plans without weights.
    pub published: &'static [&'static str],
    /// Tensors of published checkpoints that the model doesn't use.
    pub unused: UnusedTensors,
    /// Sizes with a default in the class, which configurations may omit.
    pub default_sizes: &'static [(&'static str, u64)],
    /// Keys with a single harmless value, as JSON; 0 and 1 are also false and true.
    pub inert_keys: &'static [(&'static str, &'static str)],
    /// Keys that don't affect the maths, beside [`NEUTRAL_KEYS`](super::table::NEUTRAL_KEYS).
    pub neutral_keys: &'static [&'static str],
    /// Boolean keys that GGUF files don't have.
    pub gguf_flags: &'static [TensorFlag],
}

/// A boolean configuration key that GGUF files express by a tensor.
#[derive(Debug)]
pub struct TensorFlag {
    /// Key.
    pub key: &'static str,
    /// Tensor; `{full}` stands for the first full-attention layer.
    pub tensor: &'static str,
    /// Value if the tensor exists; otherwise the key has the opposite value.
    pub present: bool,
}

/// Token mixers of a family.
#[derive(Debug)]
pub struct AttentionRules {
    /// Mixer of layers that aren't softmax attention; attention of another kind is the mixer of all layers.
    pub mixer: MixerKind,
    /// Layout of q, k and v in checkpoints.
    pub qkv: QkvLayout,
    /// Biases of q, k and v.
    pub qkv_bias: Bias,
    /// Bias of the output projection.
    pub output_bias: Bias,
    /// Whether each head has a sink, a score without a token (arXiv:2309.17453).
    pub sinks: bool,
    /// Whether each head's output has a gate, which is projected with its queries.
    pub gated: bool,
    /// Place of query-key norms.
    pub qk_norm: QkNorm,
    /// Key that enables query-key norms; `None` if they don't depend on a key.
    pub qk_norm_key: Option<&'static str>,
    /// Sliding windows.
    pub window: WindowRule,
    /// Names of full-attention layers and of layers with a window in `layer_types`.
    pub layer_types: [&'static str; 2],
    /// Whether scores are scaled by the root of `query_pre_attn_scalar` instead of the head width.
    pub query_pre_attn_scalar: bool,
    /// Whether queries are scaled from `original_max_position_embeddings` on, by `llama_4_scaling_beta`.
    pub late_query_scale: bool,
    /// Soft cap of the scores, `attn_logit_softcapping`.
    pub softcap: Softcap,
    /// Whether queries, keys and values are clipped to `-clip_qkv..clip_qkv` if the key is a number.
    pub clips: bool,
    /// Encoders of the family.
    pub bidirectional: Bidirectional,
}

/// Models of a family whose attention is bidirectional.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bidirectional {
    /// No model.
    Never,
    /// Models with `use_bidirectional_attention`; half of a window lies on each side of a token.
    ByKey,
    /// All models; a window is the distance that a token sees on each side.
    Always,
}

/// Layout of q, k and v in checkpoints of transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkvLayout {
    /// A tensor for each.
    Separate,
    /// One tensor with all of q, then k, then v.
    Fused,
    /// One tensor with q, k and v of each head together. In GGUF they are as in [`Fused`](QkvLayout::Fused).
    FusedByHead,
}

/// Rotary embedding of a family.
#[derive(Debug)]
pub struct RopeRules {
    /// Rotated pairs of dimensions.
    pub pairs: RopePairs,
    /// Layers that rotate.
    pub layers: RopeLayers,
    /// Default of `rope_theta`.
    pub theta: f64,
    /// Default of `partial_rotary_factor`, if the family has the key.
    pub partial: Option<f64>,
    /// Default of `rope_local_base_freq`, if layers with a window have an unscaled table of their own.
    pub local_theta: Option<f64>,
    /// Whether the class scales RoPE by default, so that configurations must state the scaling.
    pub scaled: bool,
    /// Whether a `dynamic` scaling with `alpha` scales the base independently of the text's length.
    pub ntk_alpha: bool,
    /// Whether RoPE has sections for images, which are equal for text.
    pub sections: bool,
}

/// Pairs of a head's dimensions that rotate together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// Dimensions `i` and `i + dim / 2`.
    Halves,
    /// As [`Halves`](RopePairs::Halves); GGUF files interleave the rows of q and k for neighbouring dimensions.
    NeighboursInGguf,
    /// Dimensions `2 i` and `2 i + 1`.
    Neighbours,
}

/// Layers that rotate queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayers {
    /// All layers.
    All,
    /// All layers if `position_embedding_type` is "rope", else none.
    ByKey,
    /// All layers except those of `no_rope_layers`, or every `no_rope_layer_interval`th.
    Listed,
    /// Layers with a window, in models with windows; else all layers.
    Windowed,
    /// No layer.
    None,
}

/// Norms of a family.
#[derive(Debug)]
pub struct NormRules {
    /// Kind.
    pub kind: NormKind,
    /// Place in a layer.
    pub placement: NormPlacement,
    /// Whether the gain is 1 + w. GGUF files contain the gain.
    pub plus_one: bool,
    /// Default of `rms_norm_eps`.
    pub eps: f64,
}

/// Feed-forward networks of a family.
#[derive(Debug)]
pub struct NetworkRules {
    /// Mixtures of experts.
    pub mixture: MixtureKind,
    /// Shared expert.
    pub shared_expert: SharedExpertRule,
    /// Whether `intermediate_size` is nominal: two thirds of it are used, rounded up.
    pub nominal_width: bool,
    /// Whether one tensor contains gate and up.
    pub fused: bool,
    /// Whether the network has no gate.
    pub plain: bool,
    /// Whether the network is four times as wide as hidden states unless `intermediate_size` is a number.
    pub fourfold: bool,
    /// Biases of the projections.
    pub bias: Bias,
    /// Activation.
    pub activation: Activation,
    /// Whether older configurations call the approximation with tanh `gelu`.
    pub gelu_is_tanh: bool,
}

/// Residual stream of a family, from the embedding to the logits.
#[derive(Debug)]
pub struct ResidualRules {
    /// Order of mixer and feed-forward network.
    pub form: LayerFormRule,
    /// Whether sums and embedding have biases and scales.
    pub scaling: bool,
    /// Whether embeddings are multiplied by the root of their width.
    pub scaled_embedding: bool,
    /// Whether learned positions are added to embeddings.
    pub positions: bool,
    /// Whether the family has `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and
    /// `logits_scaling`.
    pub multipliers: bool,
    /// Power-of-two factor of hidden states to fit fp16, unless the manifest states one. The maths doesn't change (see
    /// the module `scale`).
    pub hidden_scale: f64,
    /// Default of `tie_word_embeddings`.
    pub tied: bool,
    /// Bias of the LM head.
    pub head_bias: Bias,
    /// Default of `logit_scale`, if logits are multiplied by it.
    pub logit_scale: Option<f64>,
    /// Soft cap of the logits, `final_logit_softcapping`.
    pub logits_softcap: Softcap,
}

/// Structure of a family's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerStructure {
    /// Layers with equal heads, each with keys and values of its own.
    Uniform,
    /// Gemma 4: full-attention layers have their own head size, the last layers use keys and values of others, values
    /// are normed, scores aren't scaled, and layers may have per-layer embeddings and end with a factor.
    Gemma4,
    /// EmbeddingGemma 2: as Gemma 4, but each layer has keys and values of its own, and per-layer embeddings are
    /// projections of the token embeddings.
    EmbeddingGemma2,
}

impl DecoderFamily {
    /// Returns whether no layer has a feed-forward network other than experts.
    pub fn has_only_experts(&self) -> bool {
        self.network.mixture == MixtureKind::DepthRouted || self.network.shared_expert == SharedExpertRule::Gated
    }

    /// Returns whether published checkpoints have a next-token layer.
    pub fn predicts_tokens(&self) -> bool {
        self.names.unused == NEXT_TOKENS
    }

    /// Returns whether layers have the structure of Gemma 4.
    pub fn is_gemma4(&self) -> bool {
        self.layers == LayerStructure::Gemma4
    }

    /// Returns whether layers have the structure of EmbeddingGemma 2.
    pub fn is_embedding_gemma2(&self) -> bool {
        self.layers == LayerStructure::EmbeddingGemma2
    }

    /// Returns whether full-attention layers have their own head size, values are normed, scores aren't scaled and
    /// layers end with a factor.
    pub fn has_gemma4_layers(&self) -> bool {
        self.layers != LayerStructure::Uniform
    }
}

/// Defaults of rows.
pub(crate) const FAMILY: DecoderFamily = DecoderFamily {
    name: "",
    names: NAMES,
    attention: ATTENTION,
    rope: ROPE,
    norms: NORMS,
    network: NETWORK,
    residual: RESIDUAL,
    layers: LayerStructure::Uniform,
};

/// Default names.
pub(crate) const NAMES: SourceNames = SourceNames {
    wrappers: &[],
    gguf: &[],
    keys: &[],
    tensors: &[],
    gguf_tensors: &[],
    layers: "layers",
    transposed: false,
    prefixes: ["model.", "model.language_model."],
    published: &[],
    unused: &[],
    default_sizes: &[],
    inert_keys: &[],
    neutral_keys: &[],
    gguf_flags: &[],
};

/// Default token mixers.
pub(crate) const ATTENTION: AttentionRules = AttentionRules {
    mixer: MixerKind::Attention,
    qkv: QkvLayout::Separate,
    qkv_bias: Bias::Key("attention_bias"),
    output_bias: Bias::Key("attention_bias"),
    sinks: false,
    gated: false,
    qk_norm: QkNorm::None,
    qk_norm_key: None,
    window: WindowRule::None,
    layer_types: ["full_attention", "sliding_attention"],
    query_pre_attn_scalar: false,
    late_query_scale: false,
    softcap: Softcap::Never,
    clips: false,
    bidirectional: Bidirectional::Never,
};

/// Default rotary embedding.
pub(crate) const ROPE: RopeRules = RopeRules {
    pairs: RopePairs::Halves,
    layers: RopeLayers::All,
    theta: 10000.0,
    partial: None,
    local_theta: None,
    scaled: false,
    ntk_alpha: false,
    sections: false,
};

/// Default norms.
pub(crate) const NORMS: NormRules =
    NormRules { kind: NormKind::RootMeanSquare, placement: NormPlacement::Pre, plus_one: false, eps: 1e-6 };

/// Default feed-forward networks.
pub(crate) const NETWORK: NetworkRules = NetworkRules {
    mixture: MixtureKind::None,
    shared_expert: SharedExpertRule::None,
    nominal_width: false,
    fused: false,
    plain: false,
    fourfold: false,
    bias: Bias::Never,
    activation: Activation::Silu,
    gelu_is_tanh: false,
};

/// Default residual stream.
pub(crate) const RESIDUAL: ResidualRules = ResidualRules {
    form: LayerFormRule::Always(LayerForm::Sequential),
    scaling: false,
    scaled_embedding: false,
    positions: false,
    multipliers: false,
    hidden_scale: 1.0,
    tied: false,
    head_bias: Bias::Never,
    logit_scale: None,
    logits_softcap: Softcap::Never,
};

/// Next-token layer.
pub(crate) const NEXT_TOKENS: UnusedTensors = &[("mtp.*", "next-token layer, not part of the model")];
