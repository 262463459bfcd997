//! Rough speed estimates from bytes and calls. Nothing here is measured on this machine.

use serde::Serialize;

use super::plan::ConvertPlan;
use anec_family::FamilyModel;
use anec_manifest::{ExpertsForm, Manifest};

/// Range of weight bytes per second that the Neural Engine streams: published measurements of int8 decoders range from
/// 37 GB/s (a base M chip, small shards) to 120 GB/s (an LM head on an M4 Max).
const BYTES_PER_SECOND: [f64; 2] = [37e9, 120e9];
/// Seconds per call of a package, apart from its weights: from 0.2 ms (cached small predictions) to 1.1 ms
/// (80 packages in 87 ms).
const SECONDS_PER_CALL: [f64; 2] = [1.1e-3, 0.2e-3];

/// Estimated cost of one decode step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Weight bytes read per token: all layers and all pieces of the LM head; of experts in functions of their own,
    /// those that a token is routed to, as expected if every choice is equally likely.
    pub weight_bytes_per_token: u64,
    /// Weight bytes read per token at most.
    pub max_weight_bytes_per_token: u64,
    /// Cache bytes read per token when the context is full.
    pub state_bytes_per_token: u64,
    /// Expected calls of packages per token, rounded.
    pub calls_per_token: usize,
    /// Calls of packages per token at most.
    pub max_calls_per_token: usize,
    /// Tokens per second for the expected weights and calls, from the slow to the fast end of the assumptions.
    pub tokens_per_second: [f64; 2],
}

/// Estimate for another form of experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FormEstimate {
    /// Form of the experts.
    pub experts: ExpertsForm,
    /// Estimate for this form.
    #[serde(flatten)]
    pub estimate: Estimate,
}

impl FormEstimate {
    /// Estimates for every form of experts that the model can be converted with; empty for models without experts.
    pub fn of(manifest: &Manifest, model: &dyn FamilyModel) -> Vec<FormEstimate> {
        if (0..model.facts().num_layers).all(|layer| model.experts(layer).is_none()) {
            return Vec::new();
        }
        let estimate = |experts: ExpertsForm| {
            // skip forms whose layers exceed the packages' limit
            let plan = ConvertPlan::new(&Manifest { experts, ..manifest.clone() }, model).ok()?;
            Some(FormEstimate { experts, estimate: Estimate::of(&plan) })
        };
        [ExpertsForm::Packed, ExpertsForm::Split, ExpertsForm::Routed].into_iter().filter_map(estimate).collect()
    }
}

impl Estimate {
    /// Assumptions of the estimate.
    pub const ASSUMPTION: &str = "an estimate, not a measurement: weights and a full cache streamed at 37 to 120 GB/s, \
                                  0.2 to 1.1 ms for each call of a package";

    /// Estimates a plan.
    pub fn of(plan: &ConvertPlan) -> Self {
        let (states, [expected, most]) = (plan.state_bytes(), plan.of_one_token());
        let speed = |end: usize| {
            let bytes = expected.weight_bytes + states as f64;
            1.0 / (bytes / BYTES_PER_SECOND[end] + expected.calls * SECONDS_PER_CALL[end])
        };
        Estimate {
            weight_bytes_per_token: expected.weight_bytes.round() as u64,
            max_weight_bytes_per_token: most.weight_bytes.round() as u64,
            state_bytes_per_token: states,
            calls_per_token: expected.calls.round() as usize,
            max_calls_per_token: most.calls.round() as usize,
            tokens_per_second: [speed(0), speed(1)],
        }
    }
}
