//! Codes that a calibration text chooses: better ones, the same every time, and in no other format.

use crate::common::folder;

use std::collections::BTreeSet;
use std::path::Path;

use anec::bundle::Bundle;
use anec::calibrate::text::windows_and_starts;
use anec::manifest::Calibration;
use anec::runtime::Tokenizer;
use folder::{contents, json, run};
use serde_json::Value as Json;

/// Converts a model; returns what its report says of the calibration.
fn convert(source: &[&str], out: &Path, sets: &[&str]) -> Json {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let command: Vec<&str> =
        ["convert", "--out", out.to_str().unwrap()].into_iter().chain(source.iter().copied()).chain(sets).collect();
    let (code, _, stderr) = run(&command);
    assert_eq!(code, 0, "{stderr}");
    json(&out.join("report.json"))["calibration"].clone()
}

const DEMO: [&str; 2] = ["--manifest", "manifests/demo.yaml"];
const GPTQ: [&str; 2] = ["quant.feedback=gptq", "calibration.tokens=1500"];

#[test]
fn a_calibrated_model_is_closer_to_its_source_and_the_same_every_time() {
    let folder = tempfile::tempdir().unwrap();
    let out = |name: &str| folder.path().join(name);
    assert!(convert(&DEMO, &out("nearest"), &[]).is_null());
    let report = convert(&DEMO, &out("chosen"), &GPTQ);
    assert_eq!((report["tokens"].as_u64(), report["rounded"].as_array()), (Some(1500), None), "{report}");
    // six layers of seven projections, and both pieces of the head
    assert_eq!(report["weights"], 44);
    let divergence = |name: &str| {
        let bundle = out(name);
        let golden = ["--parity", "--golden", "demo/golden.safetensors", "--precision", "f32", "--json", "-"];
        let (code, stdout, stderr) = run(&[&["validate", bundle.to_str().unwrap()], &golden[..]].concat());
        assert_eq!(code, 0, "{stdout}{stderr}");
        let report: Json = serde_json::from_str(&stdout).unwrap();
        let checks = report["gates"][0]["checks"].as_array().unwrap().clone();
        let positions = checks.into_iter().find(|check| check["subject"] == "f32, positions").unwrap();
        positions["measured"]["kl"].as_f64().unwrap()
    };
    let (nearest, chosen) = (divergence("nearest"), divergence("chosen"));
    assert!(chosen < 0.9 * nearest, "{chosen} against {nearest}");

    // the same bytes again; nothing is left beside the bundles; only integers differ from the nearest ones
    convert(&DEMO, &out("again"), &GPTQ);
    let files = |name: &str| {
        let mut files = contents(&out(name));
        files.remove("report.json");
        files
    };
    assert!(files("chosen") == files("again"));
    let names = |name: &str| files(name).into_keys().collect::<Vec<_>>();
    assert_eq!(names("nearest"), names("chosen"));
    let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["again", "chosen", "nearest"]);
}

/// One token of eight is a text, each another, where texts begin with a token of the tokenizer's own.
#[test]
fn texts_have_their_beginnings_calibrated() {
    let folder = tempfile::tempdir().unwrap();
    let calibration = Calibration { tokens: 320, ..Calibration::default() };
    for (name, begins) in [("llama-llama3", 1), ("qwen2-tokenizer", 0)] {
        let (source, out) = (format!("tests/fixtures/families/{name}/model.gguf"), folder.path().join(name));
        convert(&["--source", &source], &out, &["quant.weights=none", "context=32"]);
        let bundle = Bundle::read(&out).unwrap();
        let first = Tokenizer::of(&bundle, &out).unwrap().encode("").unwrap();
        assert_eq!(first.len(), begins, "{name}");
        let texts = windows_and_starts(&calibration, &bundle, &out, 32).unwrap();
        assert_eq!(texts.iter().map(Vec::len).sum::<usize>(), 320, "{name}");
        assert!(texts.iter().all(|text| text.starts_with(&first)), "{name}");
        let starts: BTreeSet<_> = texts.iter().filter(|text| text.len() == 2).collect();
        assert_eq!(starts.len(), 40 * begins, "{name}");
    }
}

