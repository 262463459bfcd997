//! Thresholds of the gates: `gates.yaml`, tightened by the manifest.

use anec_advice::tables;
use serde::Deserialize;

use anec_manifest::Gates;

/// Part of the binary, so that verdicts are the same everywhere.
const BUILT_IN: &str = include_str!("gates.yaml");

/// Thresholds of all gates.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thresholds {
    /// Parity gate.
    pub parity: ParityThresholds,
    /// Numerics gate.
    pub numerics: NumericsThresholds,
    /// Residency gate.
    pub residency: ResidencyThresholds,
}

/// Thresholds of the numerics gate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericsThresholds {
    /// Smallest cosine between a layer's outputs in fp16 and f32, at any position.
    pub cosine: f64,
    /// Smallest cosine between the logits of the simulated Neural Engine and fp16, at any position.
    pub simulated_cosine: f64,
    /// Smallest and largest ratio of the norms.
    pub norm_ratio: [f64; 2],
    /// Factor by which the largest value must stay below fp16's largest number.
    pub headroom: f64,
    /// Factor by which values stay below fp16's largest number with an automatic residual scale.
    pub scale_headroom: f64,
}

/// Thresholds of the residency gate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResidencyThresholds {
    /// Milliseconds of a call below which its latency isn't compared with the CPU's.
    pub shortest_ms: f64,
    /// Smallest share of the planned cost on the Neural Engine, if the manifest sets one.
    #[serde(default)]
    pub cost_share: Option<f64>,
    /// Reason why ops may be elsewhere while that share holds; without a reason none may.
    #[serde(default)]
    pub reason: Option<String>,
}

/// Thresholds of the parity gate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParityThresholds {
    /// Smallest cosine of the logits at any position.
    pub cosine: f64,
    /// Smallest cosine at 99 % of the positions.
    pub p1: f64,
    /// Largest mean KL divergence of the next token's probabilities, in nats.
    pub kl: f64,
    /// Smallest cosine of a single function's output.
    pub function_cosine: f64,
    /// Largest error of the logits of any one token: root mean square over the positions, relative to that of all
    /// logits.
    pub row_error: f64,
    /// Smallest cosine of a single layer's contribution to the residual stream, as the mean over the positions.
    pub layer_cosine: f64,
    /// Largest relative difference between the perplexities of the golden's text.
    pub perplexity: f64,
    /// Smallest share of positions whose most likely token agrees.
    pub top1: f64,
    /// Smallest and largest ratio of the logits' norms at any position.
    pub norm_ratio: [f64; 2],
}

impl Thresholds {
    /// Combines the built-in thresholds with a manifest's; the stricter one holds. Only residency can be loosened, with
    /// a reason.
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

    /// Built-in thresholds.
    pub fn built_in() -> Self {
        tables::built_in("src/validate/gates.yaml", BUILT_IN)
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
