//! Rotary position embedding by halves (arXiv:2104.09864): for the first elements `a` of a head and as many that
//! follow, `b`, the result is `[a cos - b sin, b cos + a sin]`; the rest of the head is unchanged.
//!
//! Heads are `[1, H, T, D]`, `cos` and `sin` `[1, 1, T, D / 2]`, or narrower for a partial rotation.

use std::ops::Range;

use super::GroupMatch;
use super::flow::{Flow, slice_of_axis};
use crate::frame::Frame;
use crate::node::{FusedKernel, FusedResult};
use crate::operand::Operand;
use crate::ops::{Arithmetic, BinaryOp, Concat, SliceByIndex};
use crate::step::Step;
use anec_kernels::dispatch::{Vectorize, vectorized};
use anec_kernels::pool;

/// Operands of a fused rotary embedding.
struct Rope {
    heads: Operand,
    cos: Operand,
    sin: Operand,
    /// Elements of a half.
    half: usize,
    /// Whether elements follow the halves.
    passes: bool,
}

/// Product of a half and a table.
struct RotatedHalf<'a> {
    /// Steps of the product and of the slice of the half.
    steps: [usize; 2],
    heads: &'a Operand,
    half: Range<usize>,
    table: &'a Operand,
}

/// Matches the pattern that ends with the concatenation of halves at `at`.
pub(super) fn find(flow: &Flow<'_>, at: usize, concat: &Concat) -> Option<GroupMatch> {
    let steps = flow.steps;
    if ![-1, 3].contains(&concat.axis) || concat.interleave {
        return None;
    }
    let parts: Vec<&Operand> = concat.values.iter().map(|input| steps[at].operand(input)).collect();
    let (first, second, rest) = match parts[..] {
        [first, second] => (first, second, None),
        [first, second, rest] => (first, second, Some(rest)),
        _ => return None,
    };
    let (difference, minus) = flow.combined_by(first, BinaryOp::Sub)?;
    let (sum, plus) = flow.combined_by(second, BinaryOp::Add)?;
    let rotated_half = |step: usize, kernel: &Arithmetic| {
        let [x, y] = [kernel.x, kernel.y].map(|input| rotated_half(flow, steps[step].operand(input)));
        x.zip(y)
    };
    let ((a_cos, b_sin), (b_cos, a_sin)) = (rotated_half(difference, minus)?, rotated_half(sum, plus)?);
    let half = a_cos.half.end;
    let all = [&a_cos, &a_sin, &b_cos, &b_sin];
    let same = |x: &Operand, y: &Operand| x.slot().is_some() && x.slot() == y.slot();
    let fits = all.iter().all(|rotated_half| same(rotated_half.heads, a_cos.heads))
        && [&a_cos.half, &a_sin.half].into_iter().all(|own| *own == (0..half))
        && [&b_cos.half, &b_sin.half].into_iter().all(|own| *own == (half..2 * half))
        && same(a_cos.table, b_cos.table)
        && same(a_sin.table, b_sin.table);
    let mut members = vec![at, difference, sum];
    members.extend(all.iter().flat_map(|rotated_half| rotated_half.steps));
    if let Some(rest) = rest {
        let (step, slice) = flow.produced_by::<SliceByIndex>(rest)?;
        let (from, _) = slice_of_axis(slice, 3)?;
        if from != 2 * half || !same(steps[step].operand(slice.x), a_cos.heads) {
            return None;
        }
        members.push(step);
    }
    members.sort_unstable();
    members.dedup();
    let mut inner = members.iter().filter(|member| **member != at);
    let closed = inner.all(|member| flow.is_used_only_by(*member, |user| members.contains(user)));
    let kernel = Box::new(Rope {
        heads: a_cos.heads.clone(),
        cos: a_cos.table.clone(),
        sin: a_sin.table.clone(),
        half,
        passes: rest.is_some(),
    });
    (fits && closed).then_some(GroupMatch { members, copies: Vec::new(), kernel })
}

/// Product of a half and a table that an operand comes from.
fn rotated_half<'a>(flow: &'a Flow<'_>, operand: &Operand) -> Option<RotatedHalf<'a>> {
    let (product, kernel) = flow.combined_by(operand, BinaryOp::Mul)?;
    let operand = |input| flow.steps[product].operand(input);
    let (cut, slice) = flow.produced_by::<SliceByIndex>(operand(kernel.x))?;
    let (from, to) = slice_of_axis(slice, 3)?;
    let heads = flow.steps[cut].operand(slice.x);
    Some(RotatedHalf { steps: [product, cut], heads, half: from..to?, table: operand(kernel.y) })
}

