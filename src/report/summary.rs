//! Summaries for the terminal: the answer first, in at most some twenty-five lines. Similar rows are folded.

use std::path::Path;

use indexmap::IndexMap;

use super::conversion::{asset, smallest_cosine, totals};
use super::forecast::{by_rule, place};
use super::gates::{line, perplexities};
use super::planned::{header, totals as plan_totals};
use super::prediction::{call_cells, context_cells};
use super::table::table;
use super::{bytes, counted};
use anec_advice::{ChipPrediction, ForecastFinding};
use anec_bundle::{Bundle, Stage, TokenCount};
use anec_convert::Estimate;
use anec_convert::plan::{ConvertPlan, PackagePlan};
use anec_convert::report::{ConvertReport, PackageReport};
use anec_family::FamilyFacts;
use anec_manifest::Manifest;
use anec_validate::residency;
use anec_validate::verdict::{Check, GateReport, GatesReport, Verdict};

/// Largest number of lines in a list of checks.
const CHECKS: usize = 6;
/// Largest number of rules in a forecast.
const RULES: usize = 3;
/// Largest number of notes on predictions.
const NOTES: usize = 2;

/// Gates: a line each with the worst values, then failed and unproven checks.
pub fn gates_summary(report: &GatesReport) -> String {
    let rows = report.gates.iter().map(|gate| {
        let passed = gate.checks.iter().filter(|check| check.verdict == Verdict::Passed).count();
        let checks = format!("{passed} of {}", gate.checks.len());
        vec![gate.gate.clone(), checks, gate.verdict.to_string(), worst(gate)]
    });
    let mut text = table(&["gate", "passed", "verdict", "worst"], rows);
    for gate in &report.gates {
        let notes: Vec<String> = gate.notes.iter().map(|note| format!("  {}: {note}\n", gate.gate)).collect();
        text.push_str(&list(&notes, CHECKS));
        text.push_str(&list(&perplexities(gate), CHECKS));
        let plan = gate.checks.iter().find(|check| check.subject == "plan").and_then(|check| check.detail.as_deref());
        text.push_str(&plan.map_or_else(String::new, |plan| format!("  plan: {plan}\n")));
    }
    for (verdict, head) in [(Verdict::Failed, "failed"), (Verdict::Unproven, "unproven")] {
        let open = report.gates.iter().flat_map(|gate| gate.checks.iter().map(move |check| (gate, check)));
        let lines: Vec<String> =
            open.filter(|(_, check)| check.verdict == verdict).map(|(gate, check)| line(gate, check)).collect();
        if !lines.is_empty() {
            text.push_str(&format!("\n{head}:\n{}", list(&lines, CHECKS)));
        }
    }
    if let Some(findings) = &report.forecast {
        text.push_str(&format!("\n{}", forecast_summary(findings)));
    }
    text
}

/// First lines of a list, at most `most` in all, and the number of the others.
fn list(lines: &[String], most: usize) -> String {
    let shown = if lines.len() > most { most - 1 } else { lines.len() };
    let mut text = lines[..shown].concat();
    if shown < lines.len() {
        text.push_str(&format!("  … and {} more\n", lines.len() - shown));
    }
    text
}

/// Worst values of a gate's checks.
fn worst(gate: &GateReport) -> String {
    let sum = |name: &str| -> f64 { gate.checks.iter().filter_map(|check| check.measured.get(name)).sum() };
    if gate.gate == residency::GATE {
        let (ops, placed) = (sum("compute_ops"), sum("on_neural_engine"));
        return if ops > 0.0 { format!("{placed:.0} of {ops:.0} ops on the Neural Engine") } else { String::new() };
    }
    let values = |name: &'static str| {
        gate.checks.iter().filter_map(move |check: &Check| Some((check, *check.measured.get(name)?)))
    };
    // NaN is the worst
    let key = |value: f64| if value.is_nan() { f64::NEG_INFINITY } else { value };
    let least = |name| values(name).min_by(|a, b| key(a.1).total_cmp(&key(b.1)));
    let most = |name| values(name).max_by(|a, b| key(-b.1).total_cmp(&key(-a.1)));
    let mut parts = Vec::new();
    if let Some((check, cosine)) = least("cosine") {
        parts.push(format!("cosine (min) {cosine:.6} at {}", check.subject));
    }
    parts.extend(least("top1").map(|(_, share)| format!("top-1 {share:.3}")));
    parts.extend(most("kl").map(|(_, kl)| format!("KL {kl:.1e}")));
    let greedy = sum("greedy_tokens");
    if greedy > 0.0 {
        parts.push(format!("greedy {:.0}/{greedy:.0}", sum("greedy_agree")));
    }
    parts.join(", ")
}

