//! Packages against coremltools: what it made is read and written again, what we make it can load.
//!
//! Tests that need coremltools run `tests/oracle/check_package.py` with the Python that `ANEC_PYTHON` names.

use crate::common::coremltools;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anec::base::{Fault, Result};
use anec::mil::Data;
use anec::mil::{
    Constant, Content, DataType, Dim, FunctionBuilder, Opset, Program, SymbolRange, TensorType, ValueType,
};
use anec::package::blob::WeightPlan;
use anec::package::{self, Package, PackageError, PackageMetadata, WriteOptions};
use coreml_proto::{Message, Model, mil_spec, model};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Packages that coremltools made of small torch modules and of single ops.
fn fixtures() -> Vec<PathBuf> {
    let folder = repository("tests/fixtures/coremltools");
    let mut out: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().join("model.mlpackage"))
        .filter(|path| path.is_dir())
        .collect();
    out.sort();
    assert!(out.len() > 40, "{} fixtures", out.len());
    out
}

fn name(fixture: &Path) -> String {
    fixture.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned()
}

fn message(package: &Path) -> Model {
    Model::decode(fs::read(package.join("Data/com.apple.CoreML/model.mlmodel")).unwrap().as_slice()).unwrap()
}

fn options(package: &Package) -> WriteOptions<'static> {
    WriteOptions::new(package.metadata.clone())
}

/// Every value that is in a weight file, by owner.
fn blobs(program: &mut mil_spec::Program) -> BTreeMap<String, &mut mil_spec::value::BlobFileValue> {
    fn of_block<'a>(
        at: &str,
        block: &'a mut mil_spec::Block,
        out: &mut BTreeMap<String, &'a mut mil_spec::value::BlobFileValue>,
    ) {
        for (index, op) in block.operations.iter_mut().enumerate() {
            let at = format!("{at}/{index}");
            let bound = op.inputs.iter_mut().flat_map(|(p, a)| a.arguments.iter_mut().map(move |b| (p, b)));
            let bound = bound.filter_map(|(parameter, binding)| match &mut binding.binding {
                Some(mil_spec::argument::binding::Binding::Value(value)) => Some((parameter, value)),
                _ => None,
            });
            for (parameter, value) in op.attributes.iter_mut().chain(bound) {
                if let Some(mil_spec::value::Value::BlobFileValue(blob)) = &mut value.value {
                    out.insert(format!("{at}/{parameter}"), blob);
                }
            }
            for inner in &mut op.blocks {
                of_block(&at, inner, out);
            }
        }
    }
    let mut out = BTreeMap::new();
    for (name, function) in &mut program.functions {
        for block in function.block_specializations.values_mut() {
            of_block(name, block, &mut out);
        }
    }
    out
}

#[test]
fn coremltools_packages_are_written_again_as_coremltools_would() {
    let room = tempfile::tempdir().unwrap();
    for fixture in fixtures() {
        let name = name(&fixture);
        let package = package::open(&fixture).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(package.check_description(), [], "{name}");
        let inventory = package.inventory();
        assert!(inventory.functions.iter().all(|f| !f.ops.is_empty()), "{name}");

        let target = room.path().join(format!("{name}.mlpackage"));
        let written =
            package::write(&package.program, &target, &options(&package)).unwrap_or_else(|e| panic!("{name}: {e}"));
        // coremltools writes equal constants of one function several times, we once
        let theirs: u64 = package.weights.iter().flat_map(|w| w.records().unwrap()).map(|r| r.length).sum();
        assert!(written.weight_bytes <= theirs, "{name}: {} of {theirs}", written.weight_bytes);

        // the same message, except for the producer, our note about symbols, and the order of the weight file
        let (mut theirs, mut ours) = (message(&fixture), message(&target));
        for model in [&mut theirs, &mut ours] {
            if let Some(model::Type::MlProgram(program)) = &mut model.r#type {
                program.attributes.clear();
            }
            if let Some(metadata) = model.description.as_mut().and_then(|d| d.metadata.as_mut()) {
                metadata.user_defined.retain(|key, _| !key.starts_with("anec.symbols."));
            }
        }
        let both = (&mut theirs.r#type, &mut ours.r#type);
        let (Some(model::Type::MlProgram(a)), Some(model::Type::MlProgram(b))) = both else { panic!("{name}") };
        let (their_blobs, our_blobs) = (blobs(a), blobs(b));
        assert_eq!(their_blobs.keys().collect::<Vec<_>>(), our_blobs.keys().collect::<Vec<_>>(), "{name}");
        for (theirs, ours) in their_blobs.into_values().zip(our_blobs.into_values()) {
            theirs.offset = ours.offset;
        }
        assert_eq!(theirs.specification_version, ours.specification_version, "{name}");
        assert_eq!(theirs.description, ours.description, "{name}");
        assert!(theirs == ours, "{name}: the program differs");

        // the constants are the same
        let again = package::open(&target).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(again.program.default_function, package.program.default_function);
        for (a, b) in package.program.functions.iter().zip(&again.program.functions) {
            assert_eq!(a.lengths, b.lengths, "{name}");
            assert_eq!(a.inputs, b.inputs, "{name}");
            for (a, b) in a.ops().zip(b.ops()) {
                assert_eq!(constants(a), constants(b), "{name}, {}", a.name);
            }
        }
    }
}

