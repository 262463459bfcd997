//! Token classifiers agree with transformers: converted, run by the executor in windows of many sizes, every position's
//! logits and hidden states are the reference's, and longer texts through overlapping windows are the whole text's.

use crate::common::folder;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::bundle::Stage;
use anec::bundle::{Bundle, Task};
use anec::exec::Precision;
use anec::runtime::classify::windows::Windows;
use anec::runtime::{ForwardOutput, Hidden, LoadedModel};
use rayon::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value as Json;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families")
}

fn cases() -> Vec<Json> {
    let list: Json = serde_json::from_slice(&std::fs::read(root().join("cases.json")).unwrap()).unwrap();
    list["classifiers"].as_array().unwrap().clone()
}

/// A golden file's tensors: tokens, logits, what enters layer 0 and leaves each.
struct Golden {
    tokens: Vec<u32>,
    logits: Vec<f32>,
    hidden: Vec<Vec<f32>>,
}

fn golden(case: &Json) -> Golden {
    let bytes = std::fs::read(root().join(case["goldens"][0]["file"].as_str().unwrap())).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let four = |name: &str| {
        tensors.tensor(name).ok().map(|t| t.data().chunks_exact(4).map(<[u8; 4]>::try_from).collect::<Vec<_>>())
    };
    let floats = |name: &str| four(name).map(|all| all.into_iter().map(|b| f32::from_le_bytes(b.unwrap())).collect());
    Golden {
        tokens: four("tokens").unwrap().into_iter().map(|b| u32::from_le_bytes(b.unwrap())).collect(),
        logits: floats("logits").unwrap(),
        hidden: (0..).map_while(|i| floats(&format!("hidden.{i}"))).collect(),
    }
}

/// Converts a case's model without quantization, so that the reference's numbers are to be met.
fn convert(case: &Json, out: &Path, more: &[&str]) -> Bundle {
    let source = format!("tests/fixtures/families/{}", case["hugging_face"].as_str().unwrap());
    let out = out.to_str().unwrap();
    let mut arguments = vec!["convert", "--source", &source, "--out", out, "--set", "quant.weights=none"];
    arguments.extend(more.iter().flat_map(|set| ["--set", set]));
    let (code, _, stderr) = folder::run(&arguments);
    assert_eq!(code, 0, "{stderr}");
    Bundle::read(Path::new(out)).unwrap()
}

fn run(model: &Arc<LoadedModel>, window: Option<u64>, hidden: Hidden, tokens: &[u32]) -> ForwardOutput {
    Windows::new(model, window, hidden).unwrap().label(tokens).unwrap()
}

/// Smallest cosine over rows, and largest difference.
fn distance(found: &[f32], expected: &[f32], width: usize) -> (f64, f32) {
    assert_eq!(found.len(), expected.len());
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    found.chunks(width).zip(expected.chunks(width)).fold((1.0, 0.0), |(worst, largest), (f, e)| {
        let difference = f.iter().zip(e).map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
        ((dot(f, e) / (dot(f, f) * dot(e, e)).sqrt()).min(worst), difference.max(largest))
    })
}

#[test]
fn logits_and_hidden_states_agree_with_transformers_at_every_position_in_every_window() {
    let compared: usize = cases()
        .par_iter()
        .map(|case| {
            let room = tempfile::tempdir().unwrap();
            let golden = golden(case);
            let labels = golden.logits.len() / golden.tokens.len();
            let mut compared = 0;
            // all layers in one package, and each in its own
            for (name, shards) in [("whole", "shards.max_mb=250"), ("each", "shards.layers=each")] {
                let layers: u64 = golden.hidden.len() as u64 - 1;
                let ranges: Vec<[u64; 2]> = (0..layers).map(|layer| [layer, layer + 1]).collect();
                let each = format!("shards.layers={}", serde_json::to_string(&ranges).unwrap());
                let shards = if name == "each" { each.as_str() } else { shards };
                for lengths in ["lengths.range=[1,64]", "lengths.fixed=[16,48,64]"] {
                    let out = room.path().join(format!("{name}{}", lengths.len()));
                    let bundle = convert(case, &out, &["context=64", lengths, shards]);
                    let Task::TokenClassification(task) = &bundle.model.task else { panic!("no classifier") };
                    assert_eq!(task.label_set.labels.len(), labels);
                    let deepest = if name == "each" { 1 } else { layers };
                    assert_eq!(
                        (task.window, task.halo, task.stride),
                        (64, deepest * task.label_set.band, 64 - 2 * task.halo)
                    );
                    let model = LoadedModel::on_cpu(&out, Precision::F32).unwrap();
                    let windows =
                        [None, Some(63), Some(48), Some(40), Some(2 * task.halo + 1), Some(2 * task.halo + 4)];
                    for window in windows {
                        let name = format!("{} {name} {lengths} {window:?}", case["name"]);
                        let largest = [16, 48, 64].into_iter().rfind(|size| *size <= window.unwrap_or(64));
                        if lengths.contains("fixed") && largest.is_none_or(|largest| largest <= 2 * task.halo) {
                            continue;
                        }
                        let answer = run(&model, window, Hidden::BetweenLayers, &golden.tokens);
                        let (cosine, difference) = distance(&answer.logits, &golden.logits, labels);
                        assert!(cosine > 0.99999 && difference < 0.03, "{name}: {cosine} {difference}");
                        assert_eq!(answer.hidden.len(), golden.hidden.len());
                        for (layer, (found, expected)) in answer.hidden.iter().zip(&golden.hidden).enumerate() {
                            let (cosine, _) = distance(found, expected, bundle.model.hidden_size as usize);
                            assert!(cosine > 0.99999, "{name}: before layer {layer}: {cosine}");
                        }
                        compared += 1;
                    }
                }
            }
            compared
        })
        .sum();
    assert!(compared > 50, "{compared} comparisons");
}

