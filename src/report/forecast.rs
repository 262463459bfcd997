//! What rules expect of a program on the Neural Engine, and what a rule says.

use std::fmt::Write;

use super::table::table;
use crate::validate::forecast::Finding;
use crate::validate::rules::{Evidence, Rule};

/// A forecast as a table, with what to do.
pub fn forecast(findings: &[Finding]) -> String {
    if findings.is_empty() {
        return "forecast for the Neural Engine (no proof): no rule applies\n".into();
    }
    let rows = findings.iter().map(|finding| {
        let place = match &finding.function {
            Some(function) => format!("{}, {function}", finding.package),
            None => finding.package.clone(),
        };
        vec![
            finding.rule.clone(),
            finding.severity.to_string(),
            place,
            finding.count.to_string(),
            finding.found.clone(),
        ]
    });
    let mut text = table(&["forecast (no proof)", "severity", "where", ">count", "found"], rows);
    let mut told: Vec<&str> = Vec::new();
    text.push('\n');
    for finding in findings {
        if !told.contains(&finding.rule.as_str()) {
            told.push(&finding.rule);
            let against = if finding.evidence.iter().any(|e| e.says == crate::validate::rules::Says::Against) {
                "; sources contradict each other"
            } else {
                ""
            };
            // writing to a string doesn't fail
            let _ = writeln!(text, "  {}: {}{against}", finding.rule, finding.remedy);
        }
    }
    text.push_str("  (`anec explain RULE` has the sources)\n");
    text
}

/// A rule with its evidence.
pub fn rule(rule: &Rule) -> String {
    let mut text = format!("{} ({}): {}\n\n{}\n{}\n\n", rule.id, rule.severity, rule.what, rule.why, rule.remedy);
    text.push_str(&table(
        &["says", "source", "device", "system", "date"],
        rule.evidence.iter().map(|Evidence { says, source, device, os, date }| {
            let known = |part: &Option<String>| part.clone().unwrap_or_else(|| "-".into());
            vec![says.to_string(), source.clone(), known(device), known(os), known(date)]
        }),
    ));
    text
}
