//! The residency gate: every op prefers the Neural Engine.

use super::verdict::{Check, GateReport};

/// Name of the gate.
pub const GATE: &str = "residency";

/// What can be said of placement here: nothing. Only Core ML's compute plan tells, and this version doesn't ask for it;
/// a guess from rules would be no proof.
pub fn residency() -> GateReport {
    let reason = if cfg!(target_os = "macos") {
        "this version of anec doesn't read compute plans yet"
    } else {
        "only Core ML on a Mac can tell (MLComputePlan)"
    };
    GateReport::new(GATE, vec![Check::unproven("bundle", "every op prefers the Neural Engine", reason)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::Verdict;

    #[test]
    fn placement_is_never_claimed_without_proof() {
        assert_eq!(residency().verdict, Verdict::Unproven);
    }
}
