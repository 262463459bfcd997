//! What gates say: claims about a bundle, each proven, refuted or open.

use std::fmt::Display;
use std::path::Path;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::Serialize;

use super::forecast::ForecastFinding;
use anec_base::ContentDigest;
use anec_convert::report;
use anec_coreml::plan::Device;
use anec_package::Package;

/// Whether a claim holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema, strum::Display)]
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
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Check {
    /// The part: a package, a function, a way of running.
    pub subject: String,
    /// The claim, in a few words.
    pub claim: String,
    /// Whether it holds.
    pub verdict: Verdict,
    /// The layer, where it is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// What was measured, by name; what is not a number is null.
    #[schemars(with = "std::collections::BTreeMap<String, Option<f64>>")]
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub measured: IndexMap<String, f64>,
    /// What is wrong (found and expected), or what else there is to know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Ops that contradict the claim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ops: Vec<MisplacedOp>,
    /// What was measured at each position of a text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<Position>,
}

/// What was measured at one position of a text.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Position {
    /// The text, where there are several.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// Tokens of the text before this one.
    pub position: usize,
    /// The token whose successor is predicted here.
    pub token: u32,
    /// Cosine of the logits and the golden's.
    pub cosine: f64,
    /// Divergence of the next token's probabilities from the golden's, in nats.
    pub kl: f64,
    /// Whether the likeliest token is the golden's.
    pub top1: bool,
}

impl Check {
    /// A claim, with what contradicts it.
    pub fn of(subject: impl Into<String>, claim: impl Into<String>, contradiction: Option<String>) -> Self {
        Check {
            subject: subject.into(),
            claim: claim.into(),
            verdict: if contradiction.is_some() { Verdict::Failed } else { Verdict::Passed },
            layer: None,
            measured: IndexMap::new(),
            detail: contradiction,
            ops: Vec::new(),
            positions: Vec::new(),
        }
    }

    /// A claim that can't be tried here, with the reason.
    pub fn unproven(subject: impl Into<String>, claim: impl Into<String>, reason: impl Into<String>) -> Self {
        Check { verdict: Verdict::Unproven, ..Check::of(subject, claim, Some(reason.into())) }
    }
}

/// Most findings that a check lists.
const LISTED: usize = 5;

/// The first findings in one line, or nothing if there are none.
pub(super) fn listed<T: Display>(findings: &[T]) -> Option<String> {
    let shown: Vec<String> = findings.iter().take(LISTED).map(T::to_string).collect();
    let more = findings.len().saturating_sub(LISTED);
    let tail = if more > 0 { format!("; and {more} more") } else { String::new() };
    (!findings.is_empty()).then(|| shown.join("; ") + &tail)
}

/// A gate: checks that together say one thing.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct GateReport {
    /// `structure`, `parity`, …
    pub gate: String,
    /// What the checks say together.
    pub verdict: Verdict,
    /// The checks.
    pub checks: Vec<Check>,
    /// What every report says of the gate, whatever its verdict: that a manifest loosened it, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl GateReport {
    /// The verdict of checks: the worst of them. A gate that checked nothing failed.
    pub fn new(gate: &str, mut checks: Vec<Check>) -> Self {
        if checks.is_empty() {
            checks.push(Check::of("bundle", "something was checked", Some("there was nothing to check".into())));
        }
        let verdict = worst(checks.iter().map(|check| check.verdict));
        GateReport { gate: gate.to_owned(), verdict, checks, notes: Vec::new() }
    }
}

/// Version of the schema of [`GatesReport`].
pub const SCHEMA_VERSION: u32 = 1;

/// JSON Schema of a report.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(GatesReport).into()
}

/// What was validated, and what came out.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct GatesReport {
    /// Version of this schema.
    pub schema_version: u32,
    /// Name of the bundle.
    pub bundle: String,
    /// Digest of its files, as `bundle.json` names them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub digest: Option<ContentDigest>,
    /// Version of anec that validated.
    pub anec_version: String,
    /// What the gates say together.
    pub verdict: Verdict,
    /// The gates that were asked for.
    pub gates: Vec<GateReport>,
    /// Where rules expect trouble on the Neural Engine: a forecast, which no verdict rests on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Vec<ForecastFinding>>,
    /// What was validated, package by package.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub packages: Vec<PackageFacts>,
}

/// What is in a package, for people who read the report.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PackageFacts {
    /// Its name.
    pub package: String,
    /// Bytes of its constants.
    pub weight_bytes: u64,
    /// Bytes of its states.
    pub state_bytes: u64,
    /// Numbers of ops by operator, over all functions.
    pub ops: std::collections::BTreeMap<String, usize>,
    /// What quantization cost: `1 - cosine` of each weight, by name.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    #[schemars(with = "std::collections::BTreeMap<String, f64>")]
    pub quantization: IndexMap<String, f64>,
}

impl PackageFacts {
    /// The facts of a package.
    pub fn of(name: &str, package: &Package) -> Self {
        let inventory = package.inventory();
        let mut ops = std::collections::BTreeMap::new();
        for (operator, count) in inventory.functions.iter().flat_map(|function| &function.ops) {
            *ops.entry(operator.clone()).or_default() += count;
        }
        // functions of a package share their states
        let state_bytes = inventory.functions.iter().map(|function| function.state_bytes).max().unwrap_or(0);
        let (package, weight_bytes) = (name.to_owned(), inventory.weight_bytes);
        PackageFacts { package, weight_bytes, state_bytes, ops, quantization: IndexMap::new() }
    }
}

impl GatesReport {
    /// Adds what the conversion of the bundle in `folder` noted of its weights, if that is there.
    pub fn add_quantization(&mut self, folder: &Path) {
        let text = std::fs::read(folder.join(report::FILE_NAME)).unwrap_or_default();
        let Ok(conversion) = serde_json::from_slice::<report::ConvertReport>(&text) else { return };
        for facts in &mut self.packages {
            let own = conversion.packages.iter().filter(|package| package.package == facts.package);
            let quantized = own.flat_map(|package| &package.tensors).filter(|tensor| tensor.granularity.is_some());
            facts.quantization = quantized
                .filter_map(|tensor| Some((tensor.name.clone(), 1.0 - tensor.loss.as_ref()?.cosine)))
                .collect();
        }
    }

    /// The report of gates.
    pub fn new(bundle: &str, gates: Vec<GateReport>) -> Self {
        // no gate, no proof
        let verdict = if gates.is_empty() { Verdict::Unproven } else { worst(gates.iter().map(|gate| gate.verdict)) };
        GatesReport {
            schema_version: SCHEMA_VERSION,
            bundle: bundle.to_owned(),
            digest: None,
            anec_version: env!("CARGO_PKG_VERSION").to_owned(),
            verdict,
            gates,
            forecast: None,
            packages: Vec::new(),
        }
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

/// An op that doesn't prefer the Neural Engine.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct MisplacedOp {
    /// The operator as Core ML names it.
    pub operator: String,
    /// The name of its result.
    pub output: String,
    /// The device that it prefers; none where the plan names none.
    pub device: Option<Device>,
    /// The devices that could run it.
    pub supported: Vec<Device>,
    /// Share of the function's work, as Core ML estimates it.
    pub cost: Option<f64>,
    /// Bytes of the weights that it reads, if the package has an op with this result.
    pub weight_bytes: Option<u64>,
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
            let report = GatesReport::new("m", vec![GateReport::new("g", checks)]);
            assert_eq!((report.verdict, report.exit_code(false)), (verdict, code));
            assert_eq!(report.exit_code(true), if code == 3 { 0 } else { code });
        }
    }
}
