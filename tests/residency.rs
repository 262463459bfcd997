//! Placement without a Mac: packages projected to a function and a length are sound, and plans are judged by the verb.

use crate::common::folder;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anec::base::ContentDigest;
use anec::bundle::Bundle;
use anec::bundle::TokenCount;
use anec::coreml::plan::{
    ComputePlan, ComputeUnits, Device, FunctionPlan, Machine, Operation, PackageDigest, SCHEMA_VERSION, listing_digest,
};
use anec::coreml::project;
use anec::mil::verify::verify;
use anec::mil::{Op, Program, SymbolRange, TensorType, ValueId};
use anec::package::{self, WriteOptions};
use folder::{json, repository, run};

/// Converts the demo's model with changes of its manifest.
fn convert(out: &Path, changes: &[&str]) -> Bundle {
    let mut arguments = vec!["convert", "--no-measure", "-m", "manifests/demo.yaml", "--out", out.to_str().unwrap()];
    arguments.extend(changes.iter().flat_map(|change| ["--set", change]));
    let (code, _, stderr) = run(&arguments);
    assert_eq!(code, 0, "{stderr}");
    Bundle::read(out).unwrap()
}

fn lengths(tokens: TokenCount) -> std::ops::RangeInclusive<u64> {
    match tokens {
        TokenCount::Fixed(size) => size..=size,
        TokenCount::Range(lower, upper) => lower..=upper,
    }
}

/// The constants of an op.
type Constants = Vec<(TensorType, Arc<[u8]>)>;

/// Identity of an op: operator and name, inputs and outputs, and constants.
fn parts(op: &Op) -> (&str, &str, Vec<ValueId>, &[ValueId], Constants) {
    let constants = op.constants().map(|(_, one)| (one.ty.clone(), one.bytes().unwrap())).collect();
    (&op.operator, &op.name, op.operands().collect(), &op.outputs, constants)
}

/// Writes the projection of a function, and looks at it as the package that it has become.
fn check_projection(program: &Program, function: &str, tokens: u64, path: &Path) {
    let what = format!("{}, {function}, T = {tokens}", path.display());
    let projected = project(program, function, tokens).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(verify(&projected), [], "{what}");
    package::write(&projected, path, &WriteOptions::default()).unwrap_or_else(|e| panic!("{what}: {e}"));
    let again = package::open(path).unwrap();
    assert_eq!(again.check_description(), [], "{what}");
    assert_eq!((again.program.functions.len(), again.program.default_function.as_str()), (1, "main"), "{what}");
    let (before, after) = (program.function(function).unwrap(), &again.program.functions[0]);
    // the same ops on the same values, the same lengths, another default
    assert_eq!(before.inputs, after.inputs, "{what}");
    assert_eq!(before.ops().count(), after.ops().count(), "{what}");
    for (a, b) in before.ops().zip(after.ops()) {
        assert!(parts(a) == parts(b), "{what}, {}", a.name);
    }
    for (symbol, lengths) in &after.lengths {
        assert_eq!(lengths.default_size(), tokens, "{what}");
        match (lengths, &before.lengths[symbol]) {
            (SymbolRange::Range { lower, upper, .. }, SymbolRange::Range { lower: l, upper: u, .. }) => {
                assert_eq!((lower, upper), (l, u), "{what}");
            }
            (SymbolRange::Enumerated(a), SymbolRange::Enumerated(b)) => {
                let sorted = |sizes: &[u64]| {
                    let mut sizes = sizes.to_vec();
                    sizes.sort_unstable();
                    sizes
                };
                assert_eq!(sorted(a), sorted(b), "{what}");
            }
            other => panic!("{what}: {other:?}"),
        }
    }
    // the default shapes of the description are those of this length
    for feature in &again.interfaces[0].inputs {
        let value = after.tensor_inputs().find(|value| value.name == feature.name).unwrap();
        let fixed = after.symbols().fold(value.ty.tensor().unwrap().clone(), |ty, s| ty.substitute(s, tokens));
        let expected: Vec<i64> = fixed.fixed_shape().unwrap().iter().map(|n| *n as i64).collect();
        assert_eq!(feature.shape, expected, "{what}, {}", feature.name);
    }
}

