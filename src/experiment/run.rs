//! Runs one experiment on Core ML: compiles, plans, loads and calls its program, and compares the results.

use std::path::Path;
use std::time::Instant;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Experiment, OutcomeKind, ProbeSize};
use crate::program::ProbeInput;
use anec_base::{FileError, Result};
use anec_coreml::array::{Element, OwnedValues, StridedArray, Values};
use anec_coreml::plan::{ComputeUnits, Device, Operation};
use anec_coreml::{CoreMlError, Engine, LoadedFunction};
use anec_exec::{Executable, Precision, Tensor, TensorData, WeightCache};
use anec_mil::{DataType, Function, Value};
use anec_package::WriteOptions;

/// Uncounted calls at the beginning.
const WARM_UP: usize = 3;
/// Timed calls.
const CALLS: usize = 10;
/// Number of output values that are kept.
const SAVED_VALUES: usize = 8;

/// Outcome of an experiment. Stages that weren't reached are `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProbeOutcome {
    /// Kind of outcome; `None` until the results are compared.
    pub kind: Option<OutcomeKind>,
    /// Core ML's message if it refused, or how the process ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub said: Option<String>,
    /// Known error codes in the message: `-14`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub codes: Vec<String>,
    /// Number of compute ops.
    pub compute_ops: usize,
    /// Number of ops that prefer the Neural Engine.
    pub on_neural_engine: usize,
    /// Number of ops without a device in the plan.
    pub undetermined: usize,
    /// Ops that prefer another device: operator and device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub elsewhere: Vec<(String, Device)>,
    /// Milliseconds of compilation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compile_ms: Option<f64>,
    /// Milliseconds of the first load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_ms: Option<f64>,
    /// Median milliseconds of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_ms: Option<f64>,
    /// Median milliseconds of a call on the CPU only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_call_ms: Option<f64>,
    /// Largest error relative to the largest value of the executor in f32.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_to_f32: Option<f64>,
    /// Largest error relative to the largest value of the executor in fp16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_to_f16: Option<f64>,
    /// Largest error relative to the largest value of the executor with simulated Neural Engine arithmetic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_to_ane: Option<f64>,
    /// Difference between the last two references: the effect of the simulated arithmetic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ane_to_f16: Option<f64>,
    /// First values of the output.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<f32>,
    /// First values of the executor in f32.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expected: Vec<f32>,
}

impl ProbeOutcome {
    /// Outcome of which only a message is known.
    pub fn ended(kind: OutcomeKind, said: impl Into<String>) -> Self {
        let said = said.into();
        let text = said.to_lowercase();
        let named = |codes: Vec<String>| codes.into_iter().find(|code| text.contains(&code.to_lowercase()));
        let codes = anec_advice::rules::meaning(&said).into_iter().filter_map(|meaning| named(meaning.codes));
        ProbeOutcome { kind: Some(kind), codes: codes.collect(), said: Some(said), ..ProbeOutcome::default() }
    }

    /// Placement of the ops; a plan that names no device proves nothing.
    fn place(&self) -> OutcomeKind {
        match self.compute_ops > 0 && self.on_neural_engine == self.compute_ops {
            true => OutcomeKind::Resident,
            false => OutcomeKind::Elsewhere,
        }
    }

    fn refused(self, kind: OutcomeKind, error: &CoreMlError) -> Self {
        let ProbeOutcome { said, codes, .. } = ProbeOutcome::ended(kind, error.to_string());
        ProbeOutcome { kind: Some(kind), said, codes, ..self }
    }
}

