//! Members of a group, its inputs, and its registers.

use std::collections::BTreeSet;
use std::sync::Arc;

use smallvec::SmallVec;

use super::flow::{Flow, constant};
use crate::frame::Frame;
use crate::kernel::{Elements, Kernel};
use crate::operand::Operand;
use crate::step::Step;
use crate::tensor::{Dims, Tensor};
use anec_kernels::round::round_to_f16;
use anec_mil::DataType;

/// Maximum live results; with the elements that are read, they fit into the nearest cache of a core.
pub(super) const REGISTERS: usize = 4;
/// Maximum inputs of a group for which a run allocates no memory.
pub(super) const FEW: usize = 8;

/// A step, and the steps before it that fit and whose results nothing else uses, in order.
pub(super) fn members(flow: &Flow<'_>, last: usize, mut fits: impl FnMut(usize) -> bool) -> Vec<usize> {
    let producers =
        |step: &Step| -> Vec<usize> { step.operands.iter().filter_map(|operand| flow.producer(operand)).collect() };
    let mut members = BTreeSet::from([last]);
    // users of a member come later, so each candidate is checked when all of its users are known
    let mut next: BTreeSet<usize> = producers(&flow.steps[last]).into_iter().collect();
    while let Some(at) = next.pop_last() {
        let only_here = flow.is_used_only_by(at, |user| members.contains(user));
        if only_here && flow.steps[at].outputs.len() == 1 && fits(at) {
            members.insert(at);
            next.extend(producers(&flow.steps[at]));
        }
    }
    members.into_iter().collect()
}

/// Step of a group, with the place of its result.
pub(super) struct Link<P> {
    pub kernel: Arc<dyn Kernel>,
    pub x: InputSource<P>,
    pub y: Option<InputSource<P>>,
    pub into: P,
    /// Declared type of the result.
    pub dtype: DataType,
}

impl<P: Copy + PartialEq> Link<P> {
    /// Computes an elementwise op; if the first input is already in `own`, it is replaced.
    pub fn compute<'e>(&self, elements: impl Fn(InputSource<P>) -> Elements<'e>, own: &mut [f32], rounds: bool) {
        if self.x != InputSource::Computed(self.into) {
            match elements(self.x) {
                Elements::Each(x) => own.copy_from_slice(&x[..own.len()]),
                Elements::One(x) => own.fill(x),
            }
        }
        if let Some(kernel) = self.kernel.elementwise() {
            kernel.apply(own, self.y.map_or(Elements::One(0.0), elements));
        }
        if rounds {
            round_to_f16(own);
        }
    }
}

/// Source of a step's input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum InputSource<P> {
    Computed(P),
    /// Input of the group, by index.
    Input(usize),
    /// Constant number.
    Number(f32),
}

impl<P> InputSource<P> {
    /// Source of an operand from outside of a group whose results have rank `rank`; it becomes an input of the group if
    /// necessary.
    pub fn outer(operand: &Operand, rank: usize, inputs: &mut Vec<Operand>) -> Self {
        if let Some(tensor) = constant(operand).filter(|tensor| tensor.shape.len() <= rank)
            && let Some([number]) = tensor.floats()
        {
            return InputSource::Number(*number);
        }
        let known = inputs.iter().position(|known| known.slot().is_some() && known.slot() == operand.slot());
        InputSource::Input(known.unwrap_or_else(|| {
            inputs.push(operand.clone());
            inputs.len() - 1
        }))
    }
}

/// Input tensors of a group, and the largest shape.
pub(super) fn input_tensors(inputs: &[Operand], frame: &Frame<'_>) -> Option<(SmallVec<[Arc<Tensor>; FEW]>, Dims)> {
    let tensors = inputs.iter().map(|operand| frame.peek(operand)).collect::<Option<SmallVec<[Arc<Tensor>; FEW]>>>()?;
    let largest = tensors.iter().max_by_key(|tensor| (tensor.data.len(), tensor.shape.len()))?;
    let shape = Dims::from_slice(&largest.shape);
    Some((tensors, shape))
}

/// Steps whose results are in registers.
#[derive(Default)]
pub(super) struct Registers([Option<usize>; REGISTERS]);

impl Registers {
    /// Register that holds a step's result.
    pub fn holding(&self, producer: Option<usize>) -> Option<usize> {
        self.0.iter().position(|held| held.is_some() && *held == producer)
    }

    /// Frees registers whose results only this step or earlier ones use.
    pub fn release(&mut self, flow: &Flow<'_>, step: usize) {
        let is_needed = |held: &usize| flow.users(*held).iter().any(|user| *user > step);
        for held in &mut self.0 {
            *held = held.filter(is_needed);
        }
    }

    /// Allocates a register for a step's result: that of its first input if it is free, but not that of the second,
    /// which is read at the same time.
    pub fn take(&mut self, step: usize, x: Option<usize>, y: Option<usize>) -> Option<usize> {
        let is_free = |register: &usize| self.0[*register].is_none() && y != Some(*register);
        let register = x.filter(is_free).or_else(|| (0..REGISTERS).find(is_free))?;
        self.0[register] = Some(step);
        Some(register)
    }
}
