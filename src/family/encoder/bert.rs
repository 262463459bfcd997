//! BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692, arXiv:1911.02116): layer norms of the sums, learned
//! positions, plain feed-forward networks, biases everywhere.
//!
//! ```text
//! x = norm(embedding + position + type)
//! x = W_in x                                          (if embeddings are narrower than hidden states)
//! x = norm(x + W_o attention(W_q x, W_k x, W_v x))
//! x = norm(x + W_down gelu(W_up x))
//! ```
//!
//! ALBERT (arXiv:1909.11942) repeats the layers of its groups. MPNet (arXiv:2004.09297) adds a bias to the scores of
//! attention, by head and distance. [`deberta`] has the scores by distance of DeBERTa v2 (arXiv:2006.03654) and v3
//! (arXiv:2111.09543).

mod deberta;

use std::iter::repeat_n;

use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::head::{Head, HeadActivation, HeadLayer};
use super::naming::EncoderNaming;
use super::{Encoder, EncoderLayer, ignore_heads, purpose};
use crate::blocks::banded_attention::BandedAttention;
use crate::blocks::linear::Linear;
use crate::blocks::mlp::PlainMlp;
use crate::blocks::norm::Norm;
use crate::config::keys::Keys;
use crate::error::FamilyError;
use crate::layer::{FeedForward, Layer, Mixer};
use crate::residual_block::Norms;
use crate::row::{Activation, LayerForm};
use crate::table::NEUTRAL_KEYS;
use crate::tensors::take;
use crate::{FamilyFacts, Purpose};
use anec_base::Result;
use anec_bundle::Pooling;
use anec_manifest::Role;
use anec_source::{Ledger, SourceWeight};
use deberta::Disentangled;

