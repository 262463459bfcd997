//! The configuration of a decoder, resolved: every default filled in, every rule applied.
//!
//! GGUF metadata is first put into the words of `config.json` ([`gguf`]); then one reader serves both.

mod gemma4;
pub mod gguf;
pub mod keys;
mod layers;
mod mamba2;
pub mod onnx;
pub(super) mod rope;

use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::error::FamilyError;
use super::rope::{LateQueryScale, RopeConfig};
use super::row::{
    Activation, Bias, DecoderFamily, LayerForm, LayerFormRule, MixerKind, MixtureKind, NormKind, NormPlacement, QkNorm,
    RouterScores, SharedExpertRule, Softcap,
};
use super::table::NEUTRAL_KEYS;
use keys::Keys;
pub use mamba2::{BlockMultipliers, Mamba2Config, Mamba2Norm};

/// Tensors of multimodal models that the text model has no part in.
pub const NOT_TEXT: &[&str] = &[
    "vision_tower.*",
    "multi_modal_projector.*",
    "model.vision_tower.*",
    "model.multi_modal_projector.*",
    "model.visual.*",
    "model.audio_tower.*",
    "model.embed_vision.*",
    "model.vision_embedder.*",
    "model.embed_audio.*",
];

/// The text model's configuration within a multimodal one.
///
/// # Errors
/// When there is none.
pub fn text_config(
    place: &str,
    config: &Map<String, Json>,
    family: &DecoderFamily,
) -> Result<Map<String, Json>, FamilyError> {
    let keys = Keys::new(place, "", config);
    let Some(Json::Object(text)) = keys.get("text_config") else {
        return Err(keys.value("text_config", &format!("the configuration of a {} model", family.name)));
    };
    let mut text = text.clone();
    // tying is a matter of the whole model
    if let Some(tied) = keys.bool("tie_word_embeddings")? {
        text.insert("tie_word_embeddings".into(), Json::Bool(tied));
    }
    Ok(text)
}

/// A decoder.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecoderConfig {
    /// Family.
    pub family: &'static str,
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Width of the feed-forward network.
    pub intermediate_size: u64,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: u64,
    /// Key-value heads; divides the query heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// Longest text.
    pub max_position_embeddings: u64,
    /// Queries are scaled by their position.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub late_query_scale: Option<LateQueryScale>,
    /// Epsilon of all norms.
    pub rms_norm_eps: f64,
    /// The LM head is the embedding.
    pub tie_word_embeddings: bool,
    /// Tokens see those on both sides.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub bidirectional: bool,
    /// Vectors of each token for each layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_layer_embedding: Option<PerLayerEmbeddingConfig>,
    /// Query-key norms.
    pub qk_norm: QkNorm,
    /// Each head of values is normed, without a gain.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub value_norm: bool,
    /// Place of the norms.
    pub norms: NormPlacement,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub output_bias: bool,
    /// Biases in the feed-forward network.
    pub mlp_bias: bool,
    /// Bias of the LM head.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub head_bias: bool,
    /// What norms are.
    #[serde(skip_serializing_if = "is_root_mean_square")]
    pub norm: NormKind,
    /// How the mixer and the feed-forward network of a layer lie to each other.
    #[serde(skip_serializing_if = "is_sequential")]
    pub form: LayerForm,
    /// The source holds q, k, v in one tensor.
    pub fused: bool,
    /// The source holds gate and up in one tensor.
    #[serde(skip)]
    pub fused_mlp: bool,
    /// The feed-forward network has no gate.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub plain_mlp: bool,
    /// Among the scores is one for each head, of no token.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sinks: bool,
    /// Queries come with a gate on what attention gives.
    pub gated_attention: bool,
    /// Shape of the layers with a short convolution.
    pub short_conv: Option<ShortConvConfig>,
    /// Shape of compressed convolutional attention.
    pub cca: Option<CcaConfig>,
    /// Both sides of sums with the residual stream have biases and scales.
    pub residual_scaling: bool,
    /// Experts of the layers that have some.
    pub experts: Option<ExpertsConfig>,
    /// Shape of the layers with a DeltaNet.
    pub delta_net: Option<DeltaNetConfig>,
    /// Shape of the layers with Mamba-2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mamba2: Option<Mamba2Config>,
    /// Factors that go into the weights of blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_multipliers: Option<BlockMultipliers>,
    /// Activation of the feed-forward network's gate.
    pub activation: Activation,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Rotary embedding of the layers with a window, where it is another.
    pub rope_local: Option<RopeConfig>,
    /// What differs from layer to layer.
    pub layers: Vec<LayerConfig>,
    /// Multiplied to the scores before softmax.
    pub attention_scale: f64,
    /// Holds the scores between minus and plus this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_softcap: Option<f64>,
    /// Holds the logits between minus and plus this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits_softcap: Option<f64>,
    /// Multiplied to the embeddings.
    pub embedding_multiplier: f64,
    /// Multiplied to what a block adds to the residual stream.
    pub residual_multiplier: f64,
    /// What hidden states are multiplied by so that fp16 holds them.
    pub hidden_scale: f64,
    /// Divides the logits.
    pub logits_scaling: f64,
}

