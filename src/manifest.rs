//! Floor 0: the manifest, which is everything a user can decide about a conversion, typed.
//!
//! Every key but `source` has a default. Unknown keys are errors. The manifest decides the *form* of a graph and never
//! its maths: that comes from the source's own configuration.
//!
//! | module | holds |
//! |---|---|
//! | [`load`] | reading: YAML text, files, built-in names, `--set` overrides; the JSON Schema |
//! | [`check`] | what values must be among themselves |
//! | [`builtin`] | the manifests of `manifests/`, built in |

pub mod builtin;
pub mod check;
pub mod error;
pub mod load;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use error::ManifestError;
pub use load::schema;

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
    /// How new keys and values enter the cache; by default `mask` for `lengths.range`, `slice` for `lengths.fixed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_write: Option<KvWrite>,
    /// How the cache is divided into states.
    pub state: StateForm,
    /// Weight quantization.
    pub quant: Quant,
    /// Division of the layers into packages.
    pub shards: Shards,
    /// The LM head.
    pub lm_head: LmHead,
    /// Deployment target, which decides the opset.
    pub target: Target,
    /// What keeps the model in half precision's range.
    #[serde(skip_serializing_if = "Numerics::is_default")]
    pub numerics: Numerics,
    /// Gate thresholds; they can only be stricter than the built-in ones.
    #[serde(skip_serializing_if = "Gates::is_default")]
    pub gates: Gates,
}

impl Default for Manifest {
    fn default() -> Self {
        Manifest {
            name: None,
            source: None,
            family: None,
            acknowledge: Vec::new(),
            context: Contexts::One(2048),
            lengths: Lengths::default(),
            layout: Layout::default(),
            linear: LinearForm::default(),
            norm: NormForm::default(),
            attention: AttentionForm::default(),
            kv_write: None,
            state: StateForm::default(),
            quant: Quant::default(),
            shards: Shards::default(),
            lm_head: LmHead::default(),
            target: Target::default(),
            numerics: Numerics::default(),
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

/// One context length or several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Contexts {
    /// One.
    One(u64),
    /// One function for each.
    Several(Vec<u64>),
}

impl Contexts {
    /// All context lengths, ascending and distinct.
    pub fn all(&self) -> Vec<u64> {
        let mut all = match self {
            Contexts::One(n) => vec![*n],
            Contexts::Several(list) => list.clone(),
        };
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Numbers of tokens per call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Lengths {
    /// Every number from the first to the second in one function with a flexible dimension (RangeDim).
    Range([u64; 2]),
    /// One function for each number, weights shared.
    Fixed(Vec<u64>),
}

impl Default for Lengths {
    fn default() -> Self {
        Lengths::Range([1, 4])
    }
}

impl Lengths {
    /// The largest number of tokens of one call.
    pub fn largest(&self) -> u64 {
        match self {
            Lengths::Range([_, upper]) => *upper,
            Lengths::Fixed(sizes) => sizes.iter().copied().max().unwrap_or(1),
        }
    }
}

/// Layout of the hidden states between layers: batch, channels, sequence and a unit axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// `[1, channels, T, 1]`
    #[default]
    Bcs1,
    /// `[1, channels, 1, T]`
    Bc1s,
}

/// The op that a projection becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LinearForm {
    /// 1x1 convolution.
    #[default]
    Conv,
    /// The `linear` op.
    Linear,
    /// The `matmul` op.
    Matmul,
}

/// The form of root-mean-square norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormForm {
    /// Scaled by the largest magnitude first: accurate in fp16 for hidden rms from 1e-3 to 1e3, zero rows give zeros.
    #[default]
    Accurate,
    /// `x * rsqrt(mean(x^2) + eps)` as written in the paper: overflows in fp16 at |x| > 256.
    Naive,
    /// Layer norm of `[x, -x]`, whose mean is zero.
    LayerNormConcat,
    /// Scaled by a constant power of two first.
    Prescale,
}

/// The form of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttentionForm {
    /// One group of query heads (one key-value head) at a time.
    #[default]
    PerHead,
    /// Batched over key-value heads in rank 4: far fewer ops.
    Grouped,
}

/// How new keys and values enter the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KvWrite {
    /// A one-hot mask scatters them; rewrites the whole cache, works for any number of tokens.
    Mask,
    /// `slice_update` at a position.
    Slice,
}

/// How the cache is divided into states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StateForm {
    /// Two for each layer: keys and values.
    #[default]
    PerLayer,
    /// One for each shard.
    Unified,
}

