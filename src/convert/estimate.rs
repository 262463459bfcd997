//! How fast a model might run: an estimate from bytes, labelled as one. Nothing here was measured on this machine.

use serde::Serialize;

use super::plan::ConvertPlan;
use anec_family::FamilyModel;
use anec_manifest::{ExpertsForm, Manifest};

/// Weight bytes per second that decoders on the Neural Engine were seen to stream: published measurements of int8
/// decoders lie between 37 GB/s (a base M chip, small shards) and 120 GB/s (an LM head on an M4 Max).
const BYTES_PER_SECOND: [f64; 2] = [37e9, 120e9];
/// Seconds that one call of a package costs beside its weights: from 0.2 ms (cached small predictions) to 1.1 ms
/// (80 packages in 87 ms).
const SECONDS_PER_CALL: [f64; 2] = [1.1e-3, 0.2e-3];

/// What one token of decoding takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Weight bytes read for each token: all layers and all pieces of the LM head; of experts in functions of their own
    /// those that the token is given, at most.
    pub weight_bytes_per_token: u64,
    /// Cache bytes read for each token when the context is full.
    pub state_bytes_per_token: u64,
    /// Calls of packages for each token.
    pub calls_per_token: usize,
    /// Tokens per second, from the slow to the fast end of the assumptions.
    pub tokens_per_second: [f64; 2],
}

/// The estimate of another form of experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FormEstimate {
    /// The form.
    pub experts: ExpertsForm,
    /// Its estimate.
    #[serde(flatten)]
    pub estimate: Estimate,
}

impl FormEstimate {
    /// Estimates of every form of experts in which the model can be converted; none where it has no experts.
    pub fn of(manifest: &Manifest, model: &dyn FamilyModel) -> Vec<FormEstimate> {
        if (0..model.facts().num_layers).all(|layer| model.experts(layer).is_none()) {
            return Vec::new();
        }
        let estimate = |experts: ExpertsForm| {
            // a form for whose layers the packages are too small is none that can be chosen
            let plan = ConvertPlan::new(&Manifest { experts, ..manifest.clone() }, model).ok()?;
            Some(FormEstimate { experts, estimate: Estimate::of(&plan) })
        };
        [ExpertsForm::Packed, ExpertsForm::Split, ExpertsForm::Routed].into_iter().filter_map(estimate).collect()
    }
}

impl Estimate {
    /// What the estimate rests on.
    pub const ASSUMPTION: &str = "an estimate, not a measurement: weights and a full cache streamed at 37 to 120 GB/s, \
                                  0.2 to 1.1 ms for each call of a package";

    /// The estimate for a plan.
    pub fn of(plan: &ConvertPlan) -> Self {
        let (states, (weights, calls)) = (plan.state_bytes(), plan.of_one_token());
        let speed = |end: usize| {
            1.0 / ((weights + states) as f64 / BYTES_PER_SECOND[end] + calls as f64 * SECONDS_PER_CALL[end])
        };
        Estimate {
            weight_bytes_per_token: weights,
            state_bytes_per_token: states,
            calls_per_token: calls,
            tokens_per_second: [speed(0), speed(1)],
        }
    }
}