/// What differs from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerConfig {
    /// What mixes tokens.
    pub mixer: MixerKind,
    /// Queries and keys are rotated.
    pub rope: bool,
    /// Tokens that the layer sees, the token itself included; all if absent.
    pub window: Option<u64>,
    /// Its heads, where they aren't the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<LayerHeads>,
    /// Values are what the key projection gives.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub value_is_key: bool,
    /// The layer whose keys and values it looks at, if not its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys_of: Option<usize>,
    /// Width of its feed-forward network, where it isn't the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intermediate_size: Option<u64>,
}

impl LayerConfig {
    /// A layer like all others.
    pub fn new(mixer: MixerKind, rope: bool, window: Option<u64>) -> Self {
        LayerConfig { mixer, rope, window, heads: None, value_is_key: false, keys_of: None, intermediate_size: None }
    }
}

/// Heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerHeads {
    /// Key-value heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
}

/// Vectors of each token for each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PerLayerEmbeddingConfig {
    /// Tokens that have them.
    pub vocab_size: u64,
    /// Elements of a vector.
    pub width: u64,
}

/// Gated short convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShortConvConfig {
    /// Tokens that the convolution sees.
    pub kernel: u64,
    /// Its projections and itself have biases.
    pub bias: bool,
}

/// Compressed convolutional attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CcaConfig {
    /// Tokens that the convolution of single channels sees.
    pub channel_kernel: u64,
    /// Tokens that the convolution of heads sees.
    pub head_kernel: u64,
}

/// Mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExpertsConfig {
    /// First layers, which have none.
    pub num_dense_layers: usize,
    /// Experts of a layer.
    pub num_experts: u64,
    /// Experts that a token is given.
    pub num_experts_per_tok: u64,
    /// Width of an expert.
    pub moe_intermediate_size: u64,
    /// What becomes of the router's outputs.
    #[serde(skip_serializing_if = "is_sigmoid")]
    pub scores: RouterScores,
    /// Gates and ups are held below a limit; experts and router have biases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clamped: Option<ClampedExperts>,
    /// The weights of the chosen ones are divided by their sum.
    pub norm_topk_prob: bool,
    /// A bias is added to the scores for choosing.
    pub use_expert_bias: bool,
    /// Multiplied to the weights.
    pub routed_scaling_factor: f64,
    /// A dense network works beside them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub beside_dense: bool,
    /// Width of the state that routers pass on to those of the next layer, if they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_hidden_size: Option<u64>,
    /// The expert that every token is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedExpertConfig>,
}

/// An expert that every token is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SharedExpertConfig {
    /// Its width.
    pub intermediate_size: u64,
    /// Its output is multiplied by a sigmoid for each token.
    pub gated: bool,
}

/// Experts whose gates and ups are held below a limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClampedExperts {
    /// Gain of the sigmoid.
    pub swiglu_alpha: f64,
    /// The limit.
    pub swiglu_limit: f64,
}

