//! Model families. A family turns a source's configuration and tensors into MIL functions.
//!
//! [`open`] reads the configuration of a source, finds the family's row in the table and returns a [`FamilyModel`]: the
//! parts to emit (layers, head, host tensors) and a builder of their functions. A family composes `blocks`; a block is
//! an equation as ops. The manifest chooses the op forms ([`LoweringOptions`]); the maths is fixed.
//!
//! ```
//! use anec_family::table::DECODERS;
//!
//! // a dense family is a row that says how it differs from Llama
//! let qwen = DECODERS.iter().find(|row| row.name == "qwen3").unwrap();
//! assert_eq!(qwen.names.gguf, ["qwen3"]);
//! assert_eq!(qwen.network.mixture, anec_family::row::MixtureKind::None);
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`table`] | the family table: a row for each decoder family |
//! | [`row`] | types of the table's rows |
//! | [`published`] | tensors of the models of built-in manifests |
//! | `config` | resolved configurations |
//! | `rope` | rotary tables |
//! | `tensors` | lookup and shape checks of a source's tensors |
//! | `decoder` | the engine of decoders |
//! | `classifier` | token classifiers |
//! | `encoder` | bidirectional models |
//! | `predictor` | next-token layers for drafts |
//! | `layer` | a decoder layer: token mixer and feed-forward network |
//! | `residual_block` | norms and residual connection of a block |
//! | `scale` | scaling of the residual stream |
//! | `transform` | function-preserving transforms of the weights |
//! | `blocks` | equations as ops |

#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod blocks;
mod classifier;
mod config;
mod decoder;
mod encoder;
mod error;
mod layer;
mod open;
mod predictor;
pub mod published;
mod reranker;
mod residual_block;
#[doc(hidden)]
pub mod rope;
pub mod row;
mod scale;
pub mod table;
mod tensors;
mod transform;

use serde_json::Value as Json;

use anec_base::Result;
use anec_bundle::{
    HiddenProbe, LabelSet, Pooling, Port, ProjectionActivation, SequenceClassification, Stage, StatePort, TokenCount,
};
use anec_manifest::{
    ActivationForm, AttentionForm, ExpertsForm, HeadOutputs, KvWrite, LayerDivision, Layout, LinearForm, NormForm,
    RecurrentForm, Reranker, Role, RopeForm, StateForm, Transform,
};
use anec_mil::{Dim, Function, FunctionBuilder, Opset, SymbolRange, ValueId};
use anec_source::SourceWeight;
use blocks::Graph;

pub use encoder::{MASKED_TOKEN_HEAD, families as encoder_families, gguf_architecture as encoder_architecture};
pub use error::FamilyError;
pub use open::{open, open_with_draft};
pub use transform::Transformed;

/// Op forms of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoweringOptions {
    /// Opset.
    pub opset: Opset,
    /// Layout of hidden states.
    pub layout: Layout,
    /// Form of projections.
    pub linear: LinearForm,
    /// Form of the norms.
    pub norm: NormForm,
    /// Form of attention.
    pub attention: AttentionForm,
    /// Form of the activations.
    pub activations: ActivationForm,
    /// Form of rotations by position.
    pub rope: RopeForm,
    /// Form of KV cache writes.
    pub kv_write: KvWrite,
    /// Division of layers' caches into states.
    pub state: StateForm,
    /// Owner of recurrent states.
    pub recurrent_states: RecurrentForm,
    /// Where experts are computed.
    pub experts: ExpertsForm,
    /// Whether a layer's feed-forward network is in a function of its own.
    pub divide: LayerDivision,
}

impl LoweringOptions {
    /// Returns whether the function of a layer leaves its feed-forward network to another function. Experts in
    /// functions of their own leave nothing to separate.
    pub fn omits_feed_forward(&self, has_experts: bool) -> bool {
        !self.divide.is_none() && (self.experts.is_packed() || !has_experts)
    }
}

/// Description of a function to build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionRequest {
    /// Name in the package.
    pub name: String,
    /// Part of the model.
    pub stage: Stage,
    /// Tokens of a call.
    pub tokens: TokenCount,
    /// Default number of tokens, for which Core ML plans.
    pub default_tokens: u64,
    /// Longest text in tokens.
    pub context: u64,
    /// Largest call, in tokens, of any function that shares this one's states.
    pub most_tokens: u64,
    /// Outputs of the LM head.
    pub head: HeadOutputs,
}