fn constants(op: &anec::mil::Op) -> Vec<(TensorType, Arc<[u8]>)> {
    op.constants().map(|(_, constant)| (constant.ty.clone(), constant.bytes().unwrap())).collect()
}

#[test]
fn weight_files_are_laid_out_as_coremltools_does() {
    use anec::mil::codec::BlobSink;
    let room = tempfile::tempdir().unwrap();
    let mut compared = 0;
    for fixture in fixtures() {
        let package = package::open(&fixture).unwrap();
        for file in &package.weights {
            let mut plan = WeightPlan::new();
            let records = file.records().unwrap();
            for record in &records {
                let start = record.data as usize;
                let bytes = fs::read(file.path()).unwrap()[start..start + record.length as usize].to_vec();
                let elements = (record.length * 8 - record.padding_bits) / record.dtype.bits();
                let constant = Constant::content(TensorType::new(record.dtype, [elements]), Arc::new(Bytes(bytes)));
                assert_eq!(plan.place(&constant, "blob").unwrap().offset, record.offset);
            }
            let path = room.path().join(name(&fixture));
            plan.write(&path, &|_| {}).unwrap();
            assert!(fs::read(&path).unwrap() == fs::read(file.path()).unwrap(), "{}", file.path().display());
            compared += records.len();
        }
    }
    assert!(compared > 100, "{compared} blobs");
}

struct Bytes(Vec<u8>);

impl Content for Bytes {
    fn length(&self) -> u64 {
        self.0.len() as u64
    }
    fn granule(&self) -> u64 {
        1
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.0[offset as usize..offset as usize + out.len()]);
        Ok(())
    }
}

/// A function with what our shards have: a flexible length, a state, int8 weights, and a large and a small constant.
fn shard(name: &str, lengths: Option<SymbolRange>, weight: &Arc<dyn Content>) -> anec::mil::Function {
    let mut b = FunctionBuilder::new(name, Opset::CoreMl8);
    let t = match lengths {
        Some(lengths) => Dim::symbol(&b.symbol("T", lengths)),
        None => Dim::Fixed(8),
    };
    let fp16 = |shape: Vec<Dim>| TensorType::new(DataType::Fp16, shape);
    let hidden = b.input("hidden", fp16(vec![1.into(), 32.into(), t, 1.into()]));
    let cache = b.state("k_cache", fp16(vec![1.into(), 32.into(), 1.into(), 1.into()]));
    let data = Constant::content(TensorType::new(DataType::Int8, [32u64, 32, 1, 1]), weight.clone());
    let scale = Constant::fp16_tensor(&[32, 1, 1, 1], &[0.125; 32]);
    let weight = b.op("constexpr_blockwise_shift_scale", "weight", [("data", data), ("scale", scale)]);
    let y = b.conv("projection", hidden, weight, None);
    let read = b.read_state(cache);
    let sum = b.add(y, read);
    let peak = b.reduce_max(sum, &[2], true);
    b.write_state(cache, peak);
    let result = b.mul(sum, Constant::fp16(0.5));
    b.output("hidden_out", result);
    b.finish().unwrap()
}

