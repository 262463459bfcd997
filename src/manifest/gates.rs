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

/// Residency thresholds. Without them every op must prefer the Neural Engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ResidencyGate {
    /// Smallest share of a function's planned cost that is on the Neural Engine. With a reason it takes the place of the
    /// rule that every op is there; without one it comes on top, and ops whose device isn't known count as elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_share: Option<f64>,
    /// Why ops may be elsewhere. Every report prints it.
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
    /// Smallest cosine of the logits at ninety-nine of a hundred positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p1: Option<f64>,
    /// Largest mean of the Kullback-Leibler divergence of the next token's probabilities from the golden's, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Largest relative difference between the perplexities that the bundle and the golden give the golden's text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Smallest share of positions whose most likely token agrees, less its standard error over so many positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top1: Option<f64>,
}