/// Runs coremltools on packages; warns if it isn't available.
fn judge(packages: &Path) {
    let Some(python) = std::env::var_os("ANEC_PYTHON") else {
        anec::base::skipped("coremltools is not asked about packages of one function: ANEC_PYTHON isn't set");
        return;
    };
    let script = repository("tests/oracle/check_package.py");
    let output = Command::new(python).arg(script).arg(packages).output().expect("ANEC_PYTHON runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(text.lines().count(), std::fs::read_dir(packages).unwrap().count(), "a verdict for each package");
}

#[test]
fn every_function_and_length_can_be_made_the_default() {
    let room = tempfile::tempdir().unwrap();
    let projections = room.path().join("projections");
    for (name, changes) in [
        ("range", &["lengths={range: [1, 3]}"][..]),
        ("fixed", &["lengths={fixed: [1, 4]}", "context=[256, 512]", "quant.granularity=per_channel"]),
    ] {
        let folder = room.path().join(name);
        let bundle = convert(&folder, changes);
        for entry in &bundle.functions {
            let package = package::open(&folder.join(&entry.package)).unwrap();
            for tokens in lengths(entry.tokens) {
                let file = format!("{name}_{}_{}_{tokens}.mlpackage", entry.package.replace('.', "_"), entry.function);
                check_projection(&package.program, &entry.function, tokens, &projections.join(file));
            }
        }
    }
    assert!(std::fs::read_dir(&projections).unwrap().count() > 20);
    judge(&projections);
}

#[test]
fn packages_of_coremltools_can_be_projected() {
    let room = tempfile::tempdir().unwrap();
    let mut several = 0;
    for fixture in ["range_fp16", "enumerated", "multifunction", "state_decoder_slice", "lut4_grouped"] {
        let package = package::open(&repository("tests/fixtures/coremltools").join(fixture).join("model.mlpackage"));
        let program = package.unwrap().program;
        for function in &program.functions {
            // lengths of one symbol; several have no number of tokens in common
            let sizes: Vec<u64> = match function.lengths.values().next() {
                None => vec![1],
                Some(lengths) => (1..=64).filter(|size| lengths.contains(*size)).collect(),
            };
            several += usize::from(sizes.len() > 1);
            for tokens in sizes.into_iter().take(4) {
                let path = room.path().join(format!("{fixture}_{}_{tokens}.mlpackage", function.name));
                check_projection(&program, &function.name, tokens, &path);
            }
        }
        let missing = project(&program, "no_such_function", 1).unwrap_err();
        assert_eq!(missing.to_string(), "function `no_such_function`: the package doesn't have it");
    }
    assert!(several >= 2, "{several}");
    judge(room.path());
}

#[test]
fn a_length_that_a_function_doesnt_take_is_refused() {
    let room = tempfile::tempdir().unwrap();
    convert(room.path(), &[]);
    let program = package::open(&room.path().join("layers_0_3.mlpackage")).unwrap().program;
    let error = project(&program, "main", 5).unwrap_err().to_string();
    assert!(error.starts_with("function `main`: T = 5 isn't among its lengths"), "{error}");
}

/// A plan in which everything is where it should be, from the bundle's programs.
fn resident(bundle: &Bundle, folder: &Path) -> ComputePlan {
    let mut functions = Vec::new();
    for entry in &bundle.functions {
        let program = package::open(&folder.join(&entry.package)).unwrap().program;
        let function = program.function(&entry.function).unwrap();
        let operation = |op: &Op| {
            let idle = op.is_const() || op.is_constexpr() || op.operator == "read_state";
            let preferred = (!idle).then_some(Device::NeuralEngine);
            Operation {
                operator: if op.is_const() { "const".into() } else { format!("ios18.{}", op.operator) },
                outputs: op.outputs.iter().map(|id| function.value(*id).name.clone()).collect(),
                preferred,
                supported: preferred.into_iter().collect(),
                cost: preferred.map(|_| 0.01),
                blocks: Vec::new(),
            }
        };
        let operations: Vec<Operation> = function.ops().map(operation).collect();
        functions.extend(lengths(entry.tokens).map(|tokens| FunctionPlan {
            package: entry.package.clone(),
            function: entry.function.clone(),
            tokens: Some(tokens),
            operations: operations.clone(),
            refused: None,
            timings: Vec::new(),
        }));
    }
    let digest = |entry: &anec::bundle::PackageEntry| {
        let prefix = format!("{}/", entry.package);
        let sha256 = |file: &str| ContentDigest::sha256_of_file(&folder.join(file)).unwrap();
        let name = |file: &str| file.strip_prefix(&prefix).unwrap().to_owned();
        let files: Vec<_> = entry.files.iter().map(|file| (name(&file.file), sha256(&file.file))).collect();
        let files = files.iter().map(|(file, sha256)| (file.as_str(), sha256.hex()));
        PackageDigest { package: entry.package.clone(), sha256: listing_digest(files) }
    };
    ComputePlan {
        schema_version: SCHEMA_VERSION,
        anec_version: "0.1.0".into(),
        bundle: bundle.name.clone(),
        date: "2026-11-20T09:30:00Z".into(),
        machine: Machine {
            model: "Mac16,8".into(),
            chip: "Apple M4 Pro".into(),
            os_version: "15.6".into(),
            os_build: "24G84".into(),
            neural_engine_cores: Some(16),
        },
        compute_units: ComputeUnits::CpuAndNeuralEngine,
        packages: bundle.packages.iter().map(digest).collect(),
        functions,
    }
}

#[test]
fn a_saved_plan_is_judged_by_the_verb() {
    let room = tempfile::tempdir().unwrap();
    let folder = room.path().join("demo.anec");
    let bundle = convert(&folder, &[]);
    let path = room.path().join("plan.json");
    let report = room.path().join("report.json");
    let words =
        ["validate", folder.to_str().unwrap(), "--plan", path.to_str().unwrap(), "--json", report.to_str().unwrap()];
    let validate = |plan: &ComputePlan| {
        std::fs::write(&path, serde_json::to_vec(plan).unwrap()).unwrap();
        run(&[&words[..], &["--residency"]].concat())
    };
    let plan = resident(&bundle, &folder);
    let (code, stdout, stderr) = validate(&plan);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(stdout.contains("plan: Apple M4 Pro (Mac16,8), macOS 15.6 (24G84), Neural Engine of 16 cores, 2026-11-20"));

    // one op of one function at one length
    let mut wrong = plan.clone();
    let function =
        wrong.functions.iter_mut().find(|f| f.package == "layers_3_6.mlpackage" && f.tokens == Some(2)).unwrap();
    let conv = function.operations.iter_mut().find(|op| op.operator == "ios18.conv").unwrap();
    conv.preferred = Some(Device::Cpu);
    let output = conv.outputs[0].clone();
    let (code, stdout, _) = validate(&wrong);
    assert_eq!(code, 1, "{stdout}");
    assert!(stdout.contains("residency: layers_3_6, T = 2: every compute op prefers the Neural Engine: 1 of "));
    let checks = json(&report)["gates"][0]["checks"].as_array().unwrap().clone();
    let failed: Vec<_> = checks.iter().filter(|check| check["verdict"] == "failed").collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0]["ops"][0]["output"], output.as_str());
    assert!(failed[0]["ops"][0]["weight_bytes"].as_u64().unwrap() > 10_000);

    // a length that is missing
    let mut partial = plan.clone();
    partial.functions.retain(|f| f.tokens != Some(3));
    let (code, stdout, _) = validate(&partial);
    assert_eq!((code, stdout.matches("the plan says nothing of it").count()), (3, 4), "{stdout}");

    // naming a plan asks for the gate, beside those that are named
    std::fs::write(&path, serde_json::to_vec(&plan).unwrap()).unwrap();
    let (code, stdout, _) = run(&[&words[..], &["--structure"]].concat());
    assert_eq!((code, stdout.contains("structure"), stdout.contains("residency")), (0, true, true), "{stdout}");

    // a plan of other bytes: the package was changed after it was taken
    std::fs::write(folder.join("layers_0_3.mlpackage/Manifest.json.orig"), "").unwrap();
    let (code, _, stderr) = validate(&plan);
    assert_eq!(code, 4, "{stderr}");
    assert!(stderr.contains("layers_0_3.mlpackage is not the package that the plan was taken of"), "{stderr}");
    assert!(stderr.contains("help: take a new one on a Mac"), "{stderr}");
}

