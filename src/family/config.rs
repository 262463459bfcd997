//! The configuration of a decoder, resolved: every default filled in, every rule applied.
//!
//! GGUF metadata is first put into the words of `config.json` ([`gguf`]); then one reader serves both.

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

/// What configurations resolved before there was another kind leave out.
fn is_root_mean_square(norm: &NormKind) -> bool {
    *norm == NormKind::RootMeanSquare
}

/// The same.
fn is_sequential(form: &LayerForm) -> bool {
    *form == LayerForm::Sequential
}

impl DecoderConfig {
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