fn weight() -> Arc<dyn Content> {
    Arc::new(Bytes((0..1024u32).map(|i| ((i * 37) >> 2) as u8).collect()))
}

/// The forms in which our packages come.
fn forms() -> Vec<(&'static str, Program)> {
    let range = SymbolRange::Range { lower: 1, upper: Some(4), default: 1 };
    let renamed = Program { default_function: "first".into(), functions: vec![shard("first", None, &weight())] };
    let shared = weight();
    let both = vec![
        shard("prefill", Some(SymbolRange::Enumerated(vec![64, 16])), &shared),
        shard("generate", Some(SymbolRange::Enumerated(vec![1])), &shared),
    ];
    vec![
        ("range", Program::single(shard("main", Some(range), &weight()))),
        (
            "unbounded",
            Program::single(shard("main", Some(SymbolRange::Range { lower: 1, upper: None, default: 2 }), &weight())),
        ),
        ("enumerated", Program::single(shard("main", Some(SymbolRange::Enumerated(vec![4, 1, 2])), &weight()))),
        ("fixed", Program::single(shard("main", None, &weight()))),
        ("renamed", renamed),
        ("functions", Program { functions: both, default_function: "prefill".into() }),
    ]
}

#[test]
fn what_is_written_is_read_back() {
    let room = tempfile::tempdir().unwrap();
    let metadata = PackageMetadata {
        short_description: "A shard.".into(),
        author: "anec".into(),
        license: "MIT".into(),
        version: "1.0".into(),
        user_defined: BTreeMap::from([("anec.version".into(), "0.1.0".into())]),
    };
    for (form, program) in forms() {
        let path = room.path().join(format!("{form}.mlpackage"));
        let options = WriteOptions::new(metadata.clone());
        let written = package::write(&program, &path, &options).unwrap_or_else(|e| panic!("{form}: {e}"));
        let package = package::open(&path).unwrap();
        assert_eq!(package.metadata, metadata, "{form}");
        assert_eq!(package.specification_version, 9);
        assert_eq!(package.check_description(), [], "{form}");
        assert_eq!(package.program.default_function, program.default_function);
        let files: Vec<(&str, u64)> = package.files.iter().map(|f| (f.path.as_str(), f.bytes)).collect();
        assert_eq!(files, written.files.iter().map(|f| (f.path.as_str(), f.bytes)).collect::<Vec<_>>());
        for (read, made) in package.program.functions.iter().zip(&program.functions) {
            assert_eq!((&read.name, &read.lengths, &read.inputs), (&made.name, &made.lengths, &made.inputs), "{form}");
            let types = |f: &anec::mil::Function| -> Vec<ValueType> {
                f.inputs.iter().map(|id| f.value(*id).ty.clone()).collect()
            };
            assert_eq!(types(read), types(made), "{form}");
            // with the lengths known again, every type follows as it was
            let inferred = anec::mil::verify::infer_types(read).unwrap();
            let all = |f: &anec::mil::Function| -> Vec<(String, ValueType)> {
                f.values.iter().map(|v| (v.name.clone(), v.ty.clone())).collect()
            };
            assert_eq!(all(&inferred), all(made), "{form}");
        }
    }
    // two functions with one weight: it is in the file once
    let functions = package::open(&room.path().join("functions.mlpackage")).unwrap();
    assert_eq!(functions.weights[0].records().unwrap().len(), 2);
    let inventory = functions.inventory();
    assert!(inventory.weight_bytes >= 1024 + 64 && inventory.weight_bytes < 2048, "{}", inventory.weight_bytes);
    assert_eq!(inventory.functions[0].state_bytes, 64);
    assert_eq!(inventory.functions[0].ops["write_state"], 1);
    assert_eq!(inventory.functions[0].inputs, ["hidden: tensor<fp16, [1, 32, T, 1]>"]);
    serde_json::to_string(&inventory).unwrap();
}