/// Forecast: a row for each rule. `anec explain` has the remedies.
pub fn forecast_summary(findings: &[ForecastFinding]) -> String {
    if findings.is_empty() {
        return super::forecast(findings);
    }
    let rules = by_rule(findings);
    let rows = rules.values().take(RULES).map(|findings| {
        let first = findings[0];
        let more = if findings.len() > 1 { format!(" and {} more", findings.len() - 1) } else { String::new() };
        vec![first.rule.clone(), first.severity.to_string(), place(first) + &more]
    });
    let mut text = table(&["forecast (no proof)", "severity", "where"], rows);
    if rules.len() > RULES {
        text.push_str(&format!("  … and {}\n", counted(rules.len() - RULES, "more rule")));
    }
    text.push_str("  (`anec explain RULE` has remedies and sources)\n");
    text
}

/// Plan of a conversion.
pub fn plan_summary(manifest: &Manifest, facts: &FamilyFacts, plan: &ConvertPlan, estimate: &Estimate) -> String {
    let mut groups: IndexMap<(&str, String), Vec<&PackagePlan>> = IndexMap::new();
    for package in &plan.packages {
        groups.entry((kind(&package.stage), functions(package))).or_default().push(package);
    }
    let rows = groups.iter().map(|((_, functions), packages)| {
        let stages: Vec<&Stage> = packages.iter().map(|package| &package.stage).collect();
        vec![
            packages.len().to_string(),
            holds(&stages),
            functions.clone(),
            sizes(packages.iter().map(|package| package.weight_bytes)),
            sizes(packages.iter().map(|package| package.state_bytes.last().copied().unwrap_or(0))),
        ]
    });
    let table = table(&[">packages", "holds", "functions of each", ">weights of each", ">state of each"], rows);
    header(manifest, facts, plan) + &table + &plan_totals(facts, plan, estimate)
}

/// Functions of a package: names and tokens per call, or their number.
fn functions(package: &PackagePlan) -> String {
    let tokens = |count: &TokenCount| match count {
        TokenCount::Range(lower, upper) => format!("{lower}..{upper}"),
        TokenCount::Fixed(count) => count.to_string(),
    };
    let mut lengths: Vec<(u64, String)> =
        package.functions.iter().map(|function| (function.tokens.most(), tokens(&function.tokens))).collect();
    lengths.sort();
    lengths.dedup();
    let lengths: Vec<String> = lengths.into_iter().map(|(_, text)| text).collect();
    let lengths = format!("T = {}", lengths.join(", "));
    match package.functions.as_slice() {
        [one] => format!("{} ({lengths})", one.name),
        several => format!("{} ({lengths})", several.len()),
    }
}

/// Kind of stage.
fn kind(stage: &Stage) -> &'static str {
    match stage {
        Stage::Layers { .. } => "layer",
        Stage::FeedForward { .. } => "feed-forward network",
        Stage::Experts { .. } => "experts",
        Stage::Head { .. } => "LM head",
        Stage::Model { .. } => "model",
    }
}

/// Contents of packages of one kind.
fn holds(stages: &[&Stage]) -> String {
    let range = |first: usize, end: usize| match end - first {
        1 => format!("layer {first}"),
        _ => format!("layers {first} to {}", end - 1),
    };
    let first = stages.iter().map(|stage| stage.layers().start).min().unwrap_or(0);
    let end = stages.iter().map(|stage| stage.layers().end).max().unwrap_or(0);
    match stages {
        [one] => super::conversion::stage(one),
        [Stage::Layers { .. }, ..] => range(first, end),
        [Stage::FeedForward { .. }, ..] => format!("feed-forward networks of {}", range(first, end)),
        [Stage::Experts { .. }, ..] => format!("experts of {}", range(first, end)),
        [Stage::Head { .. } | Stage::Model { .. }, ..] => {
            let rows = stages.iter().filter_map(|stage| Some(stage.head_rows()?.end)).max();
            format!("LM head, {} rows", rows.unwrap_or(0))
        }
        [] => String::new(),
    }
}

