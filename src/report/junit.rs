//! JUnit XML for CI systems: a suite for each gate, a case for each check. Unproven checks are skipped cases.

use std::fmt::Write;

use super::escape::markup;
use anec_validate::verdict::{GateReport, GatesReport, Verdict};

/// Formats the report as JUnit XML.
pub fn junit(report: &GatesReport) -> String {
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let count = |verdict| report.gates.iter().map(|gate| of(gate, verdict)).sum::<usize>();
    let total: usize = report.gates.iter().map(|gate| gate.checks.len()).sum();
    let name = markup(&report.bundle);
    let (failed, unproven) = (count(Verdict::Failed), count(Verdict::Unproven));
    // writing to a string doesn't fail
    let _ = writeln!(text, r#"<testsuites name="{name}" tests="{total}" failures="{failed}" skipped="{unproven}">"#);
    for gate in &report.gates {
        let _ = writeln!(
            text,
            r#"  <testsuite name="{}" tests="{}" failures="{}" skipped="{}">"#,
            markup(&gate.gate),
            gate.checks.len(),
            of(gate, Verdict::Failed),
            of(gate, Verdict::Unproven),
        );
        for check in &gate.checks {
            let class = markup(&format!("{}.{}", gate.gate, check.subject));
            let _ = write!(text, r#"    <testcase classname="{class}" name="{}""#, markup(&check.claim));
            let detail = markup(check.detail.as_deref().unwrap_or_default());
            let _ = match check.verdict {
                Verdict::Passed => writeln!(text, "/>"),
                Verdict::Failed => writeln!(text, r#"><failure message="{detail}"/></testcase>"#),
                Verdict::Unproven => writeln!(text, r#"><skipped message="{detail}"/></testcase>"#),
            };
        }
        for note in &gate.notes {
            let _ = writeln!(text, "    <system-out>{}</system-out>", markup(note));
        }
        text.push_str("  </testsuite>\n");
    }
    text.push_str("</testsuites>\n");
    text
}

fn of(gate: &GateReport, verdict: Verdict) -> usize {
    gate.checks.iter().filter(|check| check.verdict == verdict).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_validate::verdict::Check;

    #[test]
    fn a_case_for_each_check() {
        let checks = vec![
            Check::of("a", "it holds", None),
            Check::of("b <c>", "it holds", Some("1 < 2".into())),
            Check::unproven("d", "it holds", "no \"Mac\""),
        ];
        let report = GatesReport::new("m & n", vec![GateReport::new("structure", checks)]);
        insta::assert_snapshot!(junit(&report), @r#"
        <?xml version="1.0" encoding="UTF-8"?>
        <testsuites name="m &amp; n" tests="3" failures="1" skipped="1">
          <testsuite name="structure" tests="3" failures="1" skipped="1">
            <testcase classname="structure.a" name="it holds"/>
            <testcase classname="structure.b &lt;c&gt;" name="it holds"><failure message="1 &lt; 2"/></testcase>
            <testcase classname="structure.d" name="it holds"><skipped message="no &quot;Mac&quot;"/></testcase>
          </testsuite>
        </testsuites>
        "#);
    }
}