/// Runs an experiment. Refusals by Core ML are outcomes.
///
/// # Errors
/// If the program can't be built or written, or the executor can't run it.
pub fn run(engine: &impl Engine, experiment: &Experiment, size: ProbeSize, room: &Path) -> Result<ProbeOutcome> {
    let program = experiment.program.program(size)?;
    let package = room.join("probe.mlpackage");
    let compiled = room.join("probe.mlmodelc");
    anec_package::write(&program, &package, &WriteOptions::default())?;
    let mut outcome = ProbeOutcome::default();
    let begin = Instant::now();
    if let Err(error) = engine.compile(&package, &compiled) {
        return Ok(outcome.refused(OutcomeKind::Refused, &error));
    }
    outcome.compile_ms = Some(milliseconds(begin));
    match engine.plan(&compiled, ComputeUnits::CpuAndNeuralEngine) {
        Ok(operations) => count(&operations, &mut outcome),
        Err(error) => return Ok(outcome.refused(OutcomeKind::Refused, &error)),
    }
    // results are compared at the default shape
    let function = program.functions.first().map(fixed).unwrap_or_else(|| unreachable!("a program of one function"));
    let inputs = inputs(&function, experiment.program.input);
    let expected = execute(&function, Precision::F32, &inputs)?;
    let half = execute(&function, Precision::F16, &inputs)?;
    let simulated = execute(&function, Precision::ANE, &inputs)?;
    let begin = Instant::now();
    let found = match call(engine, &compiled, ComputeUnits::CpuAndNeuralEngine, &function, &inputs) {
        Ok((numbers, call_ms)) => {
            outcome.load_ms = Some(milliseconds(begin));
            outcome.call_ms = call_ms;
            numbers
        }
        Err(error) => return Ok(outcome.refused(OutcomeKind::Failed, &error)),
    };
    // a failure on the CPU is not evidence about the Neural Engine
    outcome.cpu_call_ms =
        call(engine, &compiled, ComputeUnits::CpuOnly, &function, &inputs).ok().and_then(|(_, ms)| ms);
    outcome.error_to_f32 = Some(error(&found, &expected));
    outcome.error_to_f16 = Some(error(&found, &half));
    outcome.error_to_ane = Some(error(&found, &simulated));
    outcome.ane_to_f16 = Some(error(&simulated, &half));
    outcome.numbers = found.into_iter().take(SAVED_VALUES).collect();
    outcome.expected = expected.into_iter().take(SAVED_VALUES).collect();
    for folder in [package, compiled] {
        std::fs::remove_dir_all(&folder).map_err(FileError::of(&folder, "remove"))?;
    }
    let right = outcome.error_to_f32.is_some_and(|error| error <= experiment.tolerance);
    outcome.kind = Some(if right { outcome.place() } else { OutcomeKind::Wrong });
    Ok(outcome)
}

fn milliseconds(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e3
}

/// Function with the default number of tokens.
fn fixed(function: &Function) -> Function {
    let sizes = function.lengths.iter().map(|(symbol, lengths)| (symbol.clone(), lengths.default_size()));
    let sizes: Vec<_> = sizes.collect();
    sizes.iter().fold(function.clone(), |function, (symbol, size)| function.with_length(symbol, *size))
}

fn count(operations: &[Operation], outcome: &mut ProbeOutcome) {
    for op in operations {
        let operator = op.bare_operator();
        if operator != "const" && operator != "read_state" && !operator.starts_with("constexpr_") {
            outcome.compute_ops += 1;
            match op.preferred {
                Some(Device::NeuralEngine) => outcome.on_neural_engine += 1,
                Some(device) => outcome.elsewhere.push((operator.to_owned(), device)),
                None => outcome.undetermined += 1,
            }
        }
        op.blocks.iter().for_each(|block| count(block, outcome));
    }
}

