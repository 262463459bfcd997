//! Cost of number formats by role and layer: a table, and a plot for each format.

use std::fmt::Write;

use super::bytes;
use super::plot::Plot;
use super::table::table;
use anec_convert::report::{FormatCost, PlanReport, PlannedGroup};
use anec_manifest::{Quant, QuantOverride, QuantPlan, Role};

/// Height of a plot with the space above it.
const HEIGHT: usize = 210;

/// Style sheet of the plots.
const STYLE: &str = "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}.tick{text-anchor:end}\
.label{text-anchor:middle}.name{text-anchor:end}.grid{stroke:#ddd}polyline{fill:none;stroke-width:1.5}\
.line0{stroke:#1f6fb4;fill:#1f6fb4}.line1{stroke:#d1701f;fill:#d1701f}.line2{stroke:#2c8c3c;fill:#2c8c3c}\
.line3{stroke:#a33;fill:#a33}.line4{stroke:#7a4bb5;fill:#7a4bb5}polyline.line0,polyline.line1,polyline.line2,\
polyline.line3,polyline.line4{fill:none}text.name{stroke:none}";

/// Name of a format.
fn name(format: QuantOverride) -> String {
    Quant { overrides: [(Role::MlpUp, format)].into(), ..Quant::default() }.of(Role::MlpUp, None).to_string()
}

/// Formats the result of `anec quant`: KL divergence and size of each group in each format, with the plan's choices
/// marked.
pub fn sensitivities(tokens: u64, groups: &[PlannedGroup], plan: Option<&PlanReport>) -> String {
    let names: Vec<String> = groups
        .first()
        .map_or_else(Vec::new, |group| group.formats.iter().map(|of| format!(">{}", name(of.format))).collect());
    let head: Vec<&str> = ["layer", "role", ">weights"].into_iter().chain(names.iter().map(String::as_str)).collect();
    let cell = |group: &PlannedGroup, index: usize, of: &FormatCost| {
        let mark = if group.chosen == Some(index) { "* " } else { "" };
        format!("{mark}{} {}", nats(of.kl), bytes(of.bytes))
    };
    let rows = groups.iter().map(|group| {
        let layer = group.layer.map_or_else(|| "-".to_owned(), |layer| layer.to_string());
        let costs = group.formats.iter().enumerate().map(|(index, of)| cell(group, index, of));
        [layer, group.role.to_string(), group.weights.to_string()].into_iter().chain(costs).collect()
    });
    let mut text = table(&head, rows);
    let _ = writeln!(
        text,
        "\ndivergence in nats where that role of that layer alone is in the format, on {tokens} tokens, and bytes"
    );
    if let Some(plan) = plan {
        let budget = match plan.budget {
            QuantPlan::Bits(bits) => format!("{bits} bits for each weight"),
            QuantPlan::MaxMb(megabytes) => format!("{megabytes} MB"),
            QuantPlan::Kl(nats) => format!("{nats} nats"),
        };
        let _ = writeln!(
            text,
            "* chosen under a budget of {budget}: {:.3} bits for each weight, {} in all packages, {} nats as a sum",
            plan.bits,
            bytes(plan.weight_bytes),
            nats(plan.kl),
        );
    }
    text
}

fn nats(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        // NaN results are stored as the largest number
        f64::MAX => "infinite".into(),
        value => format!("{value:.1e}"),
    }
}

/// Plots the divergences over the layers as one SVG file: a plot for each format, a line for each role.
pub fn sensitivities_svg(groups: &[PlannedGroup]) -> String {
    let mut roles: Vec<Role> = groups.iter().filter(|group| group.layer.is_some()).map(|group| group.role).collect();
    roles.sort();
    roles.dedup();
    let names: Vec<String> = roles.iter().map(Role::to_string).collect();
    let count = groups.first().map_or(0, |group| group.formats.len());
    let mut plots = Vec::new();
    for index in 0..count {
        let points = |role: &Role| -> Vec<(f64, f64)> {
            let own = groups.iter().filter(|group| group.role == *role);
            let points = own.filter_map(|group| Some((group.layer? as f64, group.formats[index].kl)));
            points.filter(|(_, kl)| *kl < f64::MAX).collect()
        };
        let head = groups.iter().find(|group| group.layer.is_none()).map(|group| group.formats[index].kl);
        let head = head.filter(|kl| *kl > 0.0 && *kl < f64::MAX);
        let title = name(groups[0].formats[index].format);
        let plot = Plot {
            title: &title,
            lines: names.iter().map(String::as_str).zip(roles.iter().map(points)).collect(),
            limits: head.map(|kl| ("LM head", kl)).into_iter().collect(),
            logarithmic: true,
        };
        plots.extend(plot.svg());
    }
    let height = HEIGHT * plots.len();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 480 {height}\" width=\"720\">\n<style>{STYLE}\
         .limit{{stroke:#888;stroke-dasharray:4 3}}text.limit{{stroke:none;text-anchor:end}}</style>\n"
    );
    for (index, plot) in plots.iter().enumerate() {
        let place = format!("<svg x=\"0\" y=\"{}\" width=\"480\" height=\"{HEIGHT}\" ", index * HEIGHT);
        svg.push_str(&plot.replacen("<svg ", &place, 1));
    }
    svg.push_str("</svg>\n");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_manifest::{Granularity, WeightFormat};

    fn group(role: Role, layer: Option<usize>, kl: f64) -> PlannedGroup {
        let format = |weights, kl, bytes| FormatCost {
            format: QuantOverride {
                weights: Some(weights),
                granularity: Some(Granularity::PerTensor),
                ..QuantOverride::default()
            },
            bytes,
            kl,
        };
        let formats =
            vec![format(WeightFormat::Int8, kl, 4_000_000), format(WeightFormat::Palette4, 30.0 * kl, 2_000_000)];
        PlannedGroup { role, layer, weights: 4_000_000, formats, chosen: Some(usize::from(kl < 0.01)) }
    }

    #[test]
    fn a_table_and_plots_show_every_group() {
        let groups =
            [group(Role::MlpUp, Some(0), 0.02), group(Role::MlpUp, Some(1), 0.001), group(Role::LmHead, None, 0.0)];
        let plan = PlanReport {
            budget: QuantPlan::Bits(6.0),
            tokens: 256,
            kl: 0.05,
            bits: 5.333,
            weight_bytes: 8_100_000,
            groups: groups.to_vec(),
            manifest: String::new(),
        };
        insta::assert_snapshot!("sensitivities", sensitivities(256, &groups, Some(&plan)));
        let svg = sensitivities_svg(&groups);
        assert_eq!(svg.matches("<svg ").count(), 3, "one for each format, in one");
        assert_eq!(svg.matches("</svg>").count(), 3);
        assert!(svg.contains("palette4 per tensor") && svg.contains("mlp_up 1"), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 4);
    }
}
