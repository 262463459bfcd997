//! Chains of elementwise ops.
//!
//! `SiLU` is five ops, and a network's activations exceed the caches near a core: each op would read and write all of
//! them. A group goes through the elements once, block by block, and applies all ops to a block. Each op sees the same
//! numbers as alone, so results are equal bit for bit.

use std::ops::Range;
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
use crate::tensor::{Tensor, TensorData};
use anec_kernels::pool;
use anec_mil::DataType;

/// Elements in a block.
const BLOCK: usize = 512;

/// Elementwise steps of one or two inputs each; only the last one's result is used elsewhere.
struct Chain {
    /// Steps, with the register of each result.
    links: Vec<Link<usize>>,
    /// Inputs of the group, except constant numbers.
    inputs: Vec<Operand>,
    /// Rank of the result.
    rank: usize,
}

/// Matches steps that end with `last` and whose results, of the same shape, nothing else uses; `is_free` are steps
/// without a group.
pub(super) fn find(flow: &Flow<'_>, last: usize, is_free: impl Fn(usize) -> bool) -> Option<GroupMatch> {
    let is_link = |step: &Step| step.kernel.elementwise().is_some() && step.outputs.len() == 1;
    let shape = |step: &Step| step.types.first().map(|ty| ty.shape.clone());
    let end = &flow.steps[last];
    if !is_link(end) || !is_free(last) {
        return None;
    }
    let members = members(flow, last, |at| {
        let step = &flow.steps[at];
        is_link(step) && is_free(at) && shape(step) == shape(end)
    });
    let kernel = Box::new(Chain::new(flow, &members).filter(|_| members.len() >= 2)?);
    Some(GroupMatch { members, copies: Vec::new(), kernel })
}

impl Chain {
    /// Returns `None` if more results are live at a time than there are registers.
    fn new(flow: &Flow<'_>, members: &[usize]) -> Option<Chain> {
        let rank = flow.steps[*members.last()?].types.first()?.shape.len();
        let mut chain = Chain { links: Vec::with_capacity(members.len()), inputs: Vec::new(), rank };
        let mut registers = Registers::default();
        for member in members {
            let step = &flow.steps[*member];
            let (x, y) = step.kernel.elementwise()?.inputs();
            let mut source = |input: Input| {
                let operand = step.operand(input);
                let register = registers.holding(flow.producer(operand)).map(InputSource::Computed);
                register.unwrap_or_else(|| InputSource::outer(operand, rank, &mut chain.inputs))
            };
            let (x, y) = (source(x), y.map(source));
            registers.release(flow, *member);
            let register = |source: InputSource<usize>| match source {
                InputSource::Computed(register) => Some(register),
                InputSource::Input(_) | InputSource::Number(_) => None,
            };
            let into = registers.take(*member, register(x), y.and_then(register))?;
            chain.links.push(Link { kernel: step.kernel.clone(), x, y, into, dtype: step.dtype() });
        }
        Some(chain)
    }

    /// Computes the results of elements from `first` on. If `out` holds the elements of an input, they are replaced.
    fn compute(&self, inputs: &[GroupInput], first: usize, out: &mut [f32], rounds: impl Fn(DataType) -> bool) {
        let mut registers = [[0.0; BLOCK]; REGISTERS];
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let range = first + block * BLOCK..first + block * BLOCK + out.len();
            for link in &self.links {
                let (before, rest) = registers.split_at_mut(link.into);
                let Some((own, after)) = rest.split_first_mut() else { return };
                let elements = |source: InputSource<usize>| match source {
                    InputSource::Number(number) => Elements::One(number),
                    InputSource::Input(place) => match &inputs[place] {
                        GroupInput::Tensor(tensor) => elements_of(tensor, &range),
                        GroupInput::Replaced => Elements::Each(&*out),
                    },
                    InputSource::Computed(register) if register < link.into => {
                        Elements::Each(&before[register][..range.len()])
                    }
                    InputSource::Computed(register) => Elements::Each(&after[register - link.into - 1][..range.len()]),
                };
                link.compute(elements, &mut own[..range.len()], rounds(link.dtype));
            }
            if let Some(last) = self.links.last() {
                out.copy_from_slice(&registers[last.into][..range.len()]);
            }
        }
    }
}

/// Input of a group.
enum GroupInput {
    /// Floats: as many as the result has, or one.
    Tensor(Arc<Tensor>),
    /// Input whose buffer the results replace.
    Replaced,
}

/// Elements of a tensor for a range of the result.
fn elements_of<'t>(tensor: &'t Tensor, range: &Range<usize>) -> Elements<'t> {
    match tensor.floats().unwrap_or_default() {
        [one] => Elements::One(*one),
        all => Elements::Each(&all[range.clone()]),
    }
}

