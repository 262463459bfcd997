//! NomicBERT (arXiv:2402.01613): BERT's norms of the sums with rotary embeddings and gated networks, without biases.
//!
//! ```text
//! x = norm(embedding + type)
//! x = norm(x + W_o attention(W_q x, W_k x, W_v x))
//! x = norm(x + W_down (silu(W_gate x) * W_up x))
//! ```
//!
//! Published checkpoints have names of their own, for keys and tensors; transformers converts them to its names.

use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::head::{Head, HeadActivation, HeadLayer};
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
use crate::row::{Activation, DecoderFamily, FAMILY, LayerForm, NAMES, ROPE as ROPE_RULES, RopeRules, SourceNames};
use crate::table::NEUTRAL_KEYS;
use crate::tensors::take;
use crate::{FamilyFacts, Purpose};
use anec_base::Result;
use anec_bundle::Pooling;
use anec_manifest::Role;
use anec_source::{Ledger, SourceWeight};

/// Row for the RoPE reader; NomicBERT is no decoder.
pub(super) const ROPE: DecoderFamily = DecoderFamily {
    name: "nomic_bert",
    names: SourceNames { gguf: &[], ..NAMES },
    rope: RopeRules { theta: 1000.0, ..ROPE_RULES },
    ..FAMILY
};