#[test]
fn the_same_program_is_the_same_bytes() {
    let room = tempfile::tempdir().unwrap();
    let write = |path: &str, threads: usize, program: &Program| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| package::write(program, &room.path().join(path), &WriteOptions::default())).unwrap()
    };
    for (form, program) in forms() {
        let a = write(&format!("a/{form}.mlpackage"), 1, &program);
        let b = write(&format!("b/{form}.mlpackage"), 4, &program);
        assert_eq!(a.files, b.files);
        for file in &a.files {
            let bytes = fs::read(a.path.join(&file.path)).unwrap();
            assert!(bytes == fs::read(b.path.join(&file.path)).unwrap(), "{form}: {}", file.path);
            let digest = anec::base::ContentDigest::of(&bytes);
            assert_eq!((bytes.len() as u64, &digest), (file.bytes, &file.digest));
        }
        // reading and writing again changes nothing either: the program from the file is the program
        let read = package::open(&a.path).unwrap();
        let c =
            package::write(&read.program, &room.path().join(format!("c/{form}.mlpackage")), &options(&read)).unwrap();
        assert_eq!(a.files, c.files, "{form}");
    }
}

#[test]
fn manifests_hold_what_coremltools_manifests_hold() {
    let room = tempfile::tempdir().unwrap();
    let (_, program) = &forms()[0];
    let path = room.path().join("m.mlpackage");
    package::write(program, &path, &WriteOptions::default()).unwrap();
    let ours: serde_json::Value = serde_json::from_slice(&fs::read(path.join("Manifest.json")).unwrap()).unwrap();
    let fixture = &fixtures()[0];
    let theirs: serde_json::Value = serde_json::from_slice(&fs::read(fixture.join("Manifest.json")).unwrap()).unwrap();
    let by_path = |manifest: &serde_json::Value| -> BTreeMap<String, (String, bool)> {
        let root = manifest["rootModelIdentifier"].as_str().unwrap();
        let entries = manifest["itemInfoEntries"].as_object().unwrap().iter();
        let text = |(id, item): (&String, &serde_json::Value)| {
            let path = item["path"].as_str().unwrap().to_owned();
            (path, (item.as_object().unwrap().values().map(|v| v.as_str().unwrap()).collect(), id == root))
        };
        entries.map(text).collect()
    };
    assert_eq!(by_path(&ours).keys().collect::<Vec<_>>(), by_path(&theirs).keys().collect::<Vec<_>>());
    for (path, (text, is_root)) in by_path(&ours) {
        let (their_text, their_root) = &by_path(&theirs)[&path];
        let sorted = |text: &str| {
            let mut letters: Vec<char> = text.chars().collect();
            letters.sort_unstable();
            letters
        };
        assert_eq!(sorted(&text), sorted(their_text));
        assert_eq!(is_root, *their_root);
    }
    assert_eq!(ours["fileFormatVersion"], theirs["fileFormatVersion"]);
}

/// Errors of coremltools about packages, and warnings if `strict`.
fn complaints(packages: &Path, strict: bool) -> String {
    let Some(python) = coremltools::python() else { return String::new() };
    coremltools::judge(&python, packages).iter().map(|verdict| verdict.complaints(strict)).collect()
}

#[test]
fn coremltools_accepts_our_packages() {
    let room = tempfile::tempdir().unwrap();
    for (form, program) in forms() {
        let path = room.path().join(format!("{form}.mlpackage"));
        package::write(&program, &path, &WriteOptions::default()).unwrap();
    }
    assert_eq!(complaints(room.path(), true), "");
}

#[test]
fn coremltools_accepts_what_we_make_of_its_packages() {
    let room = tempfile::tempdir().unwrap();
    for fixture in fixtures() {
        let package = package::open(&fixture).unwrap();
        let path = room.path().join(format!("{}.mlpackage", name(&fixture)));
        package::write(&package.program, &path, &options(&package)).unwrap();
    }
    assert_eq!(complaints(room.path(), false), "");
}