impl FusedKernel for Chain {
    fn name(&self) -> &'static str {
        "elementwise"
    }

    fn run(&self, steps: &[Step], frame: &mut Frame<'_>) -> Option<FusedResult> {
        let (inputs, shape) = input_tensors(&self.inputs, frame)?;
        // inputs have the result's shape, or one element
        let fits = |tensor: &Arc<Tensor>| {
            let floats = tensor.floats().is_some_and(|floats| !floats.is_empty());
            floats && (tensor.shape[..] == shape[..] || (tensor.data.len() == 1 && tensor.shape.len() <= shape.len()))
        };
        if shape.len() != self.rank || !inputs.iter().all(fits) {
            return None;
        }
        // reuse the buffer of an input that nothing else needs
        let is_last = |slot: usize| {
            let operands = steps.iter().flat_map(|step| &step.operands);
            operands.into_iter().any(|operand| matches!(operand, Operand::Slot { slot: of, last: true } if *of == slot))
        };
        let whole =
            |place: &usize| inputs[*place].shape[..] == shape[..] && self.inputs[*place].slot().is_some_and(is_last);
        let slot = (0..inputs.len()).find(whole).and_then(|place| self.inputs[place].slot());
        let half = frame.half;
        let compute = |inputs: &[GroupInput], out: &mut [f32]| {
            pool::for_each_part(out, |first, out| {
                self.compute(inputs, first, out, |dtype| half && dtype == DataType::Fp16);
            });
        };
        let mut own = slot.and_then(|slot| frame.workspace.slots[slot].take());
        let inputs = self.inputs.iter().zip(inputs);
        let inputs = inputs.map(|(operand, tensor)| match operand.slot() {
            Some(of) if Some(of) == slot => GroupInput::Replaced,
            _ => GroupInput::Tensor(tensor),
        });
        let mut inputs: SmallVec<[GroupInput; FEW]> = inputs.collect();
        if let Some(Tensor { data: TensorData::F32(values), .. }) = own.as_mut().and_then(Arc::get_mut) {
            compute(&inputs, values);
            return own.map(FusedResult::Tensor);
        }
        // the buffer is shared
        if let Some(tensor) = own {
            let replaced = inputs.iter_mut().filter(|inputs| matches!(inputs, GroupInput::Replaced));
            replaced.for_each(|inputs| *inputs = GroupInput::Tensor(tensor.clone()));
        }
        let result = frame.workspace.pool.written(&shape, |out| compute(&inputs, out));
        Some(FusedResult::Tensor(result))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::{compare, noise};
    use crate::{Precision, Tensor};
    use anec_mil::{Constant, DataType, FunctionBuilder, Opset, TensorType, ValueId};

    fn shape(count: usize) -> TensorType {
        TensorType::new(DataType::Fp16, [1, 3, count as u64, 1])
    }

    #[test]
    fn the_activation_of_a_gated_network_is_one_group() {
        // below and above the size of a thread's part
        for count in [1, 5, 700, 40_000] {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let (gate, up) = (ops.input("gate", shape(count)), ops.input("up", shape(count)));
            let half = ops.constant("half", Constant::fp16(0.5));
            let one = ops.constant("one", Constant::fp16(1.0));
            let scaled = ops.mul(gate, half);
            let tanh = ops.tanh(scaled);
            let raised = ops.add(tanh, one);
            let silu = ops.mul(scaled, raised);
            let out = ops.mul(silu, up);
            ops.output("out", out);
            let function = ops.finish().unwrap();
            let tensor = |seed| Tensor::new([1, 3, count, 1], noise(3 * count, seed));
            let (gate, up) = (tensor(1), tensor(2));
            for precision in [Precision::F32, Precision::I16, Precision::F16] {
                assert_eq!(compare(&function, &[("gate", &gate), ("up", &up)], precision), [5], "{count}");
            }
        }
    }

    #[test]
    fn broadcast_or_shared_results_are_not_fused() {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let x = ops.input("x", shape(4));
        let row = ops.input("row", TensorType::new(DataType::Fp16, [1, 1, 4, 1]));
        let given_out = ops.abs(x);
        let wide = ops.mul(given_out, row);
        let out = ops.tanh(wide);
        // shape that broadcasts
        let narrow = ops.abs(row);
        let sum = ops.add(out, narrow);
        ops.output("magnitude", given_out);
        ops.output("sum", sum);
        let function = ops.finish().unwrap();
        let (x, row) = (Tensor::new([1, 3, 4, 1], noise(12, 1)), Tensor::new([1, 1, 4, 1], noise(4, 2)));
        // three steps match, but their inputs have other shapes at run time
        assert_eq!(compare(&function, &[("x", &x), ("row", &row)], Precision::F32), [3]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_chain_gives_what_its_steps_give(
            steps in prop::collection::vec((0usize..8, any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..24),
            count in prop_oneof![1usize..4, 150usize..200, 11_000usize..12_000], half: bool,
        ) {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let mut values: Vec<ValueId> = vec![ops.input("x", shape(count)), ops.input("y", shape(count))];
            values.push(ops.constant("number", Constant::fp16(0.75)));
            for (kind, x, y) in steps {
                // prefer recent values
                let (x, y) = (values[values.len() - 1 - x.index(values.len()) / 2], values[y.index(values.len())]);
                values.push(match kind {
                    0 => ops.add(x, y),
                    1 => ops.sub(x, y),
                    2 => ops.mul(x, y),
                    3 => ops.maximum(x, y),
                    4 => ops.real_div(x, y),
                    5 => ops.tanh(x),
                    6 => ops.sigmoid(x),
                    _ => ops.abs(x),
                });
            }
            // the last op has the shape of `x`
            let last = ops.mul(values[0], values[values.len() - 1]);
            ops.output("out", last);
            let function = ops.finish().unwrap();
            let tensor = |seed| Tensor::new([1, 3, count, 1], noise(3 * count, seed));
            let (x, y) = (tensor(1), tensor(2));
            let precision = if half { Precision::F16 } else { Precision::F32 };
            compare(&function, &[("x", &x), ("y", &y)], precision);
        }
    }
}
