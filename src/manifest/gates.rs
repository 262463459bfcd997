//! Thresholds of the gates.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Gate thresholds of this model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Gates {
    /// Parity thresholds.
    pub parity: ParityGate,
}

impl Gates {
    pub(super) fn is_default(&self) -> bool {
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
    /// Smallest cosine of the logits at ninety-nine of a hundred positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p1: Option<f64>,
    /// Largest mean of the Kullback-Leibler divergence of the next token's probabilities from the golden's, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Largest relative difference between the perplexities that the bundle and the golden give the golden's text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Smallest share of positions whose most likely token agrees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top1: Option<f64>,
}
