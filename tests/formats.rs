//! Every number format in a small model of each family: the bundle is whole, and its logits are those of the
//! unquantized model as far as the format's bits allow.

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::defect::{replace_constant, with_program};
use crate::common::folder;

use anec::mil::Op;
use anec::package;
use folder::{json, repository, run};
use rayon::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value as Json;

/// A number format, and what the cosine of logits with those of the unquantized model lies between. The weights of
/// these models are noise of equal size, which few levels hold badly.
const FORMATS: [(&str, f64, f64); 15] = [
    ("{weights: int8, op: affine}", 0.998, 1.0),
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
    ("{weights: palette4, row_scale: true, overrides: {lm_head: {weights: int8, row_scale: false}}}", 0.9, 0.9999),
    ("{weights: palette3}", 0.85, 0.999),
    ("{weights: palette2, row_scale: true}", 0.35, 0.99),
    ("{weights: palette1, granularity: {group: 4}}", 0.15, 0.98),
];

/// Forms that take part in how a projection is written.
const FORMS: [&[&str]; 9] = [
    &[],
    &["linear=linear"],
    &["linear=matmul"],
    &["layout=bc1s"],
    &["linear=linear", "layout=bc1s"],
    &["lm_head={split: 3}"],
    &["linear=matmul", "layout=bc1s"],
    &["attention=grouped"],
    &["state=unified"],
];

/// Where experts are computed, in models that have some.
const EXPERTS: [&str; 3] = ["experts=split", "experts=routed", "experts=packed"];

#[test]
fn queries_and_keys_are_fp16_and_values_int8_where_a_manifest_asks_for_it() {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("out");
    let out = out.to_str().unwrap();
    let overrides = "quant.overrides={attention_qkv: {weights: none}, attention_v: {weights: int8}}";
    let sets = ["--set", "quant.granularity=per_channel", "--set", overrides];
    let (code, _, stderr) = run(&[&["convert", "--no-measure", "-m", "demo", "--out", out][..], &sets].concat());
    assert_eq!(code, 0, "{stderr}");
    let (code, stdout, _) = run(&["validate", out, "--structure"]);
    assert_eq!(code, 0, "{stdout}");
    let first = json(&Path::new(out).join("bundle.json"))["packages"][0]["package"].as_str().unwrap().to_owned();
    let program = package::open(&Path::new(out).join(first)).unwrap().program;
    let compressed: Vec<&str> =
        program.functions[0].ops().filter(|op| op.is_constexpr()).map(|op| op.name.as_str()).collect();
    for (projection, is_compressed) in [("q_proj", false), ("k_proj", false), ("v_proj", true), ("o_proj", true)] {
        let found = compressed.iter().any(|name| name.contains(&format!("layers_0_attn_{projection}")));
        assert_eq!(found, is_compressed, "{projection}: {compressed:?}");
    }
}

/// The first model of every family, with a form.
fn models() -> Vec<(String, Vec<&'static str>)> {
    let root = repository("tests/fixtures/families");
    let listed = json(&root.join("cases.json"));
    let [cases, classifiers] = ["cases", "classifiers"].map(|list| listed[list].as_array().unwrap());
    let mut families = BTreeSet::new();
    let first = cases.iter().chain(classifiers).filter(|case| families.insert(case["family"].as_str().unwrap()));
    let mut with_experts = 0;
    let model = |(index, case): (usize, &Json)| {
        let name = case["hugging_face"].as_str().unwrap();
        let config = json(&root.join(name).join("config.json"));
        let text = config.get("text_config").unwrap_or(&config);
        let mut sets = FORMS[index % FORMS.len()].to_vec();
        if ["num_experts", "num_local_experts"].iter().any(|key| text[*key].as_u64().is_some_and(|count| count > 1)) {
            sets.push(EXPERTS[with_experts % EXPERTS.len()]);
            with_experts += 1;
        }
        // it takes whole texts in windows
        if name.starts_with("privacy_filter") {
            sets.retain(|set| !set.starts_with("state") && !set.starts_with("lm_head"));
            sets.push("lengths.range=[1, 40]");
        }
        (name.to_owned(), sets)
    };
    first.enumerate().map(model).collect()
}

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

