//! Which weights are quantized, and how.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    /// How the codes of quantized weights are chosen.
    #[serde(skip_serializing_if = "Feedback::is_default")]
    pub feedback: Feedback,
    /// What happens to weights beyond fp16's largest number.
    #[serde(skip_serializing_if = "Overflow::is_default")]
    pub overflow: Overflow,
    /// What differs for single roles.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub overrides: BTreeMap<Role, QuantOverride>,
}

impl Quant {
    /// Whether codes are chosen by a calibration text.
    pub fn is_calibrated(&self) -> bool {
        let quantized = self.weights != WeightFormat::None
            || self.overrides.values().any(|own| own.weights.is_some_and(|weights| weights != WeightFormat::None));
        self.feedback == Feedback::Gptq && quantized
    }

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

/// How the codes of quantized weights are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Feedback {
    /// Each weight is rounded to the nearest number.
    #[default]
    None,
    /// The error of each weight is made up for in those of the same row that are yet to be rounded (GPTQ): the products
    /// with the inputs that a calibration text brings are what has to be right.
    Gptq,
}

impl Feedback {
    fn is_default(&self) -> bool {
        *self == Feedback::default()
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
