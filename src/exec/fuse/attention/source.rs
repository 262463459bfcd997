//! Sources of keys and values: rows of a tensor or a state, joined with those of the current call.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::frame::Frame;
use crate::fuse::flow::{Flow, rows_of_slice};
use crate::operand::Operand;
use crate::ops::{Concat, ReadState, SliceByIndex};
use crate::pool::Pool;
use crate::state_buffer::StateBuffer;
use crate::tensor::Tensor;
use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::{product, product_of_few};

/// Keys or values.
pub(super) struct KeyValueSource {
    first: Part,
    /// Keys or values of this call, if they are joined with earlier ones.
    appended: Option<Part>,
}

/// Rows of a tensor.
struct Part {
    base: Base,
    /// Range of rows; `None` for all.
    rows: Option<Range<usize>>,
}

/// Source of a tensor.
enum Base {
    Value(Operand),
    /// Content of a state at run time.
    State(Arc<str>),
}

impl KeyValueSource {
    /// KeyValueSource of an operand. The steps that make it are added to `copies`.
    pub fn of(flow: &Flow<'_>, operand: &Operand, until: usize, copies: &mut Vec<usize>) -> KeyValueSource {
        let mut seen = Vec::new();
        let (base, rows) = rows_of(flow, operand, None, &mut seen);
        let Some((past, new, at)) = joined(flow, base) else {
            return KeyValueSource { first: Part::of(flow, operand, None, until, copies), appended: None };
        };
        copies.extend(seen);
        copies.push(at);
        let first = Part::of(flow, past, rows.clone(), until, copies);
        KeyValueSource { first, appended: Some(Part { base: Base::Value(new.clone()), rows }) }
    }

    /// Tensors that hold the source.
    pub fn buffers(&self, frame: &Frame<'_>) -> Option<Buffers> {
        let appended = match &self.appended {
            Some(part) => Some(part.buffer(frame)?),
            None => None,
        };
        Some(Buffers { first: self.first.buffer(frame)?, appended })
    }

    /// Heads in these tensors.
    pub fn heads<'a>(&self, buffers: &'a Buffers) -> Option<Heads<'a>> {
        let first = PartHeads::of(&buffers.first, &self.first.rows)?;
        let appended = match self.appended.as_ref().zip(buffers.appended.as_ref()) {
            Some((part, buffer)) => Some(PartHeads::of(buffer, &part.rows)?),
            None => None,
        };
        let fits = |other: &PartHeads<'_>| (other.count, other.width) == (first.count, first.width);
        appended.as_ref().is_none_or(fits).then_some(Heads { first, appended })
    }
}

/// Tensors of a source.
pub(super) struct Buffers {
    first: StateBuffer,
    appended: Option<StateBuffer>,
}

/// Rows of a tensor behind the slices that give an operand, and the range of rows. The slices are added to `seen`.
fn rows_of<'o>(
    flow: &'o Flow<'_>,
    operand: &'o Operand,
    mut rows: Option<Range<usize>>,
    seen: &mut Vec<usize>,
) -> (&'o Operand, Option<Range<usize>>) {
    let mut base = operand;
    while let Some((at, slice)) = flow.produced_by::<SliceByIndex>(base) {
        let Some(taken) = rows_of_slice(slice) else { break };
        rows = match rows {
            None => Some(taken),
            Some(inner) if inner.end <= taken.len() => Some(taken.start + inner.start..taken.start + inner.end),
            Some(_) => break,
        };
        seen.push(at);
        base = flow.steps[at].operand(slice.x);
    }
    (base, rows)
}

/// Two tensors that are concatenated along their slots, and the step that joins them.
fn joined<'o>(flow: &'o Flow<'_>, operand: &Operand) -> Option<(&'o Operand, &'o Operand, usize)> {
    let (at, concat) = flow.produced_by::<Concat>(operand)?;
    match &flow.steps[at].operands[concat.values.places.clone()] {
        [past, new] if [2, -2].contains(&concat.axis) && !concat.interleave => Some((past, new, at)),
        _ => None,
    }
}

impl Part {
    /// Rows of an operand. A state stays readable until `until` unless these rows are written before; then the slices
    /// remain steps.
    fn of(
        flow: &Flow<'_>,
        operand: &Operand,
        taken: Option<Range<usize>>,
        until: usize,
        copies: &mut Vec<usize>,
    ) -> Part {
        let mut seen = Vec::new();
        let (base, rows) = rows_of(flow, operand, taken.clone(), &mut seen);
        if let Some((read, ReadState { name: state })) = flow.produced_by(base) {
            let stays = |written: Option<Range<usize>>| {
                written
                    .zip(rows.as_ref())
                    .is_some_and(|(written, rows)| written.end <= rows.start || rows.end <= written.start)
            };
            if !flow.writes(state, read..until).all(|write| stays(flow.written_rows(write))) {
                return Part { base: Base::Value(operand.clone()), rows: taken };
            }
            copies.extend(seen);
            copies.push(read);
            return Part { base: Base::State(state.clone()), rows };
        }
        copies.extend(seen);
        Part { base: Base::Value(base.clone()), rows }
    }

    fn buffer(&self, frame: &Frame<'_>) -> Option<StateBuffer> {
        match &self.base {
            Base::Value(operand) => frame.peek(operand).map(StateBuffer::Tensor),
            Base::State(name) => frame.state.share(name),
        }
    }
}

