//! The write of a cache through a mask: `cache * keep + mask @ new`, computed for the slots that change.
//!
//! `cache` is `[1, heads, S, D]`, `mask` `[1, 1, S, T]`, `new` `[1, heads, T, D]`, and `keep` `[1, 1, S, 1]`. A slot whose
//! `keep` is 1 and whose row of the mask is zero stays what it is. The cache is a state of its own, or rows of one.

use std::ops::Range;
use std::sync::Arc;

use super::{Flow, Form, Found, integers, rows_of_slice};
use crate::step::{Frame, Operand};
use crate::tensor::{Tensor, TensorData};
use anec_kernels::round::round_to_f16;
use anec_mil::DataType;

/// Where a group finds what it works on.
pub(super) struct CacheWrite {
    state: Arc<str>,
    /// The rows of the state that are the cache; all if there are none.
    rows: Option<Rows>,
    mask: Operand,
    keep: Operand,
    new: Operand,
    /// Declared types of the products with `keep` and `mask`, and of their sum.
    types: [DataType; 3],
}

/// Rows of a state, and the sizes that the program gives for the other axes.
struct Rows {
    range: Range<usize>,
    begin: [i32; 4],
    end: [i32; 4],
}

/// Looks for the form that ends with the write of a state at `at`.
pub(super) fn find(flow: &Flow<'_>, at: usize) -> Option<Found> {
    let steps = flow.steps;
    let state = steps[at].state()?.clone();
    let data = flow.producer(steps[at].argument("data")?)?;
    let mut members = vec![at, data];
    let (sum, whole, mut rows) = match steps[data].operator.as_str() {
        "add" => (data, None, None),
        "slice_update" => {
            let plain = ["begin_mask", "end_mask", "squeeze_mask", "stride"];
            let plain = plain.iter().all(|name| steps[data].argument(name).is_none_or(super::is_neutral));
            let corner = |parameter: &str| integers(steps[data].argument(parameter)?)?.try_into().ok();
            let (begin, end): ([i32; 4], [i32; 4]) = (corner("begin")?, corner("end")?);
            let range = usize::try_from(begin[1]).ok()?..usize::try_from(end[1]).ok()?;
            let sum = flow.produced_by(steps[data].argument("update")?, "add").filter(|_| plain)?;
            members.push(sum);
            (sum, Some(flow.produced_by(steps[data].argument("x")?, "read_state")?), Some(Rows { range, begin, end }))
        }
        _ => return None,
    };
    let both = |step: usize| Some([steps[step].argument("x")?, steps[step].argument("y")?]);
    let [x, y] = both(sum)?;
    let (kept, placed) = match (flow.produced_by(x, "mul"), flow.produced_by(y, "matmul")) {
        (Some(kept), Some(placed)) => (kept, placed),
        _ => (flow.produced_by(y, "mul")?, flow.produced_by(x, "matmul")?),
    };
    members.extend([kept, placed]);
    if ["transpose_x", "transpose_y"].iter().any(|name| super::flag(&steps[placed], name) != Some(false)) {
        return None;
    }
    // the operand of the product that comes from the state, and the other
    let [x, y] = both(kept)?;
    let old = |operand: &Operand| match rows.as_ref() {
        None => flow.produced_by(operand, "read_state").map(|read| (read, None)),
        Some(rows) => {
            let slice = flow.producer(operand)?;
            let fits = rows_of_slice(&steps[slice])? == rows.range;
            let read = flow.produced_by(steps[slice].argument("x")?, "read_state")?;
            fits.then_some((read, Some(slice)))
        }
    };
    let ((read, slice), keep) = match old(x) {
        Some(found) => (found, y),
        None => (old(y)?, x),
    };
    members.push(read);
    members.extend(slice);
    members.extend(whole);
    // the rows and the whole that they are put back into may have been read one after the other
    let undisturbed = [Some(read), whole]
        .into_iter()
        .flatten()
        .all(|read| steps[read].state() == Some(&state) && flow.writes(&state, read..at).next().is_none());
    let closed = members.iter().filter(|member| **member != at).all(|member| {
        let users = flow.users(*member);
        !users.is_empty() && users.iter().all(|user| members.contains(user))
    });
    let [mask, new] = both(placed)?;
    let form = Form::CacheWrite(CacheWrite {
        state,
        rows: rows.take(),
        mask: mask.clone(),
        keep: keep.clone(),
        new: new.clone(),
        types: [kept, placed, sum].map(|step| steps[step].dtype()),
    });
    (undisturbed && closed).then_some(Found { members, copies: Vec::new(), form })
}

