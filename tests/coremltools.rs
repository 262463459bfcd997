//! The executor against torch and numpy, on every package of `tests/fixtures/coremltools`: coremltools made the
//! programs, so they hold forms that our own emitter never writes.
//!
//! `io.safetensors` beside each package has inputs, expected outputs and, for a state, what it holds after each call;
//! `tests/fixtures/coremltools/make.py` says how they came about.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anec::exec::{Executable, Precision, State, Tensor, TensorData, WeightCache};
use anec::mil::{DataType, Function, ValueType, text, verify};
use anec::package::{self, Package};
use half::f16;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// Every package, with the largest absolute difference to the expected outputs that it may have in f32.
///
/// The fp32 programs differ by the order of sums. Those in half precision have weights (and scales, and tables) that
/// were rounded to fp16 on the way, which the expected outputs of some were not: that is what their tolerance is for.
/// With every result rounded to fp16, the package's own `tolerance` holds.
const PACKAGES: &[(&str, f32)] = &[
    ("attention_fp16", 1e-3),
    ("attention_fp32", 1e-4),
    ("conv_decoder", 5e-3),
    ("conv_fp16", 1e-3),
    ("conv_fp32", 1e-5),
    ("enumerated", 1e-5),
    ("int4_block", 3e-3),
    ("int4_channel", 3e-3),
    ("int8_affine_channel", 3e-3),
    ("int8_affine_tensor", 3e-3),
    ("int8_block", 3e-3),
    ("int8_channel", 3e-3),
    ("int8_tensor", 3e-3),
    ("lut1_flat", 5e-4),
    ("lut1_tensor", 5e-4),
    ("lut2_flat", 5e-4),
    ("lut2_grouped", 5e-4),
    ("lut2_tensor", 5e-4),
    ("lut3_tensor", 5e-4),
    ("lut4_flat", 5e-4),
    ("lut4_grouped", 5e-4),
    ("lut4_int8", 5e-4),
    ("lut4_scaled", 5e-4),
    ("lut4_tensor", 5e-4),
    ("lut6_flat", 5e-4),
    ("lut6_tensor", 5e-4),
    ("lut8_flat", 5e-4),
    ("lut8_tensor", 5e-4),
    ("lut_vectors", 1e-5),
    ("mlp_fp16", 1e-3),
    ("mlp_fp16_io", 1e-3),
    ("mlp_fp32", 1e-5),
    ("multifunction", 1e-3),
    ("range_fp16", 1e-3),
    ("range_fp32", 1e-5),
    ("scaled_dot_product", 1e-5),
    ("sparse", 5e-4),
    ("sparse_flat", 5e-4),
    ("sparse_int8", 5e-4),
    ("sparse_lut4", 5e-4),
    ("speech_encoder", 5e-3),
    ("state_accumulator", 2e-3),
    ("state_decoder_growing", 1e-3),
    ("state_decoder_mask", 1e-3),
    ("state_decoder_slice", 1e-3),
    ("uint4_block_offset", 3e-3),
    ("uint8_affine_channel", 5e-4),
    ("uint8_block_offset", 5e-4),
    ("zoo_control", 1e-5),
    ("zoo_elementwise_fp16", 1e-2),
    ("zoo_elementwise_fp32", 2e-3),
    ("zoo_images", 1e-5),
    ("zoo_images_ios17", 1e-5),
    ("zoo_indexing", 1e-6),
    ("zoo_indexing_ios18", 1e-6),
    ("zoo_layers", 2e-5),
    ("zoo_layers_ios17", 2e-5),
    ("zoo_quantized", 1e-6),
    ("zoo_recurrent", 1e-5),
    ("zoo_recurrent_ios18", 1e-5),
    ("zoo_reductions", 1e-5),
    ("zoo_reductions_ios17", 1e-5),
    ("zoo_shapes", 1e-6),
    ("zoo_shapes_ios17", 1e-6),
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/coremltools")
}