/// Inputs: positions and row bounds for integers, the experiment's values for the rest.
fn inputs(function: &Function, input: ProbeInput) -> Vec<(String, Tensor)> {
    let tensor = |value: &Value| {
        let ty = value.ty.tensor()?;
        let shape: Vec<usize> = ty.fixed_shape()?.into_iter().map(|size| size as usize).collect();
        let count: usize = shape.iter().product();
        let width = shape.last().copied().unwrap_or(1) as i32;
        let tensor = match (ty.dtype, value.name.as_str()) {
            (DataType::Int32, name) if name.starts_with("end") => Tensor::new(shape, vec![1, 1, 1, 64]),
            (DataType::Int32, _) => Tensor::new(shape, vec![0i32; count]),
            (_, name) if name.starts_with("mask") => {
                Tensor::new(shape, (0..count).map(|i| f32::from(i == 0)).collect::<Vec<f32>>())
            }
            _ => match input {
                ProbeInput::All(number) => Tensor::new(shape, vec![number; count]),
                ProbeInput::Plain => {
                    let number = |i: usize| ((i * 37 + width as usize) % 64) as f32 / 32.0 - 1.0;
                    Tensor::new(shape, (0..count).map(number).collect::<Vec<f32>>())
                }
            },
        };
        Some((value.name.clone(), tensor))
    };
    function.tensor_inputs().filter_map(tensor).collect()
}

/// All output values of a function on the executor.
fn execute(function: &Function, precision: Precision, inputs: &[(String, Tensor)]) -> Result<Vec<f32>> {
    let executable = Executable::compile(function, precision, &WeightCache::new())?;
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let outputs = executable.run(&inputs, &mut executable.new_state())?;
    Ok(outputs.into_iter().flat_map(|(_, tensor)| numbers(tensor.data)).collect())
}

fn numbers(data: TensorData) -> Vec<f32> {
    match data {
        TensorData::F32(values) => values.to_vec(),
        TensorData::I32(values) => values.iter().map(|value| *value as f32).collect(),
        TensorData::Bool(values) => values.iter().map(|value| f32::from(u8::from(*value))).collect(),
    }
}

