//! Steps of an experiment's program: ops on the results of its projections.

use crate::program::{ProbeStep, ProgramSpec};
use anec_mil::{Constant, Dim, FunctionBuilder, ValueId};

impl ProgramSpec {
    /// Adds a step after `x`.
    pub(super) fn step(&self, ops: &mut FunctionBuilder, x: ValueId, step: ProbeStep) -> ValueId {
        let channels = ops.ty(x).shape.get(1).and_then(Dim::fixed).unwrap_or(1);
        match step {
            ProbeStep::Silu => ops.silu(x),
            ProbeStep::SiluByTanh => silu_by_tanh(ops, x),
            ProbeStep::Softplus => ops.softplus(x),
            ProbeStep::SoftplusByParts => softplus_by_parts(ops, x),
            ProbeStep::Gelu => ops.gelu(x),
            ProbeStep::Scale(factor) => ops.mul(x, Constant::fp16(factor)),
            ProbeStep::Add(number) => ops.add(x, Constant::fp16(number)),
            ProbeStep::Total => {
                let ones = vec![1.0; 8 * channels as usize];
                let weight = ops.constant("ones", Constant::fp16_tensor(&[8, channels, 1, 1], &ones));
                ops.conv("total", x, weight, None)
            }
            ProbeStep::Topk => ops.top_indices(x, 1, 1),
            ProbeStep::Argmax => ops.reduce_argmax(x, 1, true),
            ProbeStep::Gather => {
                let reversed: Vec<i32> = (0..channels as i32).rev().collect();
                let indices = ops.constant("indices", Constant::int32s(&reversed));
                let axis = ops.constant("axis", Constant::int32(1));
                ops.op("gather", "gather", [("x", x), ("indices", indices), ("axis", axis)])
            }
            ProbeStep::Depthwise => {
                let values: Vec<f32> = (0..channels).map(|i| 0.5 + (i % 7) as f32 / 8.0).collect();
                let weight = ops.constant("depthwise", Constant::fp16_tensor(&[channels, 1, 1, 1], &values));
                ops.depthwise_conv("depthwise_conv", x, weight, None)
            }
            ProbeStep::Rank5 => folded(ops, x, &[1, 2, (channels / 2) as i32], |ops, folded| ops.softmax(folded, 2)),
            ProbeStep::Rank6 => folded(ops, x, &[1, 2, 2, (channels / 4) as i32], |ops, folded| ops.silu(folded)),
            ProbeStep::Fp32 => {
                let wide = cast(ops, x, "fp32");
                let y = ops.silu(wide);
                cast(ops, y, "fp16")
            }
            ProbeStep::Softmax => ops.softmax(x, 1),
            ProbeStep::InfiniteMask => {
                let values: Vec<f32> =
                    (0..channels).map(|i| if i % 2 == 0 { f32::NEG_INFINITY } else { 0.0 }).collect();
                let masked = ops.add(x, Constant::fp16_tensor(&[1, channels, 1, 1], &values));
                ops.softmax(masked, 1)
            }
            ProbeStep::SwapLast => swap_last(ops, x),
            ProbeStep::Wide(size) => wide_softmax(ops, x, size),
            ProbeStep::Additions(count) => additions(ops, x, count),
            ProbeStep::Rows(rows) => self.project(ops, x, rows, channels, "rows"),
            ProbeStep::Columns(columns) => {
                let copies = vec![x; (columns / channels).max(1) as usize];
                let wide = ops.concat(&copies, 1);
                self.project(ops, wide, 64, channels * copies.len() as u64, "columns")
            }
            ProbeStep::NormNaive => norm(ops, x),
            ProbeStep::NormAccurate => {
                let magnitude = ops.abs(x);
                let largest = ops.reduce_max(magnitude, &[1], true);
                let scaled = ops.real_div(x, largest);
                norm(ops, scaled)
            }
            ProbeStep::NormPrescale => {
                let scaled = ops.mul(x, Constant::fp16(1.0 / 64.0));
                norm(ops, scaled)
            }
            ProbeStep::NormConcat => {
                let negative = ops.mul(x, Constant::fp16(-1.0));
                let both = ops.concat(&[x, negative], 1);
                let y = ops.layer_norm(both, &[1], 1e-5);
                ops.slice(y, 1, 0..channels)
            }
            ProbeStep::AttentionPerHead => heads(ops, x, channels, |ops, folded| {
                let mut head = |head: u64| {
                    let of = ops.slice(folded, 1, head..head + 1);
                    attend(ops, of)
                };
                let parts: Vec<ValueId> = (0..HEADS).map(&mut head).collect();
                ops.concat(&parts, 1)
            }),
            ProbeStep::AttentionGrouped => heads(ops, x, channels, attend),
        }
    }
}