/// Differences between models with BERT's layers.
pub(super) struct BertFamily {
    /// Name: transformers' `model_type`.
    pub(super) name: &'static str,
    /// Prefix of tensor names in files with a head.
    prefix: &'static str,
    /// Default padding token, behind which positions begin; `None` if positions begin at 0.
    padding: Option<u64>,
    /// Head layers: the one before the labels, and the labels.
    head: [&'static str; 2],
    /// Activation of the head.
    head_activation: HeadActivation,
    /// Keys with other names in this family: (usual name, name here).
    keys: &'static [(&'static str, &'static str)],
    /// Name of a layer; `*` is its number.
    layers: &'static str,
    /// Names of a layer's tensors that differ from BERT's: (BERT's, here).
    tensors: &'static [(&'static str, &'static str)],
    /// Whether there are token types.
    token_types: bool,
    /// Default of `hidden_act`.
    activation: Activation,
    /// Embeddings with a size of their own, if the family has the key `embedding_size`.
    embeddings: Option<NarrowEmbeddings>,
    /// Whether layers are shared, `num_hidden_groups` of them.
    groups: bool,
    /// Whether attention has biases by distance.
    relative_bias: bool,
    /// Whether attention has scores by distance, and learned positions and token types are optional.
    disentangled: bool,
}

/// Embeddings with a size of their own.
#[derive(Clone, Copy, Debug)]
struct NarrowEmbeddings {
    /// Default of `embedding_size`.
    default: u64,
    /// Projection to hidden states.
    projection: &'static str,
    /// Whether there is a projection if `embedding_size` equals `hidden_size`.
    always: bool,
}

/// Families with BERT's layers.
pub(super) const ROWS: &[BertFamily] = &[
    BertFamily { name: "bert", prefix: "bert.", padding: None, head: ["bert.pooler.dense", "classifier"], ..ROBERTA },
    BertFamily { name: "roberta", ..ROBERTA },
    BertFamily { name: "xlm-roberta", ..ROBERTA },
    BertFamily { name: "camembert", ..ROBERTA },
    BertFamily {
        name: "distilbert",
        prefix: "distilbert.",
        padding: None,
        head: ["pre_classifier", "classifier"],
        head_activation: HeadActivation::Relu,
        keys: &[
            ("hidden_act", "activation"),
            ("hidden_size", "dim"),
            ("intermediate_size", "hidden_dim"),
            ("num_attention_heads", "n_heads"),
            ("num_hidden_layers", "n_layers"),
        ],
        layers: "transformer.layer.*",
        tensors: &[
            ("attention.self.query", "attention.q_lin"),
            ("attention.self.key", "attention.k_lin"),
            ("attention.self.value", "attention.v_lin"),
            ("attention.output.dense", "attention.out_lin"),
            ("attention.output.LayerNorm", "sa_layer_norm"),
            ("intermediate.dense", "ffn.lin1"),
            ("output.dense", "ffn.lin2"),
            ("output.LayerNorm", "output_layer_norm"),
        ],
        token_types: false,
        ..ROBERTA
    },
    BertFamily {
        name: "electra",
        prefix: "electra.",
        padding: None,
        head_activation: HeadActivation::Hidden(Activation::Gelu),
        embeddings: Some(NarrowEmbeddings { default: 128, projection: "embeddings_project", always: false }),
        ..ROBERTA
    },
    BertFamily {
        name: "albert",
        prefix: "albert.",
        padding: None,
        head: ["albert.pooler", "classifier"],
        layers: "encoder.albert_layer_groups.*.albert_layers.0",
        tensors: &[
            ("attention.self.query", "attention.query"),
            ("attention.self.key", "attention.key"),
            ("attention.self.value", "attention.value"),
            ("attention.output.dense", "attention.dense"),
            ("attention.output.LayerNorm", "attention.LayerNorm"),
            ("intermediate.dense", "ffn"),
            ("output.dense", "ffn_output"),
            ("output.LayerNorm", "full_layer_layer_norm"),
        ],
        activation: Activation::GeluTanh,
        embeddings: Some(NarrowEmbeddings {
            default: 128,
            projection: "encoder.embedding_hidden_mapping_in",
            always: true,
        }),
        groups: true,
        ..ROBERTA
    },
    BertFamily {
        name: "mpnet",
        prefix: "mpnet.",
        tensors: &[
            ("attention.self.query", "attention.attn.q"),
            ("attention.self.key", "attention.attn.k"),
            ("attention.self.value", "attention.attn.v"),
            ("attention.output.dense", "attention.attn.o"),
            ("attention.output.LayerNorm", "attention.LayerNorm"),
        ],
        token_types: false,
        relative_bias: true,
        ..ROBERTA
    },
    BertFamily {
        name: "deberta-v2",
        prefix: "deberta.",
        padding: None,
        head: ["pooler.dense", "classifier"],
        tensors: &[
            ("attention.self.query", "attention.self.query_proj"),
            ("attention.self.key", "attention.self.key_proj"),
            ("attention.self.value", "attention.self.value_proj"),
        ],
        disentangled: true,
        ..ROBERTA
    },
];

/// Row for GGUF files, which have no unused rows of positions and one set of head names.
pub(super) const GGUF: BertFamily = BertFamily { name: "bert", padding: None, ..ROBERTA };

const ROBERTA: BertFamily = BertFamily {
    name: "roberta",
    prefix: "roberta.",
    padding: Some(1),
    head: ["classifier.dense", "classifier.out_proj"],
    head_activation: HeadActivation::Tanh,
    keys: &[],
    layers: "encoder.layer.*",
    tensors: &[],
    token_types: true,
    activation: Activation::Gelu,
    embeddings: None,
    groups: false,
    relative_bias: false,
    disentangled: false,
};

impl BertFamily {
    /// Name of a layer's tensor, without the prefix and `.weight` or `.bias`.
    fn tensor(&self, layer: usize, tensor: &str) -> String {
        let tensor = self.tensors.iter().find(|(own, _)| *own == tensor).map_or(tensor, |(_, here)| here);
        format!("{}.{tensor}", self.layers.replace('*', &layer.to_string()))
    }
}

/// Buckets of distances in MPNet: half of them for tokens before, half for tokens after. The closest eight distances
/// have buckets of their own; the others are divided by their logarithm.
const BUCKETS: u64 = 32;

/// Distance from which all tokens are in the last bucket.
const FARTHEST: u64 = 128;

/// Bucket of a distance to a token before, which is the same for a token after but for [`BUCKETS`] / 2:
/// `8 + 8 log(distance / 8) / log(128 / 8)`.
fn bucket(distance: u64) -> u64 {
    match distance {
        0..8 => distance,
        // twice the logarithm to base 2 of distance / 8
        8..FARTHEST => u64::from((distance * distance).ilog2()) + 2,
        _ => BUCKETS / 2 - 1,
    }
}

/// Neutral keys: of training, and of absent heads.
pub(super) const NEUTRAL: &[&str] = &[
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "classifier_dropout_prob",
    "cls_dropout",
    "conv_act",
    "conv_groups",
    "directionality",
    // of ALBERT's first implementation, read by no other
    "down_scale_factor",
    "dropout",
    "gap_size",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "id2label",
    // which layers the head for masked tokens has
    "legacy",
    "net_structure_type",
    "num_memory_blocks",
    "output_past",
    "pooler_dropout",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "qa_dropout",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
    "seq_classif_dropout",
    // positions are stored in either form
    "sinusoidal_pos_embds",
    "summary_activation",
    "summary_last_dropout",
    "summary_type",
    "summary_use_proj",
    "tie_weights_",
    "tie_word_embeddings",
    // of text generation, in configurations of 2019 and 2020
    "do_sample",
    "eos_token_ids",
    "length_penalty",
    "num_beams",
    "num_return_sequences",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "use_bfloat16",
];

/// Resolved configuration.
#[derive(Clone, Debug, Serialize)]
struct BertConfig {
    hidden_size: u64,
    /// Columns of the embeddings if they are projected.
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding_size: Option<u64>,
    intermediate_size: u64,
    num_hidden_layers: usize,
    /// Number of different layers, if they are shared.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_hidden_groups: Option<usize>,
    num_attention_heads: u64,
    vocab_size: u64,
    /// Rows of the position table.
    max_position_embeddings: u64,
    /// Row of the first token.
    first_position: u64,
    type_vocab_size: u64,
    layer_norm_eps: f64,
    activation: Activation,
    /// Scores by distance.
    #[serde(flatten)]
    disentangled: Option<Disentangled>,
}

impl BertConfig {
    fn read(keys: &Keys<'_>, row: &BertFamily) -> Result<Self, FamilyError> {
        let or = |key: &str, default: u64| if keys.get(key).is_some() { keys.size(key) } else { Ok(default) };
        let activation = activation(keys, "hidden_act")?.unwrap_or(row.activation);
        if keys.str("position_embedding_type")?.is_some_and(|kind| kind != "absolute") {
            return Err(keys.value("position_embedding_type", "\"absolute\""));
        }
        for key in ["is_decoder", "add_cross_attention"] {
            if keys.bool(key)? == Some(true) {
                return Err(keys.value(key, "false: attention is bidirectional"));
            }
        }
        if keys.get("pruned_heads").and_then(Json::as_object).is_some_and(|heads| !heads.is_empty()) {
            return Err(keys.value("pruned_heads", "{}: layers have equally many heads"));
        }
        let layer_norm_eps = keys.f64("layer_norm_eps")?.unwrap_or(if row.disentangled { 1e-7 } else { 1e-12 });
        if !(0.0..1.0).contains(&layer_norm_eps) {
            return Err(keys.value("layer_norm_eps", "between 0 and 1"));
        }
        let padding = keys.u64("pad_token_id")?;
        let hidden_size = keys.size("hidden_size")?;
        let embedding_size = match row.embeddings {
            Some(embeddings) => {
                let size = or("embedding_size", embeddings.default)?;
                if size > hidden_size {
                    return Err(keys.value("embedding_size", &format!("at most {hidden_size}, as hidden_size")));
                }
                (embeddings.always || size < hidden_size).then_some(size)
            }
            None => None,
        };
        let num_hidden_layers = keys.size("num_hidden_layers")?;
        let groups = row.groups.then(|| or("num_hidden_groups", 1)).transpose()?;
        if let Some(groups) = groups {
            if !num_hidden_layers.is_multiple_of(groups) {
                return Err(keys.value("num_hidden_groups", &format!("a divisor of {num_hidden_layers} layers")));
            }
            if or("inner_group_num", 1)? != 1 {
                return Err(keys.value("inner_group_num", "1: a group has one layer"));
            }
        }
        if row.relative_bias {
            if or("relative_attention_num_buckets", BUCKETS)? != BUCKETS {
                return Err(keys.value("relative_attention_num_buckets", &BUCKETS.to_string()));
            }
            if padding.is_some_and(|token| row.padding != Some(token)) {
                return Err(keys.value("pad_token_id", "1, behind which positions begin"));
            }
        }
        let config = BertConfig {
            hidden_size,
            embedding_size,
            intermediate_size: keys.size("intermediate_size")?,
            num_hidden_layers: num_hidden_layers as usize,
            num_hidden_groups: groups.map(|groups| groups as usize),
            num_attention_heads: keys.size("num_attention_heads")?,
            vocab_size: keys.size("vocab_size")?,
            max_position_embeddings: keys.size("max_position_embeddings")?,
            first_position: row.padding.map_or(0, |default| padding.unwrap_or(default).saturating_add(1)),
            type_vocab_size: match row.disentangled {
                true => keys.u64("type_vocab_size")?.unwrap_or(0),
                false if row.token_types => or("type_vocab_size", 2)?,
                false => 0,
            },
            layer_norm_eps,
            activation,
            disentangled: row.disentangled.then(|| Disentangled::read(keys)).transpose()?,
        };
        if !config.hidden_size.is_multiple_of(config.num_attention_heads) {
            return Err(keys.value("hidden_size", &format!("a multiple of {} heads", config.num_attention_heads)));
        }
        if config.num_hidden_layers > 4096 {
            return Err(keys.value("num_hidden_layers", "at most 4096"));
        }
        if config.first_position >= config.max_position_embeddings {
            return Err(keys.value("max_position_embeddings", &format!("more than {}", config.first_position)));
        }
        Ok(config)
    }
}

/// Activation that a key names.
fn activation(keys: &Keys<'_>, key: &str) -> Result<Option<Activation>, FamilyError> {
    match keys.str(key)? {
        None => Ok(None),
        Some("gelu") => Ok(Some(Activation::Gelu)),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Some(Activation::GeluTanh)),
        Some("silu" | "swish") => Ok(Some(Activation::Silu)),
        Some(_) => Err(keys.value(key, "\"gelu\", \"gelu_new\" or \"silu\"")),
    }
}

