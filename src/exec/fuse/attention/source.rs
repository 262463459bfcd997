//! Keys and values, and where they are: rows of a tensor or a state, and of what this call appends to it.

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
pub(super) struct Source {
    first: Part,
    /// Those of this call, where they are joined to those of earlier ones.
    appended: Option<Part>,
}

/// Rows of a tensor.
struct Part {
    base: Base,
    /// All if there are none.
    rows: Option<Range<usize>>,
}

/// Where a tensor is.
enum Base {
    Value(Operand),
    /// What the state holds when the group runs.
    State(Arc<str>),
}

impl Source {
    /// What an operand is made of. The steps that make it are put among `copies`.
    pub fn of(flow: &Flow<'_>, operand: &Operand, until: usize, copies: &mut Vec<usize>) -> Source {
        let mut seen = Vec::new();
        let (base, rows) = rows_of(flow, operand, None, &mut seen);
        let Some((past, new, at)) = joined(flow, base) else {
            return Source { first: Part::of(flow, operand, None, until, copies), appended: None };
        };
        copies.extend(seen);
        copies.push(at);
        let first = Part::of(flow, past, rows.clone(), until, copies);
        Source { first, appended: Some(Part { base: Base::Value(new.clone()), rows }) }
    }

    /// The tensors that it lies in.
    pub fn buffers(&self, frame: &Frame<'_>) -> Option<Buffers> {
        let appended = match &self.appended {
            Some(part) => Some(part.buffer(frame)?),
            None => None,
        };
        Some(Buffers { first: self.first.buffer(frame)?, appended })
    }

    /// Its heads in these tensors.
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

/// The tensors of a source.
pub(super) struct Buffers {
    first: StateBuffer,
    appended: Option<StateBuffer>,
}

/// Rows of a tensor, seen through the slices that give an operand, of which some rows are taken. The slices are put among `seen`.
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

/// Two tensors that are joined to an operand, one behind the other's slots, and the step that joins them.
fn joined<'o>(flow: &'o Flow<'_>, operand: &Operand) -> Option<(&'o Operand, &'o Operand, usize)> {
    let (at, concat) = flow.produced_by::<Concat>(operand)?;
    match &flow.steps[at].operands[concat.values.places.clone()] {
        [past, new] if [2, -2].contains(&concat.axis) && !concat.interleave => Some((past, new, at)),
        _ => None,
    }
}

impl Part {
    /// Some rows of what an operand is. A state that is read stays readable until `until` unless these rows of it are written
    /// before; then the slices are left to be made.
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

/// The heads of keys or values.
pub(super) struct Heads<'a> {
    first: PartHeads<'a>,
    appended: Option<PartHeads<'a>>,
}

impl<'a> Heads<'a> {
    /// How many.
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

    /// Some slots of a head, of both kinds.
    pub fn part(&self, head: usize, [first, appended]: &[Range<usize>; 2]) -> Option<HeadSlots<'a>> {
        let behind = match &self.appended {
            Some(part) if !appended.is_empty() => Some(part.part(head, appended)?),
            _ => None,
        };
        Some(HeadSlots { first: self.first.part(head, first)?, behind })
    }
}

/// The heads of a tensor `[1, rows, slots, width]`.
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

/// Slots of a head, in one piece or in two.
pub(super) struct HeadSlots<'a> {
    first: Elements<'a>,
    behind: Option<Elements<'a>>,
}

impl<'a> HeadSlots<'a> {
    /// The slots in one piece: those in two are copied to memory with room for `most` elements.
    pub fn in_one(self, most: usize, pool: &mut Pool) -> Joined<'a> {
        let Some(behind) = self.behind else { return Joined::InPlace(self.first) };
        let (split, count) = (self.first.len(), self.first.len() + behind.len());
        Joined::Copied(pool.written_within(most, &[1, 1, 1, count], |out| {
            let (first, rest) = out.split_at_mut(split);
            self.first.copy_to(first);
            behind.copy_to(rest);
        }))
    }
}

/// Slots in one piece.
pub(super) enum Joined<'a> {
    InPlace(Elements<'a>),
    Copied(Arc<Tensor>),
}

impl Joined<'_> {
    /// Their elements.
    pub fn elements(&self) -> Elements<'_> {
        match self {
            Joined::InPlace(elements) => *elements,
            Joined::Copied(tensor) => Elements::Single(tensor.floats().unwrap_or_default()),
        }
    }

    /// Gives memory that was needed back.
    pub fn recycle(self, pool: &mut Pool) {
        if let Joined::Copied(tensor) = self {
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

    /// How many.
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

    /// `out = a self`; the rows of `out` have the bits that they have alone if it is a product of few.
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
