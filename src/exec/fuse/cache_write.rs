//! Write of a cache through a mask: `cache * keep + mask @ new`, computed for the slots that change.
//!
//! `cache` is `[1, heads, S, D]`, `mask` `[1, 1, S, T]`, `new` `[1, heads, T, D]`, and `keep` `[1, 1, S, 1]`. A slot
//! doesn't change if its `keep` is 1 and its row of the mask is zero. The cache is a whole state, or rows of one.

use std::ops::Range;
use std::sync::Arc;

use super::GroupMatch;
use super::flow::{Flow, is_plain, rows_of_slice};
use crate::frame::Frame;
use crate::node::{FusedKernel, FusedResult};
use crate::operand::Operand;
use crate::ops::{Arithmetic, BinaryOp, Matmul, ReadState, SliceByIndex, SliceUpdate, WriteState};
use crate::slot_writes::SlotWrite;
use crate::step::Step;
use crate::workspace::Workspace;
use anec_kernels::aligned_buf::AlignedBuf;
use anec_kernels::round::round_to_f16;
use anec_mil::DataType;

/// Operands of a fused cache write.
pub(super) struct CacheWrite {
    state: Arc<str>,
    /// Rows of the state that are the cache; `None` for all.
    rows: Option<Rows>,
    mask: Operand,
    keep: Operand,
    new: Operand,
    /// Declared types of the products with `keep` and `mask`, and of their sum.
    types: [DataType; 3],
}

/// Rows of a state, and the sizes of its other axes in the program.
struct Rows {
    range: Range<usize>,
    begin: [i64; 4],
    end: [i64; 4],
}

/// Matches the pattern that ends with the write of a state at `at`.
pub(super) fn find(flow: &Flow<'_>, at: usize, write: &WriteState) -> Option<GroupMatch> {
    let steps = flow.steps;
    let state = &write.name;
    let data = flow.producer(steps[at].operand(write.data))?;
    let mut members = vec![at, data];
    let (sum, whole, mut rows) = match flow.kernel::<SliceUpdate>(data) {
        None => (data, None, None),
        Some(SliceUpdate { x, update, slicing }) => {
            let (begin, end): ([i64; 4], [i64; 4]) = (slicing.begin.known()?, slicing.end.known()?);
            let range = usize::try_from(begin[1]).ok()?..usize::try_from(end[1]).ok()?;
            let (sum, _) =
                flow.produced_by::<Arithmetic>(steps[data].operand(*update)).filter(|_| is_plain(slicing))?;
            members.push(sum);
            let (whole, _) = flow.produced_by::<ReadState>(steps[data].operand(*x))?;
            (sum, Some(whole), Some(Rows { range, begin, end }))
        }
    };
    let both = |step: usize, kernel: &Arithmetic| [steps[step].operand(kernel.x), steps[step].operand(kernel.y)];
    let added = flow.kernel::<Arithmetic>(sum).filter(|sum| sum.op == BinaryOp::Add)?;
    let [x, y] = both(sum, added);
    let pair = |x: &Operand, y: &Operand| Some((flow.combined_by(x, BinaryOp::Mul)?, flow.produced_by::<Matmul>(y)?));
    let ((kept, scaled), (placed, product)) = pair(x, y).or_else(|| pair(y, x))?;
    members.extend([kept, placed]);
    if product.transpose_x || product.transpose_y {
        return None;
    }
    // operand that comes from the state, and the other one
    let [x, y] = both(kept, scaled);
    let old = |operand: &Operand| match rows.as_ref() {
        None => flow.produced_by::<ReadState>(operand).map(|(read, _)| (read, None)),
        Some(rows) => {
            let (at, slice) = flow.produced_by::<SliceByIndex>(operand)?;
            let fits = rows_of_slice(slice)? == rows.range;
            let (read, _) = flow.produced_by::<ReadState>(steps[at].operand(slice.x))?;
            fits.then_some((read, Some(at)))
        }
    };
    let ((read, slice), keep) = match old(x) {
        Some(found) => (found, y),
        None => (old(y)?, x),
    };
    // attention may read the same rows
    let copies: Vec<usize> = [Some(read), slice, whole].into_iter().flatten().collect();
    // the rows, and the whole that they are put back into, may be separate reads
    let undisturbed = [Some(read), whole]
        .into_iter()
        .flatten()
        .all(|read| steps[read].state() == Some(state) && flow.writes(state, read..at).next().is_none());
    let mut inner = members.iter().filter(|member| **member != at);
    let closed = inner.all(|member| flow.is_used_only_by(*member, |user| members.contains(user)));
    let (mask, new) = (steps[placed].operand(product.x), steps[placed].operand(product.y));
    let kernel = Box::new(CacheWrite {
        state: state.clone(),
        rows: rows.take(),
        mask: mask.clone(),
        keep: keep.clone(),
        new: new.clone(),
        types: [kept, placed, sum].map(|step| steps[step].dtype()),
    });
    (undisturbed && closed).then_some(GroupMatch { members, copies, kernel })
}

