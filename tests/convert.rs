//! Conversions from the command line: what a bundle holds, that its bytes are the same every time, that an interrupted
//! run goes on, and that bad input is named and leaves nothing that looks whole.

#[path = "common/folder.rs"]
mod folder;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anec::convert::bundle::{self, Bundle};
use anec::family::ports::Stage;
use folder::{anec, contents, copy, edit_json, edit_tensors, finish, json, repository, run};
use serde_json::json;

/// Converts the demo model into `out`.
fn convert_demo(out: &Path, more: &[&str]) -> (i32, String, String) {
    let mut arguments = vec!["convert", "--manifest", "manifests/demo.yaml", "--out", out.to_str().unwrap()];
    arguments.extend(more);
    run(&arguments)
}

#[test]
fn the_demo_model_becomes_a_bundle() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("demo");
    let (code, stdout, stderr) = convert_demo(&out, &[]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("layers_0_3.mlpackage"), "{stdout}");

    let value = json(&out.join("bundle.json"));
    jsonschema::validate(&bundle::schema(), &value).unwrap();
    let bundle = Bundle::read(&out).unwrap();
    assert_eq!((bundle.name.as_str(), bundle.family.as_str()), ("demo", "qwen3"));
    assert_eq!(bundle.model.eos_token_ids, [0]);
    let stages: Vec<_> = bundle.functions.iter().map(|f| f.stage.clone()).collect();
    let layers = |first, end| Stage::Layers { first, end };
    let head = |first, end| Stage::Head { first, end };
    assert_eq!(stages, [layers(0, 3), layers(3, 6), head(0, 1024), head(1024, 2048)]);
    assert_eq!(bundle.ledger.ignored.len(), 0);
    assert_eq!(bundle.source.files.len(), 5);

    // every file that is named is there, with the digest that is named
    let files = bundle.packages.iter().flat_map(|p| &p.files).chain([&bundle.host.file]);
    for file in files {
        let bytes = std::fs::read(out.join(&file.file)).unwrap();
        assert_eq!(bytes.len() as u64, file.bytes);
        use sha2::Digest;
        let digest: String = sha2::Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(digest, file.sha256, "{}", file.file);
    }
    for name in bundle.tokenizer.values() {
        assert!(out.join(name).is_file(), "{name}");
    }
    // and nothing else
    let known = |name: &str| {
        name == "bundle.json"
            || name == "report.json"
            || bundle.tokenizer.values().any(|n| n == name)
            || bundle.packages.iter().flat_map(|p| &p.files).chain([&bundle.host.file]).any(|f| f.file == name)
    };
    for name in contents(&out).keys() {
        assert!(known(name), "{name}");
    }

    let report = json(&out.join("report.json"));
    jsonschema::validate(&anec::convert::report::schema(), &report).unwrap();
    let tensors: Vec<_> =
        report["packages"].as_array().unwrap().iter().flat_map(|p| p["tensors"].as_array().unwrap()).collect();
    let quantized = tensors.iter().filter(|t| t["weights"] == "int8").count();
    assert_eq!((quantized, tensors.len()), (6 * 7 + 2, 6 * 11 + 4));
    for tensor in tensors {
        assert!(tensor["loss"]["cosine"].as_f64().unwrap() > 0.999, "{tensor}");
    }
}

#[test]
fn the_same_command_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    assert_eq!(convert_demo(&a, &["--jobs", "1"]).0, 0);
    assert_eq!(convert_demo(&b, &["--jobs", "7"]).0, 0);
    same(&a, &b);
}

/// Two bundles have the same files with the same bytes, apart from the report, which holds times.
fn same(a: &Path, b: &Path) {
    let [mut a, mut b] = [a, b].map(contents);
    for bundle in [&mut a, &mut b] {
        assert!(bundle.remove("report.json").is_some());
    }
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        assert!(*bytes == b[name], "{name} differs");
    }
}

