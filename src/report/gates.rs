//! Results of the gates.

use indexmap::IndexMap;

use super::counted;
use super::table::table;
use anec_validate::verdict::{Check, GateReport, GatesReport, Verdict};
use anec_validate::{numerics, residency};

/// Formats the result of `anec validate`: a line for each gate, its measurements, and every check that didn't pass.
pub fn gates(report: &GatesReport) -> String {
    let rows = report.gates.iter().map(|gate| {
        let passed = gate.checks.iter().filter(|check| check.verdict == Verdict::Passed).count();
        vec![
            gate.gate.clone(),
            format!("{passed} of {}", counted(gate.checks.len(), "check")),
            gate.verdict.to_string(),
        ]
    });
    let mut text = table(&["gate", "passed", "verdict"], rows);
    for gate in &report.gates {
        gate.notes.iter().for_each(|note| text.push_str(&format!("  {}: {note}\n", gate.gate)));
    }
    for gate in &report.gates {
        let measures = match gate.gate.as_str() {
            residency::GATE => super::residency::residency(gate),
            numerics::GATE => layers(gate),
            _ => measures(gate),
        };
        if let Some(measures) = measures {
            text.push_str(&format!("\n{measures}"));
        }
    }
    for (verdict, head) in [(Verdict::Failed, "failed"), (Verdict::Unproven, "unproven")] {
        let open = report.gates.iter().flat_map(|gate| gate.checks.iter().map(move |check| (gate, check)));
        let lines: Vec<String> =
            open.filter(|(_, check)| check.verdict == verdict).map(|(gate, check)| line(gate, check)).collect();
        if !lines.is_empty() {
            text.push_str(&format!("\n{head}:\n{}", lines.concat()));
        }
    }
    if let Some(findings) = &report.forecast {
        text.push_str(&format!("\n{}", super::forecast(findings)));
    }
    text
}

pub(super) fn line(gate: &GateReport, check: &Check) -> String {
    let detail = check.detail.as_deref().unwrap_or_default();
    format!("  {}: {}: {}: {detail}\n", gate.gate, check.subject, check.claim)
}

/// Table of the fp16 numerics, one row per layer.
fn layers(gate: &GateReport) -> Option<String> {
    let rows: Vec<Vec<String>> = gate
        .checks
        .iter()
        .filter(|check| check.measured.contains_key("cosine"))
        .map(|check| {
            let number = |name: &str, digits: usize| {
                check.measured.get(name).map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
            };
            vec![
                check.subject.clone(),
                number("cosine", 6),
                format!("{}-{}", number("norm_ratio_min", 3), number("norm_ratio_max", 3)),
                number("max_abs", 1),
                number("overflow", 0),
                number("nan", 0),
                check.verdict.to_string(),
            ]
        })
        .collect();
    let head = [&gate.gate, ">cosine to f32", ">norm ratio", ">largest", ">infinite", ">NaN", "verdict"];
    (!rows.is_empty()).then(|| table(&head, rows))
}

/// Table of the checks that measured something.
fn measures(gate: &GateReport) -> Option<String> {
    let rows: Vec<Vec<String>> = gate
        .checks
        .iter()
        .filter(|check| check.measured.contains_key("cosine") || check.measured.contains_key("greedy_tokens"))
        .map(|check| {
            let number = |name: &str, digits: usize| {
                check.measured.get(name).map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
            };
            let small =
                |name: &str| check.measured.get(name).map_or_else(|| "-".into(), |value| format!("{value:.1e}"));
            let greedy = match (check.measured.get("greedy_agree"), check.measured.get("greedy_tokens")) {
                (Some(agree), Some(tokens)) => format!("{agree}/{tokens}"),
                _ => "-".into(),
            };
            let norms = match (check.measured.get("norm_ratio_min"), check.measured.get("norm_ratio_max")) {
                (Some(low), Some(high)) => format!("{low:.3}-{high:.3}"),
                _ => "-".into(),
            };
            let verdict = check.verdict.to_string();
            vec![
                check.subject.clone(),
                number("cosine", 6),
                number("p1", 6),
                number("median", 6),
                small("max_abs"),
                norms,
                number("top1", 3),
                small("kl"),
                greedy,
                verdict,
            ]
        })
        .collect();
    let head = ["", ">worst", ">p1", ">median", ">max diff", ">norm ratio", ">top-1", ">KL", ">greedy", "verdict"];
    let head: Vec<&str> = [gate.gate.as_str()].into_iter().chain(head.into_iter().skip(1)).collect();
    (!rows.is_empty())
        .then(|| table(&head, rows) + &perplexities(gate).concat() + &positions(gate) + &least_layers(gate))
}

/// Lines with the perplexities.
pub(super) fn perplexities(gate: &GateReport) -> Vec<String> {
    let line = |check: &Check| {
        let measured = |name: &str| check.measured.get(name);
        let (ours, golden) = (measured("perplexity")?, measured("golden_perplexity")?);
        let difference = 100.0 * measured("difference")?;
        let words = match (measured("word_perplexity"), measured("golden_word_perplexity"), measured("words")) {
            (Some(ours), Some(golden), Some(words)) => {
                let difference = 100.0 * (ours / golden - 1.0);
                format!("; of {words} words {ours:.4}, {golden:.4}: {difference:+.2} %")
            }
            _ => String::new(),
        };
        Some(format!("  {} {ours:.4}, the golden's {golden:.4}: {difference:+.2} %{words}\n", check.subject))
    };
    gate.checks.iter().filter_map(line).collect()
}

/// Passed checks that list positions far from the golden.
fn positions(gate: &GateReport) -> String {
    let passed = gate.checks.iter().filter(|check| check.verdict == Verdict::Passed && !check.positions.is_empty());
    let line = |check: &Check| Some(format!("  {}: {}\n", check.subject, check.detail.as_deref()?));
    passed.filter_map(line).collect()
}

/// For each precision, the layer that agrees least with the golden.
fn least_layers(gate: &GateReport) -> String {
    let mut least: IndexMap<&str, (usize, f64)> = IndexMap::new();
    for check in &gate.checks {
        let (Some(layer), Some(cosine)) = (check.layer, check.measured.get("added_cosine")) else { continue };
        let way = check.subject.split_once(", ").map_or("", |(way, _)| way);
        let worst = least.entry(way).or_insert((layer, *cosine));
        // `!(>=)` ranks NaN as the worst
        if !(*cosine >= worst.1) {
            *worst = (layer, *cosine);
        }
    }
    let line = |(way, (layer, cosine)): (&str, (usize, f64))| {
        format!("  {way}, of what layers add, layer {layer}'s agrees least: cosine {cosine:.6}\n")
    };
    least.into_iter().map(line).collect()
}