/// Opens a model with BERT's layers.
pub(super) fn open(
    row: &'static BertFamily,
    place: &str,
    config: &Map<String, Json>,
    ledger: &mut Ledger<'_>,
    acknowledged: &[String],
) -> Result<Encoder> {
    let keys = Keys::new(place, "", config).named(row.keys);
    let config = BertConfig::read(&keys, row)?;
    let purpose = purpose(&keys, Pooling::Cls)?;
    // read above; independent of the number of labels
    keys.accept("num_labels");
    keys.finish(row.name, &[NEUTRAL_KEYS, NEUTRAL].concat(), acknowledged)?;
    let naming = EncoderNaming::of(ledger, "embeddings.word_embeddings", row.prefix);
    Tensors { ledger, config: &config, naming, row }.encoder(purpose)
}

/// Weights of a source, taken from its ledger.
struct Tensors<'a, 'b> {
    ledger: &'a mut Ledger<'b>,
    config: &'a BertConfig,
    naming: EncoderNaming,
    row: &'static BertFamily,
}

impl Tensors<'_, '_> {
    fn encoder(mut self, purpose: Purpose) -> Result<Encoder> {
        let (config, row) = (self.config, self.row);
        let hidden = config.hidden_size;
        let embedding_size = config.embedding_size.unwrap_or(hidden);
        let embedding = self.table("word_embeddings", config.vocab_size, "vocab_size, the size of embeddings")?;
        let positions = match &config.disentangled {
            Some(Disentangled { position_biased_input: false, .. }) => {
                self.ledger
                    .ignore(&self.naming.name("embeddings.position_embeddings.*"), "position_biased_input is false");
                None
            }
            _ => {
                let count = config.max_position_embeddings;
                let table = self.table("position_embeddings", count, "max_position_embeddings")?;
                Some(table.slice(config.first_position..count)?)
            }
        };
        // GGUF files of DistilBERT have none
        let token_types = match self.naming {
            EncoderNaming::HuggingFace(_) => config.type_vocab_size > 0,
            EncoderNaming::Gguf => self.ledger.has("token_types.weight"),
        };
        let token_types = token_types
            .then(|| {
                self.table("token_type_embeddings", config.type_vocab_size, "type_vocab_size, the size of embeddings")
            })
            .transpose()?;
        let head = match &purpose {
            Purpose::SequenceClassification(classification) => {
                Some(self.head(row.head, classification.labels.len() as u64)?)
            }
            Purpose::TokenClassification(set) => Some(self.token_head(set.labels.len() as u64)?),
            _ => None,
        };
        if !matches!(purpose, Purpose::SequenceClassification(_)) {
            let pooler = self.naming.name("pooler.*");
            let heads = [
                "cls.*",
                "lm_head.*",
                "vocab_*",
                "discriminator_predictions.*",
                "generator_*",
                "predictions.*",
                "sop_classifier.*",
                "lm_predictions.*",
                "mask_predictions.*",
                "pooler.*",
            ];
            ignore_heads(self.ledger, &[&[pooler.as_str()], &heads[..]].concat());
        }
        self.ledger.ignore(&self.naming.name("embeddings.position_ids"), "positions are computed");
        let embedding_norm = self.norm("embeddings.LayerNorm", "embedding_norm", embedding_size)?;
        let embedding_projection = match (row.embeddings, config.embedding_size) {
            (Some(embeddings), Some(size)) => {
                let (name, because) = ("embedding_projection", "hidden_size, embedding_size");
                Some(self.linear(embeddings.projection, name, Role::Table, [hidden, size], because)?)
            }
            _ => None,
        };
        let relative = config.disentangled.as_ref().map(|own| self.relative_embeddings(own)).transpose()?;
        // all layers of a group are the same
        let groups = config.num_hidden_groups.unwrap_or(config.num_hidden_layers);
        let layers =
            (0..groups).map(|index| self.layer(index, relative.as_ref())).collect::<Result<Vec<_>>>()?.into_iter();
        let layers = layers.flat_map(|layer| repeat_n(layer, config.num_hidden_layers / groups)).collect();
        Ok(Encoder {
            embedding,
            positions,
            token_types,
            embedding_norm: Some(embedding_norm),
            embedding_projection,
            attention_bias: if row.relative_bias { Some(self.attention_bias()?) } else { None },
            layers,
            final_norm: None,
            head,
            final_projection: None,
            rope: [None, None],
            facts: FamilyFacts {
                family: row.name.to_owned(),
                hidden_size: hidden,
                num_layers: config.num_hidden_layers,
                vocab_size: config.vocab_size,
                purpose,
                max_position_embeddings: config.max_position_embeddings - config.first_position,
                hidden_scale: 1.0,
                recurrent: false,
                config: serde_json::to_value(config).unwrap_or(Json::Null),
            },
        })
    }

