//! Conversions from the command line: what a bundle holds, that its bytes are the same every time, how it is compiled.

use crate::common::folder;

use std::path::Path;

use anec::bundle::Stage;
use anec::bundle::{self, Bundle};
use folder::{anec, contents, finish, json, repository, run};

/// Converts the demo model into `out`.
fn convert_demo(out: &Path, more: &[&str]) -> (i32, String, String) {
    let mut arguments =
        vec!["convert", "--no-measure", "--manifest", "manifests/demo.yaml", "--out", out.to_str().unwrap()];
    arguments.extend(more);
    run(&arguments)
}

#[test]
fn the_demo_model_becomes_a_bundle() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("demo");
    let (code, stdout, stderr) = convert_demo(&out, &[]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("layers 0 to 5"), "{stdout}");

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
        assert_eq!(anec::base::ContentDigest::of(&bytes), file.digest, "{}", file.file);
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
    // norms have no gains: they are folded into what reads them
    assert_eq!((quantized, tensors.len()), (6 * 7 + 2, 6 * 9 + 2));
    for tensor in tensors {
        assert!(tensor["loss"]["cosine"].as_f64().unwrap() > 0.999, "{tensor}");
    }
}

#[test]
fn the_same_command_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    assert_eq!(convert_demo(&a, &["--threads", "1"]).0, 0);
    assert_eq!(convert_demo(&b, &["--threads", "7"]).0, 0);
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
    assert!(stderr.contains("is not a bundle"), "{stderr}");
}

/// Codes are chosen by error feedback where rounded ones would fail the gate, the manifest leaves that open, and the
/// result is better.
#[test]
fn a_form_that_would_fail_its_gate_gets_its_codes_by_feedback() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("demo");
    let convert = |more: &[&str]| {
        let sets = ["quant.weights=int8", "calibration.tokens=1500"].iter().chain(more);
        let sets = sets.flat_map(|set| ["--set", set]);
        let fixed = ["convert", "--manifest", "manifests/demo.yaml", "--json", "--out", out.to_str().unwrap()];
        let (code, stdout, stderr) = run(&fixed.into_iter().chain(sets).collect::<Vec<_>>());
        assert_eq!(code, 0, "{stderr}");
        let result: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        let feedback = json(&out.join("bundle.json"))["manifest"]["quant"]["feedback"].clone();
        (result, feedback.as_str().map(str::to_owned), stderr)
    };
    let (result, feedback, _) = convert(&[]);
    assert_eq!((result["report"]["quality"]["missed"].is_null(), feedback), (true, None));

    // rounded 0.00033, chosen 0.00021
    let limit = "gates.parity.kl=0.00027";
    std::fs::remove_dir_all(&out).unwrap();
    let (result, feedback, stderr) = convert(&[limit]);
    assert_eq!(feedback.as_deref(), Some("gptq"), "{result:#}");
    let note = "with rounded weights the parity gate would fail (KL 0.0003, limit 0.00027)";
    assert!(stderr.contains(note) && stderr.contains("quant.feedback: none"), "{stderr}");
    assert!(result["report"]["quality"]["kl"].as_f64().unwrap() < 0.00027);
    assert!(json(&out.join("report.json"))["notes"][0].as_str().unwrap().starts_with(note));
    assert_eq!(convert(&[limit]).0["status"], "up_to_date");

    std::fs::remove_dir_all(&out).unwrap();
    let (result, feedback, stderr) = convert(&[limit, "quant.feedback=none"]);
    assert_eq!(feedback.as_deref(), Some("none"), "{result:#}");
    assert!(stderr.contains("the parity gate would fail: KL 0.0003, limit 0.00027"), "{stderr}");

    // what prevents feedback is a note
    std::fs::remove_dir_all(&out).unwrap();
    let (result, feedback, stderr) = convert(&[limit, "calibration.text=missing.txt"]);
    assert_eq!((feedback, &result["status"]), (None, &serde_json::json!("written")));
    assert!(stderr.contains("`quant.feedback: gptq` was tried") && stderr.contains("missing.txt"), "{stderr}");

    // chosen codes would fail, too: the roles that lose most stay in fp16
    std::fs::remove_dir_all(&out).unwrap();
    let limit = "gates.parity.kl=0.0001";
    let (result, feedback, stderr) = convert(&[limit]);
    assert_eq!(feedback.as_deref(), Some("gptq"), "{result:#}");
    let note = "with all roles in int8 the parity gate would fail (KL 0.0002, limit 0.0001), so `";
    assert!(stderr.contains(note) && stderr.contains("in fp16, which lose most"), "{stderr}");
    let quality = &result["report"]["quality"];
    assert!(quality["kl"].as_f64().unwrap() <= 0.0001 && quality["missed"].is_null(), "{quality}");
    let bundle = json(&out.join("bundle.json"));
    let roles = bundle["manifest"]["quant"]["overrides"].as_object().unwrap();
    assert!((1..5).contains(&roles.len()) && roles.values().all(|role| role["weights"] == "none"), "{roles:?}");
    let tensors =
        || result["report"]["packages"].as_array().unwrap().iter().flat_map(|p| p["tensors"].as_array().unwrap());
    let of_role = |tensor: &serde_json::Value| {
        let role = tensor["role"].as_str().unwrap();
        roles.contains_key(role) || role.starts_with("attention_") && roles.contains_key("attention_qkv")
    };
    assert!(
        tensors().any(|tensor| tensor["weights"] == "int8" && !roles.contains_key(tensor["role"].as_str().unwrap()))
    );
    assert!(tensors().filter(|tensor| tensor["weights"] == "none").any(of_role));
    assert_eq!(convert(&[limit]).0["status"], "up_to_date");

    // a calibration text of one token is of no use: the rounded form is kept
    std::fs::remove_dir_all(&out).unwrap();
    let (result, feedback, stderr) = convert(&["quant.weights=palette4", "calibration.tokens=1"]);
    assert_eq!(feedback, None, "{result:#}");
    assert!(stderr.contains("the parity gate would fail: KL 0.03"), "{stderr}");
}

