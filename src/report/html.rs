//! Report as a self-contained page: verdicts, plots over the layers, op census, sizes, placement.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::escape::markup;
use super::plot::Plot;
use super::{bytes, counted};
use anec_coreml::plan::{ComputePlan, Device, Operation};
use anec_validate::verdict::{Check, GateReport, GatesReport, Position, Verdict};
use anec_validate::{numerics, parity};

const STYLE: &str = include_str!("html.css");

/// Formats the page. With a compute plan it shows the placement of every op.
pub fn html(report: &GatesReport, plan: Option<&ComputePlan>) -> String {
    let name = markup(&report.bundle);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>{name}: {verdict}</title>\n<style>\n{STYLE}</style>\n\
         </head>\n<body>\n<h1>{name} <span class=\"{verdict}\">{verdict}</span></h1>\n<p class=\"quiet\">anec {}</p>\n",
        markup(&report.anec_version),
        verdict = report.verdict,
    );
    page.push_str(&summary(report));
    page.push_str(&plots(report));
    for gate in &report.gates {
        page.push_str(&section(gate));
    }
    page.push_str(&forecast(report));
    page.push_str(&packages(report));
    if let Some(plan) = plan {
        page.push_str(&placement(plan));
    }
    page.push_str("</body>\n</html>\n");
    page
}

fn summary(report: &GatesReport) -> String {
    let mut text = String::from("<table>\n<tr><th>gate<th>passed<th>verdict</tr>\n");
    for gate in &report.gates {
        let passed = gate.checks.iter().filter(|check| check.verdict == Verdict::Passed).count();
        // writing to a string doesn't fail
        let _ = writeln!(
            text,
            "<tr><td><a href=\"#{0}\">{0}</a><td>{passed} of {1}<td class=\"{2}\">{2}</tr>",
            markup(&gate.gate),
            counted(gate.checks.len(), "check"),
            gate.verdict,
        );
    }
    text + "</table>\n"
}

/// Plots of the numerics and parity gates over the layers, and of the quantization loss.
fn plots(report: &GatesReport) -> String {
    let ways = ways(report);
    let over_layers = |measure: &str, change: fn(f64) -> f64| {
        points(report, numerics::GATE, |check| Some(change(*check.measured.get(measure)?)))
    };
    let same = |value| value;
    let drawn = [
        Plot {
            title: "1 - cosine of fp16 and f32, by layer",
            // equal values are drawn at f32's resolution
            lines: vec![("layer", over_layers("cosine", |cosine| (1.0 - cosine).max(1e-8)))],
            limits: Vec::new(),
            logarithmic: true,
        },
        Plot {
            title: "largest magnitude, by layer",
            lines: vec![("layer", over_layers("max_abs", same))],
            limits: vec![("fp16 ends", 65504.0)],
            logarithmic: true,
        },
        Plot {
            title: "norm ratio of fp16 and f32, by layer",
            lines: vec![("least", over_layers("norm_ratio_min", same)), ("most", over_layers("norm_ratio_max", same))],
            limits: Vec::new(),
            logarithmic: false,
        },
        Plot {
            title: "1 - cosine of what a layer adds and the golden",
            lines: ways.iter().map(|way| (way.as_str(), added(report, way))).collect(),
            limits: Vec::new(),
            logarithmic: true,
        },
        Plot {
            title: "1 - cosine of logits and the golden, by position",
            lines: by_position(report, |at| 1.0 - at.cosine),
            limits: Vec::new(),
            logarithmic: true,
        },
        Plot {
            title: "divergence from the golden in nats, by position",
            lines: by_position(report, |at| at.kl),
            limits: Vec::new(),
            logarithmic: true,
        },
        Plot {
            title: "1 - cosine of quantized weights, worst of each layer",
            lines: vec![("layer", quantization(report))],
            limits: Vec::new(),
            logarithmic: true,
        },
    ];
    let drawn: Vec<String> = drawn.iter().filter_map(Plot::svg).collect();
    if drawn.is_empty() { String::new() } else { format!("<div class=\"plots\">\n{}</div>\n", drawn.concat()) }
}

