use super::*;
use crate::{Chunking, ForwardOptions, Hidden};
use anec_exec::Precision;
use anec_mil::{DataType, Value};
use anec_testing::fake::DoubleEngine;
use anec_testing::fake::{convert_demo, convert_family};

const TEXT: [u32; 11] = [3, 141, 59, 26, 535, 89, 79, 323, 84, 626, 43];

/// Converts the demo; returns its bundle and the temporary folder.
fn demo(changes: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let room = tempfile::tempdir().unwrap();
    let folder = room.path().join("demo");
    convert_demo(&folder, changes);
    (room, folder)
}

/// Opens a bundle on the double engine, with a cache beside it.
fn on_double(folder: &Path) -> (Arc<LoadedModel>, Arc<DoubleEngine>) {
    let engine = Arc::new(DoubleEngine::new());
    let bundle = Bundle::read(folder).unwrap();
    let host = Arc::new(HostTables::open(&bundle, folder).unwrap());
    let cache = Cache::new(folder.join("cache"));
    let backend = CoreMlBackend::new(engine.clone(), &bundle, folder, ComputeUnits::CpuAndNeuralEngine, cache);
    (LoadedModel::new(bundle, folder, host, Box::new(backend)).unwrap(), engine)
}

/// Returns [`TEXT`] reduced to the model's vocabulary.
fn text(model: &LoadedModel) -> [u32; 11] {
    TEXT.map(|token| token % model.bundle().model.vocab_size as u32)
}

fn logits(model: &Arc<LoadedModel>, chunking: Chunking) -> [Vec<f32>; 2] {
    let mut session = model.start(TEXT.len() as u64).unwrap();
    [(); 2].map(|()| {
        session.reset().unwrap();
        session.forward(&text(model), &ForwardOptions::all(chunking.clone())).unwrap().logits
    })
}

#[test]
fn results_that_are_not_finite_are_errors() {
    let (_room, folder) = demo(&[]);
    let mut engine = DoubleEngine::new();
    engine.returns_nan = true;
    let bundle = Bundle::read(&folder).unwrap();
    let host = Arc::new(HostTables::open(&bundle, &folder).unwrap());
    let cache = Cache::new(folder.join("cache"));
    let backend = CoreMlBackend::new(Arc::new(engine), &bundle, &folder, ComputeUnits::CpuOnly, cache);
    let model = LoadedModel::new(bundle, &folder, host, Box::new(backend)).unwrap();
    let mut session = model.start(TEXT.len() as u64).unwrap();
    let error = session.forward(&text(&model), &ForwardOptions::all(Chunking::Largest)).unwrap_err();
    assert!(error.to_string().contains("has values that aren't finite"), "{error}");
}

#[test]
fn a_bundle_runs_as_on_the_executor() {
    let room = tempfile::tempdir().unwrap();
    for (name, changes) in [
        ("range", &[][..]),
        ("fixed", &["lengths={fixed: [1, 4]}", "context=[256, 512]"]),
        ("host", &["state=host"]),
        ("host, fixed", &["state=host", "lengths={fixed: [1, 4]}", "context=[256, 512]"]),
        ("unified", &["state=unified", "layout=bc1s", "lengths={fixed: [4]}"]),
    ] {
        let folder = room.path().join(name);
        convert_demo(&folder, changes);
        let (model, _) = on_double(&folder);
        let executor = LoadedModel::on_cpu(&folder, Precision::F16).unwrap();
        for chunking in [Chunking::Largest, Chunking::Pattern(vec![1])] {
            if name == "unified" && chunking != Chunking::Largest {
                continue;
            }
            let (found, expected) = (logits(&model, chunking.clone()), logits(&executor, chunking));
            assert!(expected[0].iter().any(|logit| *logit != 0.0));
            assert!(found == expected, "{name}");
        }
    }
}