/// Keys of published checkpoints: (transformers' name, name there).
const PUBLISHED_KEYS: &[(&str, &str)] = &[
    ("hidden_act", "activation_function"),
    ("hidden_size", "n_embd"),
    ("intermediate_size", "n_inner"),
    ("layer_norm_eps", "layer_norm_epsilon"),
    ("max_position_embeddings", "n_positions"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
    ("rope_theta", "rotary_emb_base"),
];

/// Parts of tensor names of published checkpoints: (transformers' name, name there).
const PUBLISHED_TENSORS: &[(&str, &str)] = &[
    ("self_attn.o_proj", "attn.out_proj"),
    ("mlp.gate_proj", "mlp.fc12"),
    ("mlp.up_proj", "mlp.fc11"),
    ("mlp.down_proj", "mlp.fc2"),
    ("post_attention_layernorm", "norm1"),
    ("post_mlp_layernorm", "norm2"),
];

/// Neutral keys: of training, of absent heads, and of other implementations.
pub(super) const NEUTRAL: &[&str] = &[
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "classifier_dropout",
    "dense_seq_output",
    "embd_pdrop",
    "fused_bias_fc",
    "fused_dropout_add_ln",
    "hidden_dropout_prob",
    "id2label",
    "max_trained_positions",
    "num_labels",
    "pad_vocab_size_multiple",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "sentence_transformers",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "tie_word_embeddings",
    "use_flash_attn",
    "use_xentropy",
];

/// Resolved configuration.
#[derive(Clone, Debug, Serialize)]
struct NomicBertConfig {
    hidden_size: u64,
    intermediate_size: u64,
    num_hidden_layers: usize,
    num_attention_heads: u64,
    head_dim: u64,
    vocab_size: u64,
    type_vocab_size: u64,
    max_position_embeddings: u64,
    layer_norm_eps: f64,
    activation: Activation,
    rope: RopeConfig,
}

impl NomicBertConfig {
    fn read(keys: &Keys<'_>, acknowledged: &[String]) -> Result<Self, FamilyError> {
        let (hidden_size, num_attention_heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
        let head_dim = match keys.get("head_dim") {
            Some(_) => keys.size("head_dim")?,
            None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
            None => return Err(keys.value("hidden_size", &format!("a multiple of {num_attention_heads} heads"))),
        };
        // terms that some checkpoints of this family have
        for key in [
            "causal",
            "mlp_fc1_bias",
            "mlp_fc2_bias",
            "parallel_block",
            "parallel_block_tied_norm",
            "prenorm",
            "qkv_proj_bias",
            "rotary_emb_interleaved",
            "scale_attn_by_inverse_layer_idx",
            "use_rms_norm",
        ] {
            if keys.bool(key)? == Some(true) {
                return Err(keys.value(key, "false"));
            }
        }
        for key in ["rotary_emb_fraction", "rotary_scaling_factor", "rotary_emb_scale_base"] {
            if keys.f64(key)?.is_some_and(|value| key != "rotary_emb_fraction" || value != 1.0) {
                return Err(keys.value(key, if key == "rotary_emb_fraction" { "1" } else { "absent" }));
            }
        }
        if keys.bool("scale_attn_weights")? == Some(false) {
            return Err(keys.value("scale_attn_weights", "true"));
        }
        let layer_norm_eps = keys.f64("layer_norm_eps")?.unwrap_or(1e-12);
        if !(0.0..1.0).contains(&layer_norm_eps) {
            return Err(keys.value("layer_norm_eps", "between 0 and 1"));
        }
        let num_hidden_layers = keys.size("num_hidden_layers")? as usize;
        if num_hidden_layers > 4096 {
            return Err(keys.value("num_hidden_layers", "at most 4096"));
        }
        let max_position_embeddings = keys.size("max_position_embeddings")?;
        let (rope, _) = rope::read(keys, &ROPE, [head_dim; 2], max_position_embeddings, acknowledged)?;
        Ok(NomicBertConfig {
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            num_hidden_layers,
            num_attention_heads,
            head_dim,
            vocab_size: keys.size("vocab_size")?,
            type_vocab_size: if keys.get("type_vocab_size").is_some() { keys.size("type_vocab_size")? } else { 2 },
            max_position_embeddings,
            layer_norm_eps,
            activation: match keys.str("hidden_act")?.unwrap_or("silu") {
                "silu" | "swiglu" => Activation::Silu,
                "gelu" => Activation::Gelu,
                _ => return Err(keys.value("hidden_act", "\"silu\", \"swiglu\" or \"gelu\"")),
            },
            rope,
        })
    }
}

/// Opens a NomicBERT.
pub(super) fn open(
    place: &str,
    config: &Map<String, Json>,
    ledger: &mut Ledger<'_>,
    acknowledged: &[String],
) -> Result<Encoder> {
    let keys = Keys::new(place, "", config);
    let keys = if config.contains_key("n_embd") { keys.named(PUBLISHED_KEYS) } else { keys };
    let config = NomicBertConfig::read(&keys, acknowledged)?;
    let purpose = purpose(&keys, Pooling::Cls)?;
    keys.finish(ROPE.name, &[NEUTRAL_KEYS, NEUTRAL].concat(), acknowledged)?;
    let embedding = "embeddings.word_embeddings.weight";
    let prefix = ["", "nomic_bert.", "bert."]
        .into_iter()
        .find(|prefix| ledger.has(&format!("{prefix}{embedding}")))
        .unwrap_or("");
    let published = ledger.has(&format!("{prefix}emb_ln.weight"));
    Tensors { ledger, config: &config, prefix, published }.encoder(purpose)
}

/// Weights of a source, taken from its ledger.
struct Tensors<'a, 'b> {
    ledger: &'a mut Ledger<'b>,
    config: &'a NomicBertConfig,
    /// Prefix of tensor names.
    prefix: &'static str,
    /// Whether tensors have the names of published checkpoints.
    published: bool,
}

impl Tensors<'_, '_> {
    fn encoder(mut self, purpose: Purpose) -> Result<Encoder> {
        let config = self.config;
        let norm = if self.published { "emb_ln" } else { "embeddings.LayerNorm" };
        let head = match &purpose {
            Purpose::SequenceClassification(classification) => {
                Some(self.head(classification.labels.len() as u64, true)?)
            }
            Purpose::TokenClassification(set) => Some(self.head(set.labels.len() as u64, false)?),
            _ => None,
        };
        let encoder = Encoder {
            embedding: self.table("word_embeddings", config.vocab_size, "vocab_size, hidden_size")?,
            positions: None,
            token_types: Some(self.table("token_type_embeddings", config.type_vocab_size, "type_vocab_size")?),
            embedding_norm: Some(self.norm(norm, "embedding_norm")?),
            embedding_projection: None,
            attention_bias: None,
            layers: (0..config.num_hidden_layers).map(|index| self.layer(index)).collect::<Result<_>>()?,
            final_norm: None,
            head,
            final_projection: None,
            rope: [Some(config.rope.clone()), None],
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
        };
        let pooler = format!("{}pooler.*", self.prefix);
        ignore_heads(self.ledger, &["cls.*", &pooler]);
        Ok(encoder)
    }

    /// `W_out x + b`, of `tanh(W_dense x + b)` if texts are classified.
    fn head(&mut self, labels: u64, pooled: bool) -> Result<Head> {
        let hidden = self.config.hidden_size;
        let mut linear = |tensor: &str, name, rows| -> Result<Linear> {
            let because = "labels of id2label, hidden_size";
            let weight = take(self.ledger, &format!("{tensor}.weight"), &[rows, hidden], because)?;
            let bias = Some(take(self.ledger, &format!("{tensor}.bias"), &[rows], because)?);
            Ok(Linear { name, role: Role::LmHead, weight, bias })
        };
        let pooler = format!("{}pooler.dense", self.prefix);
        let dense = pooled.then(|| linear(&pooler, "dense", hidden)).transpose()?;
        let layer = dense.map(|dense| HeadLayer { dense, activation: HeadActivation::Tanh, norm: None });
        Ok(Head { layer, output: linear("classifier", "score", labels)? })
    }

    fn layer(&mut self, index: usize) -> Result<EncoderLayer> {
        let config = self.config;
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let heads = config.num_attention_heads * config.head_dim;
        let [query, key, value] = if self.published {
            let fused = self.weight(index, "attn.Wqkv", [3 * heads, hidden])?;
            let third = |part: u64| fused.slice(part * heads..(part + 1) * heads);
            [third(0)?, third(1)?, third(2)?]
        } else {
            let mut own = |part: &str| self.weight(index, &format!("self_attn.{part}_proj"), [heads, hidden]);
            [own("q")?, own("k")?, own("v")?]
        };
        let linear = |name, role, weight| Linear { name, role, weight, bias: None };
        let attention = BandedAttention {
            query: linear("q_proj", Role::AttentionQ, query),
            key: linear("k_proj", Role::AttentionK, key),
            value: linear("v_proj", Role::AttentionV, value),
            output: linear("o_proj", Role::AttentionOutput, self.weight(index, "self_attn.o_proj", [hidden, heads])?),
            qk_norm: None,
            value_norm: None,
            sinks: None,
            distances: None,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_attention_heads,
            head_dim: config.head_dim,
            rope_dim: config.rope.rope_dim,
            scale: (config.head_dim as f64).powf(-0.5),
            softcap: None,
        };
        let mlp = Mlp {
            gate: linear("gate_proj", Role::MlpUp, self.weight(index, "mlp.gate_proj", [width, hidden])?),
            up: linear("up_proj", Role::MlpUp, self.weight(index, "mlp.up_proj", [width, hidden])?),
            down: linear("down_proj", Role::MlpDown, self.weight(index, "mlp.down_proj", [hidden, width])?),
            activation: config.activation,
        };
        let mut of_sum = |tensor: &str, own| -> Result<Norms> {
            let tensor = self.name(index, tensor);
            Ok(Norms { before: None, after: None, of_sum: Some(self.norm(&tensor, own)?), scaling: None })
        };
        let layer = Layer {
            form: LayerForm::Sequential,
            mixer: Mixer::Banded(Box::new(attention)),
            mixer_norms: of_sum("post_attention_layernorm", "attn_norm")?,
            feed_forward: FeedForward::Mlp(Box::new(mlp)),
            feed_forward_norms: of_sum("post_mlp_layernorm", "mlp_norm")?,
            per_layer_input: None,
            scalar: None,
        };
        Ok(EncoderLayer { layer, band: None })
    }

    /// Name of a layer's tensor, without the prefix and `.weight` or `.bias`.
    fn name(&self, index: usize, tensor: &str) -> String {
        if !self.published {
            return format!("layers.{index}.{tensor}");
        }
        let name = PUBLISHED_TENSORS.iter().find(|(own, _)| *own == tensor).map_or(tensor, |(_, name)| name);
        format!("encoder.layers.{index}.{name}")
    }

    fn weight(&mut self, index: usize, tensor: &str, shape: [u64; 2]) -> Result<SourceWeight> {
        let name = format!("{}{}.weight", self.prefix, self.name(index, tensor));
        take(self.ledger, &name, &shape, "hidden_size, intermediate_size, num_attention_heads")
    }

    fn table(&mut self, name: &str, rows: u64, because: &str) -> Result<SourceWeight> {
        let name = format!("{}embeddings.{name}.weight", self.prefix);
        take(self.ledger, &name, &[rows, self.config.hidden_size], because)
    }

    fn norm(&mut self, tensor: &str, name: &'static str) -> Result<Norm> {
        let mut vector = |part: &str| {
            let tensor = format!("{}{tensor}.{part}", self.prefix);
            take(self.ledger, &tensor, &[self.config.hidden_size], "hidden_size")
        };
        let (gain, bias) = (vector("weight")?, vector("bias")?);
        Ok(Norm::layer(name, gain, Some(bias), self.config.layer_norm_eps))
    }
}
