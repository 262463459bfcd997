//! Small programs that test what a Mac's Neural Engine accepts: one for each form of weights and states. Their plans
//! take half a minute instead of the ten of a conversion.

use std::path::Path;

use anec_base::FileError;

use serde::Serialize;

use anec_base::Result;
use anec_coreml::plan::{ComputeUnits, Device, Operation};
use anec_coreml::{CoreMlError, Engine};
use anec_mil::{Constant, DataType, FunctionBuilder, MilError, Opset, Program, TensorType, ValueId};
use anec_package::WriteOptions;

/// Channels of the convolutions: enough work that the planner doesn't prefer the CPU for small ops.
pub const CHANNELS: u64 = 1024;
/// Number of convolutions.
const LAYERS: usize = 4;
/// Tokens of a call.
const TOKENS: u64 = 8;
/// Slots of a state.
const SLOTS: u64 = 256;

/// Tested form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::Display, strum::EnumIter)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are what the manifest calls them
pub enum ProbeVariant {
    #[strum(to_string = "fp16 weights")]
    Fp16,
    #[strum(to_string = "int8 weights, a scale per tensor")]
    Int8PerTensor,
    #[strum(to_string = "int8 weights, a scale per channel")]
    Int8PerChannel,
    #[strum(to_string = "int8 weights, a scale per block of 32")]
    Int8PerBlock,
    #[strum(to_string = "int4 weights, a scale per channel")]
    Int4PerChannel,
    #[strum(to_string = "4-bit palette")]
    Palette4,
    #[strum(to_string = "one state")]
    OneState,
    #[strum(to_string = "two states")]
    TwoStates,
    #[strum(to_string = "four states")]
    FourStates,
    #[strum(to_string = "a state whose last axis is no multiple of 32")]
    OddState,
}

impl ProbeVariant {
    /// All forms.
    pub fn all() -> impl Iterator<Item = ProbeVariant> {
        <ProbeVariant as strum::IntoEnumIterator>::iter()
    }

    /// Number of states and size of their last axis.
    fn states(self) -> (usize, u64) {
        match self {
            ProbeVariant::OneState => (1, 64),
            ProbeVariant::TwoStates => (2, 64),
            ProbeVariant::FourStates => (4, 64),
            ProbeVariant::OddState => (1, 40),
            _ => (0, 64),
        }
    }
}

/// Builds the program of a form, with convolutions of `channels` channels.
///
/// # Errors
/// If the op catalogue refuses it, which is a defect of this crate.
pub fn program(form: ProbeVariant, channels: u64) -> std::result::Result<Program, MilError> {
    let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
    let input = ops.input("x", TensorType::new(DataType::Fp16, [1, channels, 1, TOKENS]));
    let mut x = input;
    for layer in 0..LAYERS {
        let weight = weight(&mut ops, form, channels, layer);
        x = ops.conv(&format!("conv_{layer}"), x, weight, None);
        x = ops.silu(x);
    }
    let (states, width) = form.states();
    for index in 0..states {
        let ty = TensorType::new(DataType::Fp16, [1, 1, SLOTS, width]);
        let state = ops.state(&format!("state_{index}"), ty);
        let old = ops.read_state(state);
        // the write depends on the input, and the output on the state
        let mean = ops.reduce_mean(x, &[1, 3], true);
        let new = ops.add(old, mean);
        ops.write_state(state, new);
        let read = ops.read_state(state);
        let read = ops.reduce_mean(read, &[2, 3], true);
        x = ops.add(x, read);
    }
    ops.output("y", x);
    Ok(Program::single(ops.finish()?))
}

fn weight(ops: &mut FunctionBuilder, form: ProbeVariant, channels: u64, layer: usize) -> ValueId {
    let shape = [channels, channels, 1, 1];
    let name = format!("weight_{layer}");
    // numbers that repeat after a prime number of steps make all rows different
    let step = |i: usize| ((i * 31 + layer) % 251) as i64 - 125;
    let count = (channels * channels) as usize;
    let size = 1.0 / (127.0 * (channels as f32).sqrt());
    let scales = |shape: [u64; 4], factor: f32| {
        Constant::fp16_tensor(&shape, &vec![size * factor; shape.iter().product::<u64>() as usize])
    };
    let quantized = |ops: &mut FunctionBuilder, dtype, bytes: Vec<u8>, scale: Constant| {
        let data = Constant::literal(TensorType::new(dtype, shape), bytes);
        ops.op("constexpr_blockwise_shift_scale", &name, [("data", data), ("scale", scale)])
    };
    let bytes = || (0..count).map(|i| step(i) as i8 as u8).collect::<Vec<u8>>();
    let nibbles = |of: fn(i64) -> i64| -> Vec<u8> {
        let nibble = |i: usize| (of(step(i)) & 15) as u8;
        (0..count / 2).map(|i| nibble(2 * i) | nibble(2 * i + 1) << 4).collect()
    };
    match form {
        ProbeVariant::Int8PerTensor => quantized(ops, DataType::Int8, bytes(), scales([1, 1, 1, 1], 1.0)),
        ProbeVariant::Int8PerChannel => quantized(ops, DataType::Int8, bytes(), scales([channels, 1, 1, 1], 1.0)),
        ProbeVariant::Int8PerBlock => {
            quantized(ops, DataType::Int8, bytes(), scales([channels, channels / 32, 1, 1], 1.0))
        }
        ProbeVariant::Int4PerChannel => {
            quantized(ops, DataType::Int4, nibbles(|step| step / 18), scales([channels, 1, 1, 1], 18.0))
        }
        ProbeVariant::Palette4 => {
            let indices = Constant::literal(TensorType::new(DataType::Uint4, shape), nibbles(|step| (step + 128) / 16));
            let table: Vec<f32> = (0..16).map(|i| (i as f32 - 7.5) * 16.0 * size).collect();
            let lut = Constant::fp16_tensor(&[1, 1, 1, 1, 16, 1], &table);
            ops.op("constexpr_lut_to_dense", &name, [("indices", indices), ("lut", lut)])
        }
        _ => {
            let values: Vec<f32> = (0..count).map(|i| step(i) as f32 * size).collect();
            ops.constant(&name, Constant::fp16_tensor(&shape, &values))
        }
    }
}