/// Includes arrays with padded rows: a matrix of a recurrence is as wide as a head.
#[test]
fn states_that_the_host_keeps_go_in_and_out() {
    let room = tempfile::tempdir().unwrap();
    for (case, keys) in [
        ("qwen3_5-default", &["state=unified", "lengths={fixed: [1, 4]}", "kv_write=mask"][..]),
        ("zaya-default", &["state=per_layer"]),
    ] {
        let folder = room.path().join(case);
        convert_family(case, &folder, &[keys, &["context=64", "recurrent_states=input_output"]].concat());
        let (model, _) = on_double(&folder);
        let executor = LoadedModel::on_cpu(&folder, Precision::F16).unwrap();
        for chunking in [Chunking::Largest, Chunking::Pattern(vec![1])] {
            assert!(logits(&model, chunking.clone()) == logits(&executor, chunking), "{case}");
        }
        let text = text(&model);
        let mut first = model.start(16).unwrap();
        first.forward(&text[..6], &ForwardOptions::none()).unwrap();
        let mut second = first.fork().unwrap().expect("states can be copied");
        first.forward(&[1, 2, 3], &ForwardOptions::none()).unwrap();
        let mut plain = executor.start(16).unwrap();
        plain.forward(&text[..6], &ForwardOptions::none()).unwrap();
        let [found, expected] = [&mut second, &mut plain]
            .map(|session| session.forward(&text[6..], &ForwardOptions::last()).unwrap().logits);
        assert_eq!(found, expected, "{case}");
    }
}

#[test]
fn functions_are_compiled_once_and_loaded_when_they_are_needed() {
    let (_room, folder) = demo(&["lengths={fixed: [1, 4]}"]);
    let (model, engine) = on_double(&folder);
    model.start(4).unwrap().forward(&TEXT[..4], &ForwardOptions::last()).unwrap();
    let expected = [
        "compile layers_0_3.mlpackage",
        "load tokens_4 for cpu-and-neural-engine",
        "compile layers_3_6.mlpackage",
        "load tokens_4 for cpu-and-neural-engine",
        "compile lm_head_0.mlpackage",
        "load tokens_1 for cpu-and-neural-engine",
        "compile lm_head_1.mlpackage",
        "load tokens_1 for cpu-and-neural-engine",
    ];
    assert_eq!(engine.take_log(), expected);
    // another text needs other functions of the same packages
    model.start(4).unwrap().forward(&TEXT[..1], &ForwardOptions::last()).unwrap();
    assert_eq!(engine.take_log(), ["load tokens_1 for cpu-and-neural-engine"; 2]);

    // neither cached models nor the bundle's own are compiled again
    let (model, engine) = on_double(&folder);
    model.start(1).unwrap().forward(&TEXT[..1], &ForwardOptions::last()).unwrap();
    assert_eq!(engine.take_log().len(), 4);
    let bundle = Bundle::read(&folder).unwrap();
    let cached = Cache::new(folder.join("cache"));
    let package = &bundle.packages[0];
    let own = cached.compiled(&*engine, Path::new("no"), &recorded_digest(package)).unwrap();
    std::fs::rename(own, folder.join("layers_0_3.mlmodelc")).unwrap();
    let mut changed = bundle.clone();
    changed.packages[0].compiled = Some("layers_0_3.mlmodelc".into());
    anec_convert::files::write_json(&folder.join(FILE_NAME), &changed).unwrap();
    let (model, engine) = on_double(&folder);
    model.start(1).unwrap().forward(&TEXT[..1], &ForwardOptions::last()).unwrap();
    assert_eq!(engine.take_log(), ["load tokens_1 for cpu-and-neural-engine"; 4]);
}

#[test]
fn functions_can_be_loaded_before_they_are_needed() {
    let (_room, folder) = demo(&[]);
    let (model, engine) = on_double(&folder);
    let mut seen = Vec::new();
    model.prepare(|done, of| seen.push((done, of))).unwrap();
    assert_eq!(seen, [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]);
    assert_eq!(engine.take_log().iter().filter(|line| line.starts_with("load ")).count(), 4);
    model.start(4).unwrap().forward(&TEXT[..4], &ForwardOptions::last()).unwrap();
    assert_eq!(engine.take_log(), [""; 0], "nothing is left to load");
}

