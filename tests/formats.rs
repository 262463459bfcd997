//! Every number format in a small model of each family: the bundle is whole, and its logits are those of the
//! unquantized model as far as the format's bits allow.

use std::path::Path;

use crate::common::folder;

use folder::{json, repository, run};
use safetensors::SafeTensors;
use serde_json::Value as Json;

/// A number format, and what the cosine of logits with those of the unquantized model lies between. The weights of these
/// models are noise of equal size, which few levels hold badly.
const FORMATS: [(&str, f64, f64); 15] = [
    ("{weights: int8, op: affine}", 0.999, 1.0),
    ("{weights: int8, granularity: per_channel, op: affine}", 0.9993, 1.0),
    ("{weights: int8, granularity: {block: 16}}", 0.9995, 1.0),
    ("{weights: int4}", 0.8, 0.9999),
    ("{weights: int4, granularity: per_channel}", 0.9, 0.9999),
    // of a random DeltaNet, whose few positions differ by more than that from one rounding to another
    ("{weights: int4, granularity: {block: 32}}", 0.5, 0.9999),
    ("{weights: palette8}", 0.996, 1.0),
    ("{weights: palette8, row_scale: true}", 0.999, 1.0),
    ("{weights: palette6}", 0.97, 1.0),
    ("{weights: palette6, granularity: {group: 16}, row_scale: true}", 0.99, 1.0),
    ("{weights: palette4, granularity: {group: 8}}", 0.9, 0.9999),
    ("{weights: palette4, row_scale: true, overrides: {lm_head: {weights: int8, row_scale: false}}}", 0.95, 0.9999),
    ("{weights: palette3}", 0.85, 0.999),
    ("{weights: palette2, row_scale: true}", 0.5, 0.99),
    ("{weights: palette1, granularity: {group: 4}}", 0.2, 0.98),
];

/// Models of every family, with forms that take part in how a projection is written.
const MODELS: [(&str, &[&str]); 16] = [
    ("llama-bias", &[]),
    ("mistral-default", &["linear=linear"]),
    ("qwen2-tokenizer", &["linear=matmul"]),
    ("qwen3-default", &["layout=bc1s"]),
    ("phi3-default", &["linear=linear", "layout=bc1s"]),
    ("smollm3-list", &["linear=matmul", "layout=bc1s"]),
    ("granite-bias", &["linear=linear"]),
    ("olmo2-default", &["lm_head={split: 3}"]),
    ("gemma3-default", &["attention=grouped"]),
    ("hunyuan-bias", &["linear=matmul"]),
    ("qwen3_5-default", &[]),
    ("lfm2-default", &["state=unified"]),
    ("lfm2_moe-default", &["experts=split"]),
    ("zaya-sliding", &["experts=routed", "recurrent_states=input_output"]),
    ("zaya-default", &["linear=linear"]),
    ("privacy_filter-default", &["experts=split", "lengths.range=[1, 40]"]),
];

/// Logits of a file.
fn logits(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let data = tensors.tensor("logits").unwrap();
    data.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    assert_eq!(a.len(), b.len());
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Converts a model into a folder; gives its logits, computed in f32 or rounded to half precision, and the report.
fn converted(bundle: &Path, model: &str, sets: &[&str], half: bool) -> (Vec<f32>, Json) {
    let (name, source) = (bundle.to_str().unwrap(), format!("tests/fixtures/families/{model}"));
    let mut command = vec!["convert", "--source", &source, "--out", name, "--no-compile", "--set", "context=40"];
    sets.iter().for_each(|set| command.extend(["--set", set]));
    let (code, _, stderr) = run(&command);
    assert_eq!(code, 0, "{model} {sets:?}: {stderr}");
    let (code, stdout, stderr) = run(&["validate", name, "--structure"]);
    assert_eq!(code, 0, "{model} {sets:?}: {stdout} {stderr}");
    let golden = std::fs::read(repository(&source).join("golden.safetensors")).unwrap();
    let tokens = SafeTensors::deserialize(&golden).unwrap().tensor("tokens").unwrap().data().to_vec();
    let tokens: Vec<String> =
        tokens.as_chunks::<4>().0.iter().take(12).map(|b| i32::from_le_bytes(*b).to_string()).collect();
    let out = bundle.with_extension("safetensors");
    let precision = if half { "f16" } else { "f32" };
    let (out_name, list) = (out.to_str().unwrap(), tokens.join(","));
    let (code, _, stderr) = run(&["logits", name, "--tokens", &list, "--out", out_name, "--precision", precision]);
    assert_eq!(code, 0, "{model} {sets:?}: {stderr}");
    (logits(&out), json(&bundle.join("report.json")))
}

#[test]
fn every_format_computes_in_every_family() {
    let room = tempfile::tempdir().unwrap();
    let mut failures = Vec::new();
    let mut tried = vec![0; FORMATS.len()];
    for (index, (model, form)) in MODELS.iter().enumerate() {
        let plain: Vec<&str> = form.iter().copied().chain(["quant.weights=none"]).collect();
        let bundle = |turn: usize| room.path().join(format!("{model}-{turn}"));
        let (reference, _) = converted(&bundle(2), model, &plain, false);
        // every format twice
        for turn in 0..2 {
            let place = (2 * index + turn) % FORMATS.len();
            let (format, least, most) = FORMATS[place];
            tried[place] += 1;
            let half = turn == 1;
            let quant = format!("quant={format}");
            let sets: Vec<&str> = form.iter().copied().chain([quant.as_str()]).collect();
            let (found, report) = converted(&bundle(turn), model, &sets, half);
            let cosine = cosine(&found, &reference);
            println!("{model} {form:?} {format} half {half}: {cosine:.6}");
            if !(least..=most).contains(&cosine) {
                failures.push(format!("{model} {format} half {half}: cosine {cosine}, expected {least} to {most}"));
            }
            let tensors = report["packages"].as_array().unwrap().iter().flat_map(|p| p["tensors"].as_array().unwrap());
            for tensor in tensors.filter(|tensor| tensor["weights"] != "none") {
                let (bits, bytes) = (tensor["bits_per_weight"].as_f64().unwrap(), tensor["bytes"].as_f64().unwrap());
                let shape = tensor["shape"].as_array().unwrap().iter();
                let elements: f64 = shape.map(|n| n.as_f64().unwrap()).product();
                assert!((bits * elements / 8.0 - bytes).abs() < 1.0, "{tensor}");
            }
        }
    }
    assert!(tried.iter().all(|count| *count > 0), "{tried:?}");
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}
