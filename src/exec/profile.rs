//! Time of runs by operator.

use std::collections::BTreeMap;
use std::time::Duration;

/// Time by operator, over any number of runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecProfile {
    operators: BTreeMap<&'static str, OperatorTime>,
}

/// Calls and time of one operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperatorTime {
    /// Number of calls.
    pub calls: u64,
    /// Total time of the calls.
    pub time: Duration,
}

impl ExecProfile {
    /// Adds one call.
    pub(super) fn add(&mut self, operator: &'static str, time: Duration) {
        let entry = self.operators.entry(operator).or_default();
        entry.calls += 1;
        entry.time += time;
    }

    /// Operators with their times, slowest first. A fused group counts under its own name, such as `attention` or
    /// `rope`.
    pub fn operators(&self) -> Vec<(&str, OperatorTime)> {
        let mut operators: Vec<(&str, OperatorTime)> =
            self.operators.iter().map(|(name, time)| (*name, *time)).collect();
        operators.sort_by_key(|(_, time)| std::cmp::Reverse(time.time));
        operators
    }

    /// Total time of all operators.
    pub fn total(&self) -> Duration {
        self.operators.values().map(|operator| operator.time).sum()
    }
}
