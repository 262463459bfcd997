//! Thresholds of the gates: `validators/gates.yaml`, tightened by the manifest.

use crate::data;
use serde::Deserialize;

use anec_manifest::Gates;

/// Built into the binary, so that a verdict doesn't depend on where it is run.
const BUILT_IN: &str = include_str!("validators/gates.yaml");

/// Thresholds of all gates.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thresholds {
    /// Of the parity gate.
    pub parity: ParityThresholds,
    /// Of the numerics gate.
    pub numerics: NumericsThresholds,
    /// Of the residency gate.
    pub residency: ResidencyThresholds,
}

/// Thresholds of the numerics gate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericsThresholds {
    /// Smallest cosine between what a layer gives in half and in single precision, at any position.
    pub cosine: f64,
    /// Smallest cosine between the logits of the simulated Neural Engine and those of half precision, at any position.
    pub simulated_cosine: f64,
    /// Smallest and largest ratio of their norms.
    pub norm_ratio: [f64; 2],
    /// Room that the largest value must leave below fp16's largest number: a factor.
    pub headroom: f64,
    /// Room that an automatic residual scale leaves: a factor.
    pub scale_headroom: f64,
}

/// Thresholds of the residency gate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResidencyThresholds {
    /// Milliseconds of a call below which its time isn't compared with the CPU's.
    pub shortest_ms: f64,
    /// Smallest share of the planned cost on the Neural Engine, where the manifest sets one.
    #[serde(default)]
    pub cost_share: Option<f64>,
    /// Why ops may be elsewhere as long as that share holds; without a reason none may.
    #[serde(default)]
    pub reason: Option<String>,
}

/// Thresholds of the parity gate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParityThresholds {
    /// Smallest cosine of the logits at any position.
    pub cosine: f64,
    /// Smallest cosine at ninety-nine of a hundred positions.
    pub p1: f64,
    /// Largest mean divergence of the next token's probabilities, in nats.
    pub kl: f64,
    /// Smallest cosine of what a single function gives.
    pub function_cosine: f64,
    /// Largest error of the logits of any one token: root mean square over the positions, relative to that of all logits.
    pub row_error: f64,
    /// Smallest cosine of what a single layer adds to the residual stream: the mean over the positions.
    pub layer_cosine: f64,
    /// Largest relative difference between the perplexities of the golden's text.
    pub perplexity: f64,
    /// Smallest share of positions whose most likely token agrees.
    pub top1: f64,
    /// Smallest and largest ratio of the logits' norms at any position.
    pub norm_ratio: [f64; 2],
}

impl Thresholds {
    /// The built-in thresholds, tightened by a manifest's: of two the stricter holds. Only residency can be loosened, with a
    /// reason.
    pub fn of(gates: &Gates) -> Self {
        let mut thresholds = Self::built_in();
        let parity = &mut thresholds.parity;
        parity.cosine = gates.parity.cosine.unwrap_or(0.0).max(parity.cosine);
        parity.p1 = gates.parity.p1.unwrap_or(0.0).max(parity.p1);
        parity.kl = gates.parity.kl.unwrap_or(f64::INFINITY).min(parity.kl);
        parity.top1 = gates.parity.top1.unwrap_or(0.0).max(parity.top1);
        parity.perplexity = gates.parity.perplexity.unwrap_or(f64::INFINITY).min(parity.perplexity);
        thresholds.residency.cost_share = gates.residency.cost_share;
        thresholds.residency.reason.clone_from(&gates.residency.reason);
        thresholds
    }

    /// The built-in thresholds.
    pub fn built_in() -> Self {
        data::built_in("gates.yaml", BUILT_IN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_manifest::{ParityGate, ResidencyGate};

    #[test]
    fn a_manifest_tightens_and_never_loosens() {
        let with = |share, most| {
            let (share, most) = (Some(share), Some(most));
            let parity = ParityGate { cosine: share, p1: share, kl: most, perplexity: most, top1: None };
            Thresholds::of(&Gates { parity, residency: ResidencyGate::default() }).parity
        };
        let built_in = Thresholds::of(&Gates::default()).parity;
        assert_eq!(
            built_in,
            ParityThresholds {
                cosine: 0.95,
                p1: 0.995,
                kl: 0.02,
                function_cosine: 0.97,
                row_error: 0.25,
                layer_cosine: 0.9,
                perplexity: 0.05,
                top1: 0.95,
                norm_ratio: [0.9, 1.1]
            }
        );
        let tight = with(0.999, 0.01);
        assert_eq!((tight.cosine, tight.p1, tight.kl, tight.perplexity), (0.999, 0.999, 0.01, 0.01));
        assert_eq!(with(0.5, 0.5), built_in);
    }
}
