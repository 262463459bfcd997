//! What a row of the family table says: the differences between decoders, as types.

use serde::Serialize;

/// Where query-key norms sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// On each head, before the rotation.
    PerHead,
    /// The same, where each head has a gain of its own.
    PerHeadOwn,
    /// On each head, after the rotation.
    PerHeadRotated,
    /// Over all heads at once, before the rotation.
    WholeWidth,
}

/// How the mixer and the feed-forward network of a layer lie to each other.
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

/// Which form a family's layers have; sequential where it isn't the form that is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerFormRule {
    /// This one.
    Always(LayerForm),
    /// This one where the key of the configuration is true.
    Key(&'static str, LayerForm),
    /// This one but where the key of the configuration is false.
    Unless(&'static str, LayerForm),
}

/// What norms are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * w`
    RootMeanSquare,
    /// The same of what is left when the mean is taken away, and a bias.
    Layer,
    /// The same without a bias.
    LayerWithoutBias,
}

impl NormKind {
    /// Whether the mean is taken away.
    pub fn is_centred(self) -> bool {
        self != NormKind::RootMeanSquare
    }

    /// Whether it ends with a bias.
    pub fn has_bias(self) -> bool {
        self == NormKind::Layer
    }
}

/// Where the norms of a layer sit.
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

/// Activation of the gate in a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// GELU by its approximation with tanh.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
}

impl Activation {
    /// What configurations call it.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Activation::Silu => &["silu", "swish"],
            Activation::GeluTanh => &["gelu_pytorch_tanh", "gelu_new"],
            Activation::Gelu => &["gelu"],
        }
    }
}

/// What mixes tokens in the layers.
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
    /// Softmax attention and Mamba-2 beside each other, on the same input.
    AttentionAndMamba2,
}

impl MixerKind {
    /// Whether it looks at tokens through a mask, with keys and values in a cache.
    pub fn attends(self) -> bool {
        matches!(self, MixerKind::Attention | MixerKind::Cca | MixerKind::AttentionAndMamba2)
    }

    /// Whether the tokens of a call go through a linear recurrence at once, which takes their order as an input.
    pub fn scans(self) -> bool {
        matches!(self, MixerKind::DeltaNet | MixerKind::Mamba2 | MixerKind::AttentionAndMamba2)
    }

    /// What `layer_types` calls such a layer, where there are others.
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

/// What becomes of a router's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterScores {
    /// A sigmoid, each expert for itself.
    Sigmoid,
    /// A softmax over all experts.
    Softmax,
    /// A softmax over the chosen ones: their weights sum to 1.
    ChosenSoftmax,
}

/// Which mixtures of experts the layers have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixtureKind {
    /// None.
    None,
    /// Behind the first `num_dense_layers`; weights by sigmoid, and what is added to them for choosing.
    Sigmoid,
    /// In all layers; weights by softmax, over the chosen ones where `norm_topk_prob`.
    Softmax,
    /// In all layers; weights by softmax over the chosen ones.
    ChosenSoftmax,
    /// In all layers; weights by softmax, over the chosen ones unless `norm_topk_prob` is false.
    ChosenSoftmaxUnless,
    /// In all layers, unless `num_local_experts` is 0; weights by softmax over the chosen ones.
    ChosenSoftmaxIfAny,
    /// In all layers; weights by softmax over the chosen ones, biases everywhere, and gates and ups held below `swiglu_limit`.
    Clamped,
    /// Where `enable_moe_block`, in all layers, beside a dense network; weights by softmax over the chosen ones.
    BesideDense,
    /// In all layers, behind routers that pass on a state of `router_hidden_size`.
    DepthRouted,
}

/// Whether layers with experts have one that every token is given, beside the chosen ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedExpertRule {
    /// No.
    None,
    /// Of width `shared_expert_intermediate_size`, times `sigmoid(w x)`.
    Gated,
    /// Of width `shared_intermediate_size`, with gate and up in one tensor; the only network where there are no experts.
    Fused,
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
    /// But where this key of the configuration is false.
    Unless(&'static str),
}

/// Whether something is held between minus and plus a cap, by `cap tanh(x / cap)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Softcap {
    /// Never.
    Never,
    /// By its key of the configuration; the value where it is absent.
    Key(Option<f64>),
}

/// Which layers attend through a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRule {
    /// None.
    None,
    /// Every layer, where `sliding_window` is a number; the value where the key is absent.
    Every(Option<u64>),
    /// Every layer, where `use_sliding_window`.
    EveryIfUsed,
    /// Where `use_sliding_window`, the layers from `max_window_layers` on, or as `layer_types` says.
    FromLayer,
    /// Where `use_sliding_window`, the layers without rotation, or as `layer_types` says.
    WithoutRope,
    /// All but every so manieth layer (`sliding_window_pattern`, or this where the key is absent), or as `layer_types` says.
    Pattern(u64),
    /// The same where `sliding_window` is a number; none where it is null.
    PatternOrNone(u64),
    /// As `layer_types` says; none where there is no such key.
    Types,
}

/// Patterns of transformers' names, and why the model has no part in such tensors.
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
    pub neighbours_rotate: bool,
    /// In GGUF, the rows of q and k are interleaved for rotation of neighbours and must be put back.
    pub gguf_interleaved: bool,
    /// What mixes tokens in the layers that aren't softmax attention, if there are such; attention of another kind does so
    /// in all layers.
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
    pub rope_if_said: bool,
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
    /// Layers of Gemma 4: those that attend to everything have heads of their own size, the last ones look at the keys and
    /// values of others, values are normed, scores aren't scaled, each layer may be told of the tokens and ends with a factor.
    pub gemma4_layers: bool,
    /// `use_bidirectional_attention` makes it an encoder.
    pub may_look_both_ways: bool,
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
    neighbours_rotate: false,
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
    rope_if_said: false,
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
    may_look_both_ways: false,
    inert_keys: &[],
    neutral_keys: &[],
};

/// A layer that guesses the token after the next.
pub(crate) const NEXT_TOKENS: UnusedTensors = &[("mtp.*", "guesses more than one token: no part of the model")];
