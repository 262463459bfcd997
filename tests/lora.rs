//! A model with a PEFT adapter merged at conversion gives the logits that PEFT computes with the two apart.

use crate::common::folder;

use anec::bundle::Bundle;
use anec::exec::Precision;
use anec::runtime::{Chunking, ForwardOptions, LoadedModel};
use safetensors::SafeTensors;

#[test]
fn merged_adapters_give_pefts_logits() {
    let fixtures = folder::repository("tests/fixtures");
    let bytes = std::fs::read(fixtures.join("lora/golden.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| {
        golden.tensor(name).unwrap().data().chunks_exact(4).map(|w| w.try_into().unwrap()).collect::<Vec<[u8; 4]>>()
    };
    let tokens: Vec<u32> = words("tokens").into_iter().map(u32::from_le_bytes).collect();
    let expected: Vec<f32> = words("logits").into_iter().map(f32::from_le_bytes).collect();
    let source = fixtures.join("families/qwen3-bf16");
    let adapter = format!("adapters=[{{path: {}}}]", fixtures.join("lora/adapter").display());
    let room = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| -> Vec<f32> {
        let out = room.path().join(name);
        let base =
            ["convert", "--source", source.to_str().unwrap(), "--out", out.to_str().unwrap(), "--set", "context=64"];
        let mut arguments = base.to_vec();
        arguments.extend(sets.iter().flat_map(|set| ["--set", set]));
        let (code, _, stderr) = folder::run(&arguments);
        assert_eq!(code, 0, "{stderr}");
        let model = LoadedModel::on_cpu(&out, Precision::F32).unwrap();
        model.start(64).unwrap().forward(&tokens, &ForwardOptions::all(Chunking::Largest)).unwrap().logits
    };
    let worst = |found: &[f32]| {
        let width = expected.len() / tokens.len();
        let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
        let cosine = |(f, e): (&[f32], &[f32])| dot(f, e) / (dot(f, f) * dot(e, e)).sqrt();
        found.chunks(width).zip(expected.chunks(width)).map(cosine).fold(1.0, f64::min)
    };
    let plain = run("plain", &["quant.weights=none"]);
    assert!(worst(&plain) < 0.9, "without the adapter it is another model");
    let merged = run("merged", &["quant.weights=none", &adapter]);
    assert!(worst(&merged) > 0.99999, "{}", worst(&merged));
    // transforms and quantization work on the merged weights
    let quantized =
        run("quantized", &["quant={weights: int8, granularity: per_channel}", "transforms=[rotate]", &adapter]);
    assert!(worst(&quantized) > 0.99, "{}", worst(&quantized));
    let bundle = Bundle::read(&room.path().join("merged")).unwrap();
    let files: Vec<&str> = bundle.source.files.iter().map(|file| file.file.as_str()).collect();
    assert_eq!(files, ["config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"]);
    assert_eq!(bundle.manifest.adapters.len(), 1);

    // another model's adapter, and a file that holds names of its own
    let out = room.path().join("refused");
    let other = fixtures.join("families/llama-default");
    let (code, _, stderr) = folder::run(&[
        "convert",
        "--source",
        other.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
        "--set",
        &adapter,
    ]);
    assert!(
        code == 4 && stderr.contains("tensor `model.") && stderr.contains("adapter was trained on this model"),
        "{stderr}"
    );
    let gguf = fixtures.join("families/llama-default/model.gguf");
    let (code, _, stderr) = folder::run(&[
        "convert",
        "--source",
        gguf.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
        "--set",
        &adapter,
    ]);
    assert!(code == 4 && stderr.contains("adapters name weights as transformers does"), "{stderr}");
}