impl ClampedExperts {
    /// By keys that have defaults.
    pub fn read(keys: &Keys<'_>) -> Result<Self, FamilyError> {
        let number = |key: &str, default: f64| Ok(keys.f64(key)?.unwrap_or(default));
        match number("swiglu_limit", 7.0)? {
            limit if limit <= 0.0 => Err(keys.value("swiglu_limit", "more than 0")),
            swiglu_limit => Ok(ClampedExperts { swiglu_alpha: number("swiglu_alpha", 1.702)?, swiglu_limit }),
        }
    }
}

/// Experts may be stored in MXFP4, whose tensors say it themselves; nothing else is.
fn number_format(keys: &Keys<'_>, family: &DecoderFamily, acknowledged: &[String]) -> Result<(), FamilyError> {
    let Some(quantization) = keys.object("quantization_config")? else { return Ok(()) };
    match quantization.str("quant_method")? {
        Some("mxfp4") => quantization.finish(family.name, &["dequantize", "modules_to_not_convert"], acknowledged),
        _ => Err(quantization.value("quant_method", "\"mxfp4\"")),
    }
}

/// What configurations resolved before there was another kind leave out.
fn is_sigmoid(scores: &RouterScores) -> bool {
    *scores == RouterScores::Sigmoid
}

/// The same.
fn is_root_mean_square(norm: &NormKind) -> bool {
    *norm == NormKind::RootMeanSquare
}

/// The same.
fn is_sequential(form: &LayerForm) -> bool {
    *form == LayerForm::Sequential
}

/// Gated DeltaNets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeltaNetConfig {
    /// Heads of queries and keys.
    pub num_key_heads: u64,
    /// Heads of values; a multiple.
    pub num_value_heads: u64,
    /// Width of a query or key.
    pub key_head_dim: u64,
    /// Width of a value.
    pub value_head_dim: u64,
    /// Tokens that the convolution sees.
    pub kernel: u64,
}

impl DeltaNetConfig {
    /// Rows of the queries, and of the keys.
    pub fn key_width(&self) -> u64 {
        self.num_key_heads * self.key_head_dim
    }

    /// Rows of the values.
    pub fn value_width(&self) -> u64 {
        self.num_value_heads * self.value_head_dim
    }
}