/// Converts a model into a folder; returns its logits, computed in f32 or rounded to half precision, and the report.
fn converted(bundle: &Path, model: &str, sets: &[&str], half: bool) -> (Vec<f32>, Json) {
    let (name, source) = (bundle.to_str().unwrap(), format!("tests/fixtures/families/{model}"));
    let mut command =
        vec!["convert", "--no-measure", "--source", &source, "--out", name, "--no-compile", "--set", "context=40"];
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
    let (code, _, stderr) = run(&["logits", name, "--ids", &list, "--out", out_name, "--precision", precision]);
    assert_eq!(code, 0, "{model} {sets:?}: {stderr}");
    (logits(&out), json(&bundle.join("report.json")))
}

#[test]
fn every_format_computes_in_every_family() {
    let room = tempfile::tempdir().unwrap();
    let models = models();
    // every format twice, in f32 and rounded to half precision
    assert!(models.len() >= 2 * FORMATS.len());
    let failures: Vec<String> = models
        .par_iter()
        .enumerate()
        .filter_map(|(index, (model, form))| {
            let plain: Vec<&str> = form.iter().copied().chain(["quant.weights=none"]).collect();
            let (reference, _) = converted(&room.path().join(format!("{model}-plain")), model, &plain, false);
            let (format, mut least, most) = FORMATS[index % FORMATS.len()];
            // few bits make a router choose another expert
            if form.iter().any(|set| set.starts_with("experts")) && least < 0.95 {
                least *= 0.8;
            }
            let half = (index / FORMATS.len()) % 2 == 1;
            let quant = format!("quant={format}");
            let sets: Vec<&str> = form.iter().copied().chain([quant.as_str()]).collect();
            let (found, report) = converted(&room.path().join(model), model, &sets, half);
            let tensors = report["packages"].as_array().unwrap().iter().flat_map(|p| p["tensors"].as_array().unwrap());
            for tensor in tensors.filter(|tensor| tensor["weights"] != "none") {
                let (bits, bytes) = (tensor["bits_per_weight"].as_f64().unwrap(), tensor["bytes"].as_f64().unwrap());
                let shape = tensor["shape"].as_array().unwrap().iter();
                let elements: f64 = shape.map(|n| n.as_f64().unwrap()).product();
                assert!((bits * elements / 8.0 - bytes).abs() < 1.0, "{tensor}");
            }
            let cosine = cosine(&found, &reference);
            println!("{model} {form:?} {format} half {half}: {cosine:.6}");
            let problem = format!("{model} {form:?} {format} half {half}: cosine {cosine}, expected {least} to {most}");
            (!(least..=most).contains(&cosine)).then_some(problem)
        })
        .collect();
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// Damaged constants of a bundle's weights, and the expected messages.
#[test]
fn damaged_palettes_and_scales_are_named() {
    let bits = |value: f32| half::f16::from_f32(value).to_le_bytes();
    let damages = [
        ("{weights: palette4, granularity: {group: 8}}", "lut", f32::NAN, "entry 3 of its palettes is NaN"),
        ("{weights: palette2}", "lut", f32::INFINITY, "entry 3 of its palettes is inf"),
        ("{weights: int8, granularity: per_channel}", "scale", 0.0, "scale 3 is 0, expected a positive, normal number"),
        ("{weights: int4, granularity: {block: 8}}", "scale", f32::NAN, "scale 3 is NaN"),
    ];
    damages.par_iter().for_each(|(quant, parameter, value, said)| {
        let room = tempfile::tempdir().unwrap();
        let bundle = room.path().join("whole");
        converted(&bundle, "llama-default", &[&format!("quant={quant}")], false);
        let package = json(&bundle.join("bundle.json"))["packages"][0]["package"].as_str().unwrap().to_owned();
        let mut damaged = String::new();
        let out = with_program(&bundle, room.path(), &package, |function| {
            let ops = &function.block.ops;
            let has =
                |op: &&Op| op.is_constexpr() && op.name.contains("mlp_down") && op.inputs.contains_key(*parameter);
            damaged = ops.iter().find(has).unwrap().name.clone();
            replace_constant(function, &damaged, parameter, |bytes| bytes[6..8].copy_from_slice(&bits(*value)));
        });
        let (code, stdout, stderr) = run(&["validate", out.to_str().unwrap(), "--structure"]);
        let named = format!("`{damaged}`: {said}");
        assert!(code != 0 && stdout.contains(&named), "{quant}: no `{named}` in {stdout}{stderr}");
    });
}