/// Loads a compiled model and calls it. Returns the values of the first call and the time of later ones.
fn call(
    engine: &impl Engine,
    compiled: &Path,
    units: ComputeUnits,
    function: &Function,
    inputs: &[(String, Tensor)],
) -> Result<(Vec<f32>, Option<f64>), CoreMlError> {
    let loaded = engine.load(compiled, None, units)?;
    let names: Vec<String> = function.states().map(|state| state.name.clone()).collect();
    let state = if names.is_empty() { None } else { Some(loaded.state(&names)?) };
    let array = |name: &str, dtype: DataType, shape: &[usize]| StridedArray {
        name: name.to_owned(),
        element: match dtype {
            DataType::Fp16 => Element::F16,
            DataType::Int32 => Element::I32,
            _ => Element::F32,
        },
        shape: shape.to_vec(),
    };
    let of_inputs: Vec<StridedArray> = inputs
        .iter()
        .map(|(name, tensor)| {
            let dtype = if tensor.integers().is_some() { DataType::Int32 } else { DataType::Fp16 };
            array(name, dtype, &tensor.shape)
        })
        .collect();
    let of_outputs: Vec<StridedArray> = function
        .outputs()
        .filter_map(|value| {
            let ty = value.ty.tensor()?;
            let shape: Vec<usize> = ty.fixed_shape()?.into_iter().map(|size| size as usize).collect();
            Some(array(&value.name, ty.dtype, &shape))
        })
        .collect();
    let mut prepared = loaded.call(&of_inputs, &of_outputs)?;
    let values: Vec<Values<'_>> = inputs
        .iter()
        .map(|(_, tensor)| match &tensor.data {
            TensorData::I32(values) => Values::Integers(values),
            TensorData::F32(values) => Values::Floats(values),
            TensorData::Bool(_) => Values::Integers(&[]),
        })
        .collect();
    let first = loaded.predict(&mut prepared, state.as_ref(), &values)?;
    let numbers = first
        .into_iter()
        .flat_map(|values| match values {
            OwnedValues::Floats(values) => values,
            OwnedValues::Integers(values) => values.into_iter().map(|value| value as f32).collect(),
        })
        .collect();
    let mut times = Vec::new();
    for index in 0..WARM_UP + CALLS {
        let begin = Instant::now();
        loaded.predict(&mut prepared, state.as_ref(), &values)?;
        if index >= WARM_UP {
            times.push(milliseconds(begin));
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((numbers, times.get(times.len() / 2).copied()))
}

/// Largest difference relative to the largest expected value. The largest number if only one of the two is finite.
fn error(found: &[f32], expected: &[f32]) -> f64 {
    if found.len() != expected.len() {
        return f64::MAX;
    }
    let largest = expected.iter().filter(|value| value.is_finite()).fold(1e-6f32, |most, value| most.max(value.abs()));
    let one = |(found, expected): (&f32, &f32)| match (found.is_finite(), expected.is_finite()) {
        (true, true) => f64::from((found - expected).abs() / largest),
        (false, false) => 0.0,
        // JSON has no infinity
        _ => f64::MAX,
    };
    found.iter().zip(expected).map(one).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments;
    use anec_mil::verify::verify;
    use anec_testing::fake::DoubleEngine;

    #[test]
    fn every_experiment_is_whole_and_runs_on_the_double() {
        let room = tempfile::tempdir().unwrap();
        for experiment in experiments().iter().filter(|experiment| experiment.sizes.contains(&ProbeSize::Tiny)) {
            let id = &experiment.id;
            let program = experiment.program.program(ProbeSize::Tiny).unwrap_or_else(|e| panic!("{id}: {e}"));
            assert_eq!(verify(&program), [], "{id}");
            let mut engine = DoubleEngine::new();
            engine.elsewhere.insert("softplus", Device::Cpu);
            let outcome =
                run(&engine, experiment, ProbeSize::Tiny, room.path()).unwrap_or_else(|e| panic!("{id}: {e}"));
            assert!(outcome.compute_ops > 0 && outcome.call_ms.is_some(), "{id}: {outcome:?}");
            assert!(!outcome.numbers.is_empty() && outcome.compile_ms.is_some(), "{id}");
            // the double computes in fp16 like the executor
            assert!(outcome.error_to_f16.unwrap() < 1e-3, "{id}: {outcome:?}");
            // and without the Neural Engine's effects
            if ["silu-native", "swap-last"].contains(&id.as_str()) {
                assert!(
                    outcome.error_to_ane.unwrap() > 4e-3 && outcome.ane_to_f16.unwrap() > 4e-3,
                    "{id}: {outcome:?}"
                );
            }
            assert_eq!(outcome.elsewhere.is_empty(), !id.contains("softplus-native"), "{id}");
        }
    }

    #[test]
    fn a_plan_without_ops_is_not_resident() {
        let of = |compute_ops, on_neural_engine| {
            ProbeOutcome { compute_ops, on_neural_engine, ..ProbeOutcome::default() }.place()
        };
        assert_eq!(of(3, 3), OutcomeKind::Resident);
        assert_eq!((of(3, 2), of(0, 0)), (OutcomeKind::Elsewhere, OutcomeKind::Elsewhere));
    }

    #[test]
    fn large_programs_have_fifty_megabytes() {
        for weights in ["weights-fp16", "weights-int8-channel", "weights-palette4"] {
            let experiment = experiments().iter().find(|experiment| experiment.id == weights).unwrap();
            let channels = experiment.program.channels(ProbeSize::Large) as f64;
            let bits = match weights {
                "weights-fp16" => 16.0,
                "weights-palette4" => 4.0,
                _ => 8.0,
            };
            let bytes = 4.0 * channels * channels * bits / 8.0;
            assert!((45e6..60e6).contains(&bytes), "{weights}: {bytes}");
        }
    }

    #[test]
    fn refusals_by_core_ml_are_outcomes() {
        let room = tempfile::tempdir().unwrap();
        let mut engine = DoubleEngine::new();
        engine.refuses = Some("probe.mlpackage");
        let outcome = run(&engine, &experiments()[0], ProbeSize::Tiny, room.path()).unwrap();
        assert_eq!(outcome.kind, Some(OutcomeKind::Refused));
        let said =
            "Error Domain=com.apple.appleneuralengine: failed to compile ANE model using ANEF (ANECCompile), Error=-14";
        let outcome = ProbeOutcome::ended(OutcomeKind::Refused, said);
        assert_eq!(outcome.codes, ["-14"]);
    }
}