impl CacheWrite {
    /// Changes the state in place.
    pub fn run(&self, frame: &mut Frame<'_>) -> Option<()> {
        let (mask, keep, new) = (frame.peek(&self.mask)?, frame.peek(&self.keep)?, frame.peek(&self.new)?);
        let state = frame.state.get(&self.state)?;
        let [1, all, slots, width] = state.shape[..] else { return None };
        let rows = match &self.rows {
            None => 0..all,
            Some(Rows { range, begin, end }) => {
                let [_, first, low_slot, low] = *begin;
                let reach = [1, range.end as i32, slots as i32, width as i32];
                let fits = [begin[0], low_slot, low] == [0; 3] && first >= 0 && *end == reach && range.end <= all;
                fits.then(|| range.clone())?
            }
        };
        let tokens = *mask.shape.get(3)?;
        let shapes = mask.shape == [1, 1, slots, tokens]
            && keep.shape == [1, 1, slots, 1]
            && new.shape == [1, rows.len(), tokens, width];
        let (mask, keep, new) = (mask.floats()?, keep.floats()?, new.floats()?);
        // a number that isn't finite would spread to all slots, times zero
        if !shapes || !new.iter().all(|v| v.is_finite()) {
            return None;
        }
        let open = written(mask, keep, tokens);
        let halves = self.types.map(|dtype| frame.rounds(dtype));
        let mut cache = frame.state.take(&self.state)?;
        if let Tensor { data: TensorData::F32(values), .. } = Arc::make_mut(&mut cache) {
            for (row, new) in rows.zip(new.chunks_exact((tokens * width).max(1))) {
                for slot in &open {
                    let place = &mut values[(row * slots + slot) * width..][..width];
                    merge(place, keep[*slot], &mask[slot * tokens..][..tokens], new, halves);
                }
            }
        }
        frame.state.put(&self.state, cache);
        Some(())
    }
}

/// The slots that change.
fn written(mask: &[f32], keep: &[f32], tokens: usize) -> Vec<usize> {
    const BLOCK: usize = 64;
    let mut open = Vec::new();
    for (i, keep) in keep.chunks(BLOCK).enumerate() {
        let first = i * BLOCK;
        let rows = &mask[first * tokens..][..keep.len() * tokens];
        // without an early end, so that it is done by whole vectors
        let idle =
            keep.iter().fold(true, |idle, k| idle & (*k == 1.0)) & rows.iter().fold(true, |idle, m| idle & (*m == 0.0));
        if !idle {
            let changes = |i: &usize| keep[*i] != 1.0 || rows[i * tokens..][..tokens].iter().any(|m| *m != 0.0);
            open.extend((0..keep.len()).filter(changes).map(|i| first + i));
        }
    }
    open
}

/// `old * keep + mask new`, each result rounded if it is declared so.
fn merge(old: &mut [f32], keep: f32, mask: &[f32], new: &[f32], halves: [bool; 3]) {
    let mut placed = vec![0.0; old.len()];
    for (factor, new) in mask.iter().zip(new.chunks_exact(old.len().max(1))) {
        if *factor != 0.0 {
            placed.iter_mut().zip(new).for_each(|(sum, v)| *sum += factor * v);
        }
    }
    old.iter_mut().for_each(|v| *v *= keep);
    for (values, half) in [(&mut *old, halves[0]), (&mut placed[..], halves[1])] {
        if half {
            round_to_f16(values);
        }
    }
    old.iter_mut().zip(&placed).for_each(|(v, placed)| *v += placed);
    if halves[2] {
        round_to_f16(old);
    }
}
