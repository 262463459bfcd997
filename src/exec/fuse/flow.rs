//! Producers and consumers of each value of a function, by step.

use std::collections::HashMap;
use std::ops::Range;

use crate::kernel::{Integers, Kernel};
use crate::operand::Operand;
use crate::ops::{Arithmetic, BinaryOp, Concat, ReadState, SliceByIndex, SliceUpdate, Slicing, WriteState};
use crate::step::Step;
use crate::tensor::Tensor;
use crate::value::Value;
use anec_mil::{Uses, ValueId};

/// Producers and consumers of each value.
pub(super) struct Flow<'a> {
    pub steps: &'a [Step],
    uses: &'a Uses<'a>,
    /// Step of each op, by the op's position in the function.
    step_of: HashMap<usize, usize>,
}

impl<'a> Flow<'a> {
    pub fn new(steps: &'a [Step], uses: &'a Uses<'a>) -> Self {
        let step_of = steps.iter().enumerate().map(|(i, step)| (step.place, i)).collect();
        Flow { steps, uses, step_of }
    }

    /// Kernel of a step, if it is of type `K`.
    pub fn kernel<K: Kernel>(&self, step: usize) -> Option<&'a K> {
        self.steps[step].kernel.is()
    }

    /// Step that produces an operand.
    pub fn producer(&self, operand: &Operand) -> Option<usize> {
        self.step_of.get(&self.uses.producer_place(operand.value()?)?).copied()
    }

    /// Step that produces an operand, if its kernel is of type `K`.
    pub fn produced_by<K: Kernel>(&self, operand: &Operand) -> Option<(usize, &'a K)> {
        let step = self.producer(operand)?;
        Some((step, self.kernel(step)?))
    }

    /// Step that produces an operand by combining two tensors with `op`.
    pub fn combined_by(&self, operand: &Operand, op: BinaryOp) -> Option<(usize, &'a Arithmetic)> {
        self.produced_by::<Arithmetic>(operand).filter(|(_, kernel)| kernel.op == op)
    }

    /// All uses of a step's results; none if one is an output of the function.
    pub fn users(&self, step: usize) -> Vec<usize> {
        match self.steps[step].outputs.as_slice() {
            [output] => {
                let id = ValueId(output.slot as u32);
                let places = if self.uses.is_output(id) { &[] } else { self.uses.user_places(id) };
                places.iter().filter_map(|place| self.step_of.get(place).copied()).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns whether a step's results are used, and only by some steps.
    pub fn is_used_only_by(&self, step: usize, is_one: impl Fn(&usize) -> bool) -> bool {
        let users = self.users(step);
        !users.is_empty() && users.iter().all(is_one)
    }

    /// Only step that uses a step's results, once.
    pub fn only_user(&self, step: usize) -> Option<usize> {
        match self.users(step).as_slice() {
            [one] => Some(*one),
            _ => None,
        }
    }

    /// Writes of a state between two steps.
    pub fn writes<'f>(&'f self, state: &'f str, between: Range<usize>) -> impl Iterator<Item = usize> + 'f {
        let inner = between.start + 1..between.end;
        inner.filter(move |i| self.kernel::<WriteState>(*i).is_some_and(|write| *write.name == *state))
    }

    /// Rows (positions along axis 1) that a write of a state changes; `None` if unknown.
    pub fn written_rows(&self, write: usize) -> Option<Range<usize>> {
        let WriteState { name, data } = self.kernel(write)?;
        let (step, update) = self.produced_by::<SliceUpdate>(self.steps[write].operand(*data))?;
        let (read, source) = self.produced_by::<ReadState>(self.steps[step].operand(update.x))?;
        let same = source.name == *name && self.writes(name, read..write).next().is_none();
        let first = |integers| self.leading(&self.steps[step], integers).get(1).copied();
        let (begin, end) = (first(&update.slicing.begin)?, first(&update.slicing.end)?);
        (same && is_plain(&update.slicing) && 0 <= begin && begin <= end).then_some(begin as usize..end as usize)
    }

    /// Leading elements of a step's integers that are known at compile time.
    fn leading(&self, step: &Step, integers: &Integers) -> Vec<i64> {
        let input = match integers {
            Integers::Known(values) => return values.to_vec(),
            Integers::Computed(input) => *input,
        };
        let Some((joined, concat)) = self.produced_by::<Concat>(step.operand(input)) else { return Vec::new() };
        let parts = concat.values.iter().map(|part| self.steps[joined].operand(part));
        parts.map_while(|part| constant(part)?.integers()).flatten().map(|value| i64::from(*value)).collect()
    }
}

/// Constant tensor.
pub(super) fn constant(operand: &Operand) -> Option<&Tensor> {
    match operand {
        Operand::Constant(Value::Tensor(tensor)) => Some(tensor),
        _ => None,
    }
}

/// Returns whether `begin` and `end` define a slice completely: no masks, strides of one.
pub(super) fn is_plain(slicing: &Slicing) -> bool {
    let masks = [&slicing.begin_mask, &slicing.end_mask, &slicing.squeeze_mask];
    let unset = masks.into_iter().flatten().all(|mask| !mask.contains(&true));
    unset && has_unit_strides(slicing)
}

/// Returns whether `begin` and `end` restrict a slice along one axis only.
pub(super) fn writes_axis(slicing: &Slicing, axis: usize) -> bool {
    let takes_others = |mask: &Option<Vec<bool>>| {
        mask.as_ref().is_some_and(|mask| mask.iter().enumerate().all(|(i, masked)| *masked == (i != axis)))
    };
    takes_others(&slicing.begin_mask)
        && takes_others(&slicing.end_mask)
        && !squeezes(slicing)
        && has_unit_strides(slicing)
}

fn squeezes(slicing: &Slicing) -> bool {
    slicing.squeeze_mask.as_ref().is_some_and(|mask| mask.contains(&true))
}

fn has_unit_strides(slicing: &Slicing) -> bool {
    slicing.stride.as_ref().is_none_or(|strides| strides.iter().all(|stride| *stride == 1))
}

/// Rows that a slice of a tensor of rank 4 takes, if it takes all of its other axes and all numbers are known.
pub(super) fn rows_of_slice(slice: &SliceByIndex) -> Option<Range<usize>> {
    let (first, last) = slice_of_axis(slice, 1)?;
    last.map(|last| first..last)
}

/// Range of a slice of a tensor of rank 4 along an axis, if it takes all of the others and all numbers are known;
/// without an end, it goes to the last element.
pub(super) fn slice_of_axis(
    SliceByIndex { slicing, .. }: &SliceByIndex,
    axis: usize,
) -> Option<(usize, Option<usize>)> {
    let mask = |mask: &Option<Vec<bool>>| match mask {
        None => Some([false; 4]),
        Some(mask) => mask.as_slice().try_into().ok(),
    };
    let (begin, end) = (slicing.begin.known::<4>()?, slicing.end.known::<4>()?);
    let (from_start, to_end) = (mask(&slicing.begin_mask)?, mask(&slicing.end_mask)?);
    let whole = |axis: usize| (from_start[axis] || begin[axis] == 0) && to_end[axis];
    let others = (0..4).filter(|other| *other != axis).all(whole);
    let first = if from_start[axis] { 0 } else { usize::try_from(begin[axis]).ok()? };
    let last = if to_end[axis] { None } else { Some(usize::try_from(end[axis]).ok()?) };
    let fits = has_unit_strides(slicing) && !squeezes(slicing) && others && last.is_none_or(|last| first < last);
    fits.then_some((first, last))
}
