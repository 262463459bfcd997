//! The manifest: everything a user can decide about a conversion, typed.
//!
//! Every key but `source` has a default. Unknown keys are errors. The manifest decides the *form* of a graph and never
//! its maths, which comes from the source's own configuration.
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
//! | `form`, `sizes`, `quant`, `calibration`, `transforms`, `numerics`, `gates` | the types of the keys |
//! | `load` | reading: YAML text, files, built-in names, `--set` overrides; the JSON Schema |
//! | [`check`] | what values must be among themselves |
//! | `contract` | forms that another runtime prescribes |
//! | [`builtin`] | the manifests of `manifests/`, built in |

#![forbid(unsafe_code)]

mod adapters;
pub mod builtin;
mod calibration;
pub mod check;
mod contract;
mod error;
mod form;
mod gates;
mod load;
mod numerics;
mod quant;
mod reranker;
mod sizes;
mod transforms;

use std::borrow::Cow;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use adapters::AdapterEntry;
pub use calibration::{Calibration, CalibrationText};
pub use contract::Contract;
pub use error::{ManifestError, nearest};
pub use form::{
    ActivationForm, AttentionForm, DraftLayer, ExpertsForm, KvWrite, Layout, LinearForm, NormForm, ProgramFormat,
    RecurrentForm, RopeForm, StateForm, Target,
};
pub use gates::{Gates, ParityGate, ResidencyGate};
pub use load::{schema, without_folders};
pub use numerics::{Numerics, ResidualScale};
pub use quant::{
    Feedback, Granularity, Int8Op, NumberFormat, Overflow, Quant, QuantLayers, QuantOverride, QuantPlan, Role,
    WeightFormat,
};
pub use reranker::{PairPrompt, Reranker};
pub use sizes::{Contexts, HeadOutputs, HeadSplit, Largest, LayerDivision, Lengths, LmHead, Shards};
pub use transforms::{RotateBy, RotationOptions, Transform, Transforms};

/// Description of a conversion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Manifest {
    /// Name of the bundle; defaults to the manifest's file name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Path of the weights, or `hf:owner/name[@revision][/file]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Low-rank adapters that are merged into the weights, in this order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterEntry>,
    /// Model family; read from the source by default, and must agree with it if given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub family: Option<String>,
    /// Makes a decoder score pairs of texts instead of continuing a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reranker: Option<Reranker>,
    /// Unknown keys of the source's configuration that are known not to change the maths.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub acknowledge: Vec<String>,
    /// Tokens that fit into the KV cache; a list gives one function for each.
    pub context: Contexts,
    /// Numbers of tokens that one call can process.
    pub lengths: Lengths,
    /// Layout of hidden states.
    pub layout: Layout,
    /// Op used for projections.
    pub linear: LinearForm,
    /// Form of the RMS norms.
    pub norm: NormForm,
    /// Form of attention.
    pub attention: AttentionForm,
    /// Form of SiLU, GELU and softplus.
    pub activations: ActivationForm,
    /// Form of rotary position embedding.
    #[serde(skip_serializing_if = "RopeForm::is_halves")]
    pub rope: RopeForm,
    /// How keys and values are written to the cache; defaults to `mask` for `lengths.range` and `format: coreai`,
    /// `slice` for `lengths.fixed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_write: Option<KvWrite>,
    /// Division of caches and recurrent states into Core ML states.
    pub state: StateForm,
    /// Storage of recurrent states between calls.
    #[serde(skip_serializing_if = "RecurrentForm::is_state")]
    pub recurrent_states: RecurrentForm,
    /// Placement of experts.
    #[serde(skip_serializing_if = "ExpertsForm::is_packed")]
    pub experts: ExpertsForm,
    /// Additional layer of the source that drafts tokens, converted beside the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftLayer>,
    /// Weight quantization.
    pub quant: Quant,
    /// Transforms of the weights before quantization.
    #[serde(skip_serializing_if = "Transforms::is_default")]
    pub transforms: Transforms,
    /// Division of the layers into packages.
    pub shards: Shards,
    /// LM head.
    pub lm_head: LmHead,
    /// The format of the programs.
    #[serde(skip_serializing_if = "ProgramFormat::is_coreml")]
    pub format: ProgramFormat,
    /// Runtime whose calls the bundle is made for, if it isn't `anec`'s own; sets `state`, `lengths` and the contexts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contract: Option<Contract>,
    /// Deployment target, which decides the opset.
    pub target: Target,
    /// Scaling that keeps activations in fp16's range.
    #[serde(skip_serializing_if = "Numerics::is_default")]
    pub numerics: Numerics,
    /// Text used for choosing codes if `quant.feedback` is set.
    #[serde(skip_serializing_if = "Calibration::is_default")]
    pub calibration: Calibration,
    /// Gate thresholds; they can only be stricter than the built-in ones.
    #[serde(skip_serializing_if = "Gates::is_default")]
    pub gates: Gates,
    /// Golden that the parity gate compares with: `anec golden` writes it, `anec validate` finds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub golden: Option<PathBuf>,
}

impl Default for Manifest {
    fn default() -> Self {
        Manifest {
            name: None,
            source: None,
            adapters: Vec::new(),
            family: None,
            reranker: None,
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
            format: ProgramFormat::default(),
            contract: None,
            target: Target::default(),
            numerics: Numerics::default(),
            calibration: Calibration::default(),
            gates: Gates::default(),
            golden: None,
        }
    }
}

impl Manifest {
    /// The manifest with the numbers of tokens that functions have: an asset of Core AI has a function for each number
    /// of a range.
    pub fn with_lengths_of_functions(&self) -> Cow<'_, Manifest> {
        match (self.format, &self.lengths) {
            (ProgramFormat::Coreai, Lengths::Range([lower, upper])) => {
                Cow::Owned(Manifest { lengths: Lengths::Fixed((*lower..=*upper).collect()), ..self.clone() })
            }
            _ => Cow::Borrowed(self),
        }
    }

    /// How keys and values are written; the default depends on the lengths and the format. Slice writes at computed
    /// positions stop Core AI's compiler for the Neural Engine.
    pub fn kv_write(&self) -> KvWrite {
        self.kv_write.unwrap_or(match (&self.lengths, self.format) {
            (Lengths::Fixed(_), ProgramFormat::Coreml) => KvWrite::Slice,
            (Lengths::Range(_), _) | (_, ProgramFormat::Coreai) => KvWrite::Mask,
        })
    }
}
