//! Model families. A family turns a source's configuration and tensors into MIL functions.
//!
//! [`open`] reads the configuration of a source, finds the family's row in the table and gives a [`FamilyModel`]: what there
//! is to emit (layers, head, host tensors) and how to build the function for any part of it. A family composes
//! `blocks`; a block is an equation in ops. Which op form a block takes is the manifest's choice ([`LoweringOptions`]), the maths
//! never is.
//!
//! ```
//! use anec_family::table::DECODERS;
//!
//! // a dense family is a row that says how it differs from Llama
//! let qwen = DECODERS.iter().find(|row| row.name == "qwen3").unwrap();
//! assert_eq!(qwen.gguf, ["qwen3"]);
//! assert_eq!(qwen.mixture, anec_family::row::MixtureKind::None);
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`table`] | the family table: a row for each decoder family |
//! | [`row`] | what a row can say |
//! | [`published`] | the tensors of the models that built-in manifests are for |
//! | `config` | a source's configuration, resolved |
//! | `rope` | rotary tables |
//! | `tensors` | a source's tensors, found and checked |
//! | `decoder` | the engine of decoders |
//! | `classifier` | token classifiers |
//! | `encoder` | models that look at a text in both directions |
//! | `predictor` | a layer that guesses the token after the next |
//! | `layer` | a layer: a mixer of tokens and a feed-forward network |
//! | `residual_block` | what is around a block: norms, and the sum with the residual stream |
//! | `scale` | the residual stream in another unit |
//! | [`transform`] | transforms of the weights that keep the function |
//! | `blocks` | equations in ops |

#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod blocks;
mod classifier;
mod config;
mod decoder;
mod encoder;
pub mod error;
mod layer;
mod open;
mod predictor;
pub mod published;
mod residual_block;
#[doc(hidden)]
pub mod rope;
pub mod row;
mod scale;
pub mod table;
mod tensors;
pub mod transform;

use serde_json::Value as Json;

use anec_base::Result;
use anec_bundle::{
    HiddenProbe, LabelSet, Pooling, Port, ProjectionActivation, SequenceClassification, Stage, StatePort, TokenCount,
};
use anec_manifest::{
    ActivationForm, AttentionForm, ExpertsForm, KvWrite, LayerDivision, Layout, LinearForm, NormForm, RecurrentForm,
    Role, RopeForm, StateForm, Transform,
};
use anec_mil::{Dim, Function, FunctionBuilder, Opset, SymbolRange, ValueId};
use anec_source::SourceWeight;
use blocks::Graph;

pub use encoder::{families as encoder_families, gguf_architecture as encoder_architecture};
pub use error::FamilyError;
pub use open::{open, open_with_draft};
pub use transform::Transformed;

/// The op forms that a function is built in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoweringOptions {
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
    /// Form of the activations.
    pub activations: ActivationForm,
    /// Form of rotations by position.
    pub rope: RopeForm,
    /// How keys and values are written.
    pub kv_write: KvWrite,
    /// How what layers carry is divided into states.
    pub state: StateForm,
    /// Who keeps what layers with a recurrence carry.
    pub recurrent_states: RecurrentForm,
    /// Where experts are computed.
    pub experts: ExpertsForm,
    /// Whether a layer's feed-forward network is in a function of its own.
    pub divide: LayerDivision,
}