fn silu_by_tanh(ops: &mut FunctionBuilder, x: ValueId) -> ValueId {
    let halved = ops.mul(x, Constant::fp16(0.5));
    let gate = ops.tanh(halved);
    let gate = ops.add(gate, Constant::fp16(1.0));
    ops.mul(halved, gate)
}

fn softplus_by_parts(ops: &mut FunctionBuilder, x: ValueId) -> ValueId {
    let positive = ops.maximum(x, Constant::fp16(0.0));
    let magnitude = ops.abs(x);
    let negative = ops.mul(magnitude, Constant::fp16(-1.0));
    let small = ops.exp(negative);
    let small = ops.add(small, Constant::fp16(1.0));
    let small = ops.op("log", "log", [("x", small)]);
    ops.add(positive, small)
}

fn cast(ops: &mut FunctionBuilder, x: ValueId, to: &str) -> ValueId {
    let dtype = ops.constant("dtype", Constant::string(to));
    ops.op("cast", "cast", [("x", x), ("dtype", dtype)])
}

/// Shape of a value, as `reshape` takes it.
fn sizes(ops: &FunctionBuilder, x: ValueId) -> Vec<i32> {
    ops.ty(x).shape.iter().map(|size| size.fixed().map_or(-1, |size| size as i32)).collect()
}

/// Applies `of` to `x` with its first two axes replaced by `first`, and restores the shape.
fn folded(
    ops: &mut FunctionBuilder,
    x: ValueId,
    first: &[i32],
    of: impl FnOnce(&mut FunctionBuilder, ValueId) -> ValueId,
) -> ValueId {
    let whole = sizes(ops, x);
    let folded = ops.reshape(x, &[first, &whole[2..]].concat());
    let y = of(ops, folded);
    ops.reshape(y, &whole)
}

/// Exchanges the halves of the last axis.
fn swap_last(ops: &mut FunctionBuilder, x: ValueId) -> ValueId {
    let last = ops.ty(x).shape.last().and_then(Dim::fixed).unwrap_or(2);
    let first = ops.slice(x, 3, 0..last / 2);
    let second = ops.slice(x, 3, last / 2..last);
    ops.concat(&[second, first], 3)
}

fn wide_softmax(ops: &mut FunctionBuilder, x: ValueId, size: u64) -> ValueId {
    let mean = ops.reduce_mean(x, &[1, 2], true);
    let ramp: Vec<f32> = (0..size).map(|i| (i % 97) as f32 / 97.0).collect();
    let wide = ops.mul(mean, Constant::fp16_tensor(&[1, 1, size, 1], &ramp));
    let y = ops.softmax(wide, 2);
    let y = ops.reduce_max(y, &[2], true);
    ops.add(x, y)
}

fn additions(ops: &mut FunctionBuilder, x: ValueId, count: u64) -> ValueId {
    // explicit names, because the builder searches for free ones linearly
    (0..count).fold(x, |x, index| {
        ops.enter(&format!("addition_{index}"));
        let sum = ops.add(x, Constant::fp16((index % 3) as f32 - 1.0));
        ops.leave();
        sum
    })
}

/// `x * rsqrt(mean(x^2) + eps)` over channels.
fn norm(ops: &mut FunctionBuilder, x: ValueId) -> ValueId {
    let squares = ops.mul(x, x);
    let mean = ops.reduce_mean(squares, &[1], true);
    let inverse = ops.rsqrt(mean, 1e-6);
    ops.mul(x, inverse)
}

/// Number of attention heads.
const HEADS: u64 = 4;

/// Applies `of` to the heads of `x`, `[1, heads, width, positions]`, and restores the shape.
fn heads(
    ops: &mut FunctionBuilder,
    x: ValueId,
    channels: u64,
    of: impl FnOnce(&mut FunctionBuilder, ValueId) -> ValueId,
) -> ValueId {
    let whole = sizes(ops, x);
    let folded = ops.reshape(x, &[1, HEADS as i32, (channels / HEADS) as i32, -1]);
    let y = of(ops, folded);
    ops.reshape(y, &whole)
}

fn attend(ops: &mut FunctionBuilder, of: ValueId) -> ValueId {
    let scores = ops.matmul(of, of, true, false);
    let shares = ops.softmax(scores, -1);
    ops.matmul(of, shares, false, true)
}