/// A layer whose experts have their own tokens, recurrent mixers, a gate beside attention: every quantized weight is
/// found with its input, whatever the family.
#[test]
fn every_familys_projections_are_calibrated() {
    for (model, sets) in [
        ("lfm2_moe-default", &["quant.granularity=per_channel"][..]),
        ("qwen3_5-default", &[]),
        ("gemma3-default", &["quant.granularity=per_channel", "layout=bc1s"]),
        ("phi3-default", &["linear=linear", "attention=grouped"]),
        ("granite-default", &["numerics.scale=0.25"]),
        ("cohere-normed", &["shards.divide=attention_mlp"]),
        ("gpt_neox-default", &[]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let source = format!("tests/fixtures/families/{model}");
        let sets = [&["quant.feedback=gptq", "calibration.tokens=600", "context=64"], sets].concat();
        let report = convert(&["--source", &source], &folder.path().join("out"), &sets);
        assert_eq!(report["rounded"].as_array(), None, "{model}: {report}");
        assert!(report["weights"].as_u64() > Some(8), "{model}: {report}");
    }
}

/// Four bits that make up for each other's errors: in blocks and in palettes, also of experts, some of which no token
/// came to.
#[test]
fn every_format_is_calibrated() {
    for (model, format) in [
        ("lfm2_moe-default", &["quant.weights=palette4", "quant.row_scale=true"][..]),
        ("lfm2_moe-default", &["quant.weights=int4", "quant.granularity={block: 8}"]),
        ("gemma3-default", &["quant.weights=palette6", "quant.granularity={group: 8}"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let source = format!("tests/fixtures/families/{model}");
        // one token reaches few experts, and says little of what it reaches
        let sets = [&["quant.feedback=gptq", "calibration.tokens=1", "context=64"], format].concat();
        let out = folder.path().join("out");
        let report = convert(&["--source", &source], &out, &sets);
        assert_eq!(report["rounded"].as_array(), None, "{model}: {report}");
        let (code, stdout, _) = run(&["validate", out.to_str().unwrap(), "--structure"]);
        assert_eq!(code, 0, "{stdout}");
    }
}

#[test]
fn a_budget_decides_formats_by_layers_and_the_manifest_says_them() {
    let folder = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model");
    let quant = || {
        let run = std::process::Command::new(env!("CARGO_BIN_EXE_anec"))
            .args(["quant", "--source", demo.to_str().unwrap(), "--weights", "int8,palette4", "--max-tokens", "24"])
            .args(["--plan", "bits=6", "--out", "plan.yaml", "--svg", "plan.svg", "--json"])
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        serde_json::from_slice::<Json>(&run.stdout).unwrap()
    };
    let first = quant();
    let saved = std::fs::read(folder.path().join("model.sensitivities.json")).unwrap();
    // six layers of four roles, and the head; what was measured is there, and is the same
    assert_eq!(first["groups"].as_array().unwrap().len(), 25);
    assert_eq!(quant(), first);
    assert_eq!(std::fs::read(folder.path().join("model.sensitivities.json")).unwrap(), saved);
    let plan = &first["plan"];
    assert!(plan["bits"].as_f64().unwrap() <= 6.0 && plan["bits"].as_f64().unwrap() > 5.5, "{plan}");
    // fewer bits lose more, wherever they are
    for group in first["groups"].as_array().unwrap() {
        let of = |index: usize| group["formats"][index]["kl"].as_f64().unwrap();
        assert!(of(0) > 0.0 && of(2) > of(0), "{group}");
    }
    let out = folder.path().join("out");
    let manifest = folder.path().join("plan.yaml");
    let report = {
        convert(&["--manifest", manifest.to_str().unwrap()], &out, &["context=64"]);
        json(&out.join("report.json"))
    };
    let tensors =
        || report["packages"].as_array().unwrap().iter().flat_map(|package| package["tensors"].as_array().unwrap());
    let formats: std::collections::BTreeSet<&str> = tensors().filter_map(|tensor| tensor["weights"].as_str()).collect();
    assert!(formats.contains("int8") && formats.contains("palette4"), "{formats:?}");
    let quantized = || tensors().filter(|tensor| tensor["weights"] != "none");
    let bytes: f64 = quantized().map(|tensor| tensor["bytes"].as_f64().unwrap()).sum();
    let weights: f64 =
        quantized().map(|t| 8.0 * t["bytes"].as_f64().unwrap() / t["bits_per_weight"].as_f64().unwrap()).sum();
    assert!((8.0 * bytes / weights - plan["bits"].as_f64().unwrap()).abs() < 0.02, "{}", 8.0 * bytes / weights);
    assert!(std::fs::read_to_string(folder.path().join("plan.svg")).unwrap().contains("palette4"));

    let asked = |plan: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_anec"));
        command.args(["quant", "--source", demo.to_str().unwrap(), "--weights", "int8,palette4", "--max-tokens", "24"]);
        command.args(["--plan", plan, "--json"]).current_dir(folder.path()).output().unwrap()
    };
    // a model may lose so much: the more, the fewer bits
    let mut before = 8.1;
    for kl in [0.001, 0.005, 0.01] {
        let output = asked(&format!("kl={kl}"));
        let plan = serde_json::from_slice::<Json>(&output.stdout).unwrap()["plan"].take();
        let (lost, bits) = (plan["kl"].as_f64().unwrap(), plan["bits"].as_f64().unwrap());
        assert!(lost <= kl && lost > 0.5 * kl && bits < before, "{kl}: {lost} by {bits} bits");
        before = bits;
    }

    // what no format allows is refused, and what the refusal names is enough
    for (key, too_little) in [("max_mb", "0.5"), ("bits", "0.5"), ("kl", "0.0000001")] {
        let asked = |number: &str| {
            let output = asked(&format!("{key}={number}"));
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (code, stderr) = asked(too_little);
        assert!(code == Some(2) && stderr.contains("below the minimum of the formats"), "{stderr}");
        let least = stderr.split("expected at least ").nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap();
        assert_eq!(asked(least).0, Some(0), "{key}={least}");
    }
}

#[test]
fn what_cannot_be_calibrated_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let refused = |source: &str, sets: &[&str]| {
        let source = format!("tests/fixtures/families/{source}");
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let command = ["convert", "--source", &source, "--out", out.to_str().unwrap(), "--set", "quant.feedback=gptq"];
        let (code, _, stderr) = run(&command.into_iter().chain(sets).collect::<Vec<_>>());
        assert_eq!(code, 2, "{stderr}");
        stderr
    };
    let both_ways = refused("privacy_filter-plain", &[]);
    assert!(both_ways.contains("a bidirectional model can't be calibrated"), "{both_ways}");
    // it has no predictions that formats could change
    let vectors = refused("../encoders/qwen3-embedding", &["quant.plan.bits=6"]);
    assert!(vectors.contains("next-token predictions, and the model makes none"), "{vectors}");
    let routers = refused("zaya-default", &["context=64"]);
    assert!(routers.contains("a model whose routers pass state between layers can't be calibrated"), "{routers}");
}