    /// A layer; `relative` are the embeddings of distances, if there are any.
    fn layer(&mut self, index: usize, relative: Option<&SourceWeight>) -> Result<EncoderLayer> {
        let config = self.config;
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let row = self.row;
        let name = |part: &str| row.tensor(index, part);
        let square = "hidden_size, hidden_size";
        let mut linear = |tensor: &str, own, role| {
            self.linear(&name(&format!("attention.self.{tensor}")), own, role, [hidden, hidden], square)
        };
        let query = linear("query", "q_proj", Role::AttentionQ)?;
        let key = linear("key", "k_proj", Role::AttentionK)?;
        let value = linear("value", "v_proj", Role::AttentionV)?;
        let distances = config.disentangled.as_ref().zip(relative);
        let distances =
            distances.map(|(own, relative)| self.distance_tables(own, relative, index, [&query, &key])).transpose()?;
        let output = name("attention.output.dense");
        let attention = BandedAttention {
            query,
            key,
            value,
            output: self.linear(&output, "o_proj", Role::AttentionOutput, [hidden, hidden], square)?,
            qk_norm: None,
            value_norm: None,
            sinks: None,
            distances,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_attention_heads,
            head_dim: hidden / config.num_attention_heads,
            rope_dim: 0,
            scale: config.attention_scale(),
            softcap: None,
        };
        let (up, down) = (name("intermediate.dense"), name("output.dense"));
        let mlp = PlainMlp {
            up: self.linear(&up, "up_proj", Role::MlpUp, [width, hidden], "intermediate_size, hidden_size")?,
            down: self.linear(&down, "down_proj", Role::MlpDown, [hidden, width], "hidden_size, intermediate_size")?,
            activation: config.activation,
        };
        let mut of_sum = |tensor: &str, own| -> Result<Norms> {
            Ok(Norms { before: None, after: None, of_sum: Some(self.norm(&name(tensor), own, hidden)?), scaling: None })
        };
        let layer = Layer {
            form: LayerForm::Sequential,
            mixer: Mixer::Banded(Box::new(attention)),
            mixer_norms: of_sum("attention.output.LayerNorm", "attn_norm")?,
            feed_forward: FeedForward::Plain(Box::new(mlp)),
            feed_forward_norms: of_sum("output.LayerNorm", "mlp_norm")?,
            per_layer_input: None,
            scalar: None,
        };
        Ok(EncoderLayer { layer, band: None })
    }