/// A size, or the smallest and the largest.
fn sizes(all: impl Iterator<Item = u64> + Clone) -> String {
    let (least, most) = (all.clone().min().unwrap_or(0), all.max().unwrap_or(0));
    let [least, most] = [least, most].map(bytes);
    if least == most { most } else { format!("{least} to {most}") }
}

/// Written bundle.
pub fn conversion_summary(path: &Path, bundle: &Bundle, report: &ConvertReport) -> String {
    if let Some(table) = asset(bundle, report) {
        return table + &totals(path, bundle, report);
    }
    let packages = report.packages.iter().filter_map(|package| {
        let functions: Vec<_> = bundle.all_functions().filter(|function| function.package == package.package).collect();
        let function = *functions.first()?;
        let key = (kind(&function.stage), bundle.drafts(function), functions.len());
        Some((key, (package, &function.stage)))
    });
    let mut groups: IndexMap<_, Vec<(&PackageReport, &Stage)>> = IndexMap::new();
    packages.for_each(|(key, package)| groups.entry(key).or_default().push(package));
    let rows = groups.iter().map(|((_, drafts, functions), packages)| {
        let stages: Vec<&Stage> = packages.iter().map(|(_, stage)| *stage).collect();
        let cosine = packages.iter().filter_map(|(package, _)| smallest_cosine(package)).min_by(f64::total_cmp);
        vec![
            packages.len().to_string(),
            if *drafts { format!("draft {}", holds(&stages)) } else { holds(&stages) },
            functions.to_string(),
            sizes(packages.iter().map(|(package, _)| package.weight_bytes)),
            cosine.map_or_else(|| "-".into(), |cosine| format!("{cosine:.6}")),
        ]
    });
    let head = [">packages", "holds", ">functions of each", ">weights of each", ">cosine of weights (min)"];
    table(&head, rows) + &totals(path, bundle, report)
}

/// Predictions: a row for each chip and context, or number of tokens of a call.
pub fn predictions_summary(predictions: &[ChipPrediction]) -> String {
    let of_texts = predictions.iter().all(|prediction| prediction.calls.is_empty());
    let rows = predictions.iter().flat_map(|prediction| {
        let [least, most] = prediction.first_load_seconds;
        let speeds: Vec<[String; 3]> = match of_texts {
            true => prediction.contexts.iter().map(context_cells).collect(),
            false => prediction.calls.iter().map(call_cells).collect(),
        };
        let whole =
            [bytes(prediction.loaded_bytes), bytes(prediction.all_loaded_bytes), format!("{least:.0} to {most:.0} s")];
        speeds.into_iter().map(move |speeds| [&[prediction.target.clone()][..], &speeds, &whole].concat())
    });
    let speeds = match of_texts {
        true => [">context", ">decode tok/s", ">prefill tok/s"],
        false => [">tokens per call", ">ms per call", ">tok/s"],
    };
    let whole = [">memory", ">with all functions", ">first load of all"];
    let head = [&["predicted, not measured"][..], &speeds, &whole].concat();
    let mut notes: Vec<String> = Vec::new();
    for line in predictions.iter().flat_map(|prediction| prediction.notes.iter().chain(&prediction.assumptions)) {
        let line = format!("  {line}\n");
        if !notes.contains(&line) {
            notes.push(line);
        }
    }
    table(&head, rows) + &list(&notes, NOTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut_and_say_so() {
        let lines = |count: usize| (0..count).map(|line| format!("{line}\n")).collect::<Vec<_>>();
        assert_eq!(list(&lines(3), 6), "0\n1\n2\n");
        assert_eq!(list(&lines(6), 6).lines().count(), 6);
        assert_eq!(list(&lines(9), 6), "0\n1\n2\n3\n4\n  … and 4 more\n");
    }

    #[test]
    fn packages_of_one_kind_are_one_row() {
        let layers = |first, end| Stage::Layers { first, end };
        assert_eq!(holds(&[&layers(0, 2), &layers(2, 4)]), "layers 0 to 3");
        assert_eq!(holds(&[&layers(3, 4)]), "layer 3");
        let experts = |layer, first| Stage::Experts { layer, first, end: first + 4 };
        assert_eq!(holds(&[&experts(1, 0), &experts(1, 4), &experts(2, 0)]), "experts of layers 1 to 2");
        assert_eq!(sizes([5_000_000, 7_000_000].into_iter()), "5.0 MB to 7.0 MB");
    }
}
