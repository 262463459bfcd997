//! Floor 3: model families. A family turns a source's configuration and tensors into MIL functions.
//!
//! [`open`] reads the configuration of a source, finds the family's row in the table and gives a [`Model`]: what there
//! is to emit (layers, head, host tensors) and how to build the function for any part of it. A family composes
//! `blocks`; a block is an equation in ops. Which op form a block takes is the manifest's choice ([`Form`]), the maths
//! never is.
//!
//! | module | holds |
//! |---|---|
//! | [`table`] | the family table: a row for each decoder family |
//! | [`config`] | a source's configuration, resolved |
//! | [`rope`] | rotary tables |
//! | [`tensors`] | a source's tensors, found and checked |
//! | [`decoder`] | the engine of decoders |
//! | [`classifier`] | token classifiers |
//! | [`layer`] | a layer: a mixer of tokens and a feed-forward network |
//! | [`scale`] | the residual stream in another unit |
//! | [`blocks`] | equations in ops |

#![forbid(unsafe_code)]

pub mod blocks;
pub mod classifier;
pub mod config;
pub mod decoder;
pub mod error;
pub mod layer;
pub mod rope;
pub mod scale;
pub mod table;
pub mod tensors;

use std::ops::Range;

use serde_json::Value as Json;

use anec_base::Result;
use anec_bundle::{HiddenProbe, LabelSet, Port, Stage, StatePort, TokenCount};
use anec_manifest::{
    AttentionForm, ExpertsForm, KvWrite, Layout, LinearForm, NormForm, RecurrentForm, Role, StateForm,
};
use anec_mil::{Dim, Function, FunctionBuilder, Lengths, Opset, ValueId};
use anec_source::gguf::Metadata;
use anec_source::{Description, HuggingFaceFiles, Ledger, Source, Weight, onnx};
use blocks::Graph;
use config::DecoderConfig;
use config::gguf::FactorTensors;
use decoder::Decoder;
use error::FamilyError;
use table::{DECODERS, DecoderFamily};
use tensors::{Naming, Tensors};

/// The op forms that a function is built in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Opset to write in.
    pub opset: Opset,
    /// Layout of hidden states.
    pub layout: Layout,
    /// What a projection becomes.
    pub linear: LinearForm,
    /// Form of the norms.
    pub norm: NormForm,
    /// Form of attention.
    pub attention: AttentionForm,
    /// How keys and values are written.
    pub kv_write: KvWrite,
    /// How what layers carry is divided into states.
    pub state: StateForm,
    /// Who keeps what layers with a recurrence carry.
    pub recurrent_states: RecurrentForm,
    /// Where experts are computed.
    pub experts: ExpertsForm,
}

/// A function to build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionRequest {
    /// Its name in the package.
    pub name: String,
    /// Which part of the model.
    pub stage: Stage,
    /// Tokens of one call.
    pub tokens: TokenCount,
    /// Which of them Core ML plans for.
    pub default_tokens: u64,
    /// Tokens of the longest text.
    pub context: u64,
    /// Most tokens of a call of any function that shares this one's states.
    pub most_tokens: u64,
    /// Whether an LM-head piece also gives the index of its largest logit.
    pub argmax: bool,
}

impl FunctionRequest {
    /// The function, empty.
    fn begin<'a>(&self, form: &Form, weights: &'a mut dyn EmitWeight) -> Graph<'a> {
        let mut ops = FunctionBuilder::new(&self.name, form.opset);
        let tokens = match self.tokens {
            TokenCount::Fixed(count) => Dim::Fixed(count),
            TokenCount::Range(lower, upper) => {
                let default = self.default_tokens;
                Dim::symbol(&ops.symbol("T", Lengths::Range { lower, upper: Some(upper), default }))
            }
        };
        Graph::new(ops, *form, tokens, weights)
    }
}

/// A built function and what its ports mean.
#[derive(Clone, Debug)]
pub struct FunctionGraph {
    /// The MIL function.
    pub function: Function,
    /// Inputs that are tensors.
    pub inputs: Vec<Port>,
    /// Outputs.
    pub outputs: Vec<Port>,
    /// States.
    pub states: Vec<StatePort>,
    /// Where the hidden states between its layers are.
    pub probes: Vec<HiddenProbe>,
}

