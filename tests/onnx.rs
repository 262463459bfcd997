//! ONNX bundles give the logits that ONNX Runtime computes from them, at every position, whatever the chunks that the
//! tokens come in; and what changes the maths of a graph is refused by name.

use crate::common::folder;
use crate::common::model;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::convert::{ConvertOptions, Outcome, convert};
use anec::exec::Precision;
use anec::manifest::Manifest;
use anec::runtime::{Chunking, ForwardOptions, LoadedModel};
use folder::repository;
use safetensors::SafeTensors;

/// The cases of `tests/fixtures/onnx/make.py`, with their goldens and the contexts that those were computed in.
const CASES: &[(&str, &[(&str, u64)])] = &[
    ("edge", &[("golden", 32)]),
    ("edge-biased", &[("golden", 32)]),
    ("granite-fp32", &[("golden", 32)]),
    ("hunyuan-int4", &[("golden", 32)]),
    ("llama-fp32", &[("golden", 32)]),
    ("llama-llama3", &[("golden", 32)]),
    ("llama-tied-fp32", &[("golden", 32)]),
    ("mistral-window", &[("golden", 32)]),
    ("phi3-longrope", &[("golden-12", 16), ("golden", 32)]),
    ("qwen2-fp16", &[("golden", 32)]),
    ("qwen2-int4", &[("golden", 32)]),
    ("qwen3-asymmetric", &[("golden", 32)]),
    ("qwen3-int4", &[("golden", 32)]),
    ("qwen3-int8", &[("golden", 32)]),
    ("qwen3-qdq", &[("golden", 32)]),
];

fn fixture(case: &str) -> PathBuf {
    repository("tests/fixtures/onnx").join(case)
}

