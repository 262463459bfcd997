//! Markdown, for the step summary of GitHub Actions.

use std::fmt::Write;

use super::escape::cell;
use anec_validate::{GatesReport, Verdict};

/// Most rows of a list; the other formats have all.
const LISTED: usize = 50;

/// The report as Markdown.
pub fn markdown(report: &GatesReport) -> String {
    let mut text =
        format!("## {}: {}\n\n| gate | passed | verdict |\n|---|---|---|\n", cell(&report.bundle), report.verdict);
    for gate in &report.gates {
        let passed = gate.checks.iter().filter(|check| check.verdict == Verdict::Passed).count();
        // writing to a string doesn't fail
        let _ = writeln!(
            text,
            "| {} | {passed} of {} | {} {} |",
            gate.gate,
            gate.checks.len(),
            mark(gate.verdict),
            gate.verdict
        );
    }
    for verdict in [Verdict::Failed, Verdict::Unproven] {
        let open: Vec<String> = report
            .gates
            .iter()
            .flat_map(|gate| gate.checks.iter().map(move |check| (gate, check)))
            .filter(|(_, check)| check.verdict == verdict)
            .map(|(gate, check)| {
                let detail = check.detail.as_deref().unwrap_or_default();
                format!("| {} | {} | {} | {} |\n", gate.gate, cell(&check.subject), cell(&check.claim), cell(detail))
            })
            .collect();
        if !open.is_empty() {
            let _ = write!(text, "\n### {verdict}\n\n| gate | where | claim | found |\n|---|---|---|---|\n");
            text.extend(open.iter().take(LISTED).map(String::as_str));
            if open.len() > LISTED {
                let _ = writeln!(text, "\n… and {} more", open.len() - LISTED);
            }
        }
    }
    if let Some(forecast) = report.forecast.as_ref().filter(|forecast| !forecast.is_empty()) {
        text.push_str(
            "\n### Forecast (no proof, and no gate)\n\n| rule | | where | found | remedy |\n|---|---|---|---|---|\n",
        );
        for finding in forecast.iter().take(LISTED) {
            let place = [Some(finding.package.as_str()), finding.function.as_deref()];
            let place: Vec<&str> = place.into_iter().flatten().collect();
            let row =
                [&finding.rule, &finding.severity.to_string(), &place.join(", "), &finding.found, &finding.remedy];
            let row: Vec<String> = row.into_iter().map(|text| cell(text)).collect();
            let _ = writeln!(text, "| {} |", row.join(" | "));
        }
    }
    text
}

fn mark(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "✅",
        Verdict::Unproven => "➖",
        Verdict::Failed => "❌",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_validate::{Check, GateReport};

    #[test]
    fn what_is_open_is_listed() {
        let checks = vec![Check::of("a", "it holds", None), Check::of("b|c", "it holds", Some("1 < 2".into()))];
        let gates = vec![
            GateReport::new("structure", checks),
            GateReport::new("residency", vec![Check::unproven("bundle", "resident", "no Mac")]),
        ];
        insta::assert_snapshot!(markdown(&GatesReport::new("m", gates)), @r"
        ## m: failed

        | gate | passed | verdict |
        |---|---|---|
        | structure | 1 of 2 | ❌ failed |
        | residency | 0 of 1 | ➖ unproven |

        ### failed

        | gate | where | claim | found |
        |---|---|---|---|
        | structure | b\|c | it holds | 1 &lt; 2 |

        ### unproven

        | gate | where | claim | found |
        |---|---|---|---|
        | residency | bundle | resident | no Mac |
        ");
    }
}