/// The file of tools/export_plan.py for packages, on a double of coremltools' plan; `None` without coremltools.
fn exported(options: &[&str], packages: &[&Path], out: &Path) -> Option<()> {
    let Some(python) = std::env::var_os("ANEC_PYTHON") else {
        anec::base::skipped("plans of coremltools aren't exported: ANEC_PYTHON isn't set");
        return None;
    };
    let script = repository("tests/oracle/export_plan.py");
    let output = Command::new(python).arg(script).args(options).args(packages).output().expect("ANEC_PYTHON runs");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::write(out, output.stdout).unwrap();
    Some(())
}

#[test]
fn plans_of_coremltools_are_judged_for_packages_and_bundles() {
    let room = tempfile::tempdir().unwrap();
    let folder = room.path().join("demo.anec");
    let bundle = convert(&folder, &["lengths={fixed: [1, 4]}"]);
    let packages: Vec<_> = bundle.packages.iter().map(|entry| folder.join(&entry.package)).collect();
    let path = room.path().join("plan.json");
    let validate = |of: &Path, options: &[&str]| {
        let words = ["validate", of.to_str().unwrap(), "--residency", "--plan", path.to_str().unwrap()];
        run(&[&words[..], options].concat())
    };
    let all: Vec<&Path> = packages.iter().map(|package| package.as_path()).collect();
    let Some(()) = exported(&[], &all, &path) else { return };
    let (code, stdout, stderr) = validate(&folder, &[]);
    assert_eq!(code, 0, "{stdout}{stderr}");

    // a package by itself, with both functions
    let package = packages[0].as_path();
    exported(&[], &[package], &path).unwrap();
    let (code, stdout, stderr) = validate(package, &["--details"]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    for function in ["layers_0_3 tokens_1", "layers_0_3 tokens_4"] {
        assert!(stdout.contains(function), "{stdout}");
    }

    // one operator elsewhere, then without a device
    exported(&["--cpu", "softmax"], &[package], &path).unwrap();
    let (code, stdout, _) = validate(package, &[]);
    assert_eq!((code, stdout.contains("softmax on CPU")), (1, true), "{stdout}");
    exported(&["--none", "softmax"], &[package], &path).unwrap();
    let (code, stdout, _) = validate(package, &[]);
    assert_eq!((code, stdout.contains("softmax on no device; none has a cost")), (3, true), "{stdout}");

    // a plan of nothing, then one of another model
    let mut empty = json(&path);
    empty["models"][0]["plans"] = serde_json::json!([]);
    std::fs::write(&path, empty.to_string()).unwrap();
    let (code, stdout, _) = validate(package, &[]);
    assert_eq!((code, stdout.matches("the plan says nothing of it").count()), (3, 2), "{stdout}");
    exported(&[], &[packages[1].as_path()], &path).unwrap();
    let (code, _, stderr) = validate(package, &[]);
    assert_eq!(code, 4, "{stderr}");
    assert!(stderr.contains("it is of another model: layers_0_3.mlpackage has no package layers_3_6"), "{stderr}");
    empty["compute_units"] = "CPU_AND_ANE".into();
    std::fs::write(&path, empty.to_string()).unwrap();
    let (code, _, stderr) = validate(package, &[]);
    assert_eq!((code, stderr.contains("compute units `CPU_AND_ANE`, expected CPU_AND_NE")), (4, true), "{stderr}");
}

#[test]
fn plans_of_coremltools_are_judged_for_compiled_models() {
    let room = tempfile::tempdir().unwrap();
    let folder = room.path().join("demo.anec");
    let bundle = convert(&folder, &["lengths={fixed: [1]}"]);
    let package = folder.join(&bundle.packages[0].package);
    let program = package::open(&package).unwrap().program;
    let convs = program.functions[0].ops().filter(|op| op.operator == "conv").count();
    // of a compiled model, the gate reads its description
    let (compiled, path) = (room.path().join("x.mlmodelc"), room.path().join("plan.json"));
    std::fs::create_dir(&compiled).unwrap();
    let describe = |convs: usize| {
        let metadata = serde_json::json!([{"mlProgramOperationTypeHistogram": {"Ios18.conv": convs}}]);
        std::fs::write(compiled.join("metadata.json"), metadata.to_string()).unwrap();
    };
    describe(convs);
    let validate = || run(&["validate", compiled.to_str().unwrap(), "--residency", "--plan", path.to_str().unwrap()]);
    let export = |options: &[&str]| {
        let compiled = ["--compiled", compiled.to_str().unwrap()];
        exported(&[options, &compiled[..]].concat(), &[package.as_path()], &path)
    };
    let Some(()) = export(&[]) else { return };
    let (code, stdout, stderr) = validate();
    assert_eq!(code, 0, "{stdout}{stderr}");
    export(&["--cpu", "softmax"]).unwrap();
    let (code, stdout, _) = validate();
    assert_eq!((code, stdout.contains("softmax on CPU")), (1, true), "{stdout}");
    export(&["--none", "softmax"]).unwrap();
    let (code, stdout, _) = validate();
    assert_eq!((code, stdout.contains("softmax on no device; none has a cost")), (3, true), "{stdout}");
    // a plan of nothing, of fewer convolutions, of other files, and of another model
    let mut empty = json(&path);
    empty["models"][0]["plans"] = serde_json::json!([]);
    std::fs::write(&path, empty.to_string()).unwrap();
    let (code, stdout, _) = validate();
    assert_eq!((code, stdout.contains("the plan says nothing of it")), (3, true), "{stdout}");
    describe(convs + 1);
    export(&[]).unwrap();
    let (code, stdout, _) = validate();
    assert_eq!((code, stdout.contains(&format!("of the {} convs of the program", convs + 1))), (3, true), "{stdout}");
    describe(convs);
    let (code, _, stderr) = validate();
    assert!(code == 4 && stderr.contains("is not the package that the plan was taken of"), "{stderr}");
    exported(&[], &[package.as_path()], &path).unwrap();
    let (code, _, stderr) = validate();
    assert!(code == 4 && stderr.contains("it is of another model: x.mlmodelc has no package"), "{stderr}");
}

#[test]
fn options_without_effect_are_refused() {
    let room = tempfile::tempdir().unwrap();
    let folder = room.path().join("demo.anec");
    let bundle = convert(&folder, &[]);
    let package = folder.join(&bundle.packages[0].package);
    let compiled = room.path().join("x.mlmodelc");
    std::fs::create_dir(&compiled).unwrap();
    let golden = ["--golden", "demo/golden.safetensors"];
    for (of, options, problem) in [
        (&package, &golden[..], "--golden has no effect on a package"),
        (&package, &["--positions", "8"], "--max-tokens has no effect on a package"),
        (&package, &["--precision", "f16"], "--precision has no effect on a package"),
        (&package, &["--residency", "--text", "README.md"], "--text has no effect on a package"),
        (&compiled, &["--structure"], "--structure has no effect on a compiled model"),
        (&compiled, &["--forecast"], "--forecast has no effect on a compiled model"),
        (&folder, &["--structure", "--positions", "8"], "--max-tokens has no effect on the gates that run"),
        (&folder, &["--numerics", "--precision", "f16"], "--precision has no effect on the gates that run"),
    ] {
        let (code, _, stderr) = run(&[&["validate", of.to_str().unwrap()][..], options].concat());
        assert_eq!((code, stderr.contains(problem)), (2, true), "{options:?}: {stderr}");
    }
    // a compiled model that isn't one
    let (code, _, stderr) = run(&["validate", compiled.to_str().unwrap()]);
    assert!(code == 5 && stderr.contains("neither model.mil nor metadata.json describes an ML Program"), "{stderr}");
}

#[cfg(not(target_os = "macos"))]
#[test]
fn without_a_mac_placement_is_unproven_and_core_ml_is_missing() {
    let room = tempfile::tempdir().unwrap();
    let folder = room.path().join("demo.anec");
    convert(&folder, &[]);
    let bundle = folder.to_str().unwrap();
    let (code, stdout, _) = run(&["validate", bundle, "--residency"]);
    assert_eq!((code, stdout.contains("a plan that was taken there can be judged here")), (3, true), "{stdout}");
    let plan = room.path().join("plan.json");
    let golden = "demo/golden.safetensors";
    for words in [
        &["validate", bundle, "--residency", "--plan-out", plan.to_str().unwrap()][..],
        &["validate", bundle, "--parity", "--golden", golden, "--backend", "coreml"],
        &["run", bundle, "--prompt", "It", "--backend", "coreml", "--compute-units", "cpu-only"],
        &["logits", bundle, "--ids", "1", "--out", plan.to_str().unwrap(), "--backend", "coreml"],
    ] {
        let (code, _, stderr) = run(words);
        assert_eq!(code, 5, "{words:?}: {stderr}");
        assert!(
            stderr.starts_with("error: Core ML isn't here: it is part of macOS, this is linux\nhelp: "),
            "{stderr}"
        );
        assert!(!plan.exists());
    }
    let (code, _, stderr) = run(&["run", bundle, "--prompt", "It", "--decode-units", "cpu-and-gpu"]);
    assert_eq!((code, stderr.starts_with("error: --decode-units names devices of Core ML")), (2, true), "{stderr}");
}
