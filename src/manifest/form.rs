//! The forms that a graph can take, which compute the same.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
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

/// The form of activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationForm {
    /// By tanh and exp, without the Neural Engine's tables of SiLU, GELU and softplus, which are published to be off.
    #[default]
    Stable,
    /// By the ops `silu`, `gelu`, `softplus`.
    Native,
}

/// How queries and keys are rotated by position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RopeForm {
    /// The two halves of a head are cut out, rotated and joined.
    #[default]
    Halves,
    /// A product with a matrix of 1, -1 and 0 brings each number's partner to its place: nothing is cut out of the last axis,
    /// where the Neural Engines of M1 and A14 are published to overflow beyond 4094.
    Product,
}

impl RopeForm {
    /// Whether halves are cut out.
    pub fn is_halves(&self) -> bool {
        *self == RopeForm::Halves
    }
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

/// How what layers carry is divided into states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::EnumIter)]
#[serde(rename_all = "snake_case")]
pub enum StateForm {
    /// One for each thing that a layer carries: keys, values.
    #[default]
    PerLayer,
    /// One for each shard, or for each shape where there are several.
    Unified,
    /// None: keys and values are inputs that are only read, a call gives the rows of its tokens, and the host appends them.
    /// What recurrences carry is inputs and outputs.
    Host,
}

/// Who keeps what layers with a recurrence carry from call to call: the last inputs of convolutions, the matrices of linear
/// recurrences. Keys and values are always states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::EnumIter)]
#[serde(rename_all = "snake_case")]
pub enum RecurrentForm {
    /// Core ML, as states.
    #[default]
    State,
    /// The host: outputs of a call are inputs of the next. The Neural Engine is known to fail functions with many states.
    InputOutput,
}

impl RecurrentForm {
    /// Whether they are states.
    pub fn is_state(&self) -> bool {
        *self == RecurrentForm::State
    }
}

/// A layer of the source, beside the model's own, that guesses tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DraftLayer {
    /// Multi-token prediction: the tensors `mtp.*` of Qwen3.5 and its kin.
    Mtp,
}

/// Where the experts of a layer are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ExpertsForm {
    /// All together, within the layer's function: every call reads every expert.
    #[default]
    Packed,
    /// In packages of their own, each as many as it may hold. The host leaves out those whose experts no token of a call
    /// was given.
    Split,
    /// In functions of their own, one for each expert; left out likewise.
    Routed,
}

impl ExpertsForm {
    /// Whether experts are computed in the function of their layer.
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
