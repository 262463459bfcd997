//! Norms, and other groups that reduce rows of elements and combine each row with the result.
//!
//! A root-mean-square norm is a dozen ops in a program for the Neural Engine. For a single token, starting an op takes
//! longer than computing it. A group computes one row at a time with all ops; values with one number per row are
//! scalars here. Each op sees the same numbers as alone, so results are equal bit for bit. Rows must be contiguous: if
//! channels of several tokens are reduced, they aren't, and the steps run one by one over all tokens.

use std::sync::Arc;

use smallvec::SmallVec;

use super::GroupMatch;
use super::flow::Flow;
use super::members::{FEW, InputSource, Link, REGISTERS, Registers, input_tensors, members};
use crate::frame::Frame;
use crate::kernel::{Elements, Input};
use crate::node::{FusedKernel, FusedResult};
use crate::operand::Operand;
use crate::step::Step;
use crate::tensor::Tensor;
use anec_kernels::aligned_buf::AlignedBuf;
use anec_kernels::pool;
use anec_kernels::round::round_to_f16;
use anec_mil::{DataType, Dim};

/// Steps of which only the last one's result is used elsewhere.
struct RowSteps {
    links: Vec<Link<Place>>,
    /// Inputs of the group, except constant numbers.
    inputs: Vec<Operand>,
    /// Number of scalars per row.
    numbers: usize,
    /// Axis of the rows.
    axis: usize,
    /// Rank of the result.
    rank: usize,
}

/// Place of a result.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// Row in a register.
    Row(usize),
    /// Scalar of the row.
    Number(usize),
}

/// Matches steps that end with `last` and whose results nothing else uses. They have its shape, or that shape without
/// one axis, which at least one step reduces. `is_free` are steps without a group.
pub(super) fn find(flow: &Flow<'_>, last: usize, is_free: impl Fn(usize) -> bool) -> Option<GroupMatch> {
    let shape = |step: &Step| step.types.first().map(|ty| ty.shape.clone()).filter(|_| step.outputs.len() == 1);
    let whole = shape(&flow.steps[last])?;
    flow.steps[last].kernel.elementwise().filter(|_| is_free(last))?;
    let mut axis = None;
    let members = members(flow, last, |at| {
        let (step, Some(own)) = (&flow.steps[at], shape(&flow.steps[at])) else { return false };
        let reduced = reduced_axis(&whole, &own).filter(|reduced| axis.is_none_or(|axis| axis == *reduced));
        let fits = match step.kernel.reduction() {
            Some(reduction) => reduced.is_some() && reduction.axis(own.len()) == reduced,
            None => step.kernel.elementwise().is_some() && (own == whole || reduced.is_some()),
        };
        axis = axis.or(reduced.filter(|_| fits && is_free(at)));
        fits && is_free(at)
    });
    members.iter().find(|member| flow.steps[**member].kernel.reduction().is_some())?;
    let kernel = Box::new(RowSteps::new(flow, &members, axis?)?);
    Some(GroupMatch { members, copies: Vec::new(), kernel })
}

/// Only axis by which a shape differs from `whole`.
fn reduced_axis(whole: &[Dim], shape: &[Dim]) -> Option<usize> {
    let mut others = (0..whole.len()).filter(|axis| whole.len() == shape.len() && whole[*axis] != shape[*axis]);
    others.next().filter(|axis| shape[*axis].fixed() == Some(1) && others.next().is_none())
}