/// Puts a weight into a function in the number format that its role asks for.
pub trait EmitWeight {
    /// Adds `weight`, seen as a tensor of `shape` (same elements, row-major), and gives its fp16 value.
    ///
    /// # Errors
    /// When the weight can't be represented.
    fn emit(
        &mut self,
        builder: &mut FunctionBuilder,
        name: &str,
        role: Role,
        weight: &Weight,
        shape: &[u64],
    ) -> Result<ValueId>;
}

/// A rotary table for the host, f32.
#[derive(Clone, Debug)]
pub struct RopeTables {
    /// Name by which ports ask for it.
    pub table: String,
    /// Values per position: half of the rotated dimensions.
    pub columns: u64,
    /// Variants by the length of the text, ascending.
    pub variants: Vec<RopeValues>,
}

/// One variant of a rotary table.
#[derive(Clone, Debug)]
pub struct RopeValues {
    /// Longest text it is for.
    pub max_length: u64,
    /// Cosines, `[rows, columns]`, rows = min(max_length, context); the attention factor is multiplied in.
    pub cos: Vec<f32>,
    /// Sines, likewise.
    pub sin: Vec<f32>,
}

/// What the host needs beside the packages.
#[derive(Clone, Debug)]
pub struct Host {
    /// Token embedding `[vocab_size, hidden_size]`, with any multiplier applied.
    pub embedding: Weight,
    /// Rotary tables.
    pub rope: Vec<RopeTables>,
}

/// A weight of a layer or head, for planning.
#[derive(Clone, Debug)]
pub struct PlannedWeight {
    /// Name of the tensor in the function, without the layer's prefix.
    pub name: String,
    /// What it does.
    pub role: Role,
    /// The weight.
    pub weight: Weight,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertCounts {
    /// All.
    pub count: u64,
    /// Those that a token is given at most.
    pub per_token: u64,
}

/// The dimensions that every family has.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Family name: a row of the table.
    pub family: String,
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Number of layers.
    pub num_layers: usize,
    /// Rows of the embedding, and of the LM head.
    pub vocab_size: u64,
    /// What a token classifier gives instead of tokens.
    pub label_set: Option<LabelSet>,
    /// Longest text the model was made for.
    pub max_position_embeddings: u64,
    /// Hidden states between functions are the model's times this.
    pub hidden_scale: f64,
    /// Layers carry a state that every token of a call changes for good, so that no call can be filled up.
    pub recurrent: bool,
    /// The resolved configuration, for `bundle.json`.
    pub config: Json,
}

impl Facts {
    /// Rows of the head: tokens, or labels.
    pub fn head_rows(&self) -> u64 {
        self.label_set.as_ref().map_or(self.vocab_size, |set| set.labels.len() as u64)
    }
}

/// A model that can be emitted.
pub trait Model: Send + Sync {
    /// Its dimensions.
    fn facts(&self) -> &Facts;

    /// The weights of one layer, in the order in which its function holds them.
    fn layer_weights(&self, layer: usize) -> Vec<PlannedWeight>;

    /// How many experts a layer has, and how many of them a token is given at most; none where it has none.
    fn experts(&self, _layer: usize) -> Option<ExpertCounts> {
        None
    }

    /// The weights of some experts of a layer, for functions of their own.
    ///
    /// # Errors
    /// When there are fewer.
    fn expert_weights(&self, _layer: usize, _experts: Range<u64>) -> Result<Vec<PlannedWeight>> {
        Ok(Vec::new())
    }

    /// The weights of rows `rows` of the LM head.
    ///
    /// # Errors
    /// When there are fewer rows.
    fn head_weights(&self, rows: Range<u64>) -> Result<Vec<PlannedWeight>>;

    /// Bytes of state that one layer holds for texts of `context` tokens in calls of up to `most_tokens`.
    fn layer_state_bytes(&self, layer: usize, context: u64, most_tokens: u64) -> u64;

    /// Builds a function.
    ///
    /// # Errors
    /// When a weight can't be emitted or the form can't express the model.
    fn build(&self, form: &Form, request: &FunctionRequest, weights: &mut dyn EmitWeight) -> Result<FunctionGraph>;

    /// What the host needs, with tables for up to `context` positions.
    ///
    /// # Errors
    /// When a table can't be computed.
    fn host(&self, context: u64) -> Result<Host>;

    /// Puts all hidden states into another unit, a power of two, instead of the family's own; the logits stay as they are.
    fn set_hidden_scale(&mut self, scale: f64);
}

