//! Program of an experiment: a sequence of projections with additional ops.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ProbeSize;
use anec_manifest::LinearForm;
use anec_mil::{Constant, DataType, Dim, FunctionBuilder, MilError, Opset, Program, SymbolRange, TensorType, ValueId};

/// Channels of tiny programs.
const TINY: u64 = 64;

/// Description of a program: `[1, channels, 1, tokens]` passes through projections with equal numbers of channels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProgramSpec {
    /// Form of the projections' weights.
    pub weights: ProbeWeights,
    /// Op of the projections.
    pub linear: LinearForm,
    /// Number of projections.
    pub layers: u64,
    /// Tokens of a call.
    pub tokens: u64,
    /// Whether the number of tokens is a range from 1.
    pub range: bool,
    /// Whether the last axis is 1: `[1, channels, tokens, 1]`.
    pub unit_axis_last: bool,
    /// Steps after each projection.
    pub each: Vec<ProbeStep>,
    /// Steps after the last projection.
    pub tail: Vec<ProbeStep>,
    /// States.
    pub states: Option<ProbeStates>,
    /// Values of the input.
    pub input: ProbeInput,
    /// Number of channels, independent of the size.
    pub channels: Option<u64>,
    /// Weights of a large program, in MB.
    pub megabytes: f64,
}

impl Default for ProgramSpec {
    fn default() -> Self {
        ProgramSpec {
            weights: ProbeWeights::Fp16,
            linear: LinearForm::Conv,
            layers: 4,
            tokens: 8,
            range: false,
            unit_axis_last: false,
            each: Vec::new(),
            tail: Vec::new(),
            states: None,
            input: ProbeInput::Plain,
            channels: None,
            megabytes: 50.0,
        }
    }
}

/// Form of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names say it
pub enum ProbeWeights {
    #[default]
    Fp16,
    Int8Tensor,
    Int8Channel,
    Int8ChannelAffine,
    Int8Block,
    Int4Channel,
    Int4Block,
    Palette8,
    Palette6,
    Palette4,
    Palette4Grouped,
    Palette4RowScale,
    Palette3,
    Palette2,
    Palette1,
    Palette6Grouped,
    Palette8Grouped,
}

impl ProbeWeights {
    fn bits(self) -> f64 {
        match self {
            ProbeWeights::Fp16 => 16.0,
            ProbeWeights::Palette6 | ProbeWeights::Palette6Grouped => 6.0,
            ProbeWeights::Palette3 => 3.0,
            ProbeWeights::Palette2 => 2.0,
            ProbeWeights::Palette1 => 1.0,
            ProbeWeights::Int4Channel | ProbeWeights::Int4Block => 4.0,
            ProbeWeights::Palette4 | ProbeWeights::Palette4Grouped | ProbeWeights::Palette4RowScale => 4.0,
            _ => 8.0,
        }
    }
}

/// Values of the input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProbeInput {
    /// Numbers from -1 to 1.
    #[default]
    Plain,
    /// One number for all elements.
    All(f32),
}

/// States of a program; each is written once, then read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProbeStates {
    /// Number of states.
    pub count: u64,
    /// Size of the last axis.
    #[serde(default = "width")]
    pub width: u64,
    /// Number of slots: size of the axis before the last.
    #[serde(default = "slots")]
    pub slots: u64,
    /// Whether the second state has another shape than the first.
    #[serde(default)]
    pub different: bool,
    /// How states are written.
    #[serde(default)]
    pub write: ProbeWrite,
}

fn width() -> u64 {
    64
}

fn slots() -> u64 {
    256
}

/// How a state is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProbeWrite {
    /// All of it.
    #[default]
    Whole,
    /// `old * (1 - mask) + new * mask` with the mask as an input.
    Mask,
    /// One row by `slice_update`; begin and end are computed from a position.
    SliceComputed,
    /// One row by `slice_update`; begin and end are inputs.
    SliceGiven,
    /// Product of the old content with itself.
    SelfProduct,
    /// All of it; the old content is also used elsewhere.
    UsedTwice,
    /// Not written: the cache is an input, and the new rows are an output.
    Host,
}

