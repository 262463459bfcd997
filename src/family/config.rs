//! Resolved configuration of a decoder, with all defaults and rules applied.
//!
//! GGUF metadata is first converted to the keys of `config.json` ([`gguf`]), so that one reader serves both.

mod experts;
mod gemma4;
pub mod gguf;
pub mod keys;
mod layers;
mod mamba2;
mod mixers;
pub mod onnx;
mod read;
pub(super) mod rope;

use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::error::FamilyError;
use super::rope::{LateQueryScale, RopeConfig};
use super::row::{Activation, DecoderFamily, LayerForm, MixerKind, NormKind, NormPlacement, QkNorm};
pub use experts::{ClampedExperts, ExpertsConfig, SharedExpertConfig};
use keys::Keys;
pub use mamba2::{BlockMultipliers, Mamba2Config, Mamba2Norm};
pub use mixers::{CcaConfig, DeltaNetConfig, ShortConvConfig};

/// Tensors of multimodal models outside of the text model.
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
    "audio_tower.*",
    "embed_vision.*",
    "embed_audio.*",
];

/// Configuration of the text model within a multimodal one.
///
/// # Errors
/// Returns an error if there is none.
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
    // the key of the whole model applies
    if let Some(tied) = keys.bool("tie_word_embeddings")? {
        text.insert("tie_word_embeddings".into(), Json::Bool(tied));
    }
    Ok(text)
}

/// Configuration of a decoder.
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
    /// Number of query heads.
    pub num_attention_heads: u64,
    /// Number of key-value heads; divides the query heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// Longest supported text in tokens.
    pub max_position_embeddings: u64,
    /// Position-dependent scale of queries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub late_query_scale: Option<LateQueryScale>,
    /// Epsilon of all norms.
    pub rms_norm_eps: f64,
    /// Whether the LM head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether attention is bidirectional.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub bidirectional: bool,
    /// Per-layer embeddings of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_layer_embedding: Option<PerLayerEmbeddingConfig>,
    /// Width of the projection of an encoder's final hidden states, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_dim: Option<u64>,
    /// Place of query-key norms.
    pub qk_norm: QkNorm,
    /// Whether each head of values is normed, without a gain.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub value_norm: bool,
    /// Place of the norms.
    pub norms: NormPlacement,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward network has biases.
    pub mlp_bias: bool,
    /// Whether the LM head has a bias.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub head_bias: bool,
    /// Kind of norms.
    #[serde(skip_serializing_if = "is_root_mean_square")]
    pub norm: NormKind,
    /// Order of mixer and feed-forward network.
    #[serde(skip_serializing_if = "is_sequential")]
    pub form: LayerForm,
    /// Whether the source has q, k, v in one tensor.
    pub fused: bool,
    /// Whether the source has gate and up in one tensor.
    #[serde(skip)]
    pub fused_mlp: bool,
    /// Whether the feed-forward network has no gate.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub plain_mlp: bool,
    /// Whether attention has sinks.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sinks: bool,
    /// Whether attention's output is gated.
    pub gated_attention: bool,
    /// Shape of the layers with a short convolution.
    pub short_conv: Option<ShortConvConfig>,
    /// Shape of compressed convolutional attention.
    pub cca: Option<CcaConfig>,
    /// Whether sums with the residual stream have biases and scales.
    pub residual_scaling: bool,
    /// Experts of layers that have them.
    pub experts: Option<ExpertsConfig>,
    /// Shape of the layers with a DeltaNet.
    pub delta_net: Option<DeltaNetConfig>,
    /// Shape of the layers with Mamba-2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mamba2: Option<Mamba2Config>,
    /// Multipliers folded into the weights of blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_multipliers: Option<BlockMultipliers>,
    /// Activation of the feed-forward network's gate.
    pub activation: Activation,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Rotary embedding of layers with a window, if they have their own.
    pub rope_local: Option<RopeConfig>,
    /// Per-layer configuration.
    pub layers: Vec<LayerConfig>,
    /// Factor of the scores before softmax.
    pub attention_scale: f64,
    /// Soft cap of the scores' magnitude.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_softcap: Option<f64>,
    /// Largest magnitude of queries, keys and values before the rotation; larger ones are clipped to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_qkv: Option<f64>,
    /// Soft cap of the logits' magnitude.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits_softcap: Option<f64>,
    /// Factor of the embeddings.
    pub embedding_multiplier: f64,
    /// Factor of a block's output in the residual stream.
    pub residual_multiplier: f64,
    /// Power-of-two factor of hidden states to fit fp16.
    pub hidden_scale: f64,
    /// Divisor of the logits.
    pub logits_scaling: f64,
}

/// Configuration of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerConfig {
    /// Token mixer.
    pub mixer: MixerKind,
    /// Whether queries and keys are rotated.
    pub rope: bool,
    /// Number of tokens that a token sees, including itself; `None` for all.
    pub window: Option<u64>,
    /// Heads, if they differ from the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<LayerHeads>,
    /// Whether values are the key projection's output.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub value_is_key: bool,
    /// Layer whose keys and values this layer uses, if not its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys_of: Option<usize>,
    /// Width of the feed-forward network, if it differs from the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intermediate_size: Option<u64>,
}

impl LayerConfig {
    /// Creates a layer without deviations.
    pub fn new(mixer: MixerKind, rope: bool, window: Option<u64>) -> Self {
        LayerConfig { mixer, rope, window, heads: None, value_is_key: false, keys_of: None, intermediate_size: None }
    }
}

/// Heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerHeads {
    /// Number of key-value heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
}

/// Per-layer embeddings of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PerLayerEmbeddingConfig {
    /// Number of tokens in the table of looked-up vectors; `None` if projections of the token embeddings are all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<u64>,
    /// Width of a vector.
    pub width: u64,
}

/// Default that `bundle.json` omits, as bundles did before other kinds existed.
fn is_root_mean_square(norm: &NormKind) -> bool {
    *norm == NormKind::RootMeanSquare
}

/// Default that `bundle.json` omits, as bundles did before other forms existed.
fn is_sequential(form: &LayerForm) -> bool {
    *form == LayerForm::Sequential
}

impl DecoderConfig {
    /// Rotary embedding of a layer.
    pub fn rope_of(&self, layer: usize) -> &RopeConfig {
        self.rope_local.as_ref().filter(|_| self.layers[layer].window.is_some()).unwrap_or(&self.rope)
    }

    /// Heads of a layer.
    pub fn heads_of(&self, layer: usize) -> LayerHeads {
        let Self { num_key_value_heads, head_dim, .. } = *self;
        self.layers[layer].heads.unwrap_or(LayerHeads { num_key_value_heads, head_dim })
    }

    /// Rows of a layer's query projection.
    pub fn query_width(&self, layer: usize) -> u64 {
        self.num_attention_heads * self.heads_of(layer).head_dim
    }

    /// Rows of a layer's key projection and of its value projection.
    pub fn key_width(&self, layer: usize) -> u64 {
        let heads = self.heads_of(layer);
        heads.num_key_value_heads * heads.head_dim
    }

    /// Returns whether layers from `from` on use a layer's keys and values.
    pub fn has_shared_keys(&self, layer: usize, from: usize) -> bool {
        self.layers[from..].iter().any(|other| other.keys_of == Some(layer))
    }
}
