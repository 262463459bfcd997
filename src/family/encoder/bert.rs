//! BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692, arXiv:1911.02116): layer norms of the sums, learned
//! positions, plain feed-forward networks, biases everywhere.
//!
//! ```text
//! x = norm(embedding + position + type)
//! x = norm(x + W_o attention(W_q x, W_k x, W_v x))
//! x = norm(x + W_down gelu(W_up x))
//! ```

use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::head::{Head, HeadActivation};
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
    /// Parts of tensor names that differ from BERT's: (BERT's, here).
    tensors: &'static [(&'static str, &'static str)],
    /// Whether there are token types.
    token_types: bool,
    /// Default of `embedding_size`, which must equal `hidden_size`, if the family has the key.
    embedding_size: Option<u64>,
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
        tensors: &[
            ("encoder.layer", "transformer.layer"),
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
        embedding_size: Some(128),
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
    tensors: &[],
    token_types: true,
    embedding_size: None,
};

/// Neutral keys: of training, and of absent heads.
pub(super) const NEUTRAL: &[&str] = &[
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "directionality",
    "dropout",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "id2label",
    "output_past",
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
    intermediate_size: u64,
    num_hidden_layers: usize,
    num_attention_heads: u64,
    vocab_size: u64,
    /// Rows of the position table.
    max_position_embeddings: u64,
    /// Row of the first token.
    first_position: u64,
    type_vocab_size: u64,
    layer_norm_eps: f64,
    activation: Activation,
}