/// Step of one or several ops.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are those of the ops
pub enum ProbeStep {
    Silu,
    SiluByTanh,
    Softplus,
    SoftplusByParts,
    Gelu,
    Scale(f32),
    Add(f32),
    /// Sum over channels, as a product with ones.
    Total,
    Topk,
    Argmax,
    Gather,
    Depthwise,
    Rank5,
    Rank6,
    Fp32,
    Softmax,
    /// Softmax of rows in which half of the channels are minus infinity.
    InfiniteMask,
    /// Exchange of the halves of the last axis.
    SwapLast,
    /// Softmax over an axis of the given size.
    Wide(u64),
    /// Given number of additions.
    Additions(u64),
    /// Projection to the given number of channels.
    Rows(u64),
    /// Projection from the given number of channels, all copies.
    Columns(u64),
    NormNaive,
    NormAccurate,
    NormPrescale,
    NormConcat,
    /// Keys of each head against all positions: one product per head, or one for all.
    AttentionPerHead,
    AttentionGrouped,
}

impl ProgramSpec {
    /// Channels of the projections.
    pub fn channels(&self, size: ProbeSize) -> u64 {
        let large = (self.megabytes * 8e6 / self.weights.bits() / self.layers.max(1) as f64).sqrt();
        match (self.channels, size) {
            (Some(channels), _) => channels,
            (None, ProbeSize::Tiny) => TINY,
            (None, ProbeSize::Large) => (large as u64).next_multiple_of(64),
        }
    }

    /// Builds the program.
    ///
    /// # Errors
    /// If the op catalogue refuses it, which is a defect of the experiment.
    pub fn program(&self, size: ProbeSize) -> Result<Program, MilError> {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let channels = self.channels(size);
        let tokens = if self.range {
            let lengths = SymbolRange::Range { lower: 1, upper: Some(self.tokens), default: 1 };
            Dim::symbol(&ops.symbol("T", lengths))
        } else {
            Dim::Fixed(self.tokens)
        };
        let one = Dim::Fixed(1);
        let shape = match self.unit_axis_last {
            true => vec![one.clone(), Dim::Fixed(channels), tokens, one],
            false => vec![one.clone(), Dim::Fixed(channels), one, tokens],
        };
        let mut x = ops.input("x", TensorType { dtype: DataType::Fp16, shape });
        for layer in 0..self.layers {
            x = self.project(&mut ops, x, channels, channels, &format!("{layer}"));
            for step in &self.each {
                x = self.step(&mut ops, x, *step);
            }
        }
        if let Some(states) = &self.states {
            x = states.add(&mut ops, x);
        }
        for step in &self.tail {
            x = self.step(&mut ops, x, *step);
        }
        ops.output("y", x);
        Ok(Program::single(ops.finish()?))
    }

    /// Adds a projection to `rows` channels.
    pub(super) fn project(
        &self,
        ops: &mut FunctionBuilder,
        x: ValueId,
        rows: u64,
        columns: u64,
        name: &str,
    ) -> ValueId {
        let (weight, row_scale) = weight(ops, self.weights, rows, columns, name, self.linear != LinearForm::Conv);
        let y = match self.linear {
            LinearForm::Conv => ops.conv(&format!("conv_{name}"), x, weight, None),
            form => {
                // channels move to the last axis and back
                let perm = if self.unit_axis_last { [0, 3, 2, 1] } else { [0, 2, 3, 1] };
                let last = ops.transpose(x, &perm);
                let y = match form {
                    LinearForm::Linear => ops.linear(&format!("linear_{name}"), last, weight, None),
                    _ => ops.matmul(last, weight, false, true),
                };
                ops.transpose(y, if self.unit_axis_last { &[0, 3, 2, 1] } else { &[0, 3, 1, 2] })
            }
        };
        row_scale.map_or(y, |scale| ops.mul(y, scale))
    }
}

