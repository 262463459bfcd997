//! The residency gate: every op prefers the Neural Engine.
//!
//! Only Core ML on a Mac reports where ops run (`MLComputePlan`). [`take`](mod@take) takes a plan of every function at
//! every number of tokens; [`judge`](mod@judge) judges a plan on any machine. Rules are not proof: without a plan the
//! gate is unproven.
//!
//! A plan contains preferences. [`latency`] checks them by comparing the time of calls with that on the CPU only.

pub mod judge;
pub mod latency;
pub mod take;
mod weights;

pub use judge::{judge, misplaced};
pub use take::{take, time};

use super::verdict::{Check, GateReport};
use anec_coreml::ComputeUnits;

/// Name of the gate.
pub const GATE: &str = "residency";

/// Compute units for loading: if the GPU were allowed, Core ML might prefer it to the Neural Engine.
pub const UNITS: ComputeUnits = ComputeUnits::CpuAndNeuralEngine;

/// Claim about every function.
const CLAIM: &str = "every compute op prefers the Neural Engine";

/// Report of the gate without a plan.
pub fn without_plan() -> GateReport {
    let reason = "only Core ML on a Mac can tell; a plan that was taken there can be judged here";
    GateReport::new(GATE, vec![Check::unproven("bundle", CLAIM, reason)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    #[test]
    fn placement_is_never_claimed_without_proof() {
        assert_eq!(without_plan().verdict, Verdict::Unproven);
    }
}
