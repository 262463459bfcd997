//! The gates on bundles that have something wrong with them: each defect is caught, by a gate that names the place.

#[allow(dead_code)] // this test needs only some of it
#[path = "common/folder.rs"]
mod folder;

use std::path::Path;

use folder::{copy, edit_tensors, run};
use serde_json::Value as Json;

/// The demo model's source with some tensors changed.
fn source(folder: &Path, change: impl Fn(&str, &mut [f32])) -> String {
    let source = folder.join("source");
    copy(Path::new("demo/model"), &source);
    edit_tensors(&source.join("model.safetensors"), |tensors| {
        for (name, dtype, _, bytes) in tensors {
            assert_eq!(*dtype, safetensors::Dtype::F16, "{name}");
            let mut values: Vec<f32> =
                bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
            change(name, &mut values);
            *bytes = values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
        }
    });
    source.to_str().unwrap().to_owned()
}

fn convert(source: &str, out: &Path, more: &[&str]) -> String {
    let out = out.to_str().unwrap();
    let (code, _, stderr) = run(&[&["convert", "-m", "demo", "--source", source, "--out", out], more].concat());
    assert_eq!(code, 0, "{stderr}");
    out.to_owned()
}

/// Validates and gives the exit code and the report.
fn validate(bundle: &str, more: &[&str]) -> (i32, Json) {
    let (code, stdout, stderr) = run(&[&["validate", bundle, "--json", "-"], more].concat());
    let report = serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{e}: {stdout}{stderr}"));
    (code, report)
}

/// Checks of a verdict, as `subject: claim: detail`.
fn checks(report: &Json, verdict: &str) -> Vec<String> {
    let gates = report["gates"].as_array().unwrap().iter();
    let checks = gates.flat_map(|gate| gate["checks"].as_array().unwrap());
    let text = |check: &Json, key: &str| check[key].as_str().unwrap_or_default().to_owned();
    checks
        .filter(|check| check["verdict"] == verdict)
        .map(|check| format!("{}: {}: {}", text(check, "subject"), text(check, "claim"), text(check, "detail")))
        .collect()
}

#[test]
fn a_residual_stream_that_overflows_is_found_and_scaled() {
    let room = tempfile::tempdir().unwrap();
    // single channels of real models are as far out
    let source = source(room.path(), |name, values| {
        if name == "model.layers.3.mlp.down_proj.weight" {
            values.iter_mut().for_each(|value| *value = (*value * 300_000.0).clamp(-6e4, 6e4));
        }
    });
    let golden = room.path().join("golden");
    let golden = golden.to_str().unwrap();
    let text = ["--prompt", "It was a dark night, and the wind", "--greedy", "8", "--hidden"];
    let (code, _, stderr) = run(&[&["golden", "-m", "demo", "--source", &source, "--out", golden], &text[..]].concat());
    assert_eq!(code, 0, "{stderr}");

    let plain = convert(&source, &room.path().join("plain"), &[]);
    let (code, report) = validate(&plain, &["--numerics", "--positions", "40"]);
    let failed = checks(&report, "failed");
    assert_eq!(code, 1, "{report:#}");
    // the layers before it are sound
    assert!(!failed.iter().any(|check| check.starts_with("layers_0_3")), "{failed:#?}");
    let layer = failed.iter().find(|check| check.contains("layer 3")).unwrap();
    assert!(layer.contains("`layers_3_mlp_down_proj` is the first with"), "{layer}");
    assert!(failed.iter().any(|check| check.contains("`numerics.scale: 0.")), "{failed:#?}");
    let (code, report) = validate(&plain, &["--parity", "--golden", golden, "--precision", "f16"]);
    assert_eq!(code, 1, "{report:#}");

    let scaled = convert(&source, &room.path().join("scaled"), &["--set", "numerics.scale=auto"]);
    let (code, report) = validate(&scaled, &["--numerics", "--parity", "--golden", golden, "--positions", "40"]);
    assert_eq!(code, 0, "{:#?}", checks(&report, "failed"));
    let bundle = folder::json(&Path::new(&scaled).join("bundle.json"));
    let scale = bundle["manifest"]["numerics"]["scale"].as_f64().unwrap();
    assert!(scale < 1.0 && scale.log2().fract() == 0.0, "{scale}");
}