#[test]
fn other_models_are_named() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("m.mlmodel");
    let open = |model: &Model| {
        fs::write(&path, model.encode_to_vec()).unwrap();
        package::open(&path).unwrap_err()
    };
    let mut model = Model { specification_version: 4, ..Default::default() };
    assert!(open(&model).to_string().ends_with("m.mlmodel: no Core ML model: it has no kind"));
    // a description that is longer than the file, and one that is a number
    for (bytes, expected) in [
        (&[0x12, 0x7f, 0x0a][..], "the message at Model.description: it is cut off"),
        (&[0x10, 0x01], "the message at Model.description: its bytes are of another type"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = package::open(&path).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{error}");
    }
    for (kind, expected) in [
        (model::Type::NeuralNetwork(Default::default()), "neuralNetwork"),
        (model::Type::GlmClassifier(Default::default()), "glmClassifier"),
        (model::Type::KNearestNeighborsClassifier(Default::default()), "kNearestNeighborsClassifier"),
        (model::Type::WordTagger(Default::default()), "wordTagger"),
        (
            model::Type::Pipeline(coreml_proto::Pipeline { models: vec![Model::default()], names: vec!["x".into()] }),
            "pipeline",
        ),
    ] {
        model.r#type = Some(kind);
        let error = open(&model);
        assert!(error.to_string().ends_with(&format!("not an ML Program: it is a {expected}")), "{error}");
        assert_eq!((error.fault(), error.help().is_some()), (Fault::Source, true));
    }
    // an ML Program in a file of its own has its weights beside it
    let fixture = repository("tests/fixtures/coremltools/mlp_fp16/model.mlpackage/Data/com.apple.CoreML/model.mlmodel");
    assert_eq!(package::open(&fixture).unwrap().weights.len(), 1);
}

#[test]
fn broken_packages_are_named_and_never_panic() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("m.mlpackage");
    let (_, program) = &forms()[0];
    package::write(program, &path, &WriteOptions::default()).unwrap();
    let open = || package::open(&path).map(drop).map_err(|e| e.to_string());
    open().unwrap();

    let manifest = path.join("Manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    for (damaged, expected) in [
        (String::new(), "no manifest"),
        ("[]".into(), "no manifest"),
        (text.replace("1.0.0", "2.0.0"), "fileFormatVersion `2.0.0`, expected 1.0.0"),
        (text.replace("com.apple.CoreML/model.mlmodel", "../../x"), "leads out of the package"),
        (text.replace("com.apple.CoreML/model.mlmodel", "/etc/passwd"), "leads out of the package"),
        (text.replace("com.apple.CoreML/model.mlmodel", "gone"), "gone: can't be read"),
        (text.replace("rootModelIdentifier\": \"", "rootModelIdentifier\": \"x"), "names no item"),
        (" ".repeat(2 << 20), "2097152 bytes are no manifest"),
    ] {
        fs::write(&manifest, damaged).unwrap();
        let found = open().unwrap_err();
        assert!(found.contains(expected), "{found} should say {expected}");
    }
    fs::remove_file(&manifest).unwrap();
    assert!(open().unwrap_err().contains("Manifest.json: can't be read"));
    fs::write(&manifest, &text).unwrap();

    let weights = path.join("Data/com.apple.CoreML/weights/weight.bin");
    let bytes = fs::read(&weights).unwrap();
    fs::remove_file(&weights).unwrap();
    assert!(open().unwrap_err().contains("weight.bin: can't be read"));
    for cut in (0..bytes.len()).step_by(61) {
        fs::write(&weights, &bytes[..cut]).unwrap();
        assert!(open().is_err(), "cut at {cut}");
    }
    fs::write(&weights, &bytes).unwrap();

    // references that lead elsewhere
    let model_path = path.join("Data/com.apple.CoreML/model.mlmodel");
    let good = fs::read(&model_path).unwrap();
    for (file, expected) in [
        ("@model_path/../../../x", "names no weight file below the model's folder"),
        ("/etc/passwd", "names no weight file below the model's folder"),
        ("@model_path/", "names no weight file below the model's folder"),
        ("@model_path/model.mlmodel", "weight file of version"),
    ] {
        let mut model = Model::decode(good.as_slice()).unwrap();
        let Some(model::Type::MlProgram(program)) = &mut model.r#type else { panic!() };
        blobs(program).into_values().for_each(|blob| blob.file_name = file.into());
        fs::write(&model_path, model.encode_to_vec()).unwrap();
        let found = open().unwrap_err();
        assert!(found.contains(expected), "{found} should say {expected}");
    }
    // offsets of other blobs and of none
    for shift in [-64i64, 64, 1, 1 << 40] {
        let mut model = Model::decode(good.as_slice()).unwrap();
        let Some(model::Type::MlProgram(program)) = &mut model.r#type else { panic!() };
        for blob in blobs(program).into_values() {
            blob.offset = blob.offset.wrapping_add_signed(shift);
        }
        fs::write(&model_path, model.encode_to_vec()).unwrap();
        let found = open().unwrap_err();
        assert!(found.contains("weight.bin, blob at") && found.contains("op `weight`"), "{found}");
    }
    for cut in 0..good.len() {
        fs::write(&model_path, &good[..cut]).unwrap();
        let _ = open();
    }
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let mut refused = 0;
    for _ in 0..4000 {
        let mut damaged = good.clone();
        for _ in 0..1 + random(4) {
            let at = random(damaged.len());
            match random(3) {
                0 => damaged[at] = random(256) as u8,
                1 => drop(damaged.remove(at)),
                _ => damaged.insert(at, random(256) as u8),
            }
        }
        fs::write(&model_path, &damaged).unwrap();
        refused += usize::from(open().is_err());
    }
    assert!(refused > 1000, "{refused} of 4000 damaged models are refused");
}

