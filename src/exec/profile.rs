//! Where the time of a run went.

use std::collections::BTreeMap;
use std::time::Duration;

/// Time by operator, over any number of runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecProfile {
    operators: BTreeMap<&'static str, OperatorTime>,
}

/// What the steps of one operator took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperatorTime {
    /// How often it was carried out.
    pub calls: u64,
    /// How long all calls took together.
    pub time: Duration,
}

impl ExecProfile {
    /// Counts one call.
    pub(super) fn add(&mut self, operator: &'static str, time: Duration) {
        let entry = self.operators.entry(operator).or_default();
        entry.calls += 1;
        entry.time += time;
    }

    /// The operators and their times, the one that took longest first. Ops that are carried out as one are counted
    /// together, as `attention` or `rope`.
    pub fn operators(&self) -> Vec<(&str, OperatorTime)> {
        let mut operators: Vec<(&str, OperatorTime)> =
            self.operators.iter().map(|(name, time)| (*name, *time)).collect();
        operators.sort_by_key(|(_, time)| std::cmp::Reverse(time.time));
        operators
    }

    /// The time of all operators.
    pub fn total(&self) -> Duration {
        self.operators.values().map(|operator| operator.time).sum()
    }
}