/// What a weight does in the model; decides how it may be quantized.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema, strum::Display,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Role {
    /// Query, key and value projections of attention.
    AttentionQkv,
    /// Output projection of attention.
    AttentionOutput,
    /// Gate and up projections of the feed-forward network.
    MlpUp,
    /// Down projection of the feed-forward network.
    MlpDown,
    /// Projections of experts.
    Expert,
    /// The LM head.
    LmHead,
    /// Expert routers; never quantized.
    Router,
    /// Norm gains; never quantized.
    Norm,
    /// Biases; never quantized.
    Bias,
    /// Tables and other small tensors; never quantized.
    Table,
    /// The token embedding, which the host reads; never quantized.
    Embedding,
}

impl Role {
    /// Whether weights of this role are projections, which alone may be quantized.
    pub fn is_projection(self) -> bool {
        matches!(
            self,
            Role::AttentionQkv | Role::AttentionOutput | Role::MlpUp | Role::MlpDown | Role::Expert | Role::LmHead
        )
    }
}

/// Weight quantization.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Quant {
    /// Number format of projection weights.
    pub weights: WeightFormat,
    /// How many weights share one scale.
    pub granularity: Granularity,
    /// What happens to weights beyond fp16's largest number.
    #[serde(skip_serializing_if = "Overflow::is_default")]
    pub overflow: Overflow,
    /// What differs for single roles.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub overrides: BTreeMap<Role, QuantOverride>,
}

impl Quant {
    /// Format and granularity for a role.
    pub fn of(&self, role: Role) -> (WeightFormat, Granularity) {
        if !role.is_projection() {
            return (WeightFormat::None, Granularity::PerTensor);
        }
        let own = self.overrides.get(&role);
        (
            own.and_then(|o| o.weights).unwrap_or(self.weights),
            own.and_then(|o| o.granularity).unwrap_or(self.granularity),
        )
    }
}

/// What differs for one role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct QuantOverride {
    /// Number format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<WeightFormat>,
    /// How many weights share one scale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Granularity>,
}

/// What happens to weights beyond fp16's largest number, 65504.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// The conversion fails and names the weight.
    #[default]
    Error,
    /// They are held at 65504, and the report counts them.
    Saturate,
}

impl Overflow {
    fn is_default(&self) -> bool {
        *self == Overflow::default()
    }
}

/// Number format of projection weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// 8-bit integers, symmetric around zero.
    #[default]
    Int8,
    /// Not quantized: fp16.
    None,
}

/// How many weights share one scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// The whole tensor.
    #[default]
    PerTensor,
    /// One output channel.
    PerChannel,
}

/// Division of the layers into packages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Shards {
    /// Most weight bytes of one package, in units of 1,000,000 bytes.
    pub max_mb: f64,
    /// Explicit layer ranges `[first, end)` instead; they must tile the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<[usize; 2]>>,
}

impl Default for Shards {
    fn default() -> Self {
        Shards { max_mb: 250.0, layers: None }
    }
}

/// The LM head.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LmHead {
    /// Number of pieces.
    pub split: HeadSplit,
    /// Adds the index of the largest logit of each piece as a second output.
    pub argmax: bool,
}

/// Number of LM-head pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HeadSplit {
    /// As many as keep each under the shard limit.
    #[default]
    Auto,
    /// This many; the last may be smaller.
    #[serde(untagged)]
    Pieces(u64),
}

/// Deployment target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Target {
    /// iOS 18 and macOS 15: specification version 9, the first with states.
    #[default]
    #[serde(rename = "iOS18", alias = "macOS15")]
    Ios18,
    /// iOS 26 and macOS 26: specification version 10.
    #[serde(rename = "iOS26", alias = "macOS26")]
    Ios26,
}

/// What keeps the model in half precision's range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Numerics {
    /// Factor of the residual stream: `auto`, or a power of two from 2^-16 to 1.
    pub scale: ResidualScale,
}

impl Numerics {
    /// The factor of the residual stream; 1 while it is to be measured.
    pub fn factor(self) -> f32 {
        match self.scale {
            ResidualScale::Factor(factor) => factor,
            ResidualScale::Auto => 1.0,
        }
    }

    fn is_default(&self) -> bool {
        *self == Numerics::default()
    }
}

/// A power of two that the whole residual stream is multiplied by. What the model computes stays the same: the norms
/// that read the stream divide it out again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResidualScale {
    /// The largest at which a run in f32 stays well below fp16's largest number.
    Auto,
    /// This one.
    #[serde(untagged)]
    Factor(f32),
}

impl Default for ResidualScale {
    fn default() -> Self {
        ResidualScale::Factor(1.0)
    }
}

/// Gate thresholds of this model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Gates {
    /// Parity thresholds.
    pub parity: ParityGate,
}

impl Gates {
    fn is_default(&self) -> bool {
        *self == Gates::default()
    }
}

/// Parity thresholds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ParityGate {
    /// Smallest cosine of the logits at any position.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cosine: Option<f64>,
    /// Smallest share of positions whose most likely token agrees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top1: Option<f64>,
}