#[test]
fn an_interrupted_run_goes_on_and_ends_with_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    assert_eq!(convert_demo(&whole, &[]).0, 0);
    let mut interrupted = 0;
    let mut resumed = 0;
    for delay in (0..100).step_by(4) {
        let out = folder.path().join("killed");
        let mut child = anec()
            .args(["convert", "--manifest", "demo", "--out", out.to_str().unwrap()])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        child.kill().unwrap();
        child.wait().unwrap();
        let partial = folder.path().join("killed.partial");
        if partial.is_dir() {
            assert!(!out.exists());
            interrupted += 1;
        }
        let (code, stdout, stderr) = run(&["convert", "-m", "demo", "--json", "--out", out.to_str().unwrap()]);
        assert_eq!(code, 0, "{stderr}");
        let result: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        resumed += result["report"]["run"]["resumed_packages"].as_u64().unwrap_or(0);
        assert!(!partial.exists());
        same(&whole, &out);
        std::fs::remove_dir_all(&out).unwrap();
    }
    assert!(interrupted > 0, "no run was killed in the middle");
    println!("{interrupted} runs were killed in the middle; {resumed} packages were kept");
}

#[cfg(unix)]
#[test]
fn what_an_earlier_run_finished_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, out] = ["whole", "out"].map(|name| folder.path().join(name));
    assert_eq!(convert_demo(&whole, &[]).0, 0);
    // a compiler that refuses stops a run when all else is done
    fake_xcrun(folder.path(), "[ \"$1\" = --find ]");
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let arguments = ["convert", "-m", "manifests/demo.yaml", "--out", out.to_str().unwrap(), "--json"];
    let (code, ..) = finish(anec().args(arguments).env("PATH", path).output().unwrap());
    assert_eq!(code, 5);
    assert!(!out.exists());
    let (code, stdout, stderr) = run(&arguments);
    assert_eq!(code, 0, "{stderr}");
    let result: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(result["report"]["run"]["resumed_packages"], 4);
    same(&whole, &out);
}

