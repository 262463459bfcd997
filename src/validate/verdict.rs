//! Verdicts: checks of claims, gates, reports.

use std::fmt::Display;
use std::path::Path;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::Serialize;

use anec_advice::ForecastFinding;
use anec_base::{ContentDigest, input};
use anec_convert::report;
use anec_coreml::plan::Device;
use anec_package::Package;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Verdict {
    /// The claim was verified.
    Passed,
    /// The claim couldn't be tested here.
    Unproven,
    /// The claim was refuted.
    Failed,
}

/// Claim about a part of a bundle.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Check {
    /// Part: a package, a function, a precision.
    pub subject: String,
    /// Claim in a few words.
    pub claim: String,
    /// Result.
    pub verdict: Verdict,
    /// Layer, if the claim is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// Measurements by name; NaN is written as null.
    #[schemars(with = "std::collections::BTreeMap<String, Option<f64>>")]
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub measured: IndexMap<String, f64>,
    /// Problem (found and expected), or a remark.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Ops that contradict the claim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ops: Vec<MisplacedOp>,
    /// Measurements at each position of a text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<Position>,
}

/// Measurements at one position of a text.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Position {
    /// Text, if there are several.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// Index in the text.
    pub position: usize,
    /// Token whose successor is predicted.
    pub token: u32,
    /// Cosine of the logits with the golden's.
    pub cosine: f64,
    /// KL divergence of the next token's probabilities from the golden's, in nats.
    pub kl: f64,
    /// Whether the most likely token is the golden's.
    pub top1: bool,
}

impl Check {
    /// Creates a check from a claim and its contradiction, if there is one.
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

    /// Creates a check of a claim that can't be tested here, with the reason.
    pub fn unproven(subject: impl Into<String>, claim: impl Into<String>, reason: impl Into<String>) -> Self {
        Check { verdict: Verdict::Unproven, ..Check::of(subject, claim, Some(reason.into())) }
    }
}

/// Maximum number of findings that a check lists.
const LISTED: usize = 5;

/// Joins the first findings in one line; `None` if there are none.
pub(super) fn listed<T: Display>(findings: &[T]) -> Option<String> {
    let shown: Vec<String> = findings.iter().take(LISTED).map(T::to_string).collect();
    let more = findings.len().saturating_sub(LISTED);
    let tail = if more > 0 { format!("; and {more} more") } else { String::new() };
    (!findings.is_empty()).then(|| shown.join("; ") + &tail)
}

/// Gate: a group of checks.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct GateReport {
    /// Name: `structure`, `parity`, …
    pub gate: String,
    /// Overall result.
    pub verdict: Verdict,
    /// Checks.
    pub checks: Vec<Check>,
    /// Notes that every report prints, such as a loosened threshold with its reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl GateReport {
    /// Creates a report whose verdict is the worst of the checks. A gate without checks fails.
    pub fn new(gate: &str, mut checks: Vec<Check>) -> Self {
        if checks.is_empty() {
            checks.push(Check::of("bundle", "something was checked", Some("there was nothing to check".into())));
        }
        let verdict = worst(checks.iter().map(|check| check.verdict));
        GateReport { gate: gate.to_owned(), verdict, checks, notes: Vec::new() }
    }
}

/// Name of a report that is recorded in a bundle's folder.
pub const FILE_NAME: &str = "gates.json";

/// Gates that a bundle must pass before others rely on it. Residency needs a Mac.
pub const REQUIRED: [&str; 3] = ["structure", "numerics", "parity"];

/// Returns the missing, failed or unproven gate that keeps a report of gates (as JSON) from showing that a bundle
/// passed; `None` if all passed.
pub fn missing_proof(report: &serde_json::Value) -> Option<String> {
    let gates = report["gates"].as_array().map(Vec::as_slice).unwrap_or_default();
    let verdict = |name: &str| gates.iter().find(|gate| gate["gate"] == name).map(|gate| gate["verdict"].clone());
    if let Some(failed) = gates.iter().find(|gate| gate["verdict"] == "failed") {
        return Some(format!("{} failed", failed["gate"].as_str().unwrap_or_default()));
    }
    REQUIRED.into_iter().find_map(|name| match verdict(name) {
        None => Some(format!("{name} was not tried")),
        Some(verdict) if verdict == "passed" => None,
        Some(_) => Some(format!("{name} is unproven")),
    })
}

