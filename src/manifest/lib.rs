//! The manifest, which is everything a user can decide about a conversion, typed.
//!
//! Every key but `source` has a default. Unknown keys are errors. The manifest decides the *form* of a graph and never
//! its maths: that comes from the source's own configuration.
//!
//! ```
//! use anec_manifest::{Granularity, Manifest};
//!
//! let text = "source: hf:Qwen/Qwen3-0.6B\ncontext: 1024\nquant: {granularity: per_channel}";
//! let manifest = Manifest::from_yaml(text, "the example", &[])?;
//! assert_eq!(manifest.context.all(), [1024]);
//! assert_eq!(manifest.quant.granularity, Granularity::PerChannel);
//!
//! let error = Manifest::from_yaml("contxt: 1024", "the example", &[]).unwrap_err();
//! assert!(error.to_string().contains("contxt"));
//! # Ok::<(), anec_manifest::ManifestError>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`form`], [`sizes`], [`quant`], [`calibration`], [`transforms`], [`numerics`], [`gates`] | the types of the keys |
//! | [`load`] | reading: YAML text, files, built-in names, `--set` overrides; the JSON Schema |
//! | [`check`] | what values must be among themselves |
//! | [`builtin`] | the manifests of `manifests/`, built in |

#![forbid(unsafe_code)]

pub mod adapters;
pub mod builtin;
pub mod calibration;
pub mod check;
pub mod error;
pub mod form;
pub mod gates;
pub mod load;
pub mod numerics;
pub mod quant;
pub mod sizes;
pub mod transforms;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use adapters::AdapterEntry;
pub use calibration::{Calibration, CalibrationText};
pub use error::ManifestError;
pub use form::{
    ActivationForm, AttentionForm, DraftLayer, ExpertsForm, KvWrite, Layout, LinearForm, NormForm, RecurrentForm,
    RopeForm, StateForm, Target,
};
pub use gates::{Gates, ParityGate, ResidencyGate};
pub use load::{schema, without_folders};
pub use numerics::{Numerics, ResidualScale};
pub use quant::{
    Feedback, Granularity, Int8Op, NumberFormat, Overflow, Quant, QuantLayers, QuantOverride, QuantPlan, Role,
    WeightFormat,
};
pub use sizes::{Contexts, HeadSplit, LayerDivision, Lengths, LmHead, Shards};
pub use transforms::{RotateBy, RotationOptions, Transform, Transforms};

/// A conversion, as the user describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Manifest {
    /// Name of the bundle; the manifest's file name if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where the weights are: a path, or `hf:owner/name[@revision][/file]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Low-rank adapters that are merged into the weights, one after another.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterEntry>,
    /// Model family; read from the source if absent, and must agree with it if given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub family: Option<String>,
    /// Keys of the source's configuration that you know not to change the maths although anec doesn't know them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub acknowledge: Vec<String>,
    /// Tokens that fit into the key-value cache; a list gives one function for each.
    pub context: Contexts,
    /// Numbers of tokens that one call can take.
    pub lengths: Lengths,
    /// Layout of hidden states.
    pub layout: Layout,
    /// The op that a projection becomes.
    pub linear: LinearForm,
    /// The form of the root-mean-square norms.
    pub norm: NormForm,
    /// The form of attention.
    pub attention: AttentionForm,
    /// The form of SiLU, GELU and softplus.
    pub activations: ActivationForm,
    /// How queries and keys are rotated by position.
    #[serde(skip_serializing_if = "RopeForm::is_halves")]
    pub rope: RopeForm,
    /// How new keys and values enter the cache; by default `mask` for `lengths.range`, `slice` for `lengths.fixed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_write: Option<KvWrite>,
    /// How what layers carry from call to call is divided into states.
    pub state: StateForm,
    /// Who keeps what layers with a recurrence carry.
    #[serde(skip_serializing_if = "RecurrentForm::is_state")]
    pub recurrent_states: RecurrentForm,
    /// Where the experts of layers that have some are computed.
    #[serde(skip_serializing_if = "ExpertsForm::is_packed")]
    pub experts: ExpertsForm,
    /// A layer of the source that guesses the tokens after the next, converted beside the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftLayer>,
    /// Weight quantization.
    pub quant: Quant,
    /// What is done to weights before they are quantized.
    #[serde(skip_serializing_if = "Transforms::is_default")]
    pub transforms: Transforms,
    /// Division of the layers into packages.
    pub shards: Shards,
    /// The LM head.
    pub lm_head: LmHead,
    /// Deployment target, which decides the opset.
    pub target: Target,
    /// What keeps the model in half precision's range.
    #[serde(skip_serializing_if = "Numerics::is_default")]
    pub numerics: Numerics,
    /// The text by which codes are chosen, where `quant.feedback` asks for it.
    #[serde(skip_serializing_if = "Calibration::is_default")]
    pub calibration: Calibration,
    /// Gate thresholds; they can only be stricter than the built-in ones.
    #[serde(skip_serializing_if = "Gates::is_default")]
    pub gates: Gates,
}

impl Default for Manifest {
    fn default() -> Self {
        Manifest {
            name: None,
            source: None,
            adapters: Vec::new(),
            family: None,
            acknowledge: Vec::new(),
            context: Contexts::One(2048),
            lengths: Lengths::default(),
            layout: Layout::default(),
            linear: LinearForm::default(),
            norm: NormForm::default(),
            attention: AttentionForm::default(),
            activations: ActivationForm::default(),
            rope: RopeForm::default(),
            kv_write: None,
            state: StateForm::default(),
            recurrent_states: RecurrentForm::default(),
            experts: ExpertsForm::default(),
            draft: None,
            quant: Quant::default(),
            transforms: Transforms::default(),
            shards: Shards::default(),
            lm_head: LmHead::default(),
            target: Target::default(),
            numerics: Numerics::default(),
            calibration: Calibration::default(),
            gates: Gates::default(),
        }
    }
}

impl Manifest {
    /// How keys and values are written, with the default that belongs to the lengths.
    pub fn kv_write(&self) -> KvWrite {
        self.kv_write.unwrap_or(match self.lengths {
            Lengths::Range(_) => KvWrite::Mask,
            Lengths::Fixed(_) => KvWrite::Slice,
        })
    }
}