/// Opens the model of a source: finds its family, reads its configuration and takes its tensors from the ledger.
///
/// `family` is the manifest's, which must agree with the source's. `acknowledged` lists configuration keys that the user
/// has declared harmless.
///
/// # Errors
/// When the family is unknown, the configuration isn't understood, or a tensor is missing or doesn't fit.
pub fn open(ledger: &mut Ledger<'_>, family: Option<&str>, acknowledged: &[String]) -> Result<Box<dyn Model>> {
    let source = ledger.source();
    match source.description() {
        Description::Gguf(metadata) => open_gguf(source, metadata, ledger, family, acknowledged),
        Description::HuggingFace(files) => open_hugging_face(source, files, ledger, family, acknowledged),
        Description::Onnx(bundle) => open_onnx(source, bundle, ledger, family, acknowledged),
    }
}

fn open_hugging_face(
    source: &Source,
    files: &HuggingFaceFiles,
    ledger: &mut Ledger<'_>,
    family: Option<&str>,
    acknowledged: &[String],
) -> Result<Box<dyn Model>> {
    let place = format!("{}/config.json", source.name());
    let Some(Json::Object(config)) = &files.config else {
        return Err(FamilyError::NoConfig { place: source.name().to_owned() }.into());
    };
    let Some(model_type) = config.get("model_type").and_then(Json::as_str) else {
        return Err(FamilyError::MissingKey { place, key: "model_type".into() }.into());
    };
    if model_type == table::OPENAI_PRIVACY_FILTER.name {
        if let Some(asked) = family.filter(|asked| *asked != model_type) {
            return Err(
                FamilyError::OtherFamily { place, asked: asked.to_owned(), found: model_type.to_owned() }.into()
            );
        }
        return classifier::open(&place, config, ledger, acknowledged);
    }
    let row = find(&place, model_type, family, |row| row.name == model_type || row.wrappers.contains(&model_type))?;
    let text = (row.name != model_type).then(|| config::text_config(&place, config, row)).transpose()?;
    let config = DecoderConfig::read(&place, text.as_ref().unwrap_or(config), row, acknowledged)?;
    if text.is_some() {
        for pattern in config::NOT_TEXT {
            ledger.ignore(pattern, "no part of the text model");
        }
    }
    for pattern in row.unused_tensors {
        ledger.ignore(pattern, "guesses more than one token: no part of the model");
    }
    // buffers that older checkpoints carry; the tables are computed
    ledger.ignore("model.layers.*.self_attn.rotary_emb.inv_freq", "rotary frequencies are computed");
    ledger.ignore("model.rotary_emb.inv_freq", "rotary frequencies are computed");
    assemble(config, row, Naming::HuggingFace, ledger)
}

fn open_gguf(
    source: &Source,
    metadata: &Metadata,
    ledger: &mut Ledger<'_>,
    family: Option<&str>,
    acknowledged: &[String],
) -> Result<Box<dyn Model>> {
    let place = source.name().to_owned();
    let Some(architecture) = metadata.str("general.architecture")? else {
        return Err(FamilyError::MissingKey { place, key: "general.architecture".into() }.into());
    };
    let row = find(&place, architecture, family, |row| row.gguf.contains(&architecture))?;
    let mut factors = |name: &str| -> Result<Option<Vec<f32>>> {
        let Some(tensor) = ledger.take_optional(name)? else { return Ok(None) };
        let mut values = vec![0.0; tensor.elements() as usize];
        tensor.read(0, &mut values)?;
        Ok(Some(values))
    };
    let factors = FactorTensors {
        plain: factors("rope_freqs.weight")?,
        short: factors("rope_factors_short.weight")?,
        long: factors("rope_factors_long.weight")?,
    };
    let vocab_size = source.tensor("token_embd.weight").map_or(0, |t| t.rows());
    let tied = !ledger.has("output.weight");
    let config = config::gguf::configuration(metadata, architecture, &factors, vocab_size, tied)?;
    let config = DecoderConfig::read(&place, &config, row, acknowledged)?;
    for block in config::gguf::guessing_blocks(metadata, architecture, config.num_hidden_layers)? {
        ledger.ignore(&format!("blk.{block}.*"), "guesses more than one token: no part of the model");
    }
    assemble(config, row, Naming::Gguf, ledger)
}