impl RowSteps {
    /// Returns `None` if more rows are live than there are registers, or if scalars are reduced.
    fn new(flow: &Flow<'_>, members: &[usize], axis: usize) -> Option<RowSteps> {
        let whole = &flow.steps[*members.last()?].types.first()?.shape;
        let links = Vec::with_capacity(members.len());
        let mut all = RowSteps { links, inputs: Vec::new(), numbers: 0, axis, rank: whole.len() };
        // step of each scalar
        let (mut registers, mut numbers) = (Registers::default(), Vec::new());
        for member in members {
            let step = &flow.steps[*member];
            let (x, y) = match step.kernel.reduction() {
                Some(reduction) => (reduction.input(), None),
                None => step.kernel.elementwise()?.inputs(),
            };
            let mut source = |input: Input| {
                let operand = step.operand(input);
                let producer = flow.producer(operand);
                let number = || numbers.iter().position(|held| Some(*held) == producer).map(Place::Number);
                let place = registers.holding(producer).map(Place::Row).or_else(number);
                place
                    .map(InputSource::Computed)
                    .unwrap_or_else(|| InputSource::outer(operand, whole.len(), &mut all.inputs))
            };
            let (x, y) = (source(x), y.map(source));
            registers.release(flow, *member);
            if step.kernel.reduction().is_some()
                && matches!(x, InputSource::Computed(Place::Number(_)) | InputSource::Number(_))
            {
                return None;
            }
            let into = if step.types.first()?.shape == *whole {
                let register = |source: InputSource<Place>| match source {
                    InputSource::Computed(Place::Row(register)) => Some(register),
                    _ => None,
                };
                Place::Row(registers.take(*member, register(x), y.and_then(register))?)
            } else {
                numbers.push(*member);
                Place::Number(numbers.len() - 1)
            };
            all.links.push(Link { kernel: step.kernel.clone(), x, y, into, dtype: step.dtype() });
        }
        all.numbers = numbers.len();
        Some(all)
    }

    /// Returns whether inputs that are reduced are rows, and inputs of scalars are scalars.
    fn fit(&self, inputs: &[RowInput]) -> bool {
        self.links.iter().all(|link| {
            let layout = |source: &InputSource<Place>| match source {
                InputSource::Input(place) => Some(inputs[*place].layout),
                _ => None,
            };
            let mut inputs = [Some(&link.x), link.y.as_ref()].into_iter().flatten().filter_map(layout);
            match (link.kernel.reduction(), link.into) {
                (Some(_), _) => inputs.all(|layout| layout == InputLayout::EachRow),
                (None, Place::Number(_)) => {
                    inputs.all(|layout| matches!(layout, InputLayout::ScalarPerRow | InputLayout::SharedScalar))
                }
                (None, Place::Row(_)) => true,
            }
        })
    }

    /// Computes a row of the result. `registers` has [`REGISTERS`] rows, `numbers` all scalars.
    fn compute(
        &self,
        (inputs, row): (&[RowInput], usize),
        (registers, numbers): (&mut [f32], &mut [f32]),
        out: &mut [f32],
        rounds: impl Fn(DataType) -> bool,
    ) {
        let width = out.len();
        for link in &self.links {
            let from = match link.into {
                Place::Row(register) => register * width,
                Place::Number(_) => registers.len(),
            };
            let (before, rest) = registers.split_at_mut(from);
            let (own, after) = rest.split_at_mut(width.min(rest.len()));
            let behind = from + own.len();
            let elements = |source: InputSource<Place>| match source {
                InputSource::Number(number) => Elements::One(number),
                InputSource::Input(place) => inputs[place].row(row, width),
                InputSource::Computed(Place::Number(number)) => Elements::One(numbers[number]),
                InputSource::Computed(Place::Row(register)) => Elements::Each(match register * width {
                    start if start < from => &before[start..][..width],
                    start => &after[start - behind..][..width],
                }),
            };
            let rounds = rounds(link.dtype);
            match (link.into, link.kernel.reduction()) {
                (Place::Row(_), _) => link.compute(elements, own, rounds),
                (Place::Number(number), None) => {
                    let mut result = [0.0];
                    link.compute(elements, &mut result, rounds);
                    [numbers[number]] = result;
                }
                (Place::Number(number), Some(reduction)) => {
                    // a row, as `fit` has checked
                    let mut result = match elements(link.x) {
                        Elements::Each(x) => [reduction.reduce(x)],
                        Elements::One(x) => [x],
                    };
                    if rounds {
                        round_to_f16(&mut result);
                    }
                    [numbers[number]] = result;
                }
            }
        }
        if let Some(Link { into: Place::Row(register), .. }) = self.links.last() {
            out.copy_from_slice(&registers[register * width..][..width]);
        }
    }
}

/// Layout of an input relative to the rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum InputLayout {
    /// One row per row.
    EachRow,
    /// One scalar per row.
    ScalarPerRow,
    /// One row for all.
    SharedRow,
    /// One scalar for all.
    SharedScalar,
}