#[test]
fn every_form_gives_the_same_logits() {
    let forms = [
        &["layout=bc1s", "attention=grouped"][..],
        &["linear=linear", "norm=naive"],
        &["linear=matmul", "layout=bc1s", "norm=prescale"],
        &["attention=grouped", "norm=layer_norm_concat", "lm_head.split=2"],
        // the residual stream in another unit
        &["numerics.scale=0.125"],
        // experts in packages of their own, several or one in each function
        &["experts=split"],
        &["experts=split", "shards.max_experts=3", "layout=bc1s", "numerics.scale=0.25"],
        &["experts=routed", "lengths.fixed=[35, 48, 64]"],
    ];
    let all: Vec<_> = cases().into_iter().flat_map(|case| forms.map(|form| (case.clone(), form))).collect();
    all.par_iter().for_each(|(case, form)| {
        let room = tempfile::tempdir().unwrap();
        let golden = golden(case);
        let more = [&["context=64", "lengths.range=[1,64]"], *form].concat();
        let bundle = convert(case, &room.path().join("b"), &more);
        let groups = bundle.functions.iter().filter(|entry| matches!(entry.stage, Stage::Experts { .. })).count();
        let apart = form.iter().any(|set| set.starts_with("experts="));
        assert_eq!(groups > 0, apart, "{form:?}");
        let model = LoadedModel::on_cpu(&room.path().join("b"), Precision::F32).unwrap();
        let answer = run(&model, Some(35), Hidden::BetweenLayers, &golden.tokens);
        let (cosine, _) = distance(&answer.logits, &golden.logits, golden.logits.len() / golden.tokens.len());
        assert!(cosine > 0.99999, "{} {form:?}: {cosine}", case["name"]);
        let width = model.bundle().model.hidden_size as usize;
        for (found, expected) in answer.hidden.iter().zip(&golden.hidden) {
            assert!(distance(found, expected, width).0 > 0.99999, "{} {form:?}", case["name"]);
        }
    });
}

#[test]
fn fp16_arithmetic_and_int8_weights_stay_close() {
    for case in cases() {
        let golden = golden(&case);
        let labels = golden.logits.len() / golden.tokens.len();
        for (quant, least, precision) in [("none", 0.999, Precision::F16), ("int8", 0.98, Precision::F32)] {
            let room = tempfile::tempdir().unwrap();
            let weights = format!("quant.weights={quant}");
            let sets = ["context=64", "lengths.range=[1,64]", &weights, "quant.granularity=per_channel"];
            convert(&case, &room.path().join("b"), &sets);
            let model = LoadedModel::on_cpu(&room.path().join("b"), precision).unwrap();
            let answer = run(&model, None, Hidden::No, &golden.tokens);
            let (cosine, _) = distance(&answer.logits, &golden.logits, labels);
            eprintln!("{} {quant} {precision:?}: {cosine:.5}", case["name"]);
            assert!(cosine > least, "{} {quant} {precision:?}: {cosine}", case["name"]);
        }
    }
}

#[test]
fn a_window_in_one_call_and_a_long_text_in_many_are_the_same() {
    // longer than any call: what the reference gives for the whole text is compared in the test above; here is what one
    // call with the whole text gives against windows of every size, number by number
    let case = &cases()[1];
    let room = tempfile::tempdir().unwrap();
    convert(case, &room.path().join("b"), &["context=512", "lengths.range=[1,512]"]);
    let model = LoadedModel::on_cpu(&room.path().join("b"), Precision::F32).unwrap();
    let tokens: Vec<u32> = (0..500u32).map(|i| (i * i + 7 * i) % 83).collect();
    let whole = run(&model, None, Hidden::No, &tokens).logits;
    let task = model.bundle().model.classification().unwrap().clone();
    for window in [2 * task.halo + 1, 31, 64, 200, 499] {
        let found = run(&model, Some(window), Hidden::No, &tokens).logits;
        let difference = found.iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(difference < 1e-4, "windows of {window}: {difference}");
    }
    // fed in portions of any size, it is the same to the last bit
    let mut windows = Windows::new(&model, Some(64), Hidden::No).unwrap();
    let mut logits = Vec::new();
    for portion in tokens.chunks(17) {
        windows.push(portion, &mut logits).unwrap();
        assert!(windows.waiting() <= 4 * 64 * model.bundle().model.hidden_size as usize);
    }
    windows.finish(&mut logits).unwrap();
    assert_eq!(logits, run(&model, Some(64), Hidden::No, &tokens).logits);
}

/// No op but convolutions multiplies by weights, and what is looked up in a text is what attention is made of.
#[test]
fn the_ops_of_a_layer_are_counted() {
    let room = tempfile::tempdir().unwrap();
    convert(&cases()[0], &room.path().join("b"), &["shards.layers=[[0,1],[1,2],[2,3]]"]);
    let program = anec::package::open(&room.path().join("b/layers_1_2.mlpackage")).unwrap().program;
    let mut census = std::collections::BTreeMap::<&str, usize>::new();
    for op in program.functions[0].ops().filter(|op| op.operator != "const") {
        *census.entry(op.operator.as_str()).or_default() += 1;
    }
    insta::assert_debug_snapshot!(census);
}