#[test]
fn a_form_that_would_fail_its_gate_is_not_run_from_the_cache_in_silence() {
    let folder = tempfile::tempdir().unwrap();
    let said = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let notes = said.clone();
    let progress = anec::Progress::new(move |event| {
        if let anec::ProgressEvent::Note(line) = event {
            notes.lock().unwrap().push(line.to_owned());
        }
    });
    let sets = ["quant.weights=int8", "calibration.tokens=1500", "gates.parity.kl=0.00027"];
    let text = std::fs::read_to_string(repository("src/manifest/manifests/demo.yaml")).unwrap();
    let manifest = anec::Manifest::from_yaml(&text, "demo", &sets.map(str::to_owned)).unwrap();
    let manifest = anec::Manifest { source: Some(repository("demo/model").display().to_string()), ..manifest };
    let cache = anec::BundleCache::new(folder.path());
    let convert = || cache.converted("demo", "1", manifest.clone(), "its manifest", &progress).unwrap();
    let bundle = convert();
    assert_eq!(json(&bundle.join("bundle.json"))["manifest"]["quant"]["feedback"], "gptq");
    let notes = || std::mem::take(&mut *said.lock().unwrap()).join("\n");
    let (first, again) = (notes(), (convert(), notes()));
    assert!(first.contains("with rounded weights the parity gate would fail (KL 0.0003, limit 0.00027)"), "{first}");
    assert_eq!(again, (bundle, String::new()), "it is converted once");
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

/// Linux says how much memory a process had at most, and takes back the pages of a mapped file that it needs no more.
#[cfg(target_os = "linux")]
mod memory {
    use std::io::{Seek, Write};
    use std::path::Path;

    use anec::source::SourceDtype;
    use anec::source::gguf::GgufValue;
    use anec::source::gguf::write::Writer;

    use super::folder::{json, run};

    /// A file in which zeros are holes, which take neither time nor room.
    struct Sparse(std::fs::File);

    impl Write for Sparse {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if bytes.iter().all(|byte| *byte == 0) {
                self.0.seek_relative(bytes.len() as i64)?;
                return Ok(bytes.len());
            }
            self.0.write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            let length = self.0.stream_position()?;
            self.0.set_len(length)
        }
    }

    #[test]
    fn memory_is_bounded_by_the_largest_tensor() {
        let (hidden, width, layers, vocab) = (1024, 4096, 8, 256);
        let mut writer = Writer::new();
        writer.key("general.architecture", GgufValue::String("llama".into()));
        for (key, value) in [
            ("embedding_length", hidden as u32),
            ("block_count", layers),
            ("feed_forward_length", width as u32),
            ("attention.head_count", 8),
            ("attention.head_count_kv", 8),
            ("rope.dimension_count", 128),
            ("context_length", 2048),
        ] {
            writer.key(&format!("llama.{key}"), GgufValue::U32(value));
        }
        writer.key("llama.attention.layer_norm_rms_epsilon", GgufValue::F32(1e-5));
        writer.tensor("token_embd.weight", SourceDtype::F32, &[vocab, hidden]);
        writer.tensor("output_norm.weight", SourceDtype::F32, &[hidden]);
        for layer in 0..layers {
            let mut tensor = |name: &str, shape: &[u64]| {
                writer.tensor(&format!("blk.{layer}.{name}.weight"), SourceDtype::F32, shape);
            };
            for name in ["attn_norm", "ffn_norm"] {
                tensor(name, &[hidden]);
            }
            for name in ["attn_q", "attn_k", "attn_v", "attn_output"] {
                tensor(name, &[hidden, hidden]);
            }
            for name in ["ffn_gate", "ffn_up"] {
                tensor(name, &[width, hidden]);
            }
            tensor("ffn_down", &[hidden, width]);
        }
        let room = tempfile::tempdir().unwrap();
        let (source, out) = (room.path().join("model.gguf"), room.path().join("out"));
        let lengths: Vec<u64> = writer.tensors().map(|(.., shape)| 4 * shape.iter().product::<u64>()).collect();
        let zeros = vec![0; 1 << 20];
        let file = Sparse(std::fs::File::create(&source).unwrap());
        let data = |index: usize, out: &mut dyn Write| {
            let mut left = lengths[index] as usize;
            while left > 0 {
                let step = left.min(zeros.len());
                out.write_all(&zeros[..step])?;
                left -= step;
            }
            Ok(())
        };
        writer.write(std::io::BufWriter::new(file), data).unwrap();

        for granularity in ["per_tensor", "per_channel"] {
            let set = format!("quant.granularity={granularity}");
            let [source, out] = [&source, &out].map(|path| path.to_str().unwrap());
            let (code, _, stderr) =
                run(&["convert", "--no-measure", "--source", source, "--out", out, "--set", &set, "--force"]);
            assert_eq!(code, 0, "{stderr}");
            let largest = width * hidden;
            let limit = largest * 4 * 3 / 2 + 300_000_000;
            // otherwise a conversion that kept all of its source would pass
            assert!(lengths.iter().sum::<u64>() > limit + 100_000_000);
            let peak = json(Path::new(out).join("report.json").as_path())["run"]["peak_memory_bytes"].as_u64().unwrap();
            assert!(peak <= limit, "{granularity}: {peak} bytes, at most {limit}");
        }
    }
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
    assert!(code == 0 && !stderr.contains("compile"), "{stderr}");

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
    assert_eq!(code, 0, "{stderr}");
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

/// A model by its name, its folder, its file and its manifest's file; a folder of the manifest's name doesn't hide it.
#[test]
fn a_model_is_named_by_its_argument() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("demo")).unwrap();
    let manifest = folder.path().join("mine.yaml");
    let model = repository("demo/model");
    std::fs::write(&manifest, format!("source: {}\ncontext: 64\n", model.display())).unwrap();
    let plan = |arguments: &[&str]| {
        finish(anec().current_dir(&folder).args(["plan", "--json"]).args(arguments).output().unwrap())
    };
    for (model, context) in [
        ("demo", 512),
        (model.to_str().unwrap(), 2048),
        (model.join("model.safetensors").to_str().unwrap(), 2048),
        ("mine.yaml", 64),
    ] {
        let (code, stdout, stderr) = plan(&[model]);
        assert_eq!(code, 0, "{model}: {stderr}");
        let found: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(found["contexts"], serde_json::json!([context]), "{model}");
    }
    for more in [["--source", "x"], ["--manifest", "demo"]] {
        let (code, _, stderr) = plan(&[&["demo"][..], &more].concat());
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains("cannot be used with"), "{stderr}");
    }
    // running it, too
    let cache = folder.path().join("cache");
    let run = anec()
        .current_dir(&folder)
        .env("ANEC_CACHE", &cache)
        .args(["run", "demo", "--prompt", "Once", "--max-tokens", "2"])
        .output()
        .unwrap();
    assert_eq!(run.status.code(), Some(0), "{}", String::from_utf8_lossy(&run.stderr));
}