impl ProbeStates {
    fn add(&self, ops: &mut FunctionBuilder, mut x: ValueId) -> ValueId {
        let (int32, half) = (DataType::Int32, DataType::Fp16);
        for index in 0..self.count {
            let slots = if self.different && index == 1 { self.slots / 2 } else { self.slots };
            let slots = if self.write == ProbeWrite::SelfProduct { self.width } else { slots };
            let ty = TensorType::new(half, [1, 1, slots, self.width]);
            let mean = ops.reduce_mean(x, &[1, 2, 3], true);
            let name = format!("state_{index}");
            if self.write == ProbeWrite::Host {
                let cache = ops.input(&name, ty);
                let row = ops.mul(mean, Constant::fp16_tensor(&[1, 1, 1, self.width], &vec![1.0; self.width as usize]));
                let all = ops.concat(&[cache, row], 2);
                let read = ops.reduce_mean(all, &[2, 3], true);
                ops.output(&format!("row_{index}"), row);
                x = ops.add(x, read);
                continue;
            }
            let state = ops.state(&name, ty);
            let old = ops.read_state(state);
            let row = |ops: &mut FunctionBuilder| {
                ops.mul(mean, Constant::fp16_tensor(&[1, 1, 1, self.width], &vec![1.0; self.width as usize]))
            };
            let new = match self.write {
                ProbeWrite::Whole | ProbeWrite::Host => ops.add(old, mean),
                ProbeWrite::UsedTwice => {
                    let held = ops.reduce_mean(old, &[2, 3], true);
                    x = ops.add(x, held);
                    ops.add(old, mean)
                }
                ProbeWrite::SelfProduct => {
                    let shifted = ops.add(old, mean);
                    ops.matmul(shifted, shifted, false, true)
                }
                ProbeWrite::Mask => {
                    let mask = ops.input(&format!("mask_{index}"), TensorType::new(half, [1, 1, slots, 1]));
                    let keep = ops.sub(Constant::fp16(1.0), mask);
                    let kept = ops.mul(old, keep);
                    let row = row(ops);
                    let placed = ops.mul(row, mask);
                    ops.add(kept, placed)
                }
                ProbeWrite::SliceComputed => {
                    let position = ops.input(&format!("position_{index}"), TensorType::new(int32, [1u64]));
                    let next = ops.add(position, Constant::int32s(&[1]));
                    let [zeros, zero, ones, width] = [&[0, 0][..], &[0], &[1, 1], &[self.width as i32]]
                        .map(|values| ops.constant("at", Constant::int32s(values)));
                    let begin = ops.concat(&[zeros, position, zero], 0);
                    let end = ops.concat(&[ones, next, width], 0);
                    let row = row(ops);
                    ops.slice_update_along(old, row, 2, begin, end)
                }
                ProbeWrite::SliceGiven => {
                    let begin = ops.input(&format!("begin_{index}"), TensorType::new(int32, [4u64]));
                    let end = ops.input(&format!("end_{index}"), TensorType::new(int32, [4u64]));
                    let row = row(ops);
                    ops.slice_update_along(old, row, 2, begin, end)
                }
            };
            ops.write_state(state, new);
            let read = ops.read_state(state);
            let read = ops.reduce_mean(read, &[2, 3], true);
            x = ops.add(x, read);
        }
        x
    }
}