impl DecoderConfig {
    /// Reads a configuration in the words of `config.json`. `place` names the file; `acknowledged` lists keys that the
    /// user has declared harmless.
    ///
    /// # Errors
    /// A key that is missing, has an impossible value, or is not understood.
    pub fn read(
        place: &str,
        config: &Map<String, Json>,
        family: &'static DecoderFamily,
        acknowledged: &[String],
    ) -> Result<Self, FamilyError> {
        let with_defaults = gemma4::with_defaults(config, family);
        let config = with_defaults.as_ref().unwrap_or(config);
        let keys = Keys::new(place, "", config).named(family.key_names);
        let default_size = |key: &str| family.default_sizes.iter().find(|(name, _)| *name == key).map(|(_, n)| *n);
        let optional_size = |key: &str| match keys.get(key) {
            Some(_) => keys.size(key).map(Some),
            None => Ok(default_size(key)),
        };
        let size = |key: &str| keys.required(key, optional_size(key)?);
        let hidden_size = size("hidden_size")?;
        let num_attention_heads = size("num_attention_heads")?;
        let num_key_value_heads = optional_size("num_key_value_heads")?.unwrap_or(num_attention_heads);
        if num_attention_heads % num_key_value_heads != 0 {
            return Err(keys.value("num_key_value_heads", &format!("a divisor of {num_attention_heads} heads")));
        }
        let head_dim = match optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden_size % num_attention_heads == 0 => hidden_size / num_attention_heads,
            None => return Err(keys.value("hidden_size", &format!("a multiple of {num_attention_heads} heads"))),
        };
        let num_hidden_layers = size("num_hidden_layers")?;
        if num_hidden_layers > 4096 {
            return Err(keys.value("num_hidden_layers", "at most 4096"));
        }
        let num_hidden_layers = num_hidden_layers as usize;
        if let Some(name) = keys.str("hidden_act")?
            && !family.activation.names().contains(&name)
            && !(family.gelu_is_tanh && name == "gelu")
        {
            return Err(keys.value("hidden_act", &format!("\"{}\"", family.activation.names()[0])));
        }
        for (key, inert) in family.inert_keys {
            // older configurations write 0 and 1 for false and true
            let plain = |value: &Json| value.as_bool().map_or_else(|| value.to_string(), |b| u8::from(b).to_string());
            if keys.get(key).is_some_and(|value| plain(value).as_str() != *inert) {
                return Err(keys.value(key, inert));
            }
        }
        let bias = |bias: Bias| match bias {
            Bias::Never => Ok(false),
            Bias::Always => Ok(true),
            Bias::Key(key) => Ok(keys.bool(key)?.unwrap_or(false)),
            Bias::Unless(key) => Ok(keys.bool(key)?.unwrap_or(true)),
        };
        let rms_norm_eps = keys.f64("rms_norm_eps")?.unwrap_or(family.default_rms_norm_eps);
        if !(0.0..1.0).contains(&rms_norm_eps) {
            return Err(keys.value("rms_norm_eps", "between 0 and 1"));
        }
        let max_position_embeddings = size("max_position_embeddings")?;
        let multiplier = |key: &str, default: f64| match family.multipliers {
            true => match keys.f64(key)? {
                Some(0.0) => Err(keys.value(key, "not 0")),
                value => Ok(value.unwrap_or(default)),
            },
            false => Ok(default),
        };
        let attention_scale = if family.multipliers {
            multiplier("attention_multiplier", 1.0)? // granite's class default
        } else if family.gemma4_layers {
            1.0
        } else if family.query_pre_attn_scalar {
            match keys.f64("query_pre_attn_scalar")?.unwrap_or(256.0) {
                scalar if scalar > 0.0 => scalar.powf(-0.5),
                _ => return Err(keys.value("query_pre_attn_scalar", "more than 0")),
            }
        } else {
            (head_dim as f64).powf(-0.5)
        };
        let mut layers = layers::read(&keys, family, num_hidden_layers, default_size("sliding_window"))?;
        let experts = experts(&keys, family)?;
        let intermediate_size = match experts.filter(|_| family.has_only_experts()) {
            Some(experts) => experts.moe_intermediate_size, // there is no other network
            None if family.shared_expert == SharedExpertRule::Fused => size("shared_intermediate_size")?,
            None => intermediate_size(&keys, family, size("intermediate_size")?)?,
        };
        let mut heads = [LayerHeads { num_key_value_heads, head_dim }; 2];
        let mut per_layer_embedding = None;
        if family.gemma4_layers {
            let reader = gemma4::Reader { keys: &keys, family, num_attention_heads, intermediate_size };
            heads = reader.layers(&mut layers, heads[0], acknowledged)?;
            per_layer_embedding = reader.per_layer_embedding(&size)?;
        }
        let head_dims = heads.map(|heads| heads.head_dim);
        let (rope, rope_local) = rope::read(&keys, family, head_dims, max_position_embeddings, acknowledged)?;
        let late_query_scale = late_query_scale(&keys, family)?;
        if late_query_scale.is_some() && rope.rope_dim != head_dim {
            let expected = format!("{}, for queries that are scaled with their rotation", rope.rope_dim);
            return Err(keys.value("head_dim", &expected));
        }
        if family.mixture == MixtureKind::Clamped {
            number_format(&keys, family, acknowledged)?;
        }
        let beside_attention = family.mixer == MixerKind::AttentionAndMamba2;
        let read = DecoderConfig {
            family: family.name,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: size("vocab_size")?,
            max_position_embeddings,
            late_query_scale,
            rms_norm_eps,
            tie_word_embeddings: keys.bool("tie_word_embeddings")?.unwrap_or(family.default_tie_word_embeddings),
            bidirectional: family.may_look_both_ways && keys.bool("use_bidirectional_attention")?.unwrap_or(false),
            per_layer_embedding,
            qk_norm: match family.qk_norm_if {
                Some(key) if !keys.bool(key)?.unwrap_or(false) => QkNorm::None,
                _ => family.qk_norm,
            },
            value_norm: family.gemma4_layers,
            norms: family.norms,
            qkv_bias: bias(family.qkv_bias)?,
            output_bias: bias(family.output_bias)?,
            mlp_bias: bias(family.mlp_bias)?,
            head_bias: bias(family.head_bias)?,
            norm: family.norm,
            form: match family.form {
                LayerFormRule::Always(form) => form,
                LayerFormRule::Key(key, form) if keys.bool(key)?.unwrap_or(false) => form,
                LayerFormRule::Unless(key, form) if keys.bool(key)?.unwrap_or(true) => form,
                LayerFormRule::Key(..) | LayerFormRule::Unless(..) => LayerForm::Sequential,
            },
            fused: family.fused,
            fused_mlp: family.fused_mlp,
            plain_mlp: family.plain_mlp,
            sinks: family.sinks,
            gated_attention: family.gated_attention,
            short_conv: short_conv(&keys, family)?,
            cca: cca(&keys, family, num_key_value_heads * head_dim)?,
            residual_scaling: family.residual_scaling,
            delta_net: delta_net(&keys, family)?,
            mamba2: Mamba2Config::read(&keys, family, hidden_size)?,
            block_multipliers: BlockMultipliers::read(&keys, family)?,
            experts,
            activation: family.activation,
            rope,
            rope_local,
            layers,
            attention_scale,
            attention_softcap: softcap(&keys, "attn_logit_softcapping", family.scores_softcap)?,
            logits_softcap: softcap(&keys, "final_logit_softcapping", family.logits_softcap)?,
            embedding_multiplier: match family.scaled_embedding {
                true => (hidden_size as f64).sqrt(),
                false if beside_attention => keys.f64("embedding_multiplier")?.unwrap_or(1.0),
                false => multiplier("embedding_multiplier", 1.0)?,
            },
            residual_multiplier: multiplier("residual_multiplier", 1.0)?,
            hidden_scale: family.hidden_scale,
            logits_scaling: match family.logit_scale {
                None => multiplier("logits_scaling", 1.0)?,
                Some(default) => match keys.f64("logit_scale")?.unwrap_or(default) {
                    scale if scale > 0.0 => 1.0 / scale,
                    _ => return Err(keys.value("logit_scale", "more than 0")),
                },
            },
        };
        let neutral = [NEUTRAL_KEYS, family.neutral_keys].concat();
        keys.finish(family.name, &neutral, acknowledged)?;
        Ok(read)
    }

    /// The rotary embedding of a layer.
    pub fn rope_of(&self, layer: usize) -> &RopeConfig {
        self.rope_local.as_ref().filter(|_| self.layers[layer].window.is_some()).unwrap_or(&self.rope)
    }

    /// The heads of a layer.
    pub fn heads_of(&self, layer: usize) -> LayerHeads {
        let Self { num_key_value_heads, head_dim, .. } = *self;
        self.layers[layer].heads.unwrap_or(LayerHeads { num_key_value_heads, head_dim })
    }

    /// Rows of a layer's query projection.
    pub fn query_width(&self, layer: usize) -> u64 {
        self.num_attention_heads * self.heads_of(layer).head_dim
    }

    /// Rows of a layer's key projection, and of its value projection.
    pub fn key_width(&self, layer: usize) -> u64 {
        let heads = self.heads_of(layer);
        heads.num_key_value_heads * heads.head_dim
    }

    /// Whether other layers look at a layer's keys and values, behind `end` if it is given.
    pub fn is_looked_at(&self, layer: usize, from: usize) -> bool {
        self.layers[from..].iter().any(|other| other.keys_of == Some(layer))
    }
}