#[test]
fn parts_of_the_head_run_at_the_same_time() {
    let (_room, folder) = demo(&[]);
    let (model, engine) = on_double(&folder);
    // each waits for the other
    engine.require_concurrent_calls(2);
    let mut session = model.start(TEXT.len() as u64).unwrap();
    let answer = session.forward(&TEXT, &ForwardOptions::all(Chunking::Largest)).unwrap();
    assert_eq!(answer.logits, logits(&LoadedModel::on_cpu(&folder, Precision::F16).unwrap(), Chunking::Largest)[0]);
}

#[test]
fn a_copied_text_goes_its_own_way() {
    let (_room, folder) = demo(&[]);
    let (model, _) = on_double(&folder);
    let mut first = model.start(16).unwrap();
    first.forward(&TEXT[..6], &ForwardOptions::none()).unwrap();
    let second = first.fork().unwrap().expect("states can be copied");
    // a copy that was never run, as a checkpoint, can be copied itself
    let mut third = second.fork().unwrap().expect("states can be copied");
    first.forward(&[1, 2, 3], &ForwardOptions::none()).unwrap();
    let whole = &logits(&model, Chunking::Largest)[0];
    for copy in [&mut third, &mut { second }] {
        let after = copy.forward(&TEXT[6..], &ForwardOptions::all(Chunking::Largest)).unwrap();
        assert_eq!(after.logits, whole[whole.len() - after.logits.len()..]);
    }
}

#[test]
fn ports_have_the_element_types_of_the_packages() {
    let (_room, folder) = demo(&["lengths={fixed: [1, 4]}", "lm_head={argmax: true, logits: true}"]);
    let bundle = Bundle::read(&folder).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for entry in &bundle.functions {
        let program = anec_package::open(&folder.join(&entry.package)).unwrap().program;
        let function = program.function(&entry.function).unwrap();
        let values: Vec<&Value> = function.tensor_inputs().chain(function.outputs()).collect();
        for port in entry.inputs.iter().chain(&entry.outputs) {
            let value = values.iter().find(|value| value.name == port.name).unwrap();
            let expected = match element(&port.role) {
                Element::F16 => DataType::Fp16,
                Element::F32 => DataType::Fp32,
                Element::I32 => DataType::Int32,
            };
            assert_eq!(value.ty.tensor().unwrap().dtype, expected, "{}", port.name);
            seen.insert(port.name.clone());
        }
    }
    for name in ["cache_begin", "cache_end", "top_indices", "top_values", "logits", "hidden", "attn_mask", "rope_cos"] {
        assert!(seen.contains(name), "{name}");
    }
}

#[test]
fn the_largest_logits_come_with_their_tokens() {
    let (_room, folder) = demo(&["lm_head={top_k: 3, split: 2}"]);
    let ask = ForwardOptions::default().largest(true);
    let largest = |model: &Arc<LoadedModel>| model.start(TEXT.len() as u64).unwrap().forward(&TEXT, &ask).unwrap();
    let found = largest(&on_double(&folder).0);
    assert_eq!((found.tokens.len(), found.logits.len()), (3 * TEXT.len(), 3 * TEXT.len()));
    assert_eq!(found, largest(&LoadedModel::on_cpu(&folder, Precision::F16).unwrap()));
}

#[test]
fn values_inside_a_function_cant_be_seen() {
    let (_room, folder) = demo(&[]);
    let (model, _) = on_double(&folder);
    let ask = ForwardOptions::default().recording(Hidden::BetweenLayers);
    let error = model.start(4).unwrap().forward(&TEXT[..4], &ask).unwrap_err();
    assert_eq!(error.to_string(), "backend coreml: Core ML shows no values inside a function");
    assert_eq!(error.fault(), anec_base::Fault::Platform);
}

#[cfg(not(target_os = "macos"))]
#[test]
fn without_core_ml_there_is_no_such_backend() {
    let (_room, folder) = demo(&[]);
    let error = open(&folder, ComputeUnits::CpuAndNeuralEngine, None).err().unwrap();
    assert!(error.to_string().starts_with("Core ML isn't here: it is part of macOS, this is "), "{error}");
    assert_eq!(error.fault().exit_code(), 5);
}