impl LoweringOptions {
    /// Whether the function of a layer, which has experts or none, leaves the feed-forward network to another. Experts that
    /// are in functions of their own leave nothing that could be.
    pub fn leaves_feed_forward_out(&self, has_experts: bool) -> bool {
        !self.divide.is_none() && (self.experts.is_packed() || !has_experts)
    }
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
    fn begin<'a>(&self, form: &LoweringOptions, weights: &'a mut dyn EmitWeight) -> Graph<'a> {
        let mut ops = FunctionBuilder::new(&self.name, form.opset);
        let tokens = match self.tokens {
            TokenCount::Fixed(count) => Dim::Fixed(count),
            TokenCount::Range(lower, upper) => {
                let default = self.default_tokens;
                Dim::symbol(&ops.symbol("T", SymbolRange::Range { lower, upper: Some(upper), default }))
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
    /// What is emitted from here on belongs to this layer, or to none.
    fn of_layer(&mut self, _layer: Option<usize>) {}

    /// Adds `weight`, seen as a tensor of `shape` (same elements, row-major), and gives its fp16 value.
    ///
    /// # Errors
    /// When the weight can't be represented.
    fn emit(
        &mut self,
        builder: &mut FunctionBuilder,
        name: &str,
        role: Role,
        weight: &SourceWeight,
        shape: &[u64],
    ) -> Result<ValueId>;

    /// Adds what the product of a weight is to be multiplied by, row by row, seen as a tensor of `shape` with as many
    /// elements as the weight has rows; nothing where the number format has no such scale.
    ///
    /// # Errors
    /// When the weight can't be represented.
    fn emit_row_scale(
        &mut self,
        _builder: &mut FunctionBuilder,
        _name: &str,
        _role: Role,
        _weight: &SourceWeight,
        _shape: &[u64],
    ) -> Result<Option<ValueId>> {
        Ok(None)
    }
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
pub struct HostTensors {
    /// Token embedding `[vocab_size, hidden_size]`, with any multiplier applied.
    pub embedding: SourceWeight,
    /// Learned positions `[positions, hidden_size]`.
    pub positions: Option<SourceWeight>,
    /// Token types `[types, hidden_size]`.
    pub token_types: Option<SourceWeight>,
    /// Rotary tables.
    pub rope: Vec<RopeTables>,
    /// The matrix `Q` by which hidden states are rotated, if they are, `[hidden_size, hidden_size]`: a row of hidden
    /// states is the model's times `Q`.
    pub rotation: Option<SourceWeight>,
    /// Vectors of each token for each layer, `[vocab_size, layers * width]`.
    pub per_layer_embedding: Option<SourceWeight>,
    /// Projections of what is pooled.
    pub projections: Vec<HostProjection>,
}

/// A projection that the host computes.
#[derive(Clone, Debug)]
pub struct HostProjection {
    /// `[rows, columns]`
    pub weight: SourceWeight,
    /// `[1, rows]`
    pub bias: Option<SourceWeight>,
    /// What follows.
    pub activation: ProjectionActivation,
}

/// What a model is for.
#[derive(Clone, Debug, PartialEq)]
pub enum Purpose {
    /// It continues a text.
    TextGeneration,
    /// It labels every token.
    TokenClassification(LabelSet),
    /// It gives a text a vector.
    TextEmbedding {
        /// Tokens see those on both sides.
        bidirectional: bool,
        /// How hidden states are pooled where nothing else is said.
        pooling: Pooling,
    },
    /// It classifies texts and pairs of texts.
    SequenceClassification(SequenceClassification),
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertCounts {
    /// All.
    pub count: u64,
    /// Those that a token is given at most.
    pub per_token: u64,
    /// What they give goes through a norm together: experts in functions of their own are followed by one function more, which
    /// counts as another expert that every token is given.
    pub joined: bool,
}

impl ExpertCounts {
    /// Experts whose outputs are just added.
    pub fn new(count: u64, per_token: u64) -> Self {
        ExpertCounts { count, per_token, joined: false }
    }

    /// Experts in functions of their own, what joins them included.
    pub fn apart(&self) -> u64 {
        self.count + u64::from(self.joined)
    }
}

/// The dimensions that every family has.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilyFacts {
    /// Family name: a row of the table.
    pub family: String,
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Number of layers.
    pub num_layers: usize,
    /// Rows of the embedding, and of the LM head.
    pub vocab_size: u64,
    /// What it is for.
    pub purpose: Purpose,
    /// Longest text the model was made for.
    pub max_position_embeddings: u64,
    /// Hidden states between functions are the model's times this.
    pub hidden_scale: f64,
    /// Layers carry a state that every token of a call changes for good, so that no call can be filled up.
    pub recurrent: bool,
    /// The resolved configuration, for `bundle.json`.
    pub config: Json,
}

impl FamilyFacts {
    /// What a token classifier gives instead of tokens.
    pub fn label_set(&self) -> Option<&LabelSet> {
        match &self.purpose {
            Purpose::TokenClassification(label_set) => Some(label_set),
            _ => None,
        }
    }

    /// Rows of the head: tokens, or labels. A model that gives vectors has none.
    pub fn head_rows(&self) -> u64 {
        match &self.purpose {
            Purpose::TextGeneration => self.vocab_size,
            Purpose::TokenClassification(set) => set.labels.len() as u64,
            Purpose::TextEmbedding { .. } => 0,
            Purpose::SequenceClassification(classification) => classification.labels.len() as u64,
        }
    }

    /// Whether it looks at a text in both directions: functions have no states, and a call takes a whole text, or a window.
    pub fn is_bidirectional(&self) -> bool {
        match &self.purpose {
            Purpose::TextGeneration => false,
            Purpose::TokenClassification(_) | Purpose::SequenceClassification(_) => true,
            Purpose::TextEmbedding { bidirectional, .. } => *bidirectional,
        }
    }

    /// Whether every token sees all of the text, so that a text has to fit into one call.
    pub fn takes_whole_texts(&self) -> bool {
        self.is_bidirectional() && self.label_set().is_none()
    }
}

/// A model that can be emitted.
pub trait FamilyModel: Send + Sync {
    /// Its dimensions.
    fn facts(&self) -> &FamilyFacts;

    /// How many experts a layer has, and how many of them a token is given at most; none where it has none.
    fn experts(&self, _layer: usize) -> Option<ExpertCounts> {
        None
    }

    /// The layer that guesses the tokens after the next, as a model of its own, if it was opened with one. Its embedding and its
    /// LM head are this model's.
    fn draft(&self) -> Option<&dyn FamilyModel> {
        None
    }

    /// Bytes of state that one layer holds for texts of `context` tokens in calls of up to `most_tokens`.
    fn layer_state_bytes(&self, layer: usize, context: u64, most_tokens: u64) -> u64;

    /// Builds a function.
    ///
    /// # Errors
    /// When a weight can't be emitted or the form can't express the model.
    fn build(
        &self,
        form: &LoweringOptions,
        request: &FunctionRequest,
        weights: &mut dyn EmitWeight,
    ) -> Result<FunctionGraph>;

    /// What the host needs, with tables for up to `context` positions.
    ///
    /// # Errors
    /// When a table can't be computed.
    fn host(&self, context: u64) -> Result<HostTensors>;

    /// Puts all hidden states into another unit, a power of two, instead of the family's own; the logits stay as they are.
    fn set_hidden_scale(&mut self, scale: f64);

    /// The transforms that suit it where projections are quantized with one scale for the whole tensor.
    fn recipe(&self) -> Vec<Transform> {
        Vec::new()
    }

    /// Whether a transform keeps what this model computes.
    ///
    /// # Errors
    /// Why it doesn't, as a part of a sentence.
    fn permits(&self, _transform: Transform) -> Result<(), &'static str> {
        Err("the weights of models that look at a text in both directions are not transformed")
    }

    /// Applies those transforms that the model permits, once. The logits stay as they are.
    ///
    /// # Errors
    /// When a weight hasn't the shape that a transform needs.
    fn transform(&mut self, _transforms: &[Transform]) -> Result<()> {
        Ok(())
    }

    /// What was done to the weights, and what wasn't.
    fn transformed(&self) -> Transformed {
        Transformed::default()
    }

    /// Whether norms stand behind the blocks and before them: the rows of a block's last projection go through a norm,
    /// where no unit of theirs can be undone.
    fn norms_behind_blocks(&self) -> bool {
        false
    }
}