#[test]
fn a_bundle_is_replaced_only_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("demo");
    assert_eq!(convert_demo(&out, &[]).0, 0);
    let before = contents(&out);
    let (code, stdout, _) = convert_demo(&out, &[]);
    assert_eq!(code, 0);
    assert!(stdout.ends_with("is up to date\n"), "{stdout}");
    let (code, _, stderr) = convert_demo(&out, &["--set", "context=64"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("its manifest differs") && stderr.contains("--force"), "{stderr}");
    assert_eq!(contents(&out), before);
    let (code, _, stderr) = convert_demo(&out, &["--set", "context=64", "--force"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(Bundle::read(&out).unwrap().model.contexts, [64]);
    std::fs::remove_file(out.join("bundle.json")).unwrap();
    let (code, _, stderr) = convert_demo(&out, &["--force"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("isn't a bundle"), "{stderr}");
}

#[test]
fn fixed_lengths_make_functions_that_share_weights() {
    let folder = tempfile::tempdir().unwrap();
    let [one, several] = ["one", "several"].map(|name| folder.path().join(name));
    assert_eq!(convert_demo(&one, &["--set", "lengths.fixed=[1]"]).0, 0);
    let sets = ["--set", "lengths.fixed=[8, 1]", "--set", "context=[256, 64]"];
    let (code, _, stderr) = convert_demo(&several, &sets);
    assert_eq!(code, 0, "{stderr}");
    let [one, several] = [one, several].map(|path| Bundle::read(&path).unwrap());
    let names: Vec<_> = several.functions.iter().take(4).map(|f| f.function.as_str()).collect();
    assert_eq!(names, ["context_64_tokens_1", "context_64_tokens_8", "context_256_tokens_1", "context_256_tokens_8"]);
    assert_eq!(one.functions[0].function, "main");
    for (a, b) in one.packages.iter().zip(&several.packages) {
        // four functions add constants of shapes, not weights
        assert!(b.weight_bytes < a.weight_bytes + (1 << 16), "{}: {} {}", a.package, a.weight_bytes, b.weight_bytes);
    }
}

#[test]
fn a_source_without_a_manifest_converts_with_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let source = repository("demo/model");
    let output = anec()
        .current_dir(folder.path())
        .args(["convert", "--source", source.to_str().unwrap(), "--set", "context=128"])
        .output();
    let (code, _, stderr) = finish(output.unwrap());
    assert_eq!(code, 0, "{stderr}");
    let bundle = Bundle::read(&folder.path().join("model.anec")).unwrap();
    assert_eq!((bundle.name.as_str(), bundle.family.as_str()), ("model", "qwen3"));
}

/// What is done to a copy of a small model.
type Damage = fn(&Path);

/// Damage to a source, the exit code, and words of the error.
const BAD: &[(&str, Damage, i32, &[&str])] = &[
    ("a weight that is no number", |m| edit_first_value(m, f32::NAN), 4, &["q_proj.weight", "row 0, column 0", "NaN"]),
    ("a weight beyond fp16", |m| edit_first_value(m, 1e6), 4, &["q_proj.weight", "65504", "quant.overflow"]),
    (
        "a missing tensor",
        |m| edit_tensors(&weights(m), |t| t.retain(|(name, ..)| !name.contains("layers.1.mlp.up"))),
        4,
        &["layers.1.mlp.up_proj.weight", "missing"],
    ),
    (
        "a superfluous tensor",
        |m| {
            edit_tensors(&weights(m), |t| {
                let mut extra = t[0].clone();
                extra.0 = "model.layers.0.extra.weight".into();
                t.push(extra);
            })
        },
        4,
        &["model.layers.0.extra.weight", "no part of the model"],
    ),
    (
        "a file cut short",
        |m| {
            let bytes = std::fs::read(weights(m)).unwrap();
            std::fs::write(weights(m), &bytes[..bytes.len() - 100]).unwrap();
        },
        4,
        &["model.safetensors"],
    ),
    (
        "a file of another kind",
        |m| std::fs::write(weights(m), b"not weights at all").unwrap(),
        4,
        &["model.safetensors"],
    ),
    ("no configuration", |m| std::fs::remove_file(m.join("config.json")).unwrap(), 4, &["config.json"]),
    (
        "a configuration that contradicts the tensors",
        |m| edit_json(&m.join("config.json"), |c| c["intermediate_size"] = json!(500)),
        4,
        &["mlp", "500"],
    ),
    (
        "an unknown family",
        |m| edit_json(&m.join("config.json"), |c| c["model_type"] = json!("mamba9")),
        4,
        &["mamba9", "known"],
    ),
    (
        "an unknown key",
        |m| edit_json(&m.join("config.json"), |c| c["attention_wobble"] = json!(3)),
        4,
        &["attention_wobble"],
    ),
    (
        "a tokenizer of another model",
        |m| {
            let tokenizer = json!({"model": {"type": "BPE", "vocab": {"a": 123456}}, "added_tokens": []});
            std::fs::write(m.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        },
        4,
        &["tokenizer.json", "123456", "vocabulary"],
    ),
];

fn weights(model: &Path) -> PathBuf {
    model.join("model.safetensors")
}

/// Puts a value in the place of the first weight of a projection, which becomes f32.
fn edit_first_value(model: &Path, value: f32) {
    edit_tensors(&weights(model), |tensors| {
        let found = tensors.iter_mut().find(|(name, ..)| name.ends_with("layers.1.self_attn.q_proj.weight"));
        let (_, dtype, shape, bytes) = found.unwrap();
        let elements: usize = shape.iter().product();
        let mut values = vec![0.01f32; elements];
        values[0] = value;
        *dtype = safetensors::Dtype::F32;
        *bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    });
}

#[test]
fn bad_sources_are_named_and_leave_no_bundle() {
    for (what, damage, expected, words) in BAD {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        copy(&repository("tests/fixtures/families/llama-default"), &model);
        damage(&model);
        let out = folder.path().join("out");
        let (code, stdout, stderr) = run(&[
            "convert",
            "--source",
            model.to_str().unwrap(),
            "--out",
            out.to_str().unwrap(),
            "--set",
            "context=32",
        ]);
        assert_eq!(code, *expected, "{what}: {stderr}");
        assert!(stderr.starts_with("error: ") && stdout.is_empty(), "{what}: {stderr}");
        for word in *words {
            assert!(stderr.contains(word), "{what}: `{word}` isn't in\n{stderr}");
        }
        assert!(!stderr.contains("panicked"), "{what}: {stderr}");
        assert!(!out.exists(), "{what}");
        assert!(!folder.path().join("out.partial/bundle.json").exists(), "{what}");
    }
}

/// Arguments that are wrong, the exit code, and words of the error.
const WRONG: &[(&[&str], i32, &[&str])] = &[
    (&["--manifest", "phi4-mino"], 2, &["phi4-mino", "did you mean `phi4-mini`?"]),
    (&["--manifest", "demo", "--set", "contxt=5"], 2, &["--set contxt=5", "did you mean `context`?"]),
    (&["--manifest", "demo", "--set", "family=llama"], 2, &["llama", "qwen3"]),
    (&["--manifest", "demo", "--set", "shards.max_mb=0.1"], 2, &["layer 0", "0.1 MB", "raise `shards.max_mb`"]),
    (&["--manifest", "demo", "--set", "shards.layers=[[0, 2], [2, 5]]"], 2, &["layer 5", "6 layers"]),
    (&["--manifest", "demo", "--set", "lm_head.split=4000"], 2, &["4000 pieces", "2048 rows"]),
    (&["--source", "/nowhere/at/all"], 4, &["/nowhere/at/all", "No such file"]),
    (&["--source", "hf:"], 2, &["hf:"]),
    (&[], 2, &["no source", "--source"]),
    (&["--manifest", "demo", "--out", "Cargo.toml/bundle"], 5, &["Cargo.toml/bundle"]),
    (&["--jobs", "many"], 2, &["--jobs"]),
];

#[test]
fn wrong_commands_are_explained() {
    for (arguments, expected, words) in WRONG {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let mut all = vec!["convert"];
        all.extend(*arguments);
        if !all.contains(&"--out") {
            all.extend(["--out", out.to_str().unwrap()]);
        }
        let (code, _, stderr) = run(&all);
        assert_eq!(code, *expected, "{arguments:?}: {stderr}");
        for word in *words {
            assert!(stderr.contains(word), "{arguments:?}: `{word}` isn't in\n{stderr}");
        }
        assert!(!out.exists(), "{arguments:?}");
    }
}

/// A limit on the size of files stands for a full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_is_an_error_and_leaves_no_bundle() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let script = "trap '' XFSZ; ulimit -f 1024; exec \"$0\" \"$@\"";
    let output = std::process::Command::new("bash")
        .args(["-c", script, env!("CARGO_BIN_EXE_anec"), "convert", "--manifest", "demo", "--out"])
        .arg(&out)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    let (code, _, stderr) = finish(output.unwrap());
    assert_eq!(code, 5, "{stderr}");
    assert!(stderr.contains("File too large"), "{stderr}");
    assert!(!out.exists());
    // with room again, the run goes on
    assert_eq!(convert_demo(&out, &[]).0, 0);
    assert!(out.join("bundle.json").is_file());
}

/// `xcrun` as it behaves on a Mac, as far as compilation goes.
#[cfg(unix)]
fn fake_xcrun(folder: &Path, script: &str) {
    use std::os::unix::fs::PermissionsExt;
    let path = folder.join("xcrun");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[cfg(unix)]
#[test]
fn packages_are_compiled_where_the_compiler_is() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let with_xcrun = |arguments: &[&str]| finish(anec().args(arguments).env("PATH", &path).output().unwrap());
    let (code, _, stderr) = convert_demo(&out, &["--no-compile"]);
    assert_eq!((code, stderr.as_str()), (0, ""));

    fake_xcrun(folder.path(), "[ \"$1\" = --find ] && exit 0\necho 'error: validator: no such op' >&2; exit 1");
    let (code, _, stderr) = with_xcrun(&["compile", out.to_str().unwrap()]);
    assert_eq!(code, 5);
    assert!(stderr.contains("layers_0_3.mlpackage") && stderr.contains("no such op"), "{stderr}");
    assert!(Bundle::read(&out).unwrap().packages.iter().all(|p| p.compiled.is_none()));

    let compiles = "[ \"$1\" = --find ] && exit 0\nmkdir -p \"$4/$(basename \"$3\" .mlpackage).mlmodelc\"";
    fake_xcrun(folder.path(), compiles);
    let (code, stdout, stderr) = with_xcrun(&["compile", out.to_str().unwrap()]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("compiled 4 packages"), "{stdout}");
    for package in Bundle::read(&out).unwrap().packages {
        assert!(out.join(package.compiled.unwrap()).is_dir());
    }
    // and a conversion does it by itself
    let again = folder.path().join("again");
    let (code, _, stderr) = with_xcrun(&["convert", "--manifest", "demo", "--out", again.to_str().unwrap()]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(again.join("lm_head_1.mlmodelc").is_dir());
}

#[test]
fn where_there_is_no_compiler_it_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let arguments = ["convert", "--manifest", "demo", "--out", out.to_str().unwrap()];
    let (code, _, stderr) = finish(anec().args(arguments).env("PATH", folder.path()).output().unwrap());
    assert_eq!(code, 0);
    assert!(stderr.contains("packages are not compiled (there is no xcrun on this machine)"), "{stderr}");
    let (code, _, stderr) =
        finish(anec().args(["compile", out.to_str().unwrap()]).env("PATH", folder.path()).output().unwrap());
    assert_eq!(code, 5);
    assert!(stderr.contains("help: run `anec compile BUNDLE` on a Mac"), "{stderr}");
}