impl FunctionRequest {
    /// Creates the empty function.
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

/// A built function and the roles of its ports.
#[derive(Clone, Debug)]
pub struct FunctionGraph {
    /// The MIL function.
    pub function: Function,
    /// Tensor inputs.
    pub inputs: Vec<Port>,
    /// Outputs.
    pub outputs: Vec<Port>,
    /// States.
    pub states: Vec<StatePort>,
    /// Hidden states between the layers.
    pub probes: Vec<HiddenProbe>,
    /// Value that holds the logits, if they are no output.
    pub logits: Option<String>,
}

/// Emitter of weights in the number format of their role.
pub trait EmitWeight {
    /// Sets the layer of subsequent weights; `None` outside of layers.
    fn of_layer(&mut self, _layer: Option<usize>) {}

    /// Adds `weight`, reshaped to `shape` (same elements, row-major), and returns its fp16 value.
    ///
    /// # Errors
    /// Returns an error if the weight can't be represented.
    fn emit(
        &mut self,
        builder: &mut FunctionBuilder,
        name: &str,
        role: Role,
        weight: &SourceWeight,
        shape: &[u64],
    ) -> Result<ValueId>;

    /// Adds the factors of the product's rows, reshaped to `shape`, which has as many elements as the weight has rows.
    /// `None` if the number format has no such scale.
    ///
    /// # Errors
    /// Returns an error if the weight can't be represented.
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

/// A rotary table of the host in f32.
#[derive(Clone, Debug)]
pub struct RopeTables {
    /// Name that ports refer to.
    pub table: String,
    /// Values per position: half of the rotated dimensions.
    pub columns: u64,
    /// Variants by text length, ascending.
    pub variants: Vec<RopeValues>,
}

/// A variant of a rotary table.
#[derive(Clone, Debug)]
pub struct RopeValues {
    /// Longest text in tokens.
    pub max_length: u64,
    /// Cosines `[rows, columns]` with rows = min(max_length, context), multiplied by the attention factor.
    pub cos: Vec<f32>,
    /// Sines in the same form.
    pub sin: Vec<f32>,
}

/// Tensors that the host needs beside the packages.
#[derive(Clone, Debug)]
pub struct HostTensors {
    /// Token embedding `[vocab_size, hidden_size]` including its multiplier.
    pub embedding: SourceWeight,
    /// Learned positions `[positions, hidden_size]`.
    pub positions: Option<SourceWeight>,
    /// Token types `[types, hidden_size]`.
    pub token_types: Option<SourceWeight>,
    /// Columns of the tables above if they have fewer than `hidden_size`.
    pub embedding_size: Option<u64>,
    /// Attention biases by distance, `[2 r + 1, heads]`.
    pub attention_bias: Option<SourceWeight>,
    /// Rotary tables.
    pub rope: Vec<RopeTables>,
    /// Rotation `Q` of hidden states, `[hidden_size, hidden_size]`, if they are rotated: a row of hidden states is the
    /// model's times `Q`.
    pub rotation: Option<SourceWeight>,
    /// Per-layer embeddings of tokens, `[vocab_size, layers * width]`.
    pub per_layer_embedding: Option<SourceWeight>,
    /// Projections of the pooled vector.
    pub projections: Vec<HostProjection>,
}

/// A projection that the host computes.
#[derive(Clone, Debug)]
pub struct HostProjection {
    /// `[rows, columns]`
    pub weight: SourceWeight,
    /// `[1, rows]`
    pub bias: Option<SourceWeight>,
    /// Activation of the result.
    pub activation: ProjectionActivation,
}

/// Task of a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Purpose {
    /// Text generation.
    TextGeneration,
    /// Labels for every token.
    TokenClassification(LabelSet),
    /// A vector for a text.
    TextEmbedding {
        /// Whether attention is bidirectional.
        bidirectional: bool,
        /// Default pooling of hidden states.
        pooling: Pooling,
    },
    /// Classification of texts and pairs of texts.
    SequenceClassification(SequenceClassification),
}

/// Number of experts in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertCounts {
    /// Total number.
    pub count: u64,
    /// Maximum number for a token.
    pub per_token: u64,
    /// Whether a norm is applied to the sum of the experts' outputs. Experts in functions of their own are then
    /// followed by another function, which counts as another expert of every token.
    pub joined: bool,
}

impl ExpertCounts {
    /// Counts of experts whose outputs are only added.
    pub fn new(count: u64, per_token: u64) -> Self {
        ExpertCounts { count, per_token, joined: false }
    }

    /// Number of experts in functions of their own, including the joining function.
    pub fn apart(&self) -> u64 {
        self.count + u64::from(self.joined)
    }
}

