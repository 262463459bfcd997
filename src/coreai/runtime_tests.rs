//! Apple's runtime on migrated packages: operators, weights and states against coremltools' values. Skipped, loudly,
//! without a Python that has `coreai-core` (tests/requirements-coreai.txt).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anec_base::Fault;
use anec_mil::{Function, ValueId};
use safetensors::{Dtype, SafeTensors};

use crate::aicode::{AiModule, AiOp};
use crate::bridge::{Bridge, BridgeArray, BridgeCall, BridgeElements, BridgeOptions, DescribedFunction};
use crate::lower::{LoweringChoices, LoweringPlan};
use crate::migrate::{MigrateOptions, migrate};
use crate::{AssetOptions, write};

/// Packages that can't be migrated as a whole.
const REFUSED: [&str; 4] = ["state_decoder_growing", "zoo_control", "zoo_recurrent", "zoo_recurrent_ios18"];
/// Tolerance of fixtures beside their own: of weights that were rounded on the way.
const LEAST_TOLERANCE: f32 = 5e-3;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn runtime() -> Option<BridgeOptions> {
    let options = BridgeOptions::of_machine(None);
    match Bridge::open(&fixtures().join("coreai/functions.aimodel"), &options) {
        Ok(_) => Some(options),
        Err(error) if error.fault() == Fault::Platform => {
            anec_base::skipped(&format!("not run by Apple's Core AI runtime: {error}"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A call of a fixture.
#[derive(Default)]
struct FixtureCall {
    function: Option<String>,
    inputs: BTreeMap<String, BridgeArray>,
    outputs: BTreeMap<String, BridgeArray>,
    states: BTreeMap<String, BridgeArray>,
}

/// The calls of a package with coremltools' values, and the tolerance.
fn calls(name: &str) -> (Vec<FixtureCall>, f32) {
    let bytes = std::fs::read(fixtures().join("coremltools").join(name).join("io.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap_or_default();
    let mut calls = BTreeMap::<usize, FixtureCall>::new();
    for (key, view) in file.tensors() {
        let (step, rest) = match key.strip_prefix("step").and_then(|rest| rest.split_once('.')) {
            Some((number, rest)) => (number.parse().unwrap(), rest),
            None => (0, key.as_str()),
        };
        let call = calls.entry(step).or_default();
        call.function = metadata.get(&format!("step{step}.function")).cloned();
        let (role, value) = rest.split_once('.').unwrap();
        let data = view.data();
        let halves = || data.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        let words = || data.as_chunks::<4>().0.iter();
        let elements = match view.dtype() {
            Dtype::F32 => BridgeElements::Floats(words().map(|b| f32::from_le_bytes(*b)).collect()),
            Dtype::F16 => BridgeElements::Floats(halves()),
            Dtype::I32 => BridgeElements::Integers(words().map(|b| i32::from_le_bytes(*b)).collect()),
            other => panic!("{name}: {other:?}"),
        };
        let array = BridgeArray { name: value.to_owned(), shape: view.shape().to_vec(), elements };
        let list = match role {
            "in" => &mut call.inputs,
            "out" => &mut call.outputs,
            _ => &mut call.states,
        };
        list.insert(value.to_owned(), array);
    }
    (calls.into_values().collect(), metadata["tolerance"].parse().unwrap())
}

/// Largest difference; infinite for other shapes.
fn difference(found: &BridgeArray, expected: &BridgeArray) -> f32 {
    let floats = |array: &BridgeArray| -> Vec<f32> {
        match &array.elements {
            BridgeElements::Floats(values) => values.clone(),
            BridgeElements::Integers(values) => values.iter().map(|value| *value as f32).collect(),
        }
    };
    if found.shape != expected.shape {
        return f32::INFINITY;
    }
    let pairs = floats(found).into_iter().zip(floats(expected));
    pairs.fold(0.0, |most, (a, b)| {
        let apart = (a - b).abs();
        if apart.is_nan() { f32::INFINITY } else { most.max(apart) }
    })
}

fn run_calls(bridge: &mut Bridge, calls: &[FixtureCall], tolerance: f32) -> Result<(), String> {
    for (step, call) in calls.iter().enumerate() {
        let fits = |function: &&DescribedFunction| {
            let named = call.function.as_ref().is_none_or(|name| function.name.starts_with(name.as_str()));
            let takes = |shape: &[i64], array: &BridgeArray| {
                let fits = |(size, given): (&i64, &usize)| *size < 0 || *size == *given as i64;
                shape.len() == array.shape.len() && shape.iter().zip(&array.shape).all(fits)
            };
            let mut inputs = function.inputs.iter();
            named && inputs.all(|input| call.inputs.get(&input.name).is_none_or(|array| takes(&input.shape, array)))
        };
        let function = bridge.functions().iter().find(fits).cloned().ok_or(format!("no function for call {step}"))?;
        let request = BridgeCall {
            function: &function.name,
            sequence: 0,
            inputs: call.inputs.values().cloned().collect(),
            states: function.states.iter().map(|state| (state.name.clone(), state.name.clone())).collect(),
            outputs: call.outputs.keys().cloned().collect(),
        };
        let mut found = bridge.call(&request).map_err(|error| error.to_string())?;
        let keys: Vec<&str> = call.states.keys().map(String::as_str).collect();
        found.extend(bridge.states(0, &keys).map_err(|error| error.to_string())?);
        for (found, expected) in found.iter().zip(call.outputs.values().chain(call.states.values())) {
            let apart = difference(found, expected);
            if !(apart <= tolerance) {
                return Err(format!("call {step}: `{}` differs by {apart}", expected.name));
            }
        }
    }
    Ok(())
}

fn names() -> Vec<String> {
    let folders = std::fs::read_dir(fixtures().join("coremltools")).unwrap().map(|entry| entry.unwrap());
    let mut names: Vec<String> = folders
        .filter(|entry| entry.path().join("io.safetensors").exists())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert!(names.len() > 50, "{names:?}");
    names
}

/// Every form of compressed weight, states, several functions, flexible shapes, and collections of operators.
#[test]
fn packages_of_coremltools_give_their_values_on_apples_runtime() {
    let Some(options) = runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut problems = Vec::new();
    for name in names().iter().filter(|name| !REFUSED.contains(&name.as_str())) {
        let package = anec_package::open(&fixtures().join("coremltools").join(name).join("model.mlpackage")).unwrap();
        let how = MigrateOptions { choices: LoweringChoices::wide_products(true), ..Default::default() };
        let migration = migrate(&package, &how).unwrap_or_else(|error| panic!("{name}: {error}"));
        let path = folder.path().join(format!("{name}.aimodel"));
        write(&migration.module, &path, &AssetOptions::default()).unwrap();
        let mut bridge = Bridge::open(&path, &options).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (calls, tolerance) = calls(name);
        if let Err(problem) = run_calls(&mut bridge, &calls, tolerance.max(LEAST_TOLERANCE)) {
            problems.push(format!("{name}: {problem}"));
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}

/// A Python takes one asset after another, without the states of the one before; one in which something failed takes
/// none.
#[test]
fn pythons_are_started_only_where_none_is_free() {
    let Some(options) = runtime() else { return };
    let python = std::env::var_os("ANEC_PYTHON").map(PathBuf::from).filter(|python| python.is_absolute());
    let Some(python) = python else { return anec_base::skipped("ANEC_PYTHON is no absolute path") };
    // a name of its own, so that tests beside this one don't take its processes
    let folder = python.parent().unwrap();
    let python = folder.join("..").join(folder.file_name().unwrap()).join(python.file_name().unwrap());
    let options = BridgeOptions { python: Some(python), ..options };
    let asset = fixtures().join("coreai/functions.aimodel");
    let mut open = Vec::from_iter((0..3).map(|_| Bridge::open(&asset, &options).unwrap()));
    let processes = BTreeSet::from_iter(open.iter().map(Bridge::process));
    assert_eq!(processes.len(), open.len(), "each has its own while it is open");
    let mut last = open.pop().unwrap();
    last.set_states(
        7,
        &[BridgeArray { name: "s".into(), shape: vec![1], elements: BridgeElements::Floats(vec![3.0]) }],
    )
    .unwrap();
    assert_eq!(last.states(7, &["s"]).unwrap().len(), 1);
    drop((last, open));

    let mut again = Bridge::open(&asset, &options).unwrap();
    assert!(processes.contains(&again.process()), "what is free is taken");
    assert!(again.states(7, &["s"]).unwrap().is_empty(), "an asset begins without states");
    let failed = again.process();
    let call =
        BridgeCall { function: "none", sequence: 0, inputs: Vec::new(), states: Vec::new(), outputs: Vec::new() };
    again.call(&call).unwrap_err();
    drop(again);
    let open = Vec::from_iter((0..3).map(|_| Bridge::open(&asset, &options).unwrap()));
    assert!(open.iter().all(|bridge| bridge.process() != failed), "a failed one is not used again");
}

/// Composite operations that are written.
const COMPOSITES: [&str; 10] = [
    "reduce_max_v1",
    "reduce_mean_v1",
    "reduce_min_v1",
    "reduce_product_v1",
    "reduce_sum_v1",
    "relu_v1",
    "sigmoid_v1",
    "silu_v1",
    "softmax_v1",
    "sort_v1",
];

/// Definitions of composite operations compute what the operations do: programs that consist of them, not of the names
/// that Apple's runtime knows, give coremltools' values. It can't compute those of reductions, which another test holds
/// against what Apple's exporter writes.
#[test]
fn definitions_give_coremltools_values_on_apples_runtime() {
    let Some(options) = runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (mut seen, mut problems) = (BTreeSet::new(), Vec::new());
    for name in names().iter().filter(|name| !REFUSED.contains(&name.as_str())) {
        let package = anec_package::open(&fixtures().join("coremltools").join(name).join("model.mlpackage")).unwrap();
        let how = MigrateOptions { choices: LoweringChoices::wide_products(true), ..Default::default() };
        let module = migrate(&package, &how).unwrap().module;
        let own = composites(&module);
        if own.is_empty() {
            continue;
        }
        seen.extend(own);
        let plain = crate::definitions::in_primitives(&module).unwrap();
        let left = composites(&plain);
        assert!(left.iter().all(|name| name.starts_with("reduce_") && name != "reduce_mean_v1"), "{name}: {left:?}");
        let path = folder.path().join(format!("{name}.aimodel"));
        write(&plain, &path, &AssetOptions::default()).unwrap();
        let mut bridge = Bridge::open(&path, &options).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (calls, tolerance) = calls(name);
        if let Err(problem) = run_calls(&mut bridge, &calls, tolerance.max(LEAST_TOLERANCE)) {
            problems.push(format!("{name}: {problem}"));
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
    assert_eq!(Vec::from_iter(seen.iter().map(String::as_str)), COMPOSITES);
}

/// Names of the composite operations of a module, none of which has an empty definition.
fn composites(module: &AiModule) -> BTreeSet<String> {
    fn visit(module: &AiModule, ops: &[AiOp], found: &mut BTreeSet<String>) {
        for op in ops {
            for block in op.regions.iter().flat_map(|region| &region.blocks) {
                if crate::definitions::is_composite(module, op) {
                    let last = block.ops.last().unwrap();
                    let arguments = block.arguments.len() as u32;
                    assert!(last.operands.iter().all(|id| *id >= arguments), "{} yields an argument", module.name(op));
                    found.insert(module.name(op).to_owned());
                }
                visit(module, &block.ops, found);
            }
        }
    }
    let mut found = BTreeSet::new();
    visit(module, &module.ops, &mut found);
    found
}

/// The function with one of its outputs, and the operators that it needs.
fn only(function: &Function, output: ValueId) -> Function {
    let mut needed = BTreeSet::from([output]);
    let mut ops = Vec::new();
    for op in function.block.ops.iter().rev() {
        if op.outputs.iter().any(|id| needed.contains(id)) {
            needed.extend(op.operands());
            ops.push(op.clone());
        }
    }
    ops.reverse();
    let mut only = function.clone();
    only.block.ops = ops;
    only.block.outputs = vec![output];
    only.inputs.retain(|id| needed.contains(id));
    only
}

/// Each output of coremltools' collections of operators as a program of its own.
#[test]
fn operators_one_by_one_give_coremltools_values_on_apples_runtime() {
    let Some(options) = runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (mut all, mut refused, mut wrong) = (0, Vec::new(), Vec::new());
    for name in names().iter().filter(|name| name.starts_with("zoo_") && !REFUSED.contains(&name.as_str())) {
        let package = anec_package::open(&fixtures().join("coremltools").join(name).join("model.mlpackage")).unwrap();
        let function = package.program.function(&package.program.default_function).unwrap();
        let mut plan = LoweringPlan::new(LoweringChoices::wide_products(true));
        let mut programs = Vec::new();
        for output in &function.block.outputs {
            all += 1;
            let program = only(function, *output);
            let value = function.value(*output).name.clone();
            match LoweringPlan::default().add(&value, &program) {
                Ok(()) => {
                    plan.add(&value, &program).unwrap();
                    programs.push((value, program));
                }
                Err(error) => refused.push(format!("{name}, {value}: {error}")),
            }
        }
        let path = folder.path().join(format!("{name}.aimodel"));
        write(&plan.finish(), &path, &AssetOptions::default()).unwrap();
        let mut bridge = Bridge::open(&path, &options).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (calls, tolerance) = calls(name);
        for (value, program) in programs {
            let request = BridgeCall {
                function: &value,
                sequence: 0,
                inputs: program.tensor_inputs().map(|input| calls[0].inputs[&input.name].clone()).collect(),
                states: Vec::new(),
                outputs: vec![value.clone()],
            };
            match bridge.call(&request) {
                Ok(found) => {
                    let apart = difference(&found[0], &calls[0].outputs[&value]);
                    if !(apart <= tolerance) {
                        wrong.push(format!("{name}, {value}: differs by {apart}"));
                    }
                }
                Err(error) => wrong.push(format!("{name}, {value}: {error}")),
            }
        }
    }
    eprintln!("{} of {all} operators are refused: {refused:#?}", refused.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(all > 350, "{all}");
    assert!(refused.len() * 100 <= 5 * all, "{} of {all} are refused: {refused:#?}", refused.len());
}

/// Damaged bytecode is read or refused, with its place.
#[test]
fn damaged_assets_are_refused() {
    let mut refused = 0;
    for name in ["activations", "weights", "functions"] {
        let whole = std::fs::read(fixtures().join("coreai").join(format!("{name}.aimodel/main.mlirb"))).unwrap();
        let mut numbers = anec_base::SplitMix64::new(7);
        for _ in 0..1000 {
            let mut bytes = whole.clone();
            for _ in 0..1 + numbers.bits() % 4 {
                let place = (numbers.bits() % bytes.len() as u64) as usize;
                match numbers.bits() % 4 {
                    0 => bytes[place] ^= 1 << (numbers.bits() % 8),
                    1 => bytes[place] = numbers.bits() as u8,
                    2 => drop(bytes.remove(place)),
                    _ => bytes.truncate(place.max(1)),
                }
            }
            let file = anec_base::MappedFile::from_bytes(Path::new("memory"), bytes);
            match crate::open_bytes(file) {
                Ok(asset) => {
                    assert!(asset.inventory().bytes > 0);
                    let _ = asset.module.encode();
                }
                Err(error) => {
                    assert!(error.to_string().starts_with("memory, byte "), "{error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 1000, "{refused} of 3000 are refused");
}