fn open(name: &str) -> Package {
    package::open(&folder().join(name).join("model.mlpackage")).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// One call: inputs, expected outputs and expected states by name.
#[derive(Default)]
struct Call {
    function: Option<String>,
    inputs: BTreeMap<String, Tensor>,
    outputs: BTreeMap<String, Tensor>,
    states: BTreeMap<String, Tensor>,
}

/// The calls that a package comes with, in order, and the tolerance that its precision explains.
fn calls(name: &str) -> (Vec<Call>, f32) {
    let bytes = std::fs::read(folder().join(name).join("io.safetensors")).unwrap_or_else(|e| panic!("{name}: {e}"));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap_or_default();
    let mut calls = BTreeMap::<usize, Call>::new();
    for (key, view) in file.tensors() {
        let (step, rest) = match key.strip_prefix("step") {
            Some(numbered) => {
                let (number, rest) = numbered.split_once('.').unwrap();
                (number.parse().unwrap(), rest)
            }
            None => (0, key.as_str()),
        };
        let call = calls.entry(step).or_default();
        call.function = metadata.get(&format!("step{step}.function")).cloned();
        let (role, value) = rest.split_once('.').unwrap();
        let of_role = match role {
            "in" => &mut call.inputs,
            "out" => &mut call.outputs,
            "state" => &mut call.states,
            _ => panic!("{name}: {key}"),
        };
        of_role.insert(value.to_owned(), tensor(&view));
    }
    assert!(calls.keys().copied().eq(0..calls.len()), "{name}: {:?}", calls.keys());
    (calls.into_values().collect(), metadata["tolerance"].parse().unwrap())
}

fn tensor(view: &TensorView<'_>) -> Tensor {
    let bytes = view.data();
    let data: TensorData = match view.dtype() {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>().into(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect::<Vec<f32>>().into(),
        Dtype::I32 => bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect::<Vec<i32>>().into(),
        other => panic!("{other:?}"),
    };
    Tensor::new(view.shape(), data)
}

/// Largest absolute difference; infinite if the two are not even alike. Integers must be equal.
fn difference(found: &Tensor, expected: &Tensor) -> f32 {
    if found.shape != expected.shape {
        return f32::INFINITY;
    }
    match (&found.data, &expected.data) {
        (TensorData::F32(found), TensorData::F32(expected)) => found.iter().zip(expected).fold(0.0, |most, (f, e)| {
            let apart = (f - e).abs();
            if apart.is_nan() { f32::INFINITY } else { most.max(apart) }
        }),
        (found, expected) if found == expected => 0.0,
        _ => f32::INFINITY,
    }
}

/// Runs all calls on one state; returns what differs by more than the tolerance, and the largest difference.
fn run(package: &Package, calls: &[Call], precision: Precision, tolerance: f32) -> Result<f32, String> {
    let cache = WeightCache::new();
    let mut executables = BTreeMap::<&str, Executable>::new();
    let mut state = State::default();
    let mut most = 0f32;
    for (step, call) in calls.iter().enumerate() {
        let name = call.function.as_deref().unwrap_or(&package.program.default_function);
        let function = package.program.function(name).ok_or_else(|| format!("no function `{name}`"))?;
        if !executables.contains_key(name) {
            let executable = Executable::compile(function, precision, &cache).map_err(|e| e.to_string())?;
            state.merge(executable.new_state());
            executables.insert(name, executable);
        }
        let inputs: Vec<(&str, &Tensor)> = call.inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let outputs = executables[name].run(&inputs, &mut state).map_err(|e| format!("call {step}: {e}"))?;
        let found: BTreeMap<&str, &Tensor> = outputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        if !found.keys().copied().eq(call.outputs.keys().map(String::as_str)) {
            return Err(format!("call {step}: outputs {:?}, expected {:?}", found.keys(), call.outputs.keys()));
        }
        let states: Vec<_> = call.states.iter().map(|(name, expected)| (name, expected, state.get(name))).collect();
        let states = states.iter().map(|(name, expected, found)| (*name, *expected, found.as_deref()));
        let values = call.outputs.iter().map(|(name, expected)| (name, expected, found.get(name.as_str()).copied()));
        for (name, expected, found) in values.chain(states) {
            let found = found.ok_or_else(|| format!("call {step}: no state `{name}`"))?;
            let apart = difference(found, expected);
            if !(apart <= tolerance) {
                return Err(format!("call {step}: `{name}` differs by {apart}\n{found:?}\n{expected:?}"));
            }
            most = most.max(apart);
        }
    }
    Ok(most)
}

/// Whether a function computes with fp16 values.
fn is_half(function: &Function) -> bool {
    let half = |ty: &ValueType| matches!(ty, ValueType::Tensor(ty) if ty.dtype == DataType::Fp16);
    function.values.iter().any(|value| value.constant.is_none() && half(&value.ty))
}

#[test]
fn the_list_names_every_package_of_the_folder() {
    let found: BTreeSet<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir() && path.join("io.safetensors").exists())
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    let listed: BTreeSet<String> = PACKAGES.iter().map(|(name, ..)| (*name).to_owned()).collect();
    assert_eq!(listed, found);
    assert_eq!(listed.len(), PACKAGES.len(), "a package is listed twice");
}

#[test]
fn packages_give_what_torch_and_numpy_give() {
    let mut failures = Vec::new();
    for (name, f32_tolerance) in PACKAGES {
        let (package, (calls, f16_tolerance)) = (open(name), calls(name));
        let half = package.program.functions.iter().any(is_half).then_some((Precision::F16, f16_tolerance));
        for (precision, tolerance) in [(Precision::F32, *f32_tolerance)].into_iter().chain(half) {
            match run(&package, &calls, precision, tolerance) {
                Ok(most) => println!("{name} {precision:?}: {most:.2e} of {tolerance:.0e}"),
                Err(problem) => failures.push(format!("{name} {precision:?}: {problem}")),
            }
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn packages_are_verified_and_their_text_stands_for_the_same_program() {
    for (name, ..) in PACKAGES {
        let program = open(name).program;
        let findings: Vec<String> = verify::verify(&program).iter().map(ToString::to_string).collect();
        assert!(findings.is_empty(), "{name}: {findings:#?}");
        let printed = program.to_string();
        let parsed = text::parse(&printed).unwrap_or_else(|e| panic!("{name}: {e}\n{printed}"));
        let findings: Vec<String> = verify::verify(&parsed).iter().map(ToString::to_string).collect();
        assert!(findings.is_empty(), "{name}, parsed: {findings:#?}");
        assert_eq!(parsed.to_string(), printed, "{name}");
        for (parsed, function) in parsed.functions.iter().zip(&program.functions) {
            assert_eq!(parsed.lengths, function.lengths, "{name}");
        }
    }
}

#[test]
fn the_program_calls_any_package_and_names_what_it_cannot_run() {
    let room = tempfile::tempdir().unwrap();
    let place = |name: &str| room.path().join(name).to_str().unwrap().to_owned();
    let package = folder().join("zoo_control/model.mlpackage");
    let (calls, _) = calls("zoo_control");
    let inputs: Vec<(&str, Dtype, &[usize], Vec<u8>)> = calls[0]
        .inputs
        .iter()
        .map(|(name, tensor)| match &tensor.data {
            TensorData::F32(v) => {
                (name.as_str(), Dtype::F32, &tensor.shape[..], v.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
            TensorData::I32(v) => {
                (name.as_str(), Dtype::I32, &tensor.shape[..], v.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
            TensorData::Bool(_) => panic!("a function takes no booleans"),
        })
        .collect();
    let views = inputs
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap()));
    std::fs::write(place("in.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let call = |package: &str, out: &str| {
        let words = ["run", package, "--inputs", &place("in.safetensors"), "--out", &place(out), "--precision", "f32"];
        crate::common::folder::run(&words)
    };
    let (status, shown, errors) = call(package.to_str().unwrap(), "out.safetensors");
    assert_eq!((status, errors.as_str()), (0, ""), "{shown}");
    let bytes = std::fs::read(place("out.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), calls[0].outputs.len());
    for (name, expected) in &calls[0].outputs {
        let apart = difference(&tensor(&file.tensor(name).unwrap()), expected);
        assert!(apart <= 1e-5, "{name}: {apart}");
    }

    let unknown =
        "program(1.0) { func main<ios15>(tensor<fp32, [2, 3]> x, tensor<int32, [1]> n, tensor<fp32, [2, 3, 4]> y) {
        tensor<fp32, [2, 3]> z = make_list(x = x)[name = string(\"z\")]; } -> (z); }";
    let program = text::parse(unknown).unwrap();
    package::write(&program, &room.path().join("unknown.mlpackage"), &package::WriteOptions::default()).unwrap();
    let (status, _, errors) = call(&place("unknown.mlpackage"), "none.safetensors");
    assert_eq!(status, 4, "{errors}");
    assert!(errors.contains("function `main` uses operators that the executor doesn't have: make_list"), "{errors}");
}
