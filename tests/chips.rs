//! Predictions, the search and experiments as a user meets them.

use crate::common::folder;

use folder::{json, run};

#[test]
fn what_a_search_finds_converts_and_passes_the_gates() {
    let room = tempfile::tempdir().unwrap();
    let (file, bundle) = (room.path().join("found.yaml"), room.path().join("demo.anec"));
    let [file, bundle] = [&file, &bundle].map(|path| path.to_str().unwrap());
    let (code, stdout, stderr) = run(&["plan", "-m", "demo", "--search", "--for", "m5,a17-pro", "--out", file]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("\nm5 ") && stdout.contains("\na17-pro "), "{stdout}");
    // a file that is there is somebody's
    let (code, _, stderr) = run(&["plan", "-m", "demo", "--search", "--for", "m5", "--out", file]);
    assert_eq!((code, stderr.contains("already exists")), (2, true), "{stderr}");
    let (code, _, stderr) = run(&["convert", "-m", file, "--out", bundle]);
    assert_eq!(code, 0, "{stderr}");
    let gates = ["--structure", "--numerics", "--parity", "--golden", "demo/golden.safetensors", "--allow-unproven"];
    let (code, stdout, stderr) = run(&[&["validate", bundle][..], &gates].concat());
    assert_eq!(code, 0, "{stdout}{stderr}");

    // a form that rules expect to fail is named, and what names chips avoids it
    let plain = room.path().join("plain.anec");
    let (code, _, stderr) = run(&["convert", "--no-measure", "-m", "demo", "--out", plain.to_str().unwrap()]);
    let named = "a rule doubts this form on the Neural Engine: dynamic-shapes-27; `anec explain dynamic-shapes-27`";
    assert!(code == 0 && stderr.contains(named), "{stderr}");

    // both at once: the same bundle
    let other = room.path().join("other.anec");
    let (code, _, stderr) = run(&["convert", "-m", "demo", "--for", "m5,a17-pro", "--out", other.to_str().unwrap()]);
    assert_eq!((code, stderr.contains("shards: the shortest path")), (0, true), "{stderr}");
    assert!(!stderr.contains("this form on the Neural Engine"), "{stderr}");
    let manifest = |bundle: &std::path::Path| json(&bundle.join("bundle.json"))["manifest"]["shards"].clone();
    assert_eq!(manifest(&other), manifest(std::path::Path::new(bundle)));
}

/// Classifiers, encoders and experts in packages of their own are searched, too, within the limits.
#[test]
fn every_kind_of_model_has_a_form_for_a_chip() {
    let room = tempfile::tempdir().unwrap();
    let bundle = room.path().join("redact.anec");
    let bundle = bundle.to_str().unwrap();
    let (code, _, stderr) = run(&["convert", "-m", "demo-redact", "--for", "m4-max", "--out", bundle]);
    assert!(code == 0 && stderr.contains("lengths: least predicted time per token of texts"), "{stderr}");
    let golden = "demo/redact/golden.safetensors";
    let (code, stdout, stderr) = run(&["validate", bundle, "--structure", "--parity", "--golden", golden]);
    assert_eq!(code, 0, "{stdout}{stderr}");

    let search = |name: &str, limits: &[&str]| {
        let (code, stdout, stderr) =
            run(&[&["plan", name, "--search", "--for", "m2@27", "--json"][..], limits].concat());
        assert_eq!(code, 0, "{name}: {stderr}");
        serde_json::from_str::<serde_json::Value>(&stdout).unwrap()
    };
    let lengths = search("bge-m3", &[])["manifest"]["lengths"]["fixed"].clone();
    let lengths: Vec<u64> = serde_json::from_value(lengths).unwrap();
    assert!(lengths.contains(&2048) && lengths.iter().all(|length| !(501..=512).contains(length)), "{lengths:?}");
    let free = search("demo", &[]);
    let most = |found: &serde_json::Value, key: &str| match &found["predictions"][0][key] {
        serde_json::Value::Array(range) => range[1].as_f64().unwrap(),
        number => number.as_f64().unwrap(),
    };
    let (load, memory) = (most(&free, "first_load_seconds"), most(&free, "all_loaded_bytes") / 1e6);
    let [load, memory] = [load, memory].map(|number| (number * 0.6).to_string());
    for (option, most_allowed, key, unit) in
        [("--max-first-load", &load, "first_load_seconds", 1.0), ("--max-memory-mb", &memory, "all_loaded_bytes", 1e6)]
    {
        let found = search("demo", &[option, most_allowed]);
        assert!(most(&found, key) <= most_allowed.parse::<f64>().unwrap() * unit, "{option}");
    }
    // both are in the reasons
    let choices = free["choices"].as_array().unwrap();
    let of_lengths = choices.iter().find(|choice| choice["key"] == "lengths").unwrap()["reason"].as_str().unwrap();
    assert!(of_lengths.contains(" MB") && of_lengths.contains(" s of first load"), "{of_lengths}");
}