/// Heads of keys or values.
pub(super) struct Heads<'a> {
    first: PartHeads<'a>,
    appended: Option<PartHeads<'a>>,
}

impl<'a> Heads<'a> {
    /// Number of heads.
    pub fn count(&self) -> usize {
        self.first.count
    }

    /// Elements of a slot.
    pub fn width(&self) -> usize {
        self.first.width
    }

    /// Slots of earlier calls, and of this one.
    pub fn slots(&self) -> [usize; 2] {
        [self.first.slots, self.appended.as_ref().map_or(0, |part| part.slots)]
    }

    /// Ranges of both kinds of slots of a head.
    pub fn part(&self, head: usize, [first, appended]: &[Range<usize>; 2]) -> Option<HeadSlots<'a>> {
        let behind = match &self.appended {
            Some(part) if !appended.is_empty() => Some(part.part(head, appended)?),
            _ => None,
        };
        Some(HeadSlots { first: self.first.part(head, first)?, behind })
    }
}

/// Heads of a tensor `[1, rows, slots, width]`.
struct PartHeads<'a> {
    elements: Elements<'a>,
    count: usize,
    slots: usize,
    width: usize,
}

impl<'a> PartHeads<'a> {
    fn of(buffer: &'a StateBuffer, rows: &Option<Range<usize>>) -> Option<Self> {
        let [1, all, slots, width] = *buffer.shape() else { return None };
        let rows = rows.clone().unwrap_or(0..all);
        let elements = Elements::of(buffer)?.part(rows.start * slots * width..rows.end * slots * width)?;
        Some(PartHeads { elements, count: rows.len(), slots, width })
    }

    fn part(&self, head: usize, slots: &Range<usize>) -> Option<Elements<'a>> {
        let start = (head * self.slots + slots.start) * self.width;
        self.elements.part(start..start + slots.len() * self.width)
    }
}

/// Slots of a head, in one or two pieces.
pub(super) struct HeadSlots<'a> {
    first: Elements<'a>,
    behind: Option<Elements<'a>>,
}

impl<'a> HeadSlots<'a> {
    /// Slots in one piece; two pieces are copied to memory with capacity for `most` elements.
    pub fn in_one(self, most: usize, pool: &mut Pool) -> ContiguousSlots<'a> {
        let Some(behind) = self.behind else { return ContiguousSlots::InPlace(self.first) };
        let (split, count) = (self.first.len(), self.first.len() + behind.len());
        ContiguousSlots::Copied(pool.written_within(most, &[1, 1, 1, count], |out| {
            let (first, rest) = out.split_at_mut(split);
            self.first.copy_to(first);
            behind.copy_to(rest);
        }))
    }
}

/// Contiguous slots.
pub(super) enum ContiguousSlots<'a> {
    InPlace(Elements<'a>),
    Copied(Arc<Tensor>),
}

impl ContiguousSlots<'_> {
    /// Elements of the slots.
    pub fn elements(&self) -> Elements<'_> {
        match self {
            ContiguousSlots::InPlace(elements) => *elements,
            ContiguousSlots::Copied(tensor) => Elements::Single(tensor.floats().unwrap_or_default()),
        }
    }

    /// Returns memory to the pool.
    pub fn recycle(self, pool: &mut Pool) {
        if let ContiguousSlots::Copied(tensor) = self {
            pool.recycle(tensor);
        }
    }
}

/// Elements of keys or values.
#[derive(Clone, Copy)]
pub(super) enum Elements<'a> {
    Single(&'a [f32]),
    Half(&'a [f16]),
}

impl<'a> Elements<'a> {
    fn of(buffer: &'a StateBuffer) -> Option<Self> {
        Some(match buffer {
            StateBuffer::Tensor(tensor) => Elements::Single(tensor.floats()?),
            StateBuffer::Half(half) => Elements::Half(&half.values),
        })
    }

    fn part(self, range: Range<usize>) -> Option<Self> {
        Some(match self {
            Elements::Single(values) => Elements::Single(values.get(range)?),
            Elements::Half(values) => Elements::Half(values.get(range)?),
        })
    }

    /// Number of elements.
    pub fn len(self) -> usize {
        match self {
            Elements::Single(values) => values.len(),
            Elements::Half(values) => values.len(),
        }
    }

    fn copy_to(self, out: &mut [f32]) {
        match self {
            Elements::Single(values) => out.copy_from_slice(values),
            Elements::Half(values) => values.convert_to_f32_slice(out),
        }
    }

    /// `out = a self`; if it is a product of few rows, each row has the bits that it has alone.
    pub fn multiplied(
        self,
        sizes: (usize, usize, usize),
        a: (&[f32], MatrixLayout),
        layout: MatrixLayout,
        out: &mut [f32],
        few: bool,
    ) {
        match (self, few) {
            (Elements::Single(values), false) => product(sizes, a, (values, layout), out),
            (Elements::Single(values), true) => product_of_few(sizes, a, (values, layout), out),
            (Elements::Half(values), false) => product(sizes, a, (values, layout), out),
            (Elements::Half(values), true) => product_of_few(sizes, a, (values, layout), out),
        }
    }
}
