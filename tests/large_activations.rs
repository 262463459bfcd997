//! Activations as large and as small as published ones, in half precision and in the Neural Engine's arithmetic:
//! EmbeddingGemma 2 has inputs of norms up to 710 and 2,000, whose squares exceed fp16, and outputs of feed-forward
//! networks that vanish (eeANE 2.1.0). A norm behind a projection cancels the projection's scale, so that small models
//! get such activations by other weights.

use std::path::Path;
use std::sync::Arc;

use anec::bundle::Task;
use anec::exec::Precision;
use anec::runtime::encode::Embedder;
use anec::runtime::{Chunking, EncodedText, ForwardOptions, LoadedModel};
use anec::{Converter, Manifest};

use crate::common::folder::repository;
use crate::common::model::{copy, edit_tensors};

/// Multiplies the weights whose names end so.
fn scaled(source: &Path, out: &Path, factors: &[(&str, f32)]) {
    copy(source, out);
    edit_tensors(&out.join("model.safetensors"), |tensors| {
        for (name, dtype, _, bytes) in tensors {
            let Some((_, factor)) = factors.iter().find(|(end, _)| name.ends_with(end)) else { continue };
            *bytes = match dtype {
                safetensors::Dtype::F32 => {
                    let words = bytes.as_chunks::<4>().0.iter();
                    words.flat_map(|word| (f32::from_le_bytes(*word) * factor).to_le_bytes()).collect()
                }
                safetensors::Dtype::F16 => {
                    let halves = bytes.as_chunks::<2>().0.iter();
                    let value = |half: &[u8; 2]| half::f16::from_le_bytes(*half).to_f32() * factor;
                    halves.flat_map(|half| half::f16::from_f32(value(half)).to_le_bytes()).collect()
                }
                other => panic!("{name}: {other:?}"),
            };
        }
    });
}

/// Vector or logits of a text.
fn values(model: &Arc<LoadedModel>) -> Vec<f32> {
    let ids: Vec<u32> = (5..29).collect();
    match &model.bundle().model.task {
        Task::TextEmbedding(_) => {
            Embedder::new(model, None).unwrap().embed(&EncodedText { ids, types: Vec::new() }).unwrap()
        }
        _ => {
            let ask = ForwardOptions::all(Chunking::Largest);
            model.start(ids.len() as u64).unwrap().forward(&ids, &ask).unwrap().logits
        }
    }
}

/// Cosines of the values with those in f32, in half precision and in the Neural Engine's arithmetic.
fn cosines(source: &Path, room: &Path, name: &str, sets: &[&str]) -> [f64; 2] {
    let sets: Vec<String> =
        ["quant.weights=none", "transforms=none", "context=64"].iter().chain(sets).map(|set| set.to_string()).collect();
    let out = room.join(name);
    let manifest = Manifest::from_yaml(&format!("source: {}", source.display()), "activations", &sets).unwrap();
    Converter::new(manifest).out(&out).compile(false).measure(false).convert().unwrap();
    let of = |precision| values(&LoadedModel::on_cpu(&out, precision).unwrap());
    let expected = of(Precision::F32);
    [Precision::F16, Precision::ANE].map(|precision| {
        let found = of(precision);
        if found.iter().any(|value| !value.is_finite()) {
            return 0.0;
        }
        let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
        dot(&found, &expected) / (dot(&found, &found) * dot(&expected, &expected)).sqrt()
    })
}

/// Loss of cosine in half precision and in the engine's arithmetic that is tolerated beyond that of the model as it is.
const TOLERATED: [f64; 2] = [2e-4, 4e-3];

#[test]
fn models_with_published_sizes_of_activations_keep_their_values() {
    let room = tempfile::tempdir().unwrap();
    for (fixture, projections) in [
        (
            "encoders/embeddinggemma2",
            &["q_proj.weight", "k_proj.weight", "v_proj.weight", "per_layer_projection.weight"],
        ),
        ("families/gemma4-dense", &["q_proj.weight", "k_proj.weight", "v_proj.weight", "per_layer_projection.weight"]),
    ] {
        let source = repository("tests/fixtures").join(fixture);
        let name = fixture.rsplit('/').next().unwrap();
        let plain = cosines(&source, room.path(), &format!("{name}-plain"), &[]);
        // the smallest power of two from which on the equation as written overflows
        let overflowing = (4..14).find(|power| {
            let folder = room.path().join(format!("{name}-{power}"));
            let factors: Vec<(&str, f32)> = projections.iter().map(|end| (*end, 2f32.powi(*power))).collect();
            scaled(&source, &folder, &factors);
            cosines(&folder, room.path(), &format!("{name}-{power}-naive"), &["norm=naive"])[0] < 0.99
        });
        let overflowing = overflowing.expect("squares exceed fp16");
        for power in overflowing..overflowing + 4 {
            // the outputs of feed-forward networks vanish at the same time, by weights that fp16 holds
            let small = 2f32.powi(-2 * (1 + power - overflowing));
            let mut factors: Vec<(&str, f32)> = projections.iter().map(|end| (*end, 2f32.powi(power))).collect();
            factors.extend([("mlp.up_proj.weight", small), ("mlp.down_proj.weight", small)]);
            let folder = room.path().join(format!("{name}-{power}-small"));
            scaled(&source, &folder, &factors);
            let found = cosines(&folder, room.path(), &format!("{name}-{power}-accurate"), &[]);
            for ((plain, found), tolerated) in plain.iter().zip(found).zip(TOLERATED) {
                assert!(found > plain - tolerated, "{name}, 2^{power}: {found}, as it is {plain}");
            }
        }
    }
}
