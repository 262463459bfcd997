//! What gates say: claims about a bundle, each proven, refuted or open.

use indexmap::IndexMap;
use serde::Serialize;

use super::residency::MisplacedOp;

/// Whether a claim holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Verdict {
    /// It was shown.
    Passed,
    /// It could not be tried here.
    Unproven,
    /// It doesn't.
    Failed,
}

/// A claim about a part of a bundle.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// The part: a package, a function, a way of running.
    pub subject: String,
    /// The claim, in a few words.
    pub claim: String,
    /// Whether it holds.
    pub verdict: Verdict,
    /// What was measured, by name.
    #[serde(skip_serializing_if = "IndexMap::is_empty")]
    pub measured: IndexMap<String, f64>,
    /// What is wrong (found and expected), or what else there is to know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Ops that contradict the claim.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ops: Vec<MisplacedOp>,
}

impl Check {
    /// A claim, with what contradicts it.
    pub fn of(subject: impl Into<String>, claim: impl Into<String>, contradiction: Option<String>) -> Self {
        Check {
            subject: subject.into(),
            claim: claim.into(),
            verdict: if contradiction.is_some() { Verdict::Failed } else { Verdict::Passed },
            measured: IndexMap::new(),
            detail: contradiction,
            ops: Vec::new(),
        }
    }

    /// A claim that can't be tried here, with the reason.
    pub fn unproven(subject: impl Into<String>, claim: impl Into<String>, reason: impl Into<String>) -> Self {
        Check { verdict: Verdict::Unproven, ..Check::of(subject, claim, Some(reason.into())) }
    }
}

/// A gate: checks that together say one thing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GateReport {
    /// `structure`, `parity`, …
    pub gate: String,
    /// What the checks say together.
    pub verdict: Verdict,
    /// The checks.
    pub checks: Vec<Check>,
}

impl GateReport {
    /// The verdict of checks: the worst of them. A gate that checked nothing failed.
    pub fn new(gate: &str, mut checks: Vec<Check>) -> Self {
        if checks.is_empty() {
            checks.push(Check::of("bundle", "something was checked", Some("there was nothing to check".into())));
        }
        let verdict = worst(checks.iter().map(|check| check.verdict));
        GateReport { gate: gate.to_owned(), verdict, checks }
    }
}

/// What was validated, and what came out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Name of the bundle.
    pub bundle: String,
    /// Version of anec that validated.
    pub anec_version: String,
    /// What the gates say together.
    pub verdict: Verdict,
    /// The gates that were asked for.
    pub gates: Vec<GateReport>,
}

impl Report {
    /// The report of gates.
    pub fn new(bundle: &str, gates: Vec<GateReport>) -> Self {
        let verdict = worst(gates.iter().map(|gate| gate.verdict));
        Report { bundle: bundle.to_owned(), anec_version: env!("CARGO_PKG_VERSION").to_owned(), verdict, gates }
    }

    /// The exit code: 0 passed, 1 failed, 3 unproven (0 if that is allowed).
    pub fn exit_code(&self, allow_unproven: bool) -> u8 {
        match self.verdict {
            Verdict::Passed => 0,
            Verdict::Unproven if allow_unproven => 0,
            Verdict::Unproven => 3,
            Verdict::Failed => 1,
        }
    }
}

fn worst(verdicts: impl Iterator<Item = Verdict>) -> Verdict {
    verdicts.fold(Verdict::Passed, |worst, verdict| match (worst, verdict) {
        (Verdict::Failed, _) | (_, Verdict::Failed) => Verdict::Failed,
        (Verdict::Unproven, _) | (_, Verdict::Unproven) => Verdict::Unproven,
        _ => Verdict::Passed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_is_as_good_as_its_worst_check() {
        let passed = || Check::of("a", "b", None);
        let open = || Check::unproven("a", "b", "no Mac");
        let failed = || Check::of("a", "b", Some("c".into()));
        for (checks, verdict, code) in [
            (vec![passed(), passed()], Verdict::Passed, 0),
            (vec![passed(), open()], Verdict::Unproven, 3),
            (vec![open(), failed(), passed()], Verdict::Failed, 1),
            (vec![], Verdict::Failed, 1),
        ] {
            let report = Report::new("m", vec![GateReport::new("g", checks)]);
            assert_eq!((report.verdict, report.exit_code(false)), (verdict, code));
            assert_eq!(report.exit_code(true), if code == 3 { 0 } else { code });
        }
    }
}