/// Placement of a form on a Mac.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Placement {
    /// Tested form.
    pub form: ProbeVariant,
    /// Number of compute ops.
    pub compute_ops: usize,
    /// Number of ops that prefer the Neural Engine.
    pub on_neural_engine: usize,
    /// Reason if there is no plan.
    pub error: Option<String>,
}

/// Compiles the program of a form and reads its plan.
///
/// # Errors
/// If the package can't be written. Refusals by Core ML are part of the result.
pub fn place(engine: &impl Engine, form: ProbeVariant, room: &Path) -> Result<Placement> {
    let package = room.join("probe.mlpackage");
    let compiled = room.join("probe.mlmodelc");
    anec_package::write(&program(form, CHANNELS)?, &package, &WriteOptions::default())?;
    let plan =
        engine.compile(&package, &compiled).and_then(|()| engine.plan(&compiled, ComputeUnits::CpuAndNeuralEngine));
    for folder in [package, compiled].into_iter().filter(|folder| folder.exists()) {
        std::fs::remove_dir_all(&folder).map_err(FileError::of(&folder, "remove"))?;
    }
    Ok(judge(form, plan))
}

fn judge(form: ProbeVariant, plan: std::result::Result<Vec<Operation>, CoreMlError>) -> Placement {
    match plan {
        Err(error) => Placement { form, compute_ops: 0, on_neural_engine: 0, error: Some(error.to_string()) },
        Ok(operations) => {
            let idle = |op: &&Operation| {
                let operator = op.bare_operator();
                operator != "const" && operator != "read_state" && !operator.starts_with("constexpr_")
            };
            let compute: Vec<&Operation> = operations.iter().filter(idle).collect();
            let on_neural_engine = compute.iter().filter(|op| op.preferred == Some(Device::NeuralEngine)).count();
            Placement { form, compute_ops: compute.len(), on_neural_engine, error: None }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_exec::{Executable, Precision, Tensor, WeightCache};
    use anec_mil::verify::verify;

    #[test]
    fn every_program_is_whole_and_runs() {
        for form in ProbeVariant::all() {
            let program = program(form, 64).unwrap();
            assert!(verify(&program).is_empty(), "{form}: {:?}", verify(&program));
            let function = &program.functions[0];
            let executable = Executable::compile(function, Precision::F16, &WeightCache::new()).unwrap();
            let mut state = executable.new_state();
            let x = Tensor::new([1, 64, 1, 8], (0..512).map(|i| (i % 13) as f32 / 13.0).collect::<Vec<f32>>());
            let first = executable.run(&[("x", &x)], &mut state).unwrap();
            let second = executable.run(&[("x", &x)], &mut state).unwrap();
            let values = first[0].1.floats().unwrap();
            assert!(values.iter().all(|v| v.is_finite()) && values.iter().any(|v| *v != 0.0), "{form}");
            // only a state makes a second call differ
            assert_eq!(first != second, form.states().0 > 0, "{form}");
        }
    }

    #[test]
    fn only_compute_ops_are_counted() {
        let op = |operator: &str, preferred| Operation {
            operator: operator.into(),
            outputs: vec!["y".into()],
            preferred,
            supported: Vec::new(),
            cost: None,
            blocks: Vec::new(),
        };
        let plan = vec![
            op("const", None),
            op("ios18.constexpr_blockwise_shift_scale", None),
            op("ios18.conv", Some(Device::NeuralEngine)),
            op("ios18.silu", Some(Device::Cpu)),
        ];
        let placement = judge(ProbeVariant::Fp16, Ok(plan));
        assert_eq!((placement.compute_ops, placement.on_neural_engine), (2, 1));
        let refused = judge(ProbeVariant::Fp16, Err(CoreMlError::Unavailable("no".into())));
        assert!(refused.error.is_some());
    }
}
