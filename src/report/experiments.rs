//! Results of device experiments, and which rules they confirm or refute.

use super::table::table;
use anec_advice::rules::{Evidence, Says};
use anec_experiment::{ArithmeticFinding, ProbeEntry, ProbeReport, RuleFinding};

/// Formats a row for each outcome.
pub fn experiments(report: &ProbeReport) -> String {
    let rows = report.outcomes.iter().map(|ProbeEntry { experiment, size, outcome }| {
        let milliseconds = |ms: Option<f64>| ms.map_or_else(|| "-".into(), |ms| format!("{ms:.2}"));
        let error = |error: Option<f64>| error.map_or_else(|| "-".into(), |error| format!("{error:.1e}"));
        vec![
            experiment.clone(),
            size.to_string(),
            outcome.kind.map_or_else(|| "-".into(), |kind| kind.to_string()),
            format!("{}/{}", outcome.on_neural_engine, outcome.compute_ops),
            milliseconds(outcome.call_ms),
            milliseconds(outcome.cpu_call_ms),
            error(outcome.error_to_f32),
            error(outcome.error_to_f16),
            error(outcome.error_to_ane),
            outcome.codes.join(", "),
        ]
    });
    let head = [
        "experiment",
        "size",
        "outcome",
        ">on Neural Engine",
        ">ms",
        ">ms on CPU",
        ">off f32",
        ">off f16",
        ">off ane",
        "codes",
    ];
    format!("{}\n\n{}", report.machine, table(&head, rows))
}

/// Formats which rules a report confirms or refutes, with evidence rows in the format of
/// `src/advice/tables/ane-rules.yaml`.
pub fn rule_findings(report: &ProbeReport, findings: &[RuleFinding]) -> String {
    let mut text = format!("{}, {}\n", report.machine, report.date);
    for (says, head) in [(Says::For, "confirmed"), (Says::Against, "refuted")] {
        let rules: Vec<&RuleFinding> = findings.iter().filter(|finding| finding.says == says).collect();
        if rules.is_empty() {
            continue;
        }
        text.push_str(&format!("\n{head}:\n"));
        for RuleFinding { rule, evidence, .. } in rules {
            text.push_str(&format!("- id: {rule}\n  evidence:\n"));
            evidence.iter().for_each(|row| text.push_str(&format!("    - {}\n", line(row))));
        }
    }
    if findings.is_empty() {
        let why = if report.machine.neural_engine_cores.is_none() { "without a Neural Engine " } else { "" };
        text.push_str(&format!("\n{why}nothing is said of any rule\n"));
    }
    text
}

/// Formats how the measurements compare with the simulated arithmetic. Empty if they don't decide anything.
pub fn arithmetic_findings(findings: &[ArithmeticFinding]) -> String {
    if findings.is_empty() {
        return String::new();
    }
    let mut text = "\nthe simulated arithmetic of the Neural Engine, by the largest error of numbers:\n".to_owned();
    for ArithmeticFinding { experiment, size, says, error_to_ane, error_to_f16 } in findings {
        let verdict = match says {
            Says::For => "as simulated",
            Says::Against => "not as simulated",
        };
        text.push_str(&format!(
            "- {experiment}, {size}: {verdict} ({error_to_ane:.1e} to the simulation, {error_to_f16:.1e} to half precision)\n"
        ));
    }
    text
}

/// Evidence row in YAML. Quoted values are JSON, which is valid YAML.
fn line(row: &Evidence) -> String {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let mut parts = vec![format!("says: {}", row.says), format!("source: {}", quoted(&row.source))];
    let rest = [("device", &row.device), ("os", &row.os), ("date", &row.date)];
    parts.extend(rest.into_iter().filter_map(|(name, text)| Some(format!("{name}: {}", quoted(text.as_deref()?)))));
    format!("{{ {} }}", parts.join(", "))
}
