//! Forecast of the rules, and descriptions of rules.

use std::fmt::Write;

use indexmap::IndexMap;

use super::table::table;
use anec_advice::ForecastFinding;
use anec_advice::rules::{Evidence, Rule, Says};

/// Formats a forecast as a table of rules, each with the first place where it applies and the remedy.
pub fn forecast(findings: &[ForecastFinding]) -> String {
    if findings.is_empty() {
        return "forecast for the Neural Engine (no proof): no rule applies\n".into();
    }
    let rules = by_rule(findings);
    let rows = rules.values().map(|findings| {
        let first = findings[0];
        let more = if findings.len() > 1 { format!(" and {} more", findings.len() - 1) } else { String::new() };
        vec![first.rule.clone(), first.severity.to_string(), place(first) + &more, first.found.clone()]
    });
    let mut text = table(&["forecast (no proof)", "severity", "where", "found"], rows);
    text.push('\n');
    for (rule, findings) in &rules {
        let contested = findings[0].evidence.iter().any(|evidence| evidence.says == Says::Against);
        let tail = if contested { " Sources contradict each other." } else { "" };
        // writing to a string doesn't fail
        let _ =
            writeln!(text, "  {rule}: {}{}{tail}", findings[0].remedy, only(&findings[0].chips, &findings[0].systems));
    }
    text.push_str("  (`anec explain RULE` has the sources)\n");
    text
}

/// Restriction of a rule to chips and systems: ` Only on M1, M2.`
fn only(chips: &[String], systems: &[u32]) -> String {
    let systems = systems.iter().map(|system| format!("OS {system}"));
    let names: Vec<String> = chips.iter().cloned().chain(systems).collect();
    if names.is_empty() { String::new() } else { format!(" Only on {}.", names.join(", ")) }
}

/// Groups findings by rule, worst effects first.
pub(super) fn by_rule(findings: &[ForecastFinding]) -> IndexMap<&str, Vec<&ForecastFinding>> {
    let mut rules: IndexMap<&str, Vec<&ForecastFinding>> = IndexMap::new();
    for finding in findings {
        rules.entry(&finding.rule).or_default().push(finding);
    }
    rules.sort_by_key(|_, findings| findings[0].severity);
    rules
}

/// Package and function in which a rule applies.
pub(super) fn place(finding: &ForecastFinding) -> String {
    match &finding.function {
        Some(function) => format!("{}, {function}", finding.package),
        None => finding.package.clone(),
    }
}

/// Formats a rule with its evidence.
pub fn rule(rule: &Rule) -> String {
    let (remedy, only) = (&rule.remedy, only(&rule.chips, &rule.systems));
    let mut text = format!("{} ({}): {}\n\n{}\n{remedy}{only}\n\n", rule.id, rule.severity, rule.what, rule.why);
    text.push_str(&table(
        &["says", "source", "device", "system", "date"],
        rule.evidence.iter().map(|Evidence { says, source, device, os, date }| {
            let known = |part: &Option<String>| part.clone().unwrap_or_else(|| "-".into());
            vec![says.to_string(), source.clone(), known(device), known(os), known(date)]
        }),
    ));
    text
}