#[test]
fn a_program_that_no_package_can_hold_is_refused_and_leaves_nothing() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("m.mlpackage");
    let refuse = |program: &Program| {
        let error = package::write(program, &path, &WriteOptions::default()).unwrap_err();
        assert_eq!(fs::read_dir(room.path()).unwrap().count(), 0, "nothing is left behind");
        error
    };
    let (_, good) = forms().swap_remove(5);
    let mut mixed = good.clone();
    mixed.functions[1].opset = Opset::CoreMl9;
    assert!(refuse(&mixed).to_string().contains("expected one opset"));
    let mut nameless = good.clone();
    nameless.default_function = "main".into();
    assert!(refuse(&nameless).to_string().contains("the default function `main` doesn't exist"));
    let mut old = good.clone();
    old.functions.iter_mut().for_each(|f| f.opset = Opset::CoreMl7);
    assert!(refuse(&old).to_string().contains("before iOS18 there is one function"));
    assert!(refuse(&Program { functions: vec![], ..good.clone() }).to_string().contains("there are no functions"));

    struct Broken;
    impl Content for Broken {
        fn length(&self) -> u64 {
            1024
        }
        fn granule(&self) -> u64 {
            1
        }
        fn prepare(&self) -> Result<()> {
            Err(PackageError::Program { problem: "row 7 holds NaN".into() }.into())
        }
        fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
            unreachable!("it is never ready")
        }
    }
    let broken: Arc<dyn Content> = Arc::new(Broken);
    let error = refuse(&Program::single(shard("main", None, &broken)));
    assert_eq!(error.to_string(), "op `weight`: program: row 7 holds NaN");

    struct Huge;
    impl Content for Huge {
        fn length(&self) -> u64 {
            1 << 54
        }
        fn granule(&self) -> u64 {
            1
        }
        fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
            unreachable!("there is no room for it")
        }
    }
    let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
    let x = b.input("x", TensorType::new(DataType::Fp16, [1u64]));
    let huge = b.constant("w", Constant::content(TensorType::new(DataType::Int8, [1u64 << 54]), Arc::new(Huge)));
    let _ = huge;
    b.output("y", x);
    let error = refuse(&Program::single(b.finish().unwrap()));
    if cfg!(unix) {
        assert_eq!(error.fault(), Fault::Platform);
        assert!(error.to_string().contains("18014398509547520 bytes are needed"), "{error}");
        assert_eq!(error.help().as_deref(), Some("free some space or write to another disk"));
    }
    let wrong = package::write(&good, &room.path().join("m.zip"), &WriteOptions::default()).unwrap_err();
    assert_eq!(wrong.fault(), Fault::Usage);
}

