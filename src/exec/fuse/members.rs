//! Which steps make up a group, what it is given, and where it keeps what it computes.

use std::collections::BTreeSet;

use super::flow::{Flow, constant};
use crate::operand::Operand;
use crate::step::Step;

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
        let users = flow.users(at);
        let only_here = !users.is_empty() && users.iter().all(|user| members.contains(user));
        if only_here && flow.steps[at].outputs.len() == 1 && fits(at) {
            members.insert(at);
            next.extend(producers(&flow.steps[at]));
        }
    }
    members.into_iter().collect()
}

/// An input that a group doesn't compute.
pub(super) enum Outer {
    /// A single constant.
    Number(f32),
    /// One of those that it is given.
    Given(usize),
}

impl Outer {
    /// An operand of a group whose results have so many axes; it is given it from now on, if it must be.
    pub fn new(operand: &Operand, rank: usize, given: &mut Vec<Operand>) -> Outer {
        if let Some(tensor) = constant(operand).filter(|tensor| tensor.shape.len() <= rank)
            && let Some([number]) = tensor.floats()
        {
            return Outer::Number(*number);
        }
        let known = given.iter().position(|known| known.slot().is_some() && known.slot() == operand.slot());
        Outer::Given(known.unwrap_or_else(|| {
            given.push(operand.clone());
            given.len() - 1
        }))
    }
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