/// How queries of late positions are scaled, if they are.
fn late_query_scale(keys: &Keys<'_>, family: &DecoderFamily) -> Result<Option<LateQueryScale>, FamilyError> {
    if !family.late_query_scale {
        return Ok(None);
    }
    let Some(rope) = keys.object("rope_scaling")?.or(keys.object("rope_parameters")?) else { return Ok(None) };
    let Some(beta) = rope.f64("llama_4_scaling_beta")?.filter(|beta| *beta != 0.0) else { return Ok(None) };
    Ok(Some(LateQueryScale { beta, from: rope.size("original_max_position_embeddings")? }))
}

/// The cap of a key.
fn softcap(keys: &Keys<'_>, key: &str, rule: Softcap) -> Result<Option<f64>, FamilyError> {
    match rule {
        Softcap::Never => Ok(None),
        Softcap::Key(default) if !keys.has(key) => Ok(default),
        Softcap::Key(_) => match keys.f64(key)? {
            Some(cap) if cap <= 0.0 => Err(keys.value(key, "more than 0, or null")),
            cap => Ok(cap),
        },
    }
}

/// The width of the feed-forward network. Where it is nominal: two thirds of it, times a factor, rounded up.
fn intermediate_size(keys: &Keys<'_>, family: &DecoderFamily, given: u64) -> Result<u64, FamilyError> {
    if !family.nominal_intermediate_size || !keys.bool("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        if family.nominal_intermediate_size {
            keys.accept("block_ffn_dim_multiplier");
            keys.accept("block_multiple_of");
        }
        return Ok(given);
    }
    let width = (2.0 * given as f64 / 3.0) as u64;
    // null means that nothing is rounded, either
    if keys.has("block_ffn_dim_multiplier") && keys.get("block_ffn_dim_multiplier").is_none() {
        keys.accept("block_multiple_of");
        return Ok(width);
    }
    let factor = keys.f64("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = keys.u64("block_multiple_of")?.unwrap_or(256);
    if factor <= 0.0 || multiple == 0 || multiple > u64::from(u32::MAX) {
        return Err(keys.value("block_multiple_of", "a positive number, as block_ffn_dim_multiplier"));
    }
    Ok(((factor * width as f64) as u64).next_multiple_of(multiple))
}

