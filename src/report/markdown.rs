//! Report as Markdown, for the step summary of GitHub Actions.

use std::fmt::Write;

use super::escape::cell;
use anec_validate::verdict::{Check, GatesReport, Verdict};

/// Maximum rows of a list; the other formats are complete.
const LISTED: usize = 50;

/// Formats the report as Markdown.
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
    for gate in &report.gates {
        gate.notes.iter().for_each(|note| text.push_str(&format!("\n{}: {}\n", gate.gate, cell(note))));
    }
    text.push_str(&quality(report));
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

/// Table of the logits' distance from the golden, and of the texts' perplexity.
fn quality(report: &GatesReport) -> String {
    let checks = || report.gates.iter().flat_map(|gate| &gate.checks);
    let mut text = String::new();
    for check in checks().filter(|check| !check.positions.is_empty()) {
        let Some((way, _)) = check.subject.split_once(", ") else { continue };
        let number = |check: &Check, name: &str, digits: usize| {
            check.measured.get(name).map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let [worst, p1, median] = ["worst", "p1", "median"].map(|name| number(check, name, 5));
        let [kl, top1] = [("kl", 5), ("top1", 3)].map(|(name, digits)| number(check, name, digits));
        let perplexity = checks().find(|other| other.subject == format!("{way}, perplexity"));
        let of = |name: &str| perplexity.map_or_else(|| "-".to_owned(), |check| number(check, name, 3));
        let (tokens, words) = (of("perplexity"), of("word_perplexity"));
        if text.is_empty() {
            text.push_str(
                "\n| logits | positions | worst cosine | p1 | median | KL | top-1 | perplexity | by words |\n\
                 |---|---|---|---|---|---|---|---|---|\n",
            );
        }
        let count = check.positions.len();
        let _ = writeln!(
            text,
            "| {} | {count} | {worst} | {p1} | {median} | {kl} | {top1} | {tokens} | {words} |",
            cell(way)
        );
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
    use anec_validate::verdict::{GateReport, Position};

    #[test]
    fn logits_are_summarized_in_one_row() {
        let position = Position { text: String::new(), position: 0, token: 3, cosine: 0.99, kl: 0.001, top1: true };
        let measured = |list: &[(&str, f64)]| list.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let positions = Check {
            positions: vec![position],
            measured: measured(&[("worst", 0.99), ("p1", 0.99), ("median", 0.99), ("kl", 0.001), ("top1", 1.0)]),
            ..Check::of("f32, positions", "no position is far from the golden", None)
        };
        let perplexity = Check {
            measured: measured(&[("perplexity", 12.5), ("word_perplexity", 33.25)]),
            ..Check::of("f32, perplexity", "the text is as likely", None)
        };
        let report = GatesReport::new("m", vec![GateReport::new("parity", vec![positions, perplexity])]);
        insta::assert_snapshot!(markdown(&report), @r"
        ## m: passed

        | gate | passed | verdict |
        |---|---|---|
        | parity | 2 of 2 | ✅ passed |

        | logits | positions | worst cosine | p1 | median | KL | top-1 | perplexity | by words |
        |---|---|---|---|---|---|---|---|---|
        | f32 | 1 | 0.99000 | 0.99000 | 0.99000 | 0.00100 | 1.000 | 12.500 | 33.250 |
        ");
    }

    #[test]
    fn failed_and_unproven_checks_are_listed() {
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