/// Values of a gate's checks that concern one layer each.
fn points(report: &GatesReport, gate: &str, value: impl Fn(&Check) -> Option<f64>) -> Vec<(f64, f64)> {
    let checks = report.gates.iter().filter(|found| found.gate == gate).flat_map(|gate| &gate.checks);
    let mut points: Vec<(f64, f64)> = checks.filter_map(|check| Some((check.layer? as f64, value(check)?))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// Values at each position of the golden's texts, for each precision.
fn by_position(report: &GatesReport, value: fn(&Position) -> f64) -> Vec<(&str, Vec<(f64, f64)>)> {
    let checks = report.gates.iter().filter(|gate| gate.gate == parity::GATE).flat_map(|gate| &gate.checks);
    let line = |check: &'_ Check| {
        // equal values are drawn at f32's resolution
        let points = check.positions.iter().enumerate().map(|(index, at)| (index as f64, value(at).max(1e-8)));
        points.collect::<Vec<_>>()
    };
    let measured = checks.filter(|check| !check.positions.is_empty());
    measured.filter_map(|check| Some((check.subject.split_once(", ")?.0, line(check)))).collect()
}

/// Precisions of the parity gate: `f32`, `f16`.
fn ways(report: &GatesReport) -> Vec<String> {
    let checks = report.gates.iter().filter(|gate| gate.gate == parity::GATE).flat_map(|gate| &gate.checks);
    let way = |check: &Check| Some(check.subject.split_once(", ")?.0.to_owned());
    let mut ways: Vec<String> = checks.filter(|check| check.layer.is_some()).filter_map(way).collect();
    ways.dedup();
    ways
}

/// Distance from the golden of what each layer adds.
fn added(report: &GatesReport, way: &str) -> Vec<(f64, f64)> {
    points(report, parity::GATE, |check| {
        let own = check.subject.split_once(", ").is_some_and(|(start, _)| start == way);
        // equal values are drawn at f32's resolution
        check.measured.get("added_cosine").filter(|_| own).map(|cosine| (1.0 - cosine).max(1e-8))
    })
}

/// Cosine of each layer's worst weight.
fn quantization(report: &GatesReport) -> Vec<(f64, f64)> {
    let mut worst: BTreeMap<usize, f64> = BTreeMap::new();
    for (name, loss) in report.packages.iter().flat_map(|package| &package.quantization) {
        let layer = name.strip_prefix("layers_").and_then(|rest| rest.split('_').next()?.parse().ok());
        if let Some(layer) = layer {
            let entry = worst.entry(layer).or_insert(0.0);
            *entry = entry.max(*loss);
        }
    }
    worst.into_iter().map(|(layer, loss)| (layer as f64, loss.max(1e-8))).collect()
}

/// Section of a gate: checks that didn't pass are visible, the others folded.
fn section(gate: &GateReport) -> String {
    let mut text =
        format!("<h2 id=\"{0}\">{0} <span class=\"{1}\">{1}</span></h2>\n", markup(&gate.gate), gate.verdict);
    gate.notes.iter().for_each(|note| text.push_str(&format!("<p>{}</p>\n", markup(note))));
    let (open, passed): (Vec<&Check>, Vec<&Check>) =
        gate.checks.iter().partition(|check| check.verdict != Verdict::Passed);
    if !open.is_empty() {
        text.push_str(&checks(&open));
    }
    if !passed.is_empty() {
        let count = counted(passed.len(), "check");
        let _ = write!(text, "<details><summary>{count} passed</summary>\n{}</details>\n", checks(&passed));
    }
    text
}

fn checks(checks: &[&Check]) -> String {
    let mut text = String::from("<table>\n<tr><th>where<th>claim<th>verdict<th>measured<th>found</tr>\n");
    for check in checks {
        let measured: Vec<String> =
            check.measured.iter().map(|(name, value)| format!("{} {}", markup(name), short(*value))).collect();
        let _ = writeln!(
            text,
            "<tr><td>{}<td>{}<td class=\"word {verdict}\">{verdict}<td class=\"numbers\">{}<td class=\"found\">{}</tr>",
            markup(&check.subject),
            markup(&check.claim),
            measured.join("<br>"),
            markup(check.detail.as_deref().unwrap_or_default()),
            verdict = check.verdict,
        );
    }
    text + "</table>\n"
}

fn short(value: f64) -> String {
    if value == value.trunc() && value.abs() < 1e7 { format!("{value}") } else { format!("{value:.6}") }
}

fn forecast(report: &GatesReport) -> String {
    let Some(findings) = &report.forecast else { return String::new() };
    let mut text = String::from(
        "<h2>Forecast</h2>\n<p class=\"quiet\">What rules expect of the Neural Engine. No proof, and no gate: only a \
         compute plan of Core ML tells.</p>\n",
    );
    if findings.is_empty() {
        return text + "<p>No rule applies.</p>\n";
    }
    text.push_str("<table>\n<tr><th>rule<th>severity<th>where<th>found<th>remedy<th>sources</tr>\n");
    for (rule, findings) in super::forecast::by_rule(findings) {
        let first = findings[0];
        let places: Vec<String> = findings.iter().map(|finding| markup(&super::forecast::place(finding))).collect();
        let evidence = first.evidence.iter();
        let sources: Vec<String> =
            evidence.map(|evidence| format!("{}: {}", evidence.says, markup(&evidence.source))).collect();
        let _ = writeln!(
            text,
            "<tr><td class=\"word\">{}<td class=\"word\">{}<td>{}<td class=\"found\">{}<td>{}<td class=\"quiet\">{}</tr>",
            markup(rule),
            first.severity,
            places.join("<br>"),
            markup(&first.found),
            markup(&first.remedy),
            sources.join("<br>"),
        );
    }
    text + "</table>\n"
}

fn packages(report: &GatesReport) -> String {
    if report.packages.is_empty() {
        return String::new();
    }
    let mut text = String::from("<h2>Packages</h2>\n<table>\n<tr><th>package<th>weights<th>state<th>ops</tr>\n");
    for package in &report.packages {
        let mut ops: Vec<(&String, &usize)> = package.ops.iter().collect();
        ops.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        let ops: Vec<String> = ops.into_iter().map(|(name, count)| format!("{} {count}", markup(name))).collect();
        let _ = writeln!(
            text,
            "<tr><td>{}<td class=\"right\">{}<td class=\"right\">{}<td class=\"quiet\">{}</tr>",
            markup(&package.package),
            bytes(package.weight_bytes),
            bytes(package.state_bytes),
            ops.join(", "),
        );
    }
    text + "</table>\n"
}

/// Table with a cell for each op, coloured by its device.
fn placement(plan: &ComputePlan) -> String {
    let mut text = format!(
        "<h2>Placement</h2>\n<p class=\"quiet\">{}, {}, {}</p>\n<p><i class=\"ane\"></i> Neural Engine <i class=\"gpu\"></i> \
         GPU <i class=\"cpu\"></i> CPU <i class=\"none\"></i> nothing planned</p>\n",
        markup(&plan.machine.to_string()),
        markup(&plan.date),
        plan.compute_units,
    );
    for function in &plan.functions {
        let tokens = function.tokens.map_or_else(String::new, |tokens| format!(", T = {tokens}"));
        let title = format!("{}, {}{tokens}", function.package, function.function);
        let _ = write!(text, "<h3>{}</h3>\n<div class=\"ops\">", markup(&title));
        function.operations.iter().for_each(|op| cells(op, &mut text));
        text.push_str("</div>\n");
    }
    text
}

fn cells(op: &Operation, text: &mut String) {
    let class = match op.preferred {
        Some(Device::NeuralEngine) => "ane",
        Some(Device::Gpu) => "gpu",
        Some(Device::Cpu) => "cpu",
        Some(Device::Unknown) | None => "none",
    };
    // constants would be most of the cells
    if op.preferred.is_some() || !matches!(op.bare_operator(), "const") {
        let device = op.preferred.map_or_else(|| "nothing planned".to_owned(), |device| device.to_string());
        let title = format!("{} {}: {device}", op.operator, op.outputs.join(", "));
        let _ = write!(text, "<i class=\"{class}\" title=\"{}\"></i>", markup(&title));
    }
    op.blocks.iter().flatten().for_each(|inner| cells(inner, text));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_self_contained_and_escaped() {
        let checks = vec![
            Check {
                layer: Some(0),
                measured: [("cosine".to_owned(), 0.9999)].into_iter().collect(),
                ..Check::of("<script>", "c", None)
            },
            Check::of("b", "c", Some("1 < 2".into())),
        ];
        let report = GatesReport::new("a <b>", vec![GateReport::new(numerics::GATE, checks)]);
        let page = html(&report, None);
        assert!(page.contains("a &lt;b&gt;") && page.contains("&lt;script&gt;") && page.contains("1 &lt; 2"));
        assert!(!page.contains("<script") && !page.contains("http"), "it loads something");
        assert_eq!(page.matches("<svg").count(), 1);
        assert_eq!(page.matches("<table").count(), page.matches("</table>").count());
    }
}