fn short_conv(keys: &Keys<'_>, family: &DecoderFamily) -> Result<Option<ShortConvConfig>, FamilyError> {
    if family.mixer != MixerKind::ShortConv {
        return Ok(None);
    }
    let kernel = keys.u64("conv_L_cache")?.unwrap_or(3);
    if !(2..=64).contains(&kernel) {
        return Err(keys.value("conv_L_cache", "from 2 to 64"));
    }
    Ok(Some(ShortConvConfig { kernel, bias: keys.bool("conv_bias")?.unwrap_or(false) }))
}

fn cca(keys: &Keys<'_>, family: &DecoderFamily, value_width: u64) -> Result<Option<CcaConfig>, FamilyError> {
    if family.mixer != MixerKind::Cca {
        return Ok(None);
    }
    if !value_width.is_multiple_of(2) {
        return Err(
            keys.value("head_dim", "an even number of values for each token: half of them come from the one before")
        );
    }
    let kernel = |key: &str| match keys.u64(key)?.unwrap_or(2) {
        kernel @ 1..=64 => Ok(kernel),
        _ => Err(keys.value(key, "from 1 to 64")),
    };
    let (channel_kernel, head_kernel) = (kernel("cca_time0")?, kernel("cca_time1")?);
    if channel_kernel + head_kernel < 3 {
        return Err(keys.value("cca_time0", "at least 2, or cca_time1"));
    }
    Ok(Some(CcaConfig { channel_kernel, head_kernel }))
}

fn delta_net(keys: &Keys<'_>, family: &DecoderFamily) -> Result<Option<DeltaNetConfig>, FamilyError> {
    if family.mixer != MixerKind::DeltaNet {
        return Ok(None);
    }
    let size = |key: &str, default: u64| match keys.get(key) {
        Some(_) => keys.size(key),
        None => Ok(default),
    };
    let config = DeltaNetConfig {
        num_key_heads: size("linear_num_key_heads", 16)?,
        num_value_heads: size("linear_num_value_heads", 32)?,
        key_head_dim: size("linear_key_head_dim", 128)?,
        value_head_dim: size("linear_value_head_dim", 128)?,
        kernel: size("linear_conv_kernel_dim", 4)?,
    };
    if !config.num_value_heads.is_multiple_of(config.num_key_heads) {
        return Err(keys.value("linear_num_value_heads", &format!("a multiple of {} key heads", config.num_key_heads)));
    }
    if !(2..=64).contains(&config.kernel) {
        return Err(keys.value("linear_conv_kernel_dim", "from 2 to 64"));
    }
    Ok(Some(config))
}