fn open_onnx(
    source: &Source,
    bundle: &onnx::Bundle,
    ledger: &mut Ledger<'_>,
    family: Option<&str>,
    acknowledged: &[String],
) -> Result<Box<dyn Model>> {
    let graph = &bundle.decoder;
    let genai = |key: &str| bundle.genai.as_ref().and_then(|config| config.pointer(&format!("/model/{key}")));
    let (place, config, row) = match &bundle.files.config {
        Some(Json::Object(config)) => {
            let place = format!("{}/config.json", source.name());
            let Some(model_type) = config.get("model_type").and_then(Json::as_str) else {
                return Err(FamilyError::MissingKey { place, key: "model_type".into() }.into());
            };
            let row =
                find(&place, model_type, family, |row| row.name == model_type || row.wrappers.contains(&model_type))?;
            let text = (row.name != model_type).then(|| config::text_config(&place, config, row)).transpose()?;
            (place, text.unwrap_or_else(|| config.clone()), row)
        }
        _ => {
            let place = format!("{}/{}", source.name(), onnx::CONFIG);
            // a type that isn't known doesn't matter: the graph has the form of some family
            let named =
                genai("type").and_then(Json::as_str).filter(|name| DECODERS.iter().any(|row| row.name == *name));
            let asked = family.unwrap_or_else(|| config::onnx::family(graph));
            let name = named.unwrap_or(asked);
            let row = find(&place, name, family, |row| row.name == name)?;
            let config = config::onnx::configuration(graph, genai("context_length").and_then(Json::as_u64), row)?;
            (place, config, row)
        }
    };
    let mut config = DecoderConfig::read(&place, &config, row, acknowledged)?;
    // the graph has what the weights were when it was written: fused ones apart, biases of zero left out, a tied head of
    // its own where it was quantized otherwise than the embedding
    config.fused = false;
    config.tie_word_embeddings = graph.tied;
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (graph.qkv_bias, graph.output_bias, graph.mlp_bias);
    config::onnx::check(&place, &config, graph)?;
    assemble(config, row, Naming::Onnx, ledger)
}

fn find(
    place: &str,
    found: &str,
    asked: Option<&str>,
    matches: impl Fn(&DecoderFamily) -> bool,
) -> Result<&'static DecoderFamily, FamilyError> {
    let rows = || DECODERS.iter().filter(|row| matches(row));
    // several families may share an architecture name: the manifest's word decides, else the first row
    if let Some(row) = rows().find(|row| asked == Some(row.name)) {
        return Ok(row);
    }
    let row = rows().next().ok_or_else(|| FamilyError::UnknownFamily {
        place: place.to_owned(),
        found: found.to_owned(),
        known: DECODERS
            .iter()
            .chain([&table::OPENAI_PRIVACY_FILTER])
            .map(|row| row.name)
            .collect::<Vec<_>>()
            .join(", "),
    })?;
    match asked {
        None => Ok(row),
        Some(asked) => {
            Err(FamilyError::OtherFamily { place: place.to_owned(), asked: asked.to_owned(), found: found.to_owned() })
        }
    }
}

fn assemble(
    config: DecoderConfig,
    row: &'static DecoderFamily,
    naming: Naming,
    ledger: &mut Ledger<'_>,
) -> Result<Box<dyn Model>> {
    let mut tensors = Tensors::new(ledger, naming, row, &config);
    let embedding = tensors.embedding()?;
    let head = tensors.head(&embedding)?;
    let embedding = tensors.scaled_embedding(&embedding)?;
    let final_norm = tensors.final_norm()?;
    let layers = (0..config.num_hidden_layers).map(|index| tensors.layer(index)).collect::<Result<Vec<_>>>()?;
    let facts = Facts {
        family: config.family.to_owned(),
        hidden_size: config.hidden_size,
        num_layers: config.num_hidden_layers,
        vocab_size: config.vocab_size,
        label_set: None,
        max_position_embeddings: config.max_position_embeddings,
        hidden_scale: 1.0,
        recurrent: config.short_conv.is_some() || config.cca.is_some() || config.delta_net.is_some(),
        config: serde_json::to_value(&config).unwrap_or(Json::Null),
    };
    let hidden_scale = config.hidden_scale;
    let mut decoder = Decoder { config, facts, layers, embedding, final_norm, head };
    decoder.set_hidden_scale(hidden_scale);
    Ok(Box::new(decoder))
}