/// Input of a group.
struct RowInput {
    tensor: Arc<Tensor>,
    layout: InputLayout,
}

impl RowInput {
    /// Returns `None` for any other layout.
    fn new(tensor: Arc<Tensor>, shape: &[usize], axis: usize) -> Option<RowInput> {
        let own = &tensor.shape[..];
        let layout = match tensor.floats()?.len() {
            1 if own.len() <= shape.len() => InputLayout::SharedScalar,
            _ if own == shape => InputLayout::EachRow,
            _ if own.len() != shape.len() => return None,
            count if count == shape[axis] && own[axis] == count => InputLayout::SharedRow,
            _ if own[axis] == 1 && (0..shape.len()).all(|i| i == axis || own[i] == shape[i]) => {
                InputLayout::ScalarPerRow
            }
            _ => return None,
        };
        Some(RowInput { tensor, layout })
    }

    /// Elements for a row.
    fn row(&self, row: usize, width: usize) -> Elements<'_> {
        let all = self.tensor.floats().unwrap_or_default();
        match self.layout {
            InputLayout::EachRow => Elements::Each(&all[row * width..][..width]),
            InputLayout::ScalarPerRow => Elements::One(all[row]),
            InputLayout::SharedRow => Elements::Each(all),
            InputLayout::SharedScalar => Elements::One(all[0]),
        }
    }
}