impl FusedKernel for CacheWrite {
    fn name(&self) -> &'static str {
        "cache write"
    }

    /// Updates the state in place.
    fn run(&self, _: &[Step], frame: &mut Frame<'_>) -> Option<FusedResult> {
        let (mask, keep, new) = (frame.peek(&self.mask)?, frame.peek(&self.keep)?, frame.peek(&self.new)?);
        let [all, slots, width] = frame.state.cache_sizes(&self.state)?;
        let rows = match &self.rows {
            None => 0..all,
            Some(Rows { range, begin, end }) => {
                let [_, first, low_slot, low] = *begin;
                let reach = [1, range.end, slots, width].map(|size| size as i64);
                let fits = [begin[0], low_slot, low] == [0; 3] && first >= 0 && *end == reach && range.end <= all;
                fits.then(|| range.clone())?
            }
        };
        let tokens = *mask.shape.get(3)?;
        let shapes = mask.shape == [1, 1, slots, tokens]
            && keep.shape == [1, 1, slots, 1]
            && new.shape == [1, rows.len(), tokens, width];
        let (factors, new) = (mask.floats()?, new.floats()?);
        // a non-finite number would spread to all slots, times zero
        if !shapes || !new.iter().all(|v| v.is_finite()) {
            return None;
        }
        let halves = self.types.map(|dtype| frame.rounds(dtype));
        let Workspace { slot_writes, pool, .. } = &mut frame.workspace;
        let writes = slot_writes.of(&mask, &keep, tokens)?;
        let mut cache = frame.state.take(&self.state)?;
        let mut sums = AlignedBuf::new(width);
        let changes = rows
            .zip(new.chunks_exact((tokens * width).max(1)))
            .flat_map(|(row, new)| writes.iter().map(move |write| ((row * slots + write.slot) * width, (write, new))));
        cache.change_each(pool, width, changes, |(SlotWrite { slot, keep, tokens: written }, new), old| {
            let factors = &factors[slot * tokens..][written.clone()];
            let new = &new[written.start * width..][..written.len() * width];
            merge(old, *keep, (factors, new), sums.floats(), halves);
        });
        let ends = writes.first().zip(writes.last());
        let written = ends.map_or(0..0, |(first, last)| first.slot..last.slot + 1);
        frame.state.put_back(&self.state, cache, written);
        Some(FusedResult::Nothing)
    }
}

/// Computes `old * keep + mask new`, each result rounded if it is declared fp16.
fn merge(old: &mut [f32], keep: f32, (mask, new): (&[f32], &[f32]), placed: &mut [f32], halves: [bool; 3]) {
    placed.fill(0.0);
    for (factor, new) in mask.iter().zip(new.chunks_exact(old.len().max(1))) {
        if *factor != 0.0 {
            placed.iter_mut().zip(new).for_each(|(sum, v)| *sum += factor * v);
        }
    }
    old.iter_mut().for_each(|v| *v *= keep);
    if halves[0] {
        round_to_f16(old);
    }
    if halves[1] {
        round_to_f16(placed);
    }
    old.iter_mut().zip(placed).for_each(|(v, placed)| *v += *placed);
    if halves[2] {
        round_to_f16(old);
    }
}
