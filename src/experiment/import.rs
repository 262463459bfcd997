//! Conclusions from a report of experiments: evidence for and against rules, in the format of
//! `ane-rules.yaml`.

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::Serialize;

use super::{Experiment, OutcomeKind, ProbeSize, Settles, experiments};
use crate::launch::{ProbeEntry, ProbeReport};
use anec_advice::rules::{Evidence, Says};

/// Conclusion about a rule.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct RuleFinding {
    /// Name of the rule.
    pub rule: String,
    /// `For` if at least one experiment confirms the rule, `Against` if some refute it and none confirms it.
    pub says: Says,
    /// Evidence row for each conclusive experiment and size.
    pub evidence: Vec<Evidence>,
}

/// Comparison of an experiment's results with the arithmetic that the executor simulates.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ArithmeticFinding {
    /// Name of the experiment.
    pub experiment: String,
    /// Size of its program.
    pub size: ProbeSize,
    /// `For` if the results are much closer to the simulation than to fp16, `Against` in the opposite case.
    pub says: Says,
    /// Largest error relative to the simulation's largest value.
    pub error_to_ane: f64,
    /// Largest error relative to fp16's largest value.
    pub error_to_f16: f64,
}

/// Minimum difference between simulation and fp16 for a conclusion.
const MIN_DIFFERENCE: f64 = 4e-3;
/// Minimum ratio of the errors for a conclusion.
const MIN_ERROR_RATIO: f64 = 2.0;

/// Compares a report's results with the simulated arithmetic, for experiments on the Neural Engine whose simulation
/// differs from fp16.
pub fn import_arithmetic(report: &ProbeReport) -> Vec<ArithmeticFinding> {
    let finding = |entry: &ProbeEntry| {
        let ProbeEntry { experiment, size, outcome } = entry;
        let on_engine = outcome.compute_ops > 0 && outcome.on_neural_engine == outcome.compute_ops;
        let apart = outcome.ane_to_f16.is_some_and(|apart| apart > MIN_DIFFERENCE);
        let (error_to_ane, error_to_f16) = outcome.error_to_ane.zip(outcome.error_to_f16)?;
        let says =
            match (error_to_ane * MIN_ERROR_RATIO <= error_to_f16, error_to_f16 * MIN_ERROR_RATIO <= error_to_ane) {
                (true, _) => Says::For,
                (_, true) => Says::Against,
                _ => return None,
            };
        let (experiment, size) = (experiment.clone(), *size);
        (on_engine && apart).then_some(ArithmeticFinding { experiment, size, says, error_to_ane, error_to_f16 })
    };
    match report.machine.neural_engine_cores {
        None => Vec::new(),
        Some(_) => report.outcomes.iter().filter_map(finding).collect(),
    }
}

/// Minimum ratio of times for "slower".
const MIN_TIME_RATIO: f64 = 1.1;

/// Conclusions of a report, in the order of the experiments. Omits rules without conclusion. A machine without a Neural
/// Engine, such as a virtual machine, gives none.
pub fn import(report: &ProbeReport) -> Vec<RuleFinding> {
    if report.machine.neural_engine_cores.is_none() {
        return Vec::new();
    }
    let mut rows: IndexMap<&str, Vec<Evidence>> = IndexMap::new();
    for entry in &report.outcomes {
        let Some(experiment) = experiments().iter().find(|experiment| experiment.id == entry.experiment) else {
            continue;
        };
        for settles in &experiment.settles {
            if let Some((says, found)) = verdict(report, entry, settles) {
                rows.entry(&settles.rule).or_default().push(evidence(report, experiment, entry, says, &found));
            }
        }
    }
    let finding = |(rule, evidence): (&str, Vec<Evidence>)| {
        let says = if evidence.iter().any(|row| row.says == Says::For) { Says::For } else { Says::Against };
        RuleFinding { rule: rule.to_owned(), says, evidence }
    };
    rows.into_iter().map(finding).collect()
}

