//! The residency gate: every op prefers the Neural Engine.
//!
//! Only Core ML knows where ops run, and tells it on a Mac (`MLComputePlan`). There [`take`](mod@take) takes a plan of every function
//! at every number of tokens; [`judge`](mod@judge) judges such a plan, on any machine. A guess from rules would be no proof: without a
//! plan the gate is unproven.
//!
//! A plan says what is preferred, not what happened. [`latency`] compares how long calls take with how long they take on
//! the CPU alone.

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

/// What functions are loaded for: with the GPU allowed, Core ML may prefer it to the Neural Engine.
pub const UNITS: ComputeUnits = ComputeUnits::CpuAndNeuralEngine;

/// What is claimed of every function.
const CLAIM: &str = "every compute op prefers the Neural Engine";

/// What can be said of placement without a plan: nothing.
pub fn without_plan() -> GateReport {
    let reason = "only Core ML on a Mac can tell; a plan that was taken there can be judged here (--plan FILE)";
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
