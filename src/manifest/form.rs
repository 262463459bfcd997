//! Equivalent forms of a graph.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The format of the programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProgramFormat {
    /// Core ML packages (`.mlpackage`).
    #[default]
    Coreml,
    /// One asset of Core AI (`.aimodel`, OS 27) with all functions.
    Coreai,
}

impl ProgramFormat {
    /// Whether the programs are Core ML packages.
    pub fn is_coreml(&self) -> bool {
        *self == ProgramFormat::Coreml
    }
}

/// Layout of hidden states between layers: batch, channels, sequence and a unit axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// `[1, channels, T, 1]`
    #[default]
    Bcs1,
    /// `[1, channels, 1, T]`
    Bc1s,
}

/// Op used for projections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LinearForm {
    /// 1x1 convolution.
    #[default]
    Conv,
    /// Op `linear`.
    Linear,
    /// Op `matmul`.
    Matmul,
}

/// Form of RMS norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum NormForm {
    /// Scaled by the largest magnitude first: accurate in fp16 for hidden rms from 1e-3 to 1e3; zero rows give zeros.
    #[default]
    Accurate,
    /// `x * rsqrt(mean(x^2) + eps)` as in the paper: overflows in fp16 at |x| > 256.
    Naive,
    /// Layer norm of `[x, -x]`, whose mean is zero.
    LayerNormConcat,
    /// Scaled by a constant power of two first.
    Prescale,
}

/// Form of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttentionForm {
    /// One group of query heads (one key-value head) at a time.
    #[default]
    PerHead,
    /// Batched over key-value heads in rank 4: far fewer ops.
    Grouped,
}

/// Form of activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationForm {
    /// Computed from tanh and exp, without the Neural Engine's tables of SiLU, GELU and softplus, which are published
    /// to be inaccurate.
    #[default]
    Stable,
    /// Ops `silu`, `gelu`, `softplus`.
    Native,
}

/// Form of rotary position embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RopeForm {
    /// Slices, rotates and concatenates the two halves of a head.
    #[default]
    Halves,
    /// Multiplies by a matrix of 1, -1 and 0 instead of slicing the last axis, where the Neural Engines of M1 and A14
    /// are published to overflow beyond 4094.
    Product,
}

impl RopeForm {
    /// Whether this is [`RopeForm::Halves`].
    pub fn is_halves(&self) -> bool {
        *self == RopeForm::Halves
    }
}

/// How new keys and values are written to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KvWrite {
    /// Scattered by a one-hot mask: rewrites the whole cache, works for any number of tokens.
    Mask,
    /// `slice_update` at a position.
    Slice,
}

/// Division of the layers' caches and recurrent states into Core ML states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::EnumIter)]
#[serde(rename_all = "snake_case")]
pub enum StateForm {
    /// One state for each cache or recurrent state of a layer.
    #[default]
    PerLayer,
    /// One state for each shard, or for each shape if there are several.
    Unified,
    /// No states. Caches are read-only inputs; a call returns the rows of its tokens, and the host appends them.
    /// Recurrent states are inputs and outputs.
    Host,
}

/// Storage of recurrent states between calls: the last inputs of convolutions and the matrices of linear recurrences.
/// KV caches are not affected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::EnumIter)]
#[serde(rename_all = "snake_case")]
pub enum RecurrentForm {
    /// States of Core ML.
    #[default]
    State,
    /// Outputs of a call that are inputs of the next. The Neural Engine is known to fail functions with many states.
    InputOutput,
}

impl RecurrentForm {
    /// Whether this is [`RecurrentForm::State`].
    pub fn is_state(&self) -> bool {
        *self == RecurrentForm::State
    }
}

/// Additional layer of the source that drafts tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DraftLayer {
    /// Multi-token prediction: the tensors `mtp.*` of Qwen3.5 and similar models.
    Mtp,
}

/// Placement of a layer's experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ExpertsForm {
    /// All in the layer's function: every call reads every expert.
    #[default]
    Packed,
    /// In separate packages with several experts each. The host skips packages whose experts no token of a call
    /// selected.
    Split,
    /// In separate functions, one for each expert; skipped likewise.
    Routed,
}

impl ExpertsForm {
    /// Whether this is [`ExpertsForm::Packed`].
    pub fn is_packed(&self) -> bool {
        *self == ExpertsForm::Packed
    }
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