#[test]
fn what_is_there_is_replaced_only_when_asked() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("m.mlpackage");
    let forms = forms();
    package::write(&forms[0].1, &path, &WriteOptions::default()).unwrap();
    let before = fs::read(path.join("Manifest.json")).unwrap();
    let error = package::write(&forms[1].1, &path, &WriteOptions::default()).unwrap_err();
    assert_eq!(error.fault(), Fault::Usage);
    assert_eq!(fs::read(path.join("Manifest.json")).unwrap(), before);
    package::write(&forms[1].1, &path, &WriteOptions::default().replacing(true)).unwrap();
    assert_ne!(fs::read(path.join("Manifest.json")).unwrap(), before);
    assert_eq!(fs::read_dir(room.path()).unwrap().count(), 1);
}

/// Weights that take their time, so that there is a moment to be killed in.
struct Slow;

impl Content for Slow {
    fn length(&self) -> u64 {
        1024
    }
    fn granule(&self) -> u64 {
        1024
    }
    fn read(&self, _: u64, out: &mut [u8]) -> Result<()> {
        std::thread::sleep(std::time::Duration::from_secs(60));
        out.fill(0);
        Ok(())
    }
}

#[test]
fn a_killed_writer_leaves_nothing_that_looks_like_a_package() {
    const FOLDER: &str = "ANEC_TEST_KILLED_WRITER";
    if let Some(folder) = std::env::var_os(FOLDER) {
        // this is the process that will be killed
        let slow: Arc<dyn Content> = Arc::new(Slow);
        let path = Path::new(&folder).join("m.mlpackage");
        let _ = package::write(&Program::single(shard("main", None, &slow)), &path, &WriteOptions::default());
        return;
    }
    let room = tempfile::tempdir().unwrap();
    let mut writer = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "package::a_killed_writer_leaves_nothing_that_looks_like_a_package"])
        .env(FOLDER, room.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let names = || -> Vec<String> {
        let entries = fs::read_dir(room.path()).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    };
    let weights = |name: &String| room.path().join(name).join("Data/com.apple.CoreML/weights/weight.bin").exists();
    let begin = std::time::Instant::now();
    while !names().iter().any(weights) {
        assert!(begin.elapsed().as_secs() < 50, "the writer doesn't get to its weights");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let left = names();
    assert!(left.len() == 1 && left[0].starts_with(".m.mlpackage.partial-"), "{left:?}");
    if cfg!(unix) {
        assert_eq!(package::clean_partials(room.path()).unwrap(), 0, "it is still being written");
    }
    writer.kill().unwrap();
    writer.wait().unwrap();
    assert_eq!(names(), left);
    assert_eq!(package::clean_partials(room.path()).unwrap(), 1);
    assert!(names().is_empty());
    package::write(&forms()[0].1, &room.path().join("m.mlpackage"), &WriteOptions::default()).unwrap();
    assert_eq!(names(), ["m.mlpackage"]);
}

#[test]
fn large_constants_of_a_package_are_not_copied() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("m.mlpackage");
    let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
    let x = b.input("x", TensorType::new(DataType::Fp16, [1u64, 100_000]));
    let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 60) as u8).collect();
    let w = b.constant("w", Constant::literal(TensorType::new(DataType::Fp16, [1u64, 100_000]), bytes.clone()));
    let y = b.add(x, w);
    b.output("y", y);
    package::write(&Program::single(b.finish().unwrap()), &path, &WriteOptions::default()).unwrap();
    let package = package::open(&path).unwrap();
    let mut ops = package.program.functions[0].ops();
    let value = ops.find(|op| op.name == "w").unwrap().attributes.get("val").unwrap();
    assert!(matches!(value.data, Data::Content(_)));
    assert_eq!(*value.bytes().unwrap(), *bytes);
}
