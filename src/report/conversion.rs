//! Result of a conversion.

use std::path::Path;

use super::table::table;
use super::{bytes, counted};
use anec_bundle::Bundle;
use anec_bundle::{FunctionEntry, Stage};
use anec_convert::report::{ConvertReport, PackageReport};

/// Contents of an asset of Core AI.
pub(super) const WHOLE_MODEL: &str = "the whole model";
/// Number of tensors with the largest loss that are listed.
const WORST: usize = 3;

/// Formats the result of `anec convert`.
pub fn conversion(path: &Path, bundle: &Bundle, report: &ConvertReport) -> String {
    if let Some(table) = asset(bundle, report) {
        return table + &totals(path, bundle, report);
    }
    let rows = report.packages.iter().map(|package| {
        let functions: Vec<_> = bundle.all_functions().filter(|f| f.package == package.package).collect();
        let what = functions.first().map_or_else(String::new, |function| part(bundle, function));
        vec![
            package.package.clone(),
            what,
            functions.len().to_string(),
            bytes(package.weight_bytes),
            smallest_cosine(package).map_or_else(|| "-".into(), |cosine| format!("{cosine:.6}")),
        ]
    });
    table(&["package", "holds", ">functions", ">weights", ">cosine"], rows) + &totals(path, bundle, report)
}

/// Table of the asset of Core AI that a bundle's packages became.
pub(super) fn asset(bundle: &Bundle, report: &ConvertReport) -> Option<String> {
    let [asset] = &bundle.packages[..] else { return None };
    let cosine = report.packages.iter().filter_map(smallest_cosine).min_by(f64::total_cmp);
    let row = vec![
        asset.package.clone(),
        WHOLE_MODEL.to_owned(),
        bundle.all_functions().count().to_string(),
        bytes(asset.weight_bytes),
        cosine.map_or_else(|| "-".into(), |cosine| format!("{cosine:.6}")),
    ];
    let head = ["asset", "holds", ">functions", ">weights", ">cosine of weights (min)"];
    asset.is_asset().then(|| table(&head, [row]))
}

/// Size, time and memory of a conversion, and its largest losses.
pub(super) fn totals(path: &Path, bundle: &Bundle, report: &ConvertReport) -> String {
    let run = &report.run;
    let mut text = format!(
        "\n{}: {}, {} in {}; {:.1} s, {:.1} s of processor time, {} of memory at most\n",
        path.display(),
        bundle.name,
        bytes(run.bundle_bytes),
        counted(bundle.packages.len(), programs(bundle)),
        run.seconds,
        run.cpu_seconds,
        bytes(run.peak_memory_bytes),
    );
    if run.resumed_packages > 0 {
        text.push_str(&format!("{} were finished by an earlier run\n", counted(run.resumed_packages, "package")));
    }
    let worst = report.worst();
    if !worst.is_empty() {
        let list: Vec<String> = worst
            .iter()
            .take(WORST)
            .map(|t| format!("{} {:.2} %", t.name, t.loss.map_or(0.0, |l| l.relative_rms_error) * 100.0))
            .collect();
        text.push_str(&format!("quantization lost most (relative rms error): {}\n", list.join(", ")));
    }
    if let Some(quality) = &report.quality {
        text.push_str(&format!(
            "against the source's own weights, {} tokens: KL {:.4}, top-1 {:.3}, cosine {:.4} (p1), {:.4} (min); {:.1} s\n",
            quality.tokens, quality.kl, quality.top1, quality.p1, quality.cosine, quality.seconds,
        ));
    }
    let sum = |count: fn(&anec_quant::Loss) -> u64| -> u64 {
        report.packages.iter().flat_map(|p| &p.tensors).filter_map(|t| t.loss.as_ref()).map(count).sum()
    };
    let saturated = sum(|loss| loss.saturated);
    if saturated > 0 {
        text.push_str(&format!("{saturated} weights were held at 65504, fp16's largest number\n"));
    }
    text
}

/// Smallest cosine among a package's quantized weights.
pub(super) fn smallest_cosine(package: &PackageReport) -> Option<f64> {
    let cosines = package.tensors.iter().filter(|t| t.granularity.is_some()).filter_map(|t| t.loss.map(|l| l.cosine));
    cosines.min_by(f64::total_cmp)
}

/// Noun for a bundle's programs.
pub(super) fn programs(bundle: &Bundle) -> &'static str {
    if bundle.manifest.format.is_coreml() { "package" } else { "asset" }
}

/// Part of the model that a function computes, for tables.
pub(super) fn part(bundle: &Bundle, function: &FunctionEntry) -> String {
    match (&function.stage, bundle.drafts(function)) {
        (stage, false) => self::stage(stage),
        (Stage::Layers { .. }, true) => "layer that drafts".to_owned(),
        (Stage::Model { .. }, true) => "layer that drafts and LM head".to_owned(),
        (stage, true) => format!("{}, of drafts", self::stage(stage)),
    }
}

/// Name of a stage, for tables.
pub(super) fn stage(stage: &Stage) -> String {
    match stage {
        Stage::Layers { first, end } if end - first == 1 => format!("layer {first}"),
        Stage::Layers { first, end } => format!("layers {first} to {}", end - 1),
        Stage::FeedForward { layer } => format!("layer {layer}, feed-forward network"),
        Stage::Experts { layer, first, end } if end - first == 1 => format!("layer {layer}, expert {first}"),
        Stage::Experts { layer, first, end } => format!("layer {layer}, experts {first} to {}", end - 1),
        Stage::Head { first, end } => format!("LM head rows {first} to {}", end - 1),
        Stage::Model { layers, .. } => format!("layers 0 to {} and LM head", layers - 1),
    }
}