/// Dimensions that every family has.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilyFacts {
    /// Family name: a row of the table.
    pub family: String,
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Number of layers.
    pub num_layers: usize,
    /// Rows of the embedding and of the LM head.
    pub vocab_size: u64,
    /// Task of the model.
    pub purpose: Purpose,
    /// Longest supported text in tokens.
    pub max_position_embeddings: u64,
    /// Factor of hidden states between functions relative to the model's.
    pub hidden_scale: f64,
    /// Whether a layer has a recurrent state, which padding tokens would corrupt.
    pub recurrent: bool,
    /// Resolved configuration for `bundle.json`.
    pub config: Json,
}

impl FamilyFacts {
    /// Labels of a token classifier.
    pub fn label_set(&self) -> Option<&LabelSet> {
        match &self.purpose {
            Purpose::TokenClassification(label_set) => Some(label_set),
            _ => None,
        }
    }

    /// Rows of the head: tokens, or labels. Embedding models have none.
    pub fn head_rows(&self) -> u64 {
        match &self.purpose {
            Purpose::TextGeneration => self.vocab_size,
            Purpose::TokenClassification(set) => set.labels.len() as u64,
            Purpose::TextEmbedding { .. } => 0,
            Purpose::SequenceClassification(classification) => classification.labels.len() as u64,
        }
    }

    /// Returns whether attention is bidirectional: functions have no states, and a call takes a whole text or a window.
    pub fn is_bidirectional(&self) -> bool {
        match &self.purpose {
            Purpose::TextGeneration => false,
            Purpose::TokenClassification(_) => true,
            Purpose::SequenceClassification(classification) => !classification.causal,
            Purpose::TextEmbedding { bidirectional, .. } => *bidirectional,
        }
    }
}

/// A model that can be built into functions.
pub trait FamilyModel: Send + Sync {
    /// Dimensions.
    fn facts(&self) -> &FamilyFacts;

    /// Number of experts in a layer; `None` for a layer without experts.
    fn experts(&self, _layer: usize) -> Option<ExpertCounts> {
        None
    }

    /// Number of a decoder's learned positions, if it has them: no context can be longer.
    fn positions(&self) -> Option<u64> {
        None
    }

    /// Next-token layer as a model, if it was opened with one. It shares this model's embedding and LM head.
    fn draft(&self) -> Option<&dyn FamilyModel> {
        None
    }

    /// Bytes of a layer's states for texts of `context` tokens in calls of up to `most_tokens`.
    fn layer_state_bytes(&self, layer: usize, context: u64, most_tokens: u64) -> u64;

    /// Builds a function.
    ///
    /// # Errors
    /// Returns an error if a weight can't be emitted or the form can't express the model.
    fn build(
        &self,
        form: &LoweringOptions,
        request: &FunctionRequest,
        weights: &mut dyn EmitWeight,
    ) -> Result<FunctionGraph>;

    /// Tensors of the host, with tables for up to `context` positions.
    ///
    /// # Errors
    /// Returns an error if a table can't be computed.
    fn host(&self, context: u64) -> Result<HostTensors>;

    /// Makes a decoder score pairs of texts.
    ///
    /// # Errors
    /// Returns an error if the model doesn't continue texts, or has no such tokens.
    fn score_pairs(&mut self, _reranker: &Reranker) -> Result<()> {
        let problem = "it doesn't continue texts".into();
        Err(FamilyError::Reranker { family: self.facts().family.clone(), problem }.into())
    }

    /// Replaces the family's scale of hidden states, a power of two; the logits don't change.
    fn set_hidden_scale(&mut self, scale: f64);

    /// Recommended transforms for projections that are quantized with one scale per tensor.
    fn recipe(&self) -> Vec<Transform> {
        Vec::new()
    }

    /// Checks that a transform preserves the model's function.
    ///
    /// # Errors
    /// Returns the reason as a part of a sentence if it doesn't.
    fn permits(&self, _transform: Transform) -> Result<(), &'static str> {
        Err("the weights of models that look at a text in both directions are not transformed")
    }

    /// Applies the transforms that the model permits, once. The logits don't change.
    ///
    /// # Errors
    /// Returns an error if a weight hasn't the shape that a transform needs.
    fn transform(&mut self, _transforms: &[Transform]) -> Result<()> {
        Ok(())
    }

    /// Applied transforms, and parts that were left out.
    fn transformed(&self) -> Transformed {
        Transformed::default()
    }

    /// Returns whether blocks have norms before and after: the rows of a block's last projection pass through a norm,
    /// which prevents rescaling.
    fn norms_behind_blocks(&self) -> bool {
        false
    }
}