/// Weight of `rows` by `columns`, and the scale of its rows if the form has one. Its numbers repeat after a prime
/// number of steps, so that rows differ.
fn weight(
    ops: &mut FunctionBuilder,
    form: ProbeWeights,
    rows: u64,
    columns: u64,
    name: &str,
    flat: bool,
) -> (ValueId, Option<ValueId>) {
    let of = |sizes: [u64; 4]| if flat { sizes[..2].to_vec() } else { sizes.to_vec() };
    let shape = of([rows, columns, 1, 1]);
    let name = format!("weight_{name}");
    let count = (rows * columns) as usize;
    let size = 1.0 / (127.0 * (columns as f32).sqrt());
    let step = |i: usize| ((i * 31) % 251) as i64 - 125;
    let scales = |sizes: [u64; 4], factor: f32| {
        let shape = of(sizes);
        Constant::fp16_tensor(&shape, &vec![size * factor; shape.iter().product::<u64>() as usize])
    };
    let bytes = || (0..count).map(|i| step(i) as i8 as u8).collect::<Vec<u8>>();
    // packs indices from the low bits
    let indices = |bits: u32, of: &dyn Fn(i64) -> i64| -> Vec<u8> {
        let mut out = vec![0u8; (count * bits as usize).div_ceil(8)];
        for i in 0..count {
            let value = (of(step(i)) as u64) & ((1 << bits) - 1);
            for bit in 0..bits as usize {
                let at = i * bits as usize + bit;
                out[at / 8] |= (((value >> bit) & 1) as u8) << (at % 8);
            }
        }
        out
    };
    let typed = |dtype| TensorType::new(dtype, shape.iter().copied());
    let shifted = |ops: &mut FunctionBuilder, dtype, bytes: Vec<u8>, scale: Constant| {
        let data = Constant::literal(typed(dtype), bytes);
        ops.op("constexpr_blockwise_shift_scale", &name, [("data", data), ("scale", scale)])
    };
    let palette = |ops: &mut FunctionBuilder, dtype, bits: u32, groups: u64, factor: f32| {
        let data = Constant::literal(typed(dtype), indices(bits, &|step| (step + 128) >> (8 - bits)));
        let entries = 1u64 << bits;
        let width = 256.0 / entries as f32;
        let table: Vec<f32> = (0..groups * entries)
            .map(|i| ((i % entries) as f32 - entries as f32 / 2.0 + 0.5) * width * size * factor)
            .collect();
        let mut lut = of([groups, 1, 1, 1]);
        lut.extend([entries, 1]);
        ops.op("constexpr_lut_to_dense", &name, [("indices", data), ("lut", Constant::fp16_tensor(&lut, &table))])
    };
    let value = match form {
        ProbeWeights::Fp16 => {
            let values: Vec<f32> = (0..count).map(|i| step(i) as f32 * size).collect();
            ops.constant(&name, Constant::fp16_tensor(&shape, &values))
        }
        ProbeWeights::Int8Tensor => shifted(ops, DataType::Int8, bytes(), scales([1, 1, 1, 1], 1.0)),
        ProbeWeights::Int8Channel => shifted(ops, DataType::Int8, bytes(), scales([rows, 1, 1, 1], 1.0)),
        ProbeWeights::Int8Block => shifted(ops, DataType::Int8, bytes(), scales([rows, columns / 32, 1, 1], 1.0)),
        ProbeWeights::Int8ChannelAffine => {
            let parts = [
                ("quantized_data", Constant::literal(typed(DataType::Int8), bytes())),
                ("zero_point", Constant::literal(TensorType::scalar(DataType::Int8), [0])),
                ("scale", Constant::fp16_tensor(&[rows], &vec![size; rows as usize])),
                ("axis", Constant::int32(0)),
            ];
            ops.op("constexpr_affine_dequantize", &name, parts)
        }
        ProbeWeights::Int4Channel => {
            shifted(ops, DataType::Int4, indices(4, &|step| step / 18), scales([rows, 1, 1, 1], 18.0))
        }
        ProbeWeights::Int4Block => {
            shifted(ops, DataType::Int4, indices(4, &|step| step / 18), scales([rows, columns / 32, 1, 1], 18.0))
        }
        ProbeWeights::Palette8 => palette(ops, DataType::Uint8, 8, 1, 1.0),
        ProbeWeights::Palette6 => palette(ops, DataType::Uint6, 6, 1, 1.0),
        ProbeWeights::Palette4 => palette(ops, DataType::Uint4, 4, 1, 1.0),
        ProbeWeights::Palette4Grouped => palette(ops, DataType::Uint4, 4, rows / 16, 1.0),
        ProbeWeights::Palette4RowScale => palette(ops, DataType::Uint4, 4, 1, 0.5),
        ProbeWeights::Palette3 => palette(ops, DataType::Uint3, 3, 1, 1.0),
        ProbeWeights::Palette2 => palette(ops, DataType::Uint2, 2, 1, 1.0),
        ProbeWeights::Palette1 => palette(ops, DataType::Uint1, 1, 1, 1.0),
        ProbeWeights::Palette6Grouped => palette(ops, DataType::Uint6, 6, rows / 16, 1.0),
        ProbeWeights::Palette8Grouped => palette(ops, DataType::Uint8, 8, rows / 16, 1.0),
    };
    let scale = (form == ProbeWeights::Palette4RowScale).then(|| {
        ops.constant(&format!("{name}_rows"), Constant::fp16_tensor(&[1, rows, 1, 1], &vec![2.0; rows as usize]))
    });
    (value, scale)
}