impl FusedKernel for RowSteps {
    fn name(&self) -> &'static str {
        "rows"
    }

    fn run(&self, _: &[Step], frame: &mut Frame<'_>) -> Option<FusedResult> {
        let (tensors, shape) = input_tensors(&self.inputs, frame)?;
        let is_gathered = shape.len() == self.rank && shape[self.axis + 1..].iter().all(|size| *size == 1);
        if !is_gathered || shape.contains(&0) {
            return None;
        }
        let inputs = tensors.into_iter().map(|tensor| RowInput::new(tensor, &shape, self.axis));
        let inputs = inputs.collect::<Option<SmallVec<[RowInput; FEW]>>>().filter(|inputs| self.fit(inputs))?;
        let (width, half) = (shape[self.axis], frame.half);
        let compute = |first: usize, out: &mut [f32]| {
            let mut buffer = AlignedBuf::new(REGISTERS * width + self.numbers);
            let (registers, numbers) = buffer.floats().split_at_mut(REGISTERS * width);
            for (i, out) in out.chunks_exact_mut(width).enumerate() {
                let registers = (&mut *registers, &mut numbers[..self.numbers]);
                self.compute((&inputs, first + i), registers, out, |dtype| half && dtype == DataType::Fp16);
            }
        };
        let result = frame.workspace.pool.written(&shape, |out| {
            pool::for_each_part_of_rows(out, width, compute);
        });
        Some(FusedResult::Tensor(result))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::{compare, noise, runs_fused};
    use crate::{Precision, Tensor};
    use anec_mil::{Constant, DataType, FunctionBuilder, Opset, TensorType, ValueId};

    const WIDTH: usize = 37;

    /// `x` divided by its root mean square along an axis, times a gain; the largest magnitude is divided out first.
    fn norm(ops: &mut FunctionBuilder, x: ValueId, axis: usize) -> ValueId {
        let width = ops.ty(x).shape[axis].fixed().unwrap();
        let axes = [axis as i32];
        let magnitude = ops.abs(x);
        let largest = ops.reduce_max(magnitude, &axes, true);
        let least = ops.constant("least", Constant::fp16(6.1e-5));
        let largest = ops.maximum(largest, least);
        let scaled = ops.real_div(x, largest);
        let square = ops.mul(scaled, scaled);
        let mean = ops.reduce_mean(square, &axes, true);
        let root = ops.constant("root", Constant::fp16(1e-3));
        let root = ops.real_div(root, largest);
        let epsilon = ops.mul(root, root);
        let total = ops.add(mean, epsilon);
        let inverse = ops.rsqrt(total, 1e-7);
        let normal = ops.mul(scaled, inverse);
        let mut shape = [1; 4];
        shape[axis] = width;
        let gain = ops.constant("gain", Constant::fp16_tensor(&shape, &noise(width as usize, 5)));
        ops.mul(normal, gain)
    }

    #[test]
    fn a_norm_is_one_group() {
        let forms = [
            // channels of one token with a gain that is a weight, channels of several tokens (not contiguous), heads
            ([1, WIDTH, 1, 1], 1),
            ([1, 1500, 1, 1], 1),
            ([1, WIDTH, 3, 1], 1),
            ([1, 5, 3, WIDTH], 3),
            ([1, 64, 70, WIDTH], 3),
        ];
        for (shape, axis) in forms {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let x = ops.input("x", TensorType::new(DataType::Fp16, shape.map(|size| size as u64)));
            let normal = norm(&mut ops, x, axis);
            ops.output("out", normal);
            let function = ops.finish().unwrap();
            let x = Tensor::new(shape, noise(shape.iter().product(), 1));
            for precision in [Precision::F32, Precision::I16, Precision::F16] {
                assert_eq!(compare(&function, &[("x", &x)], precision), [12], "{shape:?}");
                let in_one_piece = shape[axis + 1..].iter().all(|size| *size == 1);
                let is_one = runs_fused("rows", &function, &[("x", &x)], precision);
                assert_eq!(is_one, in_one_piece, "{shape:?}");
            }
        }
    }

    #[test]
    fn a_reduction_of_another_tensor_is_not_fused() {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let row = |ops: &mut FunctionBuilder, name, width: usize| {
            ops.input(name, TensorType::new(DataType::Fp16, [1, width as u64, 1, 1]))
        };
        let (x, narrow) = (row(&mut ops, "x", WIDTH), row(&mut ops, "narrow", 3));
        let sum = ops.reduce_sum(narrow, &[1], true);
        let wide = ops.mul(x, sum);
        let out = ops.tanh(wide);
        ops.output("out", out);
        let function = ops.finish().unwrap();
        let (x, narrow) = (Tensor::new([1, WIDTH, 1, 1], noise(WIDTH, 1)), Tensor::new([1, 3, 1, 1], noise(3, 2)));
        assert_eq!(compare(&function, &[("x", &x), ("narrow", &narrow)], Precision::F32), [3]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_steps_of_rows_give_what_they_give_one_by_one(
            steps in prop::collection::vec((0usize..9, any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..24),
            rows in prop_oneof![1usize..4, 900usize..910], half: bool,
        ) {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let ty = |width: usize| TensorType::new(DataType::Fp16, [1, rows as u64, 1, width as u64]);
            let mut values: Vec<ValueId> = vec![ops.input("x", ty(WIDTH)), ops.input("number", ty(1))];
            values.push(ops.constant("constant", Constant::fp16(0.75)));
            values.push(ops.constant("gain", Constant::fp16_tensor(&[1, 1, 1, WIDTH as u64], &noise(WIDTH, 3))));
            for (kind, x, y) in steps {
                // prefer recent values
                let (x, y) = (values[values.len() - 1 - x.index(values.len()) / 2], values[y.index(values.len())]);
                values.push(match kind {
                    0 => ops.add(x, y),
                    1 => ops.sub(x, y),
                    2 => ops.mul(x, y),
                    3 => ops.real_div(x, y),
                    4 => ops.tanh(x),
                    5 => ops.abs(x),
                    6 if ops.ty(x).rank() == 4 => ops.reduce_max(x, &[3], true),
                    7 if ops.ty(x).rank() == 4 => ops.reduce_mean(x, &[3], true),
                    _ if ops.ty(x).rank() == 4 => ops.reduce_sum(x, &[-1], true),
                    _ => ops.sigmoid(x),
                });
            }
            // the last op has the shape of `x`
            let last = ops.mul(values[0], values[values.len() - 1]);
            ops.output("out", last);
            let function = ops.finish().unwrap();
            let tensor = |width: usize, seed| Tensor::new([1, rows, 1, width], noise(rows * width, seed));
            let (x, number) = (tensor(WIDTH, 1), tensor(1, 2));
            let precision = if half { Precision::F16 } else { Precision::F32 };
            compare(&function, &[("x", &x), ("number", &number)], precision);
        }
    }
}