    /// `W_out tanh(W_dense x + b) + b`
    fn head(&mut self, [dense, output]: [&str; 2], labels: u64) -> Result<Head> {
        let hidden = self.config.hidden_size;
        let naming = self.naming;
        self.naming = naming.outside();
        let dense = self.linear(dense, "dense", Role::LmHead, [hidden, hidden], "hidden_size, hidden_size")?;
        let output = self.linear(output, "score", Role::LmHead, [labels, hidden], "labels of id2label, hidden_size")?;
        self.naming = naming;
        let activation = self.config.disentangled.as_ref().map(|own| HeadActivation::Hidden(own.pooler_hidden_act));
        let activation = activation.unwrap_or(self.row.head_activation);
        Ok(Head { layer: Some(HeadLayer { dense, activation, norm: None }), output })
    }

    /// `W_out x + b`
    fn token_head(&mut self, labels: u64) -> Result<Head> {
        let naming = self.naming;
        self.naming = naming.outside();
        let shape = [labels, self.config.hidden_size];
        let output = self.linear("classifier", "score", Role::LmHead, shape, "labels of id2label, hidden_size")?;
        self.naming = naming;
        Ok(Head { layer: None, output })
    }

    /// Biases of attention by distance, `[2 FARTHEST + 1, heads]`, the token farthest before first.
    fn attention_bias(&mut self) -> Result<SourceWeight> {
        let name = format!("{}.weight", self.naming.name("encoder.relative_attention_bias"));
        let shape = [BUCKETS, self.config.num_attention_heads];
        let table = take(self.ledger, &name, &shape, "relative_attention_num_buckets, num_attention_heads")?;
        let before = (0..=FARTHEST).rev().map(bucket);
        let after = (1..=FARTHEST).map(|distance| BUCKETS / 2 + bucket(distance));
        let rows = before.chain(after).map(|bucket| table.slice(bucket..bucket + 1)).collect::<Result<_, _>>()?;
        Ok(SourceWeight::concatenate(rows)?)
    }