#[test]
fn a_plan_for_chips_predicts_and_says_that_it_does() {
    let (code, stdout, stderr) = run(&["plan", "-m", "demo", "--for", "m4-max,m1@26", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let plan: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let predictions = plan["predictions"].as_array().unwrap();
    assert_eq!(predictions.len(), 2);
    assert_eq!((&predictions[1]["target"], &predictions[1]["evidence"]), (&"m1@26".into(), &"predicted".into()));
    assert!(predictions[0]["contexts"][0]["decode_per_second"].as_f64().unwrap() > 1.0);
    // rules about other chips and systems don't apply
    let rules: Vec<&str> =
        plan["forecast"].as_array().unwrap().iter().map(|finding| finding["rule"].as_str().unwrap()).collect();
    assert!(rules.contains(&"unfolded-int8") && !rules.contains(&"stateful-m5"), "{rules:?}");
    let (code, _, stderr) = run(&["plan", "-m", "demo", "--for", "m9"]);
    assert_eq!((code, stderr.contains("no chip `m9` is known\nhelp: expected one of a14, a15")), (2, true), "{stderr}");
}

#[test]
fn experiments_are_listed_anywhere_and_imported_anywhere() {
    let (code, stdout, _) = run(&["doctor", "--experiments"]);
    assert_eq!((code, stdout.contains("weights-int4-block")), (0, true));
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("probe.json");
    let report = r#"{"schema_version": 1, "anec_version": "0.1.0", "date": "2026-11-22T10:00:00Z",
        "machine": {"model": "Mac16,8", "chip": "Apple M4 Pro", "os_version": "26.1", "os_build": "25B1", "neural_engine_cores": 16},
        "outcomes": [
            {"experiment": "state-four", "size": "tiny", "outcome": {"kind": "failed", "said": "Program Inference error", "codes": ["11"]}},
            {"experiment": "depthwise", "size": "tiny", "outcome": {"kind": "resident", "compute_ops": 5, "on_neural_engine": 5}}]}"#;
    std::fs::write(&file, report).unwrap();
    let (code, stdout, stderr) = run(&["doctor", "--import", file.to_str().unwrap()]);
    assert_eq!(code, 0, "{stderr}");
    let due = "Apple M4 Pro (Mac16,8), macOS 26.1 (25B1), Neural Engine of 16 cores, 2026-11-22T10:00:00Z

confirmed:
- id: state-count
  evidence:
    - { says: for, source: \"anec doctor --probe 0.1.0, state-four, tiny: failed (11)\", device: \"M4 Pro\", os: \"macOS 26.1 (25B1)\", date: \"2026-11-22\" }

refuted:
- id: depthwise-convolution
  evidence:
    - { says: against, source: \"anec doctor --probe 0.1.0, depthwise, tiny: resident, 5 of 5 ops on the Neural Engine\", device: \"M4 Pro\", os: \"macOS 26.1 (25B1)\", date: \"2026-11-22\" }
";
    assert_eq!(stdout, due);
}

#[cfg(not(target_os = "macos"))]
#[test]
fn experiments_need_a_mac() {
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("probe.json");
    let (code, _, stderr) = run(&["doctor", "--probe", file.to_str().unwrap()]);
    assert_eq!((code, file.exists()), (5, false), "{stderr}");
    assert!(stderr.starts_with("error: Core ML isn't here: it is part of macOS"), "{stderr}");
}
