//! ModernBERT (arXiv:2412.13663): norms before the blocks, rotary embeddings, gated networks. Two of three layers see a
//! band of the text, the others all of it; each kind has its own RoPE base.
//!
//! ```text
//! x = norm(embedding)
//! x = x + attention(norm(x))            (the first layer without this norm)
//! x = x + W_o (gelu(W_i x) * W_g x)     (of norm(x))
//! x = norm(x)
//! ```

use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::head::{Head, HeadActivation, HeadLayer};
use super::naming::EncoderNaming;
use super::{Encoder, EncoderLayer, ignore_heads, purpose};
use crate::blocks::banded_attention::BandedAttention;
use crate::blocks::linear::Linear;
use crate::blocks::mlp::Mlp;
use crate::blocks::norm::Norm;
use crate::config::keys::Keys;
use crate::config::rope;
use crate::error::FamilyError;
use crate::layer::{FeedForward, Layer, Mixer};
use crate::residual_block::Norms;
use crate::rope::RopeConfig;
use crate::row::{
    Activation, Bias, DecoderFamily, FAMILY, LayerForm, NAMES, NETWORK, NetworkRules, ROPE as ROPE_RULES, RopeRules,
    SourceNames,
};
use crate::table::NEUTRAL_KEYS;
use crate::tensors::take;
use crate::{FamilyFacts, Purpose};
use anec_base::Result;
use anec_bundle::Pooling;
use anec_manifest::Role;
use anec_source::{Ledger, SourceWeight};

/// Row for the RoPE reader; ModernBERT is no decoder.
pub(super) const ROPE: DecoderFamily = DecoderFamily {
    name: "modernbert",
    names: SourceNames {
        gguf: &[],
        keys: &[("rope_theta", "global_rope_theta"), ("rope_local_base_freq", "local_rope_theta")],
        ..NAMES
    },
    rope: RopeRules { local_theta: Some(10_000.0), theta: 160_000.0, ..ROPE_RULES },
    network: NetworkRules { bias: Bias::Key("mlp_bias"), ..NETWORK },
    ..FAMILY
};

/// Neutral keys: of training, of other heads, and of other implementations.
pub(super) const NEUTRAL: &[&str] = &[
    "classifier_dropout",
    "cls_token_id",
    "decoder_bias",
    "deterministic_flash_attn",
    "embedding_dropout",
    "gradient_checkpointing",
    "id2label",
    "initializer_cutoff_factor",
    "layer_norm_eps",
    "mlp_dropout",
    "num_labels",
    "position_embedding_type",
    "reference_compile",
    "repad_logits_with_grad",
    "sentence_transformers",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "tie_word_embeddings",
];

/// Resolved configuration.
#[derive(Clone, Debug, Serialize)]
struct ModernBertConfig {
    hidden_size: u64,
    intermediate_size: u64,
    num_hidden_layers: usize,
    num_attention_heads: u64,
    vocab_size: u64,
    max_position_embeddings: u64,
    norm_eps: f64,
    norm_bias: bool,
    attention_bias: bool,
    mlp_bias: bool,
    activation: Activation,
    classifier_bias: bool,
    classifier_activation: Activation,
    classifier_pooling: Pooling,
    /// Width of the band of local layers, both sides together.
    local_attention: u64,
    /// Distance that each layer's tokens see on each side; `None` for the whole text.
    bands: Vec<Option<u64>>,
    rope: RopeConfig,
    rope_local: RopeConfig,
}

