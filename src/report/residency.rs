//! What the residency gate said.

use super::bytes;
use super::table::table;
use crate::validate::GateReport;

/// Most ops that are listed of one function; JSON has all.
const LISTED: usize = 12;

/// Where the ops of each function are, and which are in the wrong place. Nothing without a plan.
pub fn residency(gate: &GateReport) -> Option<String> {
    let planned: Vec<_> = gate.checks.iter().filter(|check| !check.measured.is_empty()).collect();
    if planned.is_empty() {
        return None;
    }
    let rows = planned.iter().map(|check| {
        let of = |name: &str| check.measured.get(name);
        let count = |name: &str| of(name).map_or_else(|| "-".into(), |value| format!("{value:.0}"));
        let milliseconds = |name: &str| of(name).map_or_else(|| "-".into(), |value| format!("{value:.2}"));
        let cost = of("cost_on_neural_engine").map_or_else(|| "-".into(), |share| percent(*share));
        vec![
            check.subject.clone(),
            count("compute_ops"),
            count("on_neural_engine"),
            count("convs"),
            cost,
            milliseconds("milliseconds"),
            milliseconds("cpu_milliseconds"),
            check.verdict.to_string(),
        ]
    });
    let head = [&gate.gate, ">ops", ">on Neural Engine", ">convs", ">cost there", ">ms", ">ms on CPU", "verdict"];
    let mut text = String::new();
    let plan = gate.checks.iter().find(|check| check.subject == "plan").and_then(|check| check.detail.as_deref());
    if let Some(plan) = plan {
        text.push_str(&format!("plan: {plan}\n\n"));
    }
    text.push_str(&table(&head, rows));

    let misplaced: Vec<Vec<String>> = planned
        .iter()
        .flat_map(|check| {
            let shown = check.ops.iter().take(LISTED).map(|op| {
                let devices: Vec<String> = op.supported.iter().map(ToString::to_string).collect();
                vec![
                    check.subject.clone(),
                    op.operator.clone(),
                    op.output.clone(),
                    op.device.map_or_else(|| "none".into(), |device| device.to_string()),
                    devices.join(", "),
                    op.cost.map_or_else(|| "-".into(), percent),
                    op.weight_bytes.map_or_else(|| "-".into(), bytes),
                ]
            });
            let more = check.ops.len().saturating_sub(LISTED);
            let rest = (more > 0).then(|| vec![check.subject.clone(), format!("and {more} more")]);
            shown.chain(rest).collect::<Vec<_>>()
        })
        .collect();
    if !misplaced.is_empty() {
        let head = ["not on the Neural Engine", "op", "result", "prefers", "could run on", ">cost", ">weights"];
        text.push_str(&format!("\n{}", table(&head, misplaced)));
    }
    Some(text)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