impl BertConfig {
    fn read(keys: &Keys<'_>, row: &BertFamily) -> Result<Self, FamilyError> {
        let or = |key: &str, default: u64| if keys.get(key).is_some() { keys.size(key) } else { Ok(default) };
        let activation = match keys.str("hidden_act")?.unwrap_or("gelu") {
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
            "silu" | "swish" => Activation::Silu,
            _ => return Err(keys.value("hidden_act", "\"gelu\", \"gelu_new\" or \"silu\"")),
        };
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
        let layer_norm_eps = keys.f64("layer_norm_eps")?.unwrap_or(1e-12);
        if !(0.0..1.0).contains(&layer_norm_eps) {
            return Err(keys.value("layer_norm_eps", "between 0 and 1"));
        }
        let padding = keys.u64("pad_token_id")?;
        let hidden_size = keys.size("hidden_size")?;
        if let Some(default) = row.embedding_size
            && or("embedding_size", default)? != hidden_size
        {
            return Err(keys.value("embedding_size", &format!("{hidden_size}, as hidden_size")));
        }
        let config = BertConfig {
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            num_hidden_layers: keys.size("num_hidden_layers")? as usize,
            num_attention_heads: keys.size("num_attention_heads")?,
            vocab_size: keys.size("vocab_size")?,
            max_position_embeddings: keys.size("max_position_embeddings")?,
            first_position: row.padding.map_or(0, |default| padding.unwrap_or(default).saturating_add(1)),
            type_vocab_size: if row.token_types { or("type_vocab_size", 2)? } else { 0 },
            layer_norm_eps,
            activation,
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
        let embedding = self.table("word_embeddings", config.vocab_size, "vocab_size, hidden_size")?;
        let positions = self.table("position_embeddings", config.max_position_embeddings, "max_position_embeddings")?;
        let positions = positions.slice(config.first_position..config.max_position_embeddings)?;
        // GGUF files of DistilBERT have none
        let token_types = match self.naming {
            EncoderNaming::HuggingFace(_) => row.token_types,
            EncoderNaming::Gguf => self.ledger.has("token_types.weight"),
        };
        let token_types = token_types
            .then(|| self.table("token_type_embeddings", config.type_vocab_size, "type_vocab_size, hidden_size"))
            .transpose()?;
        let head = match &purpose {
            Purpose::SequenceClassification(classification) => {
                Some(self.head(row.head, classification.labels.len() as u64)?)
            }
            _ => {
                let pooler = self.naming.name("pooler.*");
                let heads = ["cls.*", "lm_head.*", "vocab_*", "discriminator_predictions.*", "generator_*"];
                ignore_heads(self.ledger, &[&[pooler.as_str()], &heads[..]].concat());
                None
            }
        };
        self.ledger.ignore(&self.naming.name("embeddings.position_ids"), "positions are computed");
        Ok(Encoder {
            embedding,
            positions: Some(positions.clone()),
            token_types,
            embedding_norm: Some(self.norm("embeddings.LayerNorm", "embedding_norm")?),
            layers: (0..config.num_hidden_layers).map(|index| self.layer(index)).collect::<Result<_>>()?,
            final_norm: None,
            head,
            rope: [None, None],
            facts: FamilyFacts {
                family: row.name.to_owned(),
                hidden_size: hidden,
                num_layers: config.num_hidden_layers,
                vocab_size: config.vocab_size,
                purpose,
                max_position_embeddings: positions.rows(),
                hidden_scale: 1.0,
                recurrent: false,
                config: serde_json::to_value(config).unwrap_or(Json::Null),
            },
        })
    }

    fn layer(&mut self, index: usize) -> Result<EncoderLayer> {
        let config = self.config;
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let name = |part: &str| format!("encoder.layer.{index}.{part}");
        let square = "hidden_size, hidden_size";
        let mut qkv = |tensor: &str, own| {
            self.linear(&name(&format!("attention.self.{tensor}")), own, Role::AttentionQkv, [hidden, hidden], square)
        };
        let (query, key, value) = (qkv("query", "q_proj")?, qkv("key", "k_proj")?, qkv("value", "v_proj")?);
        let output = name("attention.output.dense");
        let attention = BandedAttention {
            query,
            key,
            value,
            output: self.linear(&output, "o_proj", Role::AttentionOutput, [hidden, hidden], square)?,
            qk_norm: None,
            sinks: None,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_attention_heads,
            head_dim: hidden / config.num_attention_heads,
            rope_dim: 0,
            scale: ((hidden / config.num_attention_heads) as f64).powf(-0.5),
            softcap: None,
        };
        let (up, down) = (name("intermediate.dense"), name("output.dense"));
        let mlp = PlainMlp {
            up: self.linear(&up, "up_proj", Role::MlpUp, [width, hidden], "intermediate_size, hidden_size")?,
            down: self.linear(&down, "down_proj", Role::MlpDown, [hidden, width], "hidden_size, intermediate_size")?,
            activation: config.activation,
        };
        let mut of_sum = |tensor: &str, own| -> Result<Norms> {
            Ok(Norms { before: None, after: None, of_sum: Some(self.norm(&name(tensor), own)?), scaling: None })
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
        Ok(Head { dense, activation: self.row.head_activation, norm: None, output })
    }

    /// Name of a tensor in the file, without `.weight` or `.bias`.
    fn name(&self, tensor: &str) -> String {
        let renamed = |name: String| match self.row.tensors.iter().find(|(own, _)| name.ends_with(own)) {
            Some((own, here)) => format!("{}{here}", name.strip_suffix(own).unwrap_or_default()),
            None => name,
        };
        match (tensor.strip_prefix("encoder.layer."), self.row.tensors.first()) {
            (Some(rest), Some((_, layers))) => self.naming.name(&renamed(format!("{layers}.{rest}"))),
            _ => self.naming.name(tensor),
        }
    }

    fn table(&mut self, name: &str, rows: u64, because: &str) -> Result<SourceWeight> {
        let name = format!("{}.weight", self.naming.name(&format!("embeddings.{name}")));
        take(self.ledger, &name, &[rows, self.config.hidden_size], because)
    }

    fn norm(&mut self, tensor: &str, name: &'static str) -> Result<Norm> {
        let tensor = self.name(tensor);
        // the first files have TensorFlow's names
        let [gain, bias] = match self.ledger.has(&format!("{tensor}.gamma")) {
            true => ["gamma", "beta"],
            false => ["weight", "bias"],
        };
        let shape = [self.config.hidden_size];
        let gain = take(self.ledger, &format!("{tensor}.{gain}"), &shape, "hidden_size")?;
        let bias = take(self.ledger, &format!("{tensor}.{bias}"), &shape, "hidden_size")?;
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
        let tensor = self.name(tensor);
        let weight = take(self.ledger, &format!("{tensor}.weight"), &shape, because)?;
        let bias = Some(take(self.ledger, &format!("{tensor}.bias"), &shape[..1], because)?);
        Ok(Linear { name, role, weight, bias })
    }
}