fn room(name: &str) -> PathBuf {
    let room = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("onnx-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&room);
    room
}

/// Converts a source without a manifest, weights as they are, and loads it in single precision.
fn loaded(source: &Path, context: u64, room: &Path) -> anec::base::Result<Arc<LoadedModel>> {
    let sets = [
        format!("source={}", serde_json::to_string(source).unwrap()),
        format!("context={context}"),
        "quant.weights=none".into(),
    ];
    let mut options = ConvertOptions::new(Manifest::from_yaml("", "test", &sets)?);
    (options.out, options.force) = (Some(room.to_owned()), true);
    assert!(matches!(convert(&options)?, Outcome::Written(_)));
    LoadedModel::on_cpu(room, Precision::F32)
}

fn golden(path: &Path) -> (Vec<u32>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> { tensors.tensor(name).unwrap().data().as_chunks().0.to_vec() };
    (
        words("tokens").into_iter().map(u32::from_le_bytes).collect(),
        words("logits").into_iter().map(f32::from_le_bytes).collect(),
    )
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn logits_agree_with_onnx_runtime_at_every_position() {
    let on_disk: Vec<String> = std::fs::read_dir(repository("tests/fixtures/onnx"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    assert_eq!(on_disk.len(), CASES.len(), "every fixture is a case: {on_disk:?}");
    for (case, goldens) in CASES {
        for (file, context) in *goldens {
            let room = room(case);
            let (tokens, expected) = golden(&fixture(case).join(format!("{file}.safetensors")));
            let model = loaded(&fixture(case), *context, &room).unwrap_or_else(|error| panic!("{case}: {error}"));
            let mut predicted = std::collections::BTreeSet::new();
            for pattern in [&[1][..], &[2], &[4], &[3, 1, 4, 2]] {
                let chunking = Chunking::Pattern(pattern.to_vec());
                let ask = ForwardOptions::all(chunking);
                let found = model.start(tokens.len() as u64).unwrap().forward(&tokens, &ask).unwrap().logits;
                assert_eq!(found.len(), expected.len());
                let vocabulary = expected.len() / tokens.len();
                for (position, (found, expected)) in
                    found.chunks(vocabulary).zip(expected.chunks(vocabulary)).enumerate()
                {
                    let cosine = cosine(found, expected);
                    assert!(cosine > 0.99999, "{case} {file} {pattern:?}, position {position}: {cosine}");
                    let largest = expected.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
                    predicted.insert(largest);
                }
            }
            assert!(predicted.len() > 3, "{case}: the model says the same at every position: {predicted:?}");
            std::fs::remove_dir_all(&room).unwrap();
        }
    }
}

#[test]
fn a_bundle_tells_its_end_tokens_and_tokenizer() {
    let room = room("text");
    let model = loaded(&fixture("qwen3-int4"), 32, &room).unwrap();
    let facts = &model.bundle().model;
    assert_eq!(facts.eos_token_ids, [2, 3]);
    assert!(room.join("tokenizer.json").exists() && room.join("generation_config.json").exists());
    std::fs::remove_dir_all(&room).unwrap();
}

/// The bundle of a browser's on-device model, with the files that lie beside it, by the manifest for it; the index of
/// the largest logit is where ONNX Runtime has it.
#[test]
fn the_manifest_for_a_browsers_bundle_converts_one_of_its_layout() {
    let (source, out) = (room("aion-source"), room("aion"));
    model::copy(&fixture("edge"), &source);
    std::fs::write(source.join("manifest.json"), r#"{"version": "2026.1.1"}"#).unwrap();
    std::fs::write(source.join("edge_on_device_model_execution_config.pb"), [8, 1]).unwrap();
    let sets = [
        format!("source={}", serde_json::to_string(&source).unwrap()),
        "context=[16, 32]".into(),
        "lengths={fixed: [1, 8]}".into(),
        "quant.weights=none".into(),
    ];
    let manifest = std::fs::read_to_string(repository("examples/aion.yaml")).unwrap();
    let mut options = ConvertOptions::new(Manifest::from_yaml(&manifest, "aion", &sets).unwrap());
    (options.out, options.force) = (Some(out.clone()), true);
    assert!(matches!(convert(&options).unwrap(), Outcome::Written(_)));
    let model = LoadedModel::on_cpu(&out, Precision::F32).unwrap();
    assert_eq!(model.bundle().model.contexts, [16, 32]);
    let (tokens, expected) = golden(&fixture("edge").join("golden.safetensors"));
    let ask = ForwardOptions::all(Chunking::Largest);
    let found = model.start(tokens.len() as u64).unwrap().forward(&tokens, &ask).unwrap().logits;
    let width = expected.len() / tokens.len();
    for (position, (found, expected)) in found.chunks(width).zip(expected.chunks(width)).enumerate() {
        assert!(cosine(found, expected) > 0.99999, "position {position}");
    }
    std::fs::remove_dir_all(&source).unwrap();
    std::fs::remove_dir_all(&out).unwrap();
}

#[test]
fn the_model_file_is_a_source_like_its_folder() {
    let (code, by_file, stderr) = folder::run(&["inspect", "tests/fixtures/onnx/qwen3-int4/model.onnx", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let (_, by_folder, _) = folder::run(&["inspect", "tests/fixtures/onnx/qwen3-int4", "--json"]);
    let tensors = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap()["tensors"].clone();
    assert_eq!(tensors(&by_file), tensors(&by_folder));
    let (_, text, _) = folder::run(&["inspect", "tests/fixtures/onnx/qwen3-int4"]);
    insta::assert_snapshot!("inspect", text);
}

/// Error and help of the copy of a bundle that `edit` changed.
fn refused(case: &str, name: &str, edit: impl FnOnce(&Path)) -> String {
    let (copy, out) = (room(&format!("{name}-source")), room(name));
    model::copy(&fixture(case), &copy);
    edit(&copy);
    let (code, _, stderr) =
        folder::run(&["convert", "--source", copy.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    std::fs::remove_dir_all(&copy).unwrap();
    assert_eq!(code, 4, "{name}: {stderr}");
    stderr
}

#[test]
fn a_configuration_that_isnt_the_graphs_is_refused() {
    let change = |key: &'static str, value: serde_json::Value| {
        move |folder: &Path| {
            let config = serde_json::json!({
                "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 80,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
                "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
            });
            std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
            model::edit_json(&folder.join("config.json"), |config| config[key] = value);
        }
    };
    for (key, value, expected) in [
        ("rms_norm_eps", 1e-5.into(), "`rms_norm_eps` is 0.00001; expected 0.000001, as the ONNX graph computes"),
        ("rope_theta", 1e6.into(), "rope_theta"),
        ("num_attention_heads", 8.into(), "`num_attention_heads` is 8; expected 4"),
        ("model_type", "llama".into(), "`model_type (query-key norm)` is None; expected PerHead"),
        ("intermediate_size", 65.into(), "`intermediate_size` is 65; expected 64"),
    ] {
        let message = refused("qwen3-int4", "config", change(key, value));
        assert!(message.contains(expected), "{key}: {message}");
    }
    let genai = refused("qwen3-int4", "genai", |folder| {
        model::edit_json(&folder.join("genai_config.json"), |config| {
            config["model"]["decoder"]["head_size"] = 8.into()
        });
    });
    assert!(genai.contains("key `model.decoder.head_size`: it is 8, but the graph has 16"), "{genai}");
}

#[test]
fn missing_and_shortened_files_are_named() {
    let missing =
        refused("qwen3-int4", "missing", |folder| std::fs::remove_file(folder.join("model.onnx.data")).unwrap());
    assert!(missing.contains("model.onnx.data, which isn't beside the model"), "{missing}");
    let short = refused("qwen3-int4", "short", |folder| {
        let file = std::fs::OpenOptions::new().write(true).open(folder.join("model.onnx.data")).unwrap();
        file.set_len(10_000).unwrap();
    });
    assert!(short.contains("end after the file, 10000 bytes"), "{short}");
    let cut = refused("qwen3-int4", "cut", |folder| {
        let bytes = std::fs::read(folder.join("model.onnx")).unwrap();
        std::fs::write(folder.join("model.onnx"), &bytes[..bytes.len() / 2]).unwrap();
    });
    assert!(cut.contains("it was cut off"), "{cut}");
}