/// Whether an outcome supports a rule, and the finding; `None` if it isn't conclusive.
fn verdict(report: &ProbeReport, entry: &ProbeEntry, settles: &Settles) -> Option<(Says, String)> {
    let kind = entry.outcome.kind?;
    if let Some(other) = &settles.slower_than {
        // unless both are on the Neural Engine, times compare devices instead of forms
        let resident = |entry: &ProbeEntry| entry.outcome.kind == Some(OutcomeKind::Resident);
        let of = |entry: &ProbeEntry| entry.outcome.call_ms.filter(|_| resident(entry));
        let same = |candidate: &&ProbeEntry| candidate.experiment == *other && candidate.size == entry.size;
        let (own, other_ms) = (of(entry)?, of(report.outcomes.iter().find(same)?)?);
        let says = if own >= other_ms * MIN_TIME_RATIO { Says::For } else { Says::Against };
        return Some((says, format!("{own:.2} ms a call, {other_ms:.2} ms of {other}")));
    }
    let says = if settles.confirmed_by.contains(&kind) { Says::For } else { Says::Against };
    let mut found = match kind {
        OutcomeKind::Resident | OutcomeKind::Elsewhere | OutcomeKind::Wrong => {
            let outcome = &entry.outcome;
            format!("{kind}, {} of {} ops on the Neural Engine", outcome.on_neural_engine, outcome.compute_ops)
        }
        kind => kind.to_string(),
    };
    if !entry.outcome.codes.is_empty() {
        found += &format!(" ({})", entry.outcome.codes.join(", "));
    }
    Some((says, found))
}

fn evidence(report: &ProbeReport, experiment: &Experiment, entry: &ProbeEntry, says: Says, found: &str) -> Evidence {
    let machine = &report.machine;
    Evidence {
        says,
        source: format!("anec doctor --probe {}, {}, {}: {found}", report.anec_version, experiment.id, entry.size),
        device: Some(machine.chip.trim_start_matches("Apple ").to_owned()),
        os: Some(format!("macOS {} ({})", machine.os_version, machine.os_build)),
        date: Some(report.date.chars().take(10).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProbeOutcome;
    use anec_coreml::plan::Machine;

    fn report(cores: Option<u32>, outcomes: &[(&str, OutcomeKind, f64)]) -> ProbeReport {
        let machine = Machine { neural_engine_cores: cores, ..anec_testing::fake::machine() };
        let entry = |(experiment, kind, call_ms): &(&str, OutcomeKind, f64)| ProbeEntry {
            experiment: (*experiment).to_owned(),
            size: ProbeSize::Tiny,
            outcome: ProbeOutcome { kind: Some(*kind), call_ms: Some(*call_ms), ..ProbeOutcome::default() },
        };
        let outcomes = outcomes.iter().map(entry).collect();
        ProbeReport { schema_version: 1, anec_version: "0".into(), date: "2026-11-22".into(), machine, outcomes }
    }

    #[test]
    fn numbers_confirm_the_simulation_or_refute_it() {
        let says = |on_neural_engine, to_f16: f64, to_ane: f64, apart: f64| {
            let mut report = report(Some(16), &[("silu-native", OutcomeKind::Resident, 1.0)]);
            let outcome = &mut report.outcomes[0].outcome;
            (outcome.compute_ops, outcome.on_neural_engine) = (2, on_neural_engine);
            (outcome.error_to_f16, outcome.error_to_ane, outcome.ane_to_f16) =
                (Some(to_f16), Some(to_ane), Some(apart));
            import_arithmetic(&report).first().map(|finding| finding.says)
        };
        assert_eq!(says(2, 0.05, 0.001, 0.05), Some(Says::For));
        assert_eq!(says(2, 0.001, 0.05, 0.05), Some(Says::Against));
        assert_eq!(says(2, 0.03, 0.04, 0.05), None, "as far from both");
        assert_eq!(says(2, 0.0, 0.001, 0.001), None, "they are the same");
        assert_eq!(says(1, 0.05, 0.001, 0.05), None, "another device computed");
    }

    #[test]
    fn times_are_compared_where_both_programs_are_on_the_neural_engine() {
        use OutcomeKind::{Elsewhere, Resident};
        let says = |kinds: [OutcomeKind; 2], cores| {
            let outcomes = [("weights-int8-channel", kinds[0], 2.0), ("weights-int8-affine", kinds[1], 1.0)];
            import(&report(cores, &outcomes)).first().map(|finding| finding.says)
        };
        assert_eq!(says([Resident, Resident], Some(16)), Some(Says::For));
        assert_eq!(says([Elsewhere, Resident], Some(16)), None);
        assert_eq!(says([Resident, Elsewhere], Some(16)), None);
        // a virtual machine's CPU is no evidence
        assert_eq!(says([Resident, Resident], None), None);
        assert!(import(&report(None, &[("rank-5", Elsewhere, 1.0)])).is_empty());
    }
}