fn experts(keys: &Keys<'_>, family: &DecoderFamily) -> Result<Option<ExpertsConfig>, FamilyError> {
    let size = |key: &str, default: u64| if keys.get(key).is_some() { keys.size(key) } else { Ok(default) };
    let of_sizes = |num_experts, num_experts_per_tok, moe_intermediate_size, scores| ExpertsConfig {
        num_dense_layers: 0,
        num_experts,
        num_experts_per_tok,
        moe_intermediate_size,
        scores,
        clamped: None,
        norm_topk_prob: false,
        use_expert_bias: false,
        routed_scaling_factor: 1.0,
        beside_dense: false,
        router_hidden_size: None,
        shared: None,
    };
    let shared = match family.shared_expert {
        SharedExpertRule::None => None,
        SharedExpertRule::Gated => {
            let intermediate_size = size("shared_expert_intermediate_size", 512)?;
            Some(SharedExpertConfig { intermediate_size, gated: true })
        }
        SharedExpertRule::Fused => {
            let intermediate_size = size("shared_intermediate_size", 1024)?;
            Some(SharedExpertConfig { intermediate_size, gated: false })
        }
    };
    let plain = |scores: RouterScores| -> Result<ExpertsConfig, FamilyError> {
        let num_experts = keys.size("num_experts")?;
        let num_experts_per_tok = keys.size("num_experts_per_tok")?;
        if num_experts_per_tok > num_experts {
            return Err(keys.value("num_experts_per_tok", &format!("at most {num_experts} experts")));
        }
        let experts = of_sizes(num_experts, num_experts_per_tok, keys.size("moe_intermediate_size")?, scores);
        Ok(ExpertsConfig { shared, ..experts })
    };
    Ok(Some(match family.mixture {
        MixtureKind::None => return Ok(None),
        MixtureKind::Sigmoid => ExpertsConfig {
            num_dense_layers: keys.u64("num_dense_layers")?.unwrap_or(2) as usize,
            norm_topk_prob: keys.bool("norm_topk_prob")?.unwrap_or(true),
            use_expert_bias: keys.bool("use_expert_bias")?.unwrap_or(true),
            routed_scaling_factor: keys.f64("routed_scaling_factor")?.unwrap_or(1.0),
            ..plain(RouterScores::Sigmoid)?
        },
        // a softmax divided by the sum of the chosen ones is their own
        MixtureKind::Softmax => plain(match keys.bool("norm_topk_prob")? {
            Some(true) => RouterScores::ChosenSoftmax,
            _ => RouterScores::Softmax,
        })?,
        MixtureKind::BesideDense if !keys.bool("enable_moe_block")?.unwrap_or(false) => {
            // without effect
            ["num_experts", "num_experts_per_tok", "moe_intermediate_size"].iter().for_each(|key| keys.accept(key));
            keys.accept("top_k_experts");
            return Ok(None);
        }
        // a softmax divided by the sum of the chosen ones is their own
        MixtureKind::BesideDense => ExpertsConfig { beside_dense: true, ..plain(RouterScores::ChosenSoftmax)? },
        MixtureKind::ChosenSoftmax => plain(RouterScores::ChosenSoftmax)?,
        MixtureKind::ChosenSoftmaxUnless => plain(match keys.bool("norm_topk_prob")? {
            Some(false) => RouterScores::Softmax,
            _ => RouterScores::ChosenSoftmax,
        })?,
        MixtureKind::ChosenSoftmaxIfAny if keys.u64("num_experts")? == Some(0) => {
            // of experts that aren't there
            let _ = (keys.get("num_experts_per_tok"), keys.get("moe_intermediate_size"));
            return Ok(None);
        }
        MixtureKind::ChosenSoftmaxIfAny => plain(RouterScores::ChosenSoftmax)?,
        MixtureKind::Clamped => {
            ExpertsConfig { clamped: Some(ClampedExperts::read(keys)?), ..plain(RouterScores::ChosenSoftmax)? }
        }
        MixtureKind::DepthRouted => ExpertsConfig {
            use_expert_bias: true,
            router_hidden_size: Some(size("router_hidden_size", 256)?),
            ..of_sizes(size("num_experts", 16)?, 1, size("moe_intermediate_size", 2048)?, RouterScores::Sigmoid)
        },
    }))
}
