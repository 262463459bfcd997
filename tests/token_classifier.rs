//! Token classifiers agree with transformers: converted, run by the executor in windows of many sizes, every position's
//! logits and hidden states are the reference's, and longer texts through overlapping windows are the whole text's.

#[path = "common/folder.rs"]
mod folder;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::convert::bundle::{Bundle, Task};
use anec::exec::Precision;
use anec::runtime::{Answer, Hidden, Model, Windows};
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

fn run(model: &Arc<Model>, window: Option<u64>, hidden: Hidden, tokens: &[u32]) -> Answer {
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
                    assert_eq!(task.labels.len(), labels);
                    let deepest = if name == "each" { 1 } else { layers };
                    assert_eq!((task.window, task.halo, task.stride), (64, deepest * task.band, 64 - 2 * task.halo));
                    let model = Model::on_cpu(&out, Precision::F32).unwrap();
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