/// State of a bundle's gates in one line, from the report in its folder.
pub fn recorded_state(bundle: &anec_bundle::Bundle, folder: &Path) -> String {
    let text = anec_base::input::read(&folder.join(FILE_NAME), MAX_REPORT).unwrap_or_default();
    let Ok(report) = serde_json::from_slice::<serde_json::Value>(&text) else { return "not recorded".to_owned() };
    if report["digest"].as_str() != Some(&bundle.digest().to_string()) {
        return "recorded for other files".to_owned();
    }
    let gates = report["gates"].as_array().into_iter().flatten();
    let state = |gate: &serde_json::Value| Some(format!("{} {}", gate["gate"].as_str()?, gate["verdict"].as_str()?));
    gates.filter_map(state).collect::<Vec<_>>().join(", ")
}

/// Maximum size of a recorded report, in bytes.
const MAX_REPORT: u64 = 1 << 28;

/// Version of the schema of [`GatesReport`].
pub const SCHEMA_VERSION: u32 = 1;

/// JSON Schema of a report.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(GatesReport).into()
}

/// Report of a validation.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct GatesReport {
    /// Version of this schema.
    pub schema_version: u32,
    /// Name of the bundle.
    pub bundle: String,
    /// Digest of the files that `bundle.json` lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub digest: Option<ContentDigest>,
    /// Version of anec.
    pub anec_version: String,
    /// Overall result.
    pub verdict: Verdict,
    /// Requested gates.
    pub gates: Vec<GateReport>,
    /// Forecast of the rules, which doesn't influence the verdict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Vec<ForecastFinding>>,
    /// Contents of the packages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub packages: Vec<PackageFacts>,
}

/// Contents of a package, for reports.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PackageFacts {
    /// Name.
    pub package: String,
    /// Bytes of the constants.
    pub weight_bytes: u64,
    /// Bytes of the states.
    pub state_bytes: u64,
    /// Number of ops by operator, over all functions.
    pub ops: std::collections::BTreeMap<String, usize>,
    /// Loss by quantization, `1 - cosine` of each weight, by name.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    #[schemars(with = "std::collections::BTreeMap<String, f64>")]
    pub quantization: IndexMap<String, f64>,
}

impl PackageFacts {
    /// Collects the facts of a package.
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
    /// Adds the quantization loss from the conversion report in `folder`, if there is one.
    pub fn add_quantization(&mut self, folder: &Path) {
        let text = input::read_file(&folder.join(report::FILE_NAME), input::MOST_JSON).unwrap_or_default();
        let Ok(conversion) = serde_json::from_slice::<report::ConvertReport>(&text) else { return };
        for facts in &mut self.packages {
            let own = conversion.packages.iter().filter(|package| package.package == facts.package);
            let quantized = own.flat_map(|package| &package.tensors).filter(|tensor| tensor.granularity.is_some());
            facts.quantization = quantized
                .filter_map(|tensor| Some((tensor.name.clone(), 1.0 - tensor.loss.as_ref()?.cosine)))
                .collect();
        }
    }

    /// Creates a report of gates.
    pub fn new(bundle: &str, gates: Vec<GateReport>) -> Self {
        // without gates nothing is verified
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

    /// Exit code: 0 passed, 1 failed, 3 unproven (0 if that is allowed).
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

/// Op that doesn't prefer the Neural Engine.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct MisplacedOp {
    /// Operator, by Core ML's name.
    pub operator: String,
    /// Name of the result.
    pub output: String,
    /// Preferred device; `None` if the plan names none.
    pub device: Option<Device>,
    /// Supported devices.
    pub supported: Vec<Device>,
    /// Share of the function's cost, as estimated by Core ML.
    pub cost: Option<f64>,
    /// Bytes of the weights that the op reads, if the package has an op with this result.
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
