//! Which steps make up a group, what it is given, and where it keeps what it computes.

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

/// Results of steps that are kept at a time: with the elements that are read, they stay in a core's nearest cache.
pub(super) const REGISTERS: usize = 4;
/// Inputs of a group up to which a run allocates no memory for them.
pub(super) const FEW: usize = 8;

/// A step, and those before it that fit and whose results nothing else needs, in order.
pub(super) fn members(flow: &Flow<'_>, last: usize, mut fits: impl FnMut(usize) -> bool) -> Vec<usize> {
    let producers =
        |step: &Step| -> Vec<usize> { step.operands.iter().filter_map(|operand| flow.producer(operand)).collect() };
    let mut members = BTreeSet::from([last]);
    // whoever uses a member comes later, so each is looked at when all of its users are known
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

/// A step of a group, whose result goes to a place among the group's.
pub(super) struct Link<P> {
    pub kernel: Arc<dyn Kernel>,
    pub x: Source<P>,
    pub y: Option<Source<P>>,
    pub into: P,
    /// Declared type of the result.
    pub dtype: DataType,
}

impl<P: Copy + PartialEq> Link<P> {
    /// What an op that works on each element by itself gives, in place of its first input if that is there already.
    pub fn compute<'e>(&self, elements: impl Fn(Source<P>) -> Elements<'e>, own: &mut [f32], rounds: bool) {
        if self.x != Source::Computed(self.into) {
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

/// Where an input is found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Source<P> {
    Computed(P),
    /// One of those that the group is given.
    Given(usize),
    /// A constant.
    Number(f32),
}

impl<P> Source<P> {
    /// An operand that isn't computed by a group, whose results have so many axes; it is given it from now on, if it must be.
    pub fn outer(operand: &Operand, rank: usize, given: &mut Vec<Operand>) -> Self {
        if let Some(tensor) = constant(operand).filter(|tensor| tensor.shape.len() <= rank)
            && let Some([number]) = tensor.floats()
        {
            return Source::Number(*number);
        }
        let known = given.iter().position(|known| known.slot().is_some() && known.slot() == operand.slot());
        Source::Given(known.unwrap_or_else(|| {
            given.push(operand.clone());
            given.len() - 1
        }))
    }
}

/// The tensors that a group is given, and the shape of the largest.
pub(super) fn given_tensors(given: &[Operand], frame: &Frame<'_>) -> Option<(SmallVec<[Arc<Tensor>; FEW]>, Dims)> {
    let tensors = given.iter().map(|operand| frame.peek(operand)).collect::<Option<SmallVec<[Arc<Tensor>; FEW]>>>()?;
    let largest = tensors.iter().max_by_key(|tensor| (tensor.data.len(), tensor.shape.len()))?;
    let shape = Dims::from_slice(&largest.shape);
    Some((tensors, shape))
}

/// Whose results registers hold that are still needed.
#[derive(Default)]
pub(super) struct Registers([Option<usize>; REGISTERS]);

impl Registers {
    /// The register that holds what a step gives.
    pub fn holding(&self, producer: Option<usize>) -> Option<usize> {
        self.0.iter().position(|held| held.is_some() && *held == producer)
    }

    /// Gives up what only this step or those before it use.
    pub fn release(&mut self, flow: &Flow<'_>, step: usize) {
        let is_needed = |held: &usize| flow.users(*held).iter().any(|user| *user > step);
        for held in &mut self.0 {
            *held = held.filter(is_needed);
        }
    }

    /// The register for a step's result: that of its first input if it is free, not that of the second, which is read beside it.
    pub fn take(&mut self, step: usize, x: Option<usize>, y: Option<usize>) -> Option<usize> {
        let is_free = |register: &usize| self.0[*register].is_none() && y != Some(*register);
        let register = x.filter(is_free).or_else(|| (0..REGISTERS).find(is_free))?;
        self.0[register] = Some(step);
        Some(register)
    }
}
