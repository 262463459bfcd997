//! Speed section of a model card: predictions and measurements.

use std::fmt::Write;

use anec_advice::ChipPrediction;
use serde_json::Value as Json;

use super::super::escape::cell;
use super::super::prediction::{call_cells, context_cells};
use super::super::{bytes, counted};

/// Formats the section. `bench` is the output of `anec bench --json`.
pub(super) fn speed(predictions: &[ChipPrediction], bench: Option<&Json>) -> String {
    let mut text = String::from("## Speed\n\n");
    if predictions.is_empty() && bench.is_none() {
        text.push_str("Neither predicted nor measured for this card.\n\n");
    }
    if !predictions.is_empty() {
        text.push_str(&predicted(predictions));
    }
    if let Some(bench) = bench {
        text.push_str(&measured(bench));
    }
    text
}

fn predicted(predictions: &[ChipPrediction]) -> String {
    let of_texts = predictions.iter().all(|prediction| prediction.calls.is_empty());
    let speeds =
        if of_texts { "context | decode tok/s | prefill tok/s" } else { "tokens per call | ms per call | tok/s" };
    let mut text = format!(
        "Predicted from published numbers of these chips, not measured (`anec plan --for CHIP`):\n\n\
         | chip | {speeds} | memory | first load |\n\
         |---|---|---|---|---|---|\n",
    );
    for prediction in predictions {
        let [least, most] = prediction.first_load_seconds;
        let rows: Vec<[String; 3]> = match of_texts {
            true => prediction.contexts.iter().map(context_cells).collect(),
            false => prediction.calls.iter().map(call_cells).collect(),
        };
        for row in rows {
            // writing to a string doesn't fail
            let _ = writeln!(
                text,
                "| {} | {} | {} | {least:.0} to {most:.0} s |",
                cell(&prediction.target),
                row.join(" | "),
                bytes(prediction.loaded_bytes),
            );
        }
    }
    text.push('\n');
    text
}

fn measured(bench: &Json) -> String {
    let word = |key: &str| cell(bench[key].as_str().unwrap_or("unknown"));
    let threads = bench["threads"].as_u64().unwrap_or_default() as usize;
    let mut text = format!(
        "Measured by `anec bench` on {} ({}, {}), medians of several runs:\n\n\
         | test | tok/s | spread | TTFT |\n|---|---|---|---|\n",
        word("machine"),
        word("device"),
        counted(threads, "thread"),
    );
    for test in bench["tests"].as_array().into_iter().flatten() {
        let [median, spread, first] =
            ["median_tps", "spread_tps", "ttft_ms"].map(|key| test[key].as_f64().unwrap_or(f64::NAN));
        let name = cell(test["test"].as_str().unwrap_or_default());
        let _ = writeln!(text, "| {name} | {median:.1} | {spread:.1} | {first:.1} ms |");
    }
    text.push_str("\n`pp64`: prefill of 64 tokens; `tg32`: decode of 32 tokens.\n\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_name_their_machine() {
        let bench = serde_json::json!({
            "machine": "linux x86_64, AVX2", "device": "cpu, f32", "threads": 2,
            "tests": [{"test": "tg32", "median_tps": 12.34, "spread_tps": 0.5, "ttft_ms": 7.0}],
        });
        let text = speed(&[], Some(&bench));
        assert!(text.contains("on linux x86_64, AVX2 (cpu, f32, 2 threads)"), "{text}");
        assert!(text.contains("| tg32 | 12.3 | 0.5 | 7.0 ms |") && !text.contains("Predicted"), "{text}");
        assert!(speed(&[], None).contains("Neither predicted nor measured"));
    }
}
