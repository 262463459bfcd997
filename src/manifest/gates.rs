//! Thresholds of the gates.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Gate thresholds of this model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Gates {
    /// Parity thresholds.
    pub parity: ParityGate,
    /// Residency thresholds.
    #[serde(skip_serializing_if = "ResidencyGate::is_default")]
    pub residency: ResidencyGate,
}

impl Gates {
    pub(super) fn is_default(&self) -> bool {
        *self == Gates::default()
    }
}

/// Residency thresholds. By default every op must prefer the Neural Engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ResidencyGate {
    /// Smallest share of a function's planned cost on the Neural Engine. With a reason it replaces the rule that every
    /// op is there. Without one it is an additional condition, and ops whose device isn't known count as elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_share: Option<f64>,
    /// Reason why ops may be elsewhere. Every report prints it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl ResidencyGate {
    fn is_default(&self) -> bool {
        *self == ResidencyGate::default()
    }
}

/// Parity thresholds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ParityGate {
    /// Smallest cosine of the logits at any position.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cosine: Option<f64>,
    /// Smallest cosine of the logits at 99 % of the positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p1: Option<f64>,
    /// Largest mean KL divergence of the next token's probabilities from the golden's, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Largest relative difference between the bundle's and the golden's perplexity on the golden's text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Smallest share of positions whose most likely token agrees, less its standard error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top1: Option<f64>,
}