fn activation(keys: &Keys<'_>, key: &str) -> Result<Activation, FamilyError> {
    match keys.str(key)?.unwrap_or("gelu") {
        "gelu" => Ok(Activation::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        "silu" => Ok(Activation::Silu),
        _ => Err(keys.value(key, "\"gelu\", \"gelu_new\" or \"silu\"")),
    }
}

impl ModernBertConfig {
    fn read(keys: &Keys<'_>, acknowledged: &[String]) -> Result<Self, FamilyError> {
        let (hidden_size, num_attention_heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
        if hidden_size % num_attention_heads != 0 {
            return Err(keys.value("hidden_size", &format!("a multiple of {num_attention_heads} heads")));
        }
        let max_position_embeddings = keys.size("max_position_embeddings")?;
        let count = keys.size("num_hidden_layers")? as usize;
        if count > 4096 {
            return Err(keys.value("num_hidden_layers", "at most 4096"));
        }
        if keys.get("rope_scaling").is_some() {
            return Err(keys.value("rope_scaling", "`rope_parameters`, by the type of the layer"));
        }
        let norm_eps = keys.f64("norm_eps")?.unwrap_or(1e-5);
        if !(0.0..1.0).contains(&norm_eps) {
            return Err(keys.value("norm_eps", "between 0 and 1"));
        }
        let head_dims = [hidden_size / num_attention_heads; 2];
        let (rope, local) = rope::read(keys, &ROPE, head_dims, max_position_embeddings, acknowledged)?;
        let flag = |key: &str| Ok(keys.bool(key)?.unwrap_or(false));
        Ok(ModernBertConfig {
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            num_hidden_layers: count,
            num_attention_heads,
            vocab_size: keys.size("vocab_size")?,
            max_position_embeddings,
            norm_eps,
            norm_bias: flag("norm_bias")?,
            attention_bias: flag("attention_bias")?,
            mlp_bias: flag("mlp_bias")?,
            activation: activation(keys, "hidden_activation")?,
            classifier_bias: flag("classifier_bias")?,
            classifier_activation: activation(keys, "classifier_activation")?,
            classifier_pooling: match keys.str("classifier_pooling")?.unwrap_or("cls") {
                "cls" => Pooling::Cls,
                "mean" => Pooling::Mean,
                _ => return Err(keys.value("classifier_pooling", "\"cls\" or \"mean\"")),
            },
            local_attention: keys.u64("local_attention")?.unwrap_or(128),
            bands: bands(keys, count)?,
            rope_local: local.unwrap_or_else(|| rope.clone()),
            rope,
        })
    }
}

/// Band of each layer: all layers except every Nth, or by `layer_types`.
fn bands(keys: &Keys<'_>, count: usize) -> Result<Vec<Option<u64>>, FamilyError> {
    let band = keys.u64("local_attention")?.unwrap_or(128) / 2;
    let [full, sliding] = ROPE.attention.layer_types;
    let every = keys.u64("global_attn_every_n_layers")?.unwrap_or(3);
    if every == 0 {
        return Err(keys.value("global_attn_every_n_layers", "at least 1"));
    }
    match keys.strings("layer_types")? {
        None => Ok((0..count as u64).map(|layer| (layer % every != 0).then_some(band)).collect()),
        Some(types) if types.len() == count && types.iter().all(|kind| [full, sliding].contains(kind)) => {
            Ok(types.iter().map(|kind| (*kind == sliding).then_some(band)).collect())
        }
        Some(_) => Err(keys.value("layer_types", &format!("\"{full}\" or \"{sliding}\" for each of {count} layers"))),
    }
}

/// Opens a ModernBERT.
pub(super) fn open(
    place: &str,
    config: &Map<String, Json>,
    ledger: &mut Ledger<'_>,
    acknowledged: &[String],
) -> Result<Encoder> {
    let keys = Keys::new(place, "", config).named(ROPE.names.keys);
    let config = ModernBertConfig::read(&keys, acknowledged)?;
    let purpose = purpose(&keys, config.classifier_pooling)?;
    keys.finish(ROPE.name, &[NEUTRAL_KEYS, NEUTRAL].concat(), acknowledged)?;
    let naming = EncoderNaming::of(ledger, "embeddings.tok_embeddings", "model.");
    Tensors { ledger, config: &config, naming }.encoder(purpose)
}

/// Weights of a source, taken from its ledger.
struct Tensors<'a, 'b> {
    ledger: &'a mut Ledger<'b>,
    config: &'a ModernBertConfig,
    naming: EncoderNaming,
}

impl Tensors<'_, '_> {
    fn encoder(mut self, purpose: Purpose) -> Result<Encoder> {
        let config = self.config;
        let table = format!("{}.weight", self.naming.name("embeddings.tok_embeddings"));
        let shape = [config.vocab_size, config.hidden_size];
        let head = match &purpose {
            Purpose::SequenceClassification(classification) => Some(self.head(classification.labels.len() as u64)?),
            Purpose::TokenClassification(set) => Some(self.head(set.labels.len() as u64)?),
            _ => {
                ignore_heads(self.ledger, &["head.*", "decoder.*", "cls.*"]);
                None
            }
        };
        Ok(Encoder {
            embedding: take(self.ledger, &table, &shape, "vocab_size, hidden_size")?,
            positions: None,
            token_types: None,
            embedding_norm: Some(self.norm("embeddings.norm", "embedding_norm")?),
            embedding_projection: None,
            attention_bias: None,
            layers: (0..config.num_hidden_layers).map(|index| self.layer(index)).collect::<Result<_>>()?,
            final_norm: Some(self.norm("final_norm", "final_norm")?),
            head,
            final_projection: None,
            rope: [Some(config.rope.clone()), Some(config.rope_local.clone())],
            facts: FamilyFacts {
                family: ROPE.name.to_owned(),
                hidden_size: config.hidden_size,
                num_layers: config.num_hidden_layers,
                vocab_size: config.vocab_size,
                purpose,
                max_position_embeddings: config.max_position_embeddings,
                hidden_scale: 1.0,
                recurrent: false,
                config: serde_json::to_value(config).unwrap_or(Json::Null),
            },
        })
    }

    fn layer(&mut self, index: usize) -> Result<EncoderLayer> {
        let config = self.config;
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let name = |part: &str| format!("layers.{index}.{part}");
        let fused =
            self.linear(&name("attn.Wqkv"), "qkv", Role::AttentionQkv, [3 * hidden, hidden], config.attention_bias)?;
        let third = |own, part: u64| rows(&fused, own, part * hidden..(part + 1) * hidden);
        let head_dim = hidden / config.num_attention_heads;
        let attention = BandedAttention {
            query: third("q_proj", 0)?,
            key: third("k_proj", 1)?,
            value: third("v_proj", 2)?,
            output: self.linear(
                &name("attn.Wo"),
                "o_proj",
                Role::AttentionOutput,
                [hidden, hidden],
                config.attention_bias,
            )?,
            qk_norm: None,
            value_norm: None,
            sinks: None,
            distances: None,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_attention_heads,
            head_dim,
            rope_dim: config.rope.rope_dim,
            scale: (head_dim as f64).powf(-0.5),
            softcap: None,
        };
        let fused = self.linear(&name("mlp.Wi"), "gate_up", Role::MlpUp, [2 * width, hidden], config.mlp_bias)?;
        let mlp = Mlp {
            gate: rows(&fused, "gate_proj", 0..width)?,
            up: rows(&fused, "up_proj", width..2 * width)?,
            down: self.linear(&name("mlp.Wo"), "down_proj", Role::MlpDown, [hidden, width], config.mlp_bias)?,
            activation: config.activation,
        };
        let before = |norm| Norms { before: norm, after: None, of_sum: None, scaling: None };
        // the input of the first layer is normed already
        let attention_norm = (index > 0).then(|| self.norm(&name("attn_norm"), "attn_norm")).transpose()?;
        let layer = Layer {
            form: LayerForm::Sequential,
            mixer: Mixer::Banded(Box::new(attention)),
            mixer_norms: before(attention_norm),
            feed_forward: FeedForward::Mlp(Box::new(mlp)),
            feed_forward_norms: before(Some(self.norm(&name("mlp_norm"), "mlp_norm")?)),
            per_layer_input: None,
            scalar: None,
        };
        Ok(EncoderLayer { layer, band: config.bands[index] })
    }

    /// `W_out norm(gelu(W_dense x)) + b`
    fn head(&mut self, labels: u64) -> Result<Head> {
        let config = self.config;
        let naming = self.naming;
        self.naming = naming.outside();
        let hidden = config.hidden_size;
        let dense = self.linear("head.dense", "dense", Role::LmHead, [hidden, hidden], config.classifier_bias)?;
        let norm = self.norm("head.norm", "norm")?;
        let output = self.linear("classifier", "score", Role::LmHead, [labels, hidden], true)?;
        self.naming = naming;
        let activation = HeadActivation::Hidden(config.classifier_activation);
        Ok(Head { layer: Some(HeadLayer { dense, activation, norm: Some(norm) }), output })
    }

    fn norm(&mut self, tensor: &str, name: &'static str) -> Result<Norm> {
        let mut vector = |part: &str| -> Result<SourceWeight> {
            let tensor = format!("{}.{part}", self.naming.name(tensor));
            take(self.ledger, &tensor, &[self.config.hidden_size], "hidden_size")
        };
        let gain = vector("weight")?;
        let bias = self.config.norm_bias.then(|| vector("bias")).transpose()?;
        Ok(Norm::layer(name, gain, bias, self.config.norm_eps))
    }

    fn linear(&mut self, tensor: &str, name: &'static str, role: Role, shape: [u64; 2], bias: bool) -> Result<Linear> {
        let because = "hidden_size, intermediate_size, labels of id2label";
        let tensor = self.naming.name(tensor);
        let weight = take(self.ledger, &format!("{tensor}.weight"), &shape, because)?;
        let bias = bias.then(|| take(self.ledger, &format!("{tensor}.bias"), &shape[..1], because)).transpose()?;
        Ok(Linear { name, role, weight, bias })
    }
}

/// Slices the rows of a projection.
fn rows(of: &Linear, name: &'static str, range: std::ops::Range<u64>) -> Result<Linear> {
    let bias = of.bias.as_ref().map(|bias| bias.slice(range.clone())).transpose()?;
    Ok(Linear { name, role: of.role, weight: of.weight.slice(range)?, bias })
}
