//! Write of a cache from one slot to another, `cache[:, :, begin..end, :] = new`, in place.
//!
//! `cache` is `[1, heads, S, D]` and a whole state, `new` `[1, heads, T, D]`.

use std::sync::Arc;

use super::GroupMatch;
use super::flow::{Flow, writes_axis};
use crate::frame::Frame;
use crate::kernel::Integers;
use crate::node::{FusedKernel, FusedResult};
use crate::operand::Operand;
use crate::ops::{ReadState, SliceUpdate, WriteState};
use crate::step::Step;

/// Axis of the slots.
const SLOTS: usize = 2;

/// Operands of a fused slice write.
pub(super) struct SliceWrite {
    state: Arc<str>,
    begin: Position,
    end: Position,
    new: Operand,
}

/// Position along the axis of the slots.
enum Position {
    Known(i64),
    /// Element of a computed vector.
    Computed(Operand),
}

/// Matches the pattern that ends with the write of a state at `at`.
pub(super) fn find(flow: &Flow<'_>, at: usize, write: &WriteState) -> Option<GroupMatch> {
    let (updated, SliceUpdate { x, update, slicing }) = flow.produced_by(flow.steps[at].operand(write.data))?;
    let step = &flow.steps[updated];
    let (read, ReadState { name }) = flow.produced_by(step.operand(*x))?;
    let undisturbed = *name == write.name && flow.writes(name, read..at).next().is_none();
    let closed = flow.only_user(updated) == Some(at);
    let position = |integers: &Integers| match integers {
        Integers::Known(values) => Some(Position::Known(*values.get(SLOTS)?)),
        Integers::Computed(input) => Some(Position::Computed(step.operand(*input).clone())),
    };
    let (begin, end) = (position(&slicing.begin)?, position(&slicing.end)?);
    let kernel = Box::new(SliceWrite { state: name.clone(), begin, end, new: step.operand(*update).clone() });
    // attention may read the same state
    let found = GroupMatch { members: vec![updated, at], copies: vec![read], kernel };
    (undisturbed && closed && writes_axis(slicing, SLOTS)).then_some(found)
}

impl Position {
    fn of(&self, frame: &Frame<'_>) -> Option<usize> {
        let position = match self {
            Position::Known(position) => *position,
            Position::Computed(operand) => i64::from(*frame.peek(operand)?.integers()?.get(SLOTS)?),
        };
        usize::try_from(position).ok()
    }
}

impl FusedKernel for SliceWrite {
    fn name(&self) -> &'static str {
        "slice write"
    }

    /// Updates the state in place.
    fn run(&self, _: &[Step], frame: &mut Frame<'_>) -> Option<FusedResult> {
        let [heads, slots, width] = frame.state.cache_sizes(&self.state)?;
        let (begin, end) = (self.begin.of(frame)?, self.end.of(frame)?);
        let new = frame.peek(&self.new)?;
        if begin > end || end > slots || new.shape != [1, heads, end - begin, width] {
            return None;
        }
        let written = new.floats()?;
        let mut cache = frame.state.take(&self.state)?;
        let length = (end - begin) * width;
        let parts = (0..heads).map(|head| (head * slots + begin) * width).zip(written.chunks_exact(length.max(1)));
        cache.change_each(&mut frame.workspace.pool, length, parts, |new, old| old.copy_from_slice(new));
        frame.state.put_back(&self.state, cache, begin..end);
        Some(FusedResult::Nothing)
    }
}
