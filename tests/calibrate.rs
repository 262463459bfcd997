//! Codes that a calibration text chooses: better ones, the same every time, and in no other format.

use crate::common::folder;

use std::path::Path;

use folder::{contents, json, run};
use serde_json::Value as Json;

/// Converts a model; gives what its report says of the calibration.
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

/// A layer whose experts have their own tokens, recurrent mixers, a gate beside attention: every quantized weight is found
/// with its input, whatever the family.
#[test]
fn every_familys_projections_are_calibrated() {
    for (model, sets) in [
        ("lfm2_moe-default", &["quant.granularity=per_channel"][..]),
        ("qwen3_5-default", &[]),
        ("gemma3-default", &["quant.granularity=per_channel", "layout=bc1s"]),
        ("phi3-default", &["linear=linear", "attention=grouped"]),
        ("granite-default", &["numerics.scale=0.25"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let source = format!("tests/fixtures/families/{model}");
        let sets = [&["quant.feedback=gptq", "calibration.tokens=600", "context=64"], sets].concat();
        let report = convert(&["--source", &source], &folder.path().join("out"), &sets);
        assert_eq!(report["rounded"].as_array(), None, "{model}: {report}");
        assert!(report["weights"].as_u64() > Some(8), "{model}: {report}");
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
    assert!(refused("privacy_filter-plain", &[]).contains("a token classifier can't be calibrated"));
    let routers = refused("zaya-default", &["context=64"]);
    assert!(routers.contains("a model whose routers pass on what they gather can't be calibrated"), "{routers}");
}