impl FusedKernel for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    /// Computes the result, of the shape of the heads.
    fn run(&self, _: &[Step], frame: &mut Frame<'_>) -> Option<FusedResult> {
        let [x, cos, sin] = [&self.heads, &self.cos, &self.sin].map(|operand| frame.peek(operand));
        let (x, cos, sin) = (x?, cos?, sin?);
        let [1, heads, tokens, width] = x.shape[..] else { return None };
        let fits = [&cos, &sin].into_iter().all(|table| table.shape == [1, 1, tokens, self.half])
            && (width == 2 * self.half || (self.passes && width > 2 * self.half));
        // under fp16 each op rounds on its own
        if !fits || frame.half || heads * tokens * self.half == 0 {
            return None;
        }
        let (x, cos, sin) = (x.floats()?, cos.floats()?, sin.floats()?);
        let rotate = |first: usize, out: &mut [f32]| {
            let tables = (cos, sin, self.half);
            vectorized(Rotate { rows: &x[first * width..][..out.len()], width, tables, first, tokens, out });
        };
        let result = frame.workspace.pool.written(&[1, heads, tokens, width], |out| {
            pool::for_each_part_of_rows(out, width, rotate);
        });
        Some(FusedResult::Tensor(result))
    }
}

/// Rotation of rows of heads.
struct Rotate<'a> {
    rows: &'a [f32],
    width: usize,
    /// Cosines, sines, and their number for each token.
    tables: (&'a [f32], &'a [f32], usize),
    first: usize,
    tokens: usize,
    out: &'a mut [f32],
}

impl Vectorize for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (cos, sin, half) = self.tables;
        for (i, (x, out)) in self.rows.chunks_exact(self.width).zip(self.out.chunks_exact_mut(self.width)).enumerate() {
            let token = (self.first + i) % self.tokens;
            let (cos, sin) = (&cos[token * half..][..half], &sin[token * half..][..half]);
            let ((a, others), (a_out, others_out)) = (x.split_at(half), out.split_at_mut(half));
            let ((b, rest), (b_out, rest_out)) = (others.split_at(half), others_out.split_at_mut(half));
            for k in 0..half {
                a_out[k] = a[k] * cos[k] - b[k] * sin[k];
                b_out[k] = b[k] * cos[k] + a[k] * sin[k];
            }
            rest_out.copy_from_slice(rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, noise, runs_fused};
    use crate::{Precision, Tensor};
    use anec_mil::{DataType, FunctionBuilder, Opset, TensorType};

    #[test]
    fn halves_that_are_rotated_are_one_group() {
        for (heads, tokens, half, rest) in [(2, 1, 8, 0), (3, 5, 16, 0), (1, 4, 5, 7), (9, 300, 16, 3)] {
            let width = 2 * half + rest;
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let ty = |shape: [usize; 4]| TensorType::new(DataType::Fp16, shape.map(|size| size as u64));
            let x = ops.input("x", ty([1, heads, tokens, width]));
            let [cos, sin] = ["cos", "sin"].map(|name| ops.input(name, ty([1, 1, tokens, half])));
            let (first, second) = (ops.slice(x, 3, 0..half as u64), ops.slice(x, 3, half as u64..2 * half as u64));
            let (a_cos, b_sin) = (ops.mul(first, cos), ops.mul(second, sin));
            let (b_cos, a_sin) = (ops.mul(second, cos), ops.mul(first, sin));
            let mut parts = vec![ops.sub(a_cos, b_sin), ops.add(b_cos, a_sin)];
            if rest > 0 {
                parts.push(ops.slice(x, 3, 2 * half as u64..width as u64));
            }
            let rotated = ops.concat(&parts, 3);
            ops.output("out", rotated);
            let function = ops.finish().unwrap();
            let tensor = |shape: [usize; 4], seed| Tensor::new(shape, noise(shape.iter().product(), seed));
            let x = tensor([1, heads, tokens, width], 1);
            let (cos, sin) = (tensor([1, 1, tokens, half], 2), tensor([1, 1, tokens, half], 3));
            for precision in [Precision::F32, Precision::I16, Precision::F16] {
                let steps = if rest > 0 { 10 } else { 9 };
                let inputs = [("x", &x), ("cos", &cos), ("sin", &sin)];
                assert_eq!(compare(&function, &inputs, precision), [steps]);
                assert_eq!(runs_fused("rope", &function, &inputs, precision), precision != Precision::F16);
            }
        }
    }

    #[test]
    fn other_halves_are_not_fused() {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let ty = |width: u64| TensorType::new(DataType::Fp16, [1, 2, 3, width]);
        let x = ops.input("x", ty(8));
        let table = TensorType::new(DataType::Fp16, [1, 1, 3, 4]);
        let [cos, sin] = ["cos", "sin"].map(|name| ops.input(name, table.clone()));
        // the second half has the wrong sign
        let (first, second) = (ops.slice(x, 3, 0..4), ops.slice(x, 3, 4..8));
        let (a_cos, b_sin) = (ops.mul(first, cos), ops.mul(second, sin));
        let (b_cos, a_sin) = (ops.mul(second, sin), ops.mul(first, cos));
        let parts = [ops.sub(a_cos, b_sin), ops.add(b_cos, a_sin)];
        let rotated = ops.concat(&parts, 3);
        ops.output("out", rotated);
        let function = ops.finish().unwrap();
        let tensor = |shape: [usize; 4], seed| Tensor::new(shape, noise(shape.iter().product(), seed));
        let (x, cos, sin) = (tensor([1, 2, 3, 8], 1), tensor([1, 1, 3, 4], 2), tensor([1, 1, 3, 4], 3));
        let groups = compare(&function, &[("x", &x), ("cos", &cos), ("sin", &sin)], Precision::F32);
        assert_eq!(groups, [3, 3], "each half is a chain");
    }
}
