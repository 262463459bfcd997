//! Device experiments of `probes.yaml`. Each is a small program that settles a contested rule, or checks a
//! published risk on this machine.
//!
//! ```
//! let experiments = anec_experiment::experiments();
//! assert!(experiments.iter().any(|experiment| !experiment.settles.is_empty()));
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `program` | the program of an experiment |
//! | `run` | one experiment on Core ML: compile, plan, load, call, compare |
//! | `launch` | all of them, each in a process of its own with a time limit; the file that comes out |
//! | `import` | what such a file says of the rules |
//! | [`probe`] | small programs for the self-test of a Mac |

#![forbid(unsafe_code)]

mod import;
mod launch;
pub mod probe;
mod program;
mod run;
mod step;

use std::sync::LazyLock;

use anec_advice::tables;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use import::{ArithmeticFinding, RuleFinding, import, import_arithmetic};
pub use launch::{ProbeEntry, ProbeError, ProbeReport, launch};
pub use program::ProgramSpec;
pub use run::{ProbeOutcome, run};

const PROBES: &str = include_str!("probes.yaml");

/// Experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// Name.
    pub id: String,
    /// Question in a few words.
    pub asks: String,
    /// Origin of the question: a risk, a rule, a list of open questions.
    pub about: String,
    /// Program to run.
    #[serde(default)]
    pub program: ProgramSpec,
    /// Rules that the outcome confirms or refutes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settles: Vec<Settles>,
    /// Sizes in which the program is built.
    #[serde(default = "sizes")]
    pub sizes: Vec<ProbeSize>,
    /// Largest relative error of correct results.
    #[serde(default = "tolerance")]
    pub tolerance: f64,
}

fn sizes() -> Vec<ProbeSize> {
    <ProbeSize as strum::IntoEnumIterator>::iter().collect()
}

/// A few roundings to fp16 in sequence.
fn tolerance() -> f64 {
    0.02
}

/// Interpretation of an outcome for a rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Settles {
    /// Name of the rule.
    pub rule: String,
    /// Outcomes that confirm the rule; all other conclusive ones refute it.
    #[serde(default = "trouble")]
    pub confirmed_by: Vec<OutcomeKind>,
    /// Other experiment of the same size: the rule is confirmed if this one takes at least 10 % longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slower_than: Option<String>,
}

/// All outcomes except [`OutcomeKind::Resident`].
fn trouble() -> Vec<OutcomeKind> {
    use OutcomeKind::{Crashed, Elsewhere, Failed, Hung, Refused, Wrong};
    vec![Elsewhere, Refused, Failed, Crashed, Hung, Wrong]
}

/// Outcome of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum OutcomeKind {
    /// Every op prefers the Neural Engine, and the results are correct.
    Resident,
    /// Some ops prefer another device, or the plan names no device for any.
    Elsewhere,
    /// Compilation failed.
    Refused,
    /// Compilation succeeded, but loading or running failed.
    Failed,
    /// Results are wrong.
    Wrong,
    /// The process crashed.
    Crashed,
    /// The process exceeded its time limit.
    Hung,
}

/// Size of an experiment's program.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::Display,
    strum::EnumString,
    strum::EnumIter,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ProbeSize {
    /// Some kilobytes of weights.
    Tiny,
    /// About 50 MB of weights.
    Large,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Probes {
    experiments: Vec<Experiment>,
}

/// All experiments.
pub fn experiments() -> &'static [Experiment] {
    static PARSED: LazyLock<Vec<Experiment>> = LazyLock::new(|| {
        let probes: Probes = tables::built_in("src/experiment/probes.yaml", PROBES);
        probes.experiments
    });
    &PARSED
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use anec_advice::rules::{Says, rules};

    #[test]
    fn every_contested_rule_and_every_risk_has_an_experiment() {
        let all = experiments();
        let ids: BTreeSet<&str> = all.iter().map(|experiment| experiment.id.as_str()).collect();
        assert_eq!(ids.len(), all.len());
        let known: BTreeSet<String> = rules().into_iter().map(|rule| rule.id).collect();
        let settled: BTreeSet<&str> =
            all.iter().flat_map(|experiment| &experiment.settles).map(|settles| settles.rule.as_str()).collect();
        for experiment in all {
            for settles in &experiment.settles {
                assert!(known.contains(&settles.rule), "{}: no rule {}", experiment.id, settles.rule);
                let other = settles.slower_than.as_deref();
                assert!(other.is_none_or(|other| ids.contains(other)), "{}: no {other:?}", experiment.id);
            }
        }
        for rule in rules() {
            let contested = rule.evidence.iter().any(|evidence| evidence.says == Says::Against);
            assert!(!contested || settled.contains(rule.id.as_str()), "no experiment settles {}", rule.id);
        }
        let risks = [
            "A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "B1", "B2", "B3", "C1", "C2", "C3", "C4", "C5", "C6", "C7",
        ];
        // question 8 is about a model's mathematics, which parity settles without a Mac
        let questions = (1..=10).filter(|number| *number != 8).map(|number| format!("question {number}"));
        for part in risks.into_iter().map(|risk| format!("risk {risk}")).chain(questions) {
            let asked = |experiment: &&Experiment| experiment.about.split(", ").any(|about| about == part);
            assert!(all.iter().any(|experiment| asked(&experiment)), "no experiment is about {part}");
        }
    }
}