    fn table(&mut self, name: &str, rows: u64, because: &str) -> Result<SourceWeight> {
        let name = format!("{}.weight", self.naming.name(&format!("embeddings.{name}")));
        let columns = self.config.embedding_size.unwrap_or(self.config.hidden_size);
        take(self.ledger, &name, &[rows, columns], because)
    }

    fn norm(&mut self, tensor: &str, name: &'static str, width: u64) -> Result<Norm> {
        let tensor = self.naming.name(tensor);
        // the first files have TensorFlow's names
        let [gain, bias] = match self.ledger.has(&format!("{tensor}.gamma")) {
            true => ["gamma", "beta"],
            false => ["weight", "bias"],
        };
        let because = if width == self.config.hidden_size { "hidden_size" } else { "embedding_size" };
        let gain = take(self.ledger, &format!("{tensor}.{gain}"), &[width], because)?;
        let bias = take(self.ledger, &format!("{tensor}.{bias}"), &[width], because)?;
        Ok(Norm::layer(name, gain, Some(bias), self.config.layer_norm_eps))
    }

    fn linear(
        &mut self,
        tensor: &str,
        name: &'static str,
        role: Role,
        shape: [u64; 2],
        because: &str,
    ) -> Result<Linear> {
        let tensor = self.naming.name(tensor);
        let weight = take(self.ledger, &format!("{tensor}.weight"), &shape, because)?;
        let bias = Some(take(self.ledger, &format!("{tensor}.bias"), &shape[..1], because)?);
        Ok(Linear { name, role, weight, bias })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Buckets as transformers computes them, with a logarithm.
    #[test]
    fn distances_have_the_buckets_of_their_logarithms() {
        for distance in 8..1000u64 {
            let logarithm = (distance as f32 / 8.0).ln() / 16f64.ln() as f32 * 8.0;
            assert_eq!(bucket(distance), (8 + logarithm as u64).min(15), "{distance}");
        }
        assert_eq!([0, 7, 8, 11, 12, 16, 127, 128].map(bucket), [0, 7, 8, 8, 9, 10, 15, 15]);
    }

    /// Keys that this graph can't express are refused by name.
    #[test]
    fn other_groups_buckets_terms_and_sizes_are_refused() {
        let base = json!({
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 3, "vocab_size": 50,
            "max_position_embeddings": 64, "embedding_size": 16
        });
        let deberta = json!({"embedding_size": 24, "relative_attention": true, "pos_att_type": "c2p|p2c"});
        for (family, key, value) in [
            ("albert", "num_hidden_groups", json!(3)),
            ("albert", "inner_group_num", json!(2)),
            ("albert", "embedding_size", json!(25)),
            ("electra", "embedding_size", json!(25)),
            ("mpnet", "relative_attention_num_buckets", json!(64)),
            ("mpnet", "pad_token_id", json!(0)),
            ("deberta-v2", "relative_attention", json!(false)),
            ("deberta-v2", "conv_kernel_size", json!(3)),
            ("deberta-v2", "attention_head_size", json!(16)),
            ("deberta-v2", "embedding_size", json!(16)),
            ("deberta-v2", "pooler_hidden_size", json!(16)),
            ("deberta-v2", "pooler_hidden_act", json!("tanh")),
            ("deberta-v2", "pos_att_type", json!(["c2p", "p2p"])),
            ("deberta-v2", "pos_att_type", json!([])),
            ("deberta-v2", "norm_rel_ebd", json!("rms_norm")),
            ("deberta-v2", "position_buckets", json!(126)),
        ] {
            let row = ROWS.iter().find(|row| row.name == family).unwrap();
            let read = |config: &Json| {
                BertConfig::read(&Keys::new("config.json", "", config.as_object().unwrap()), row)
                    .map_err(|error| error.to_string())
            };
            let mut config = base.clone();
            if row.disentangled {
                config.as_object_mut().unwrap().extend(deberta.as_object().unwrap().clone());
            }
            assert!(read(&config).is_ok(), "{family}");
            config[key] = value;
            let error = read(&config).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}
