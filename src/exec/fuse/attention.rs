//! Attention under a mask, `softmax(q kᵀ + mask) v`, computed for the slots that the mask opens.
//!
//! `q` is `[1, Q, T, D]`, `k` and `v` are `[1, K, S, D]` with K = Q or K = 1, the mask is `[1, 1, T, S]`. A slot that the
//! mask closes ([`MASKED`]) to every token gets a weight of `exp(score + mask - highest)`, which is 0 in f32 unless its
//! score is higher than those of all open slots by almost as much as the mask takes off. Slots before the first and
//! after the last open one are left out; those between are computed as they stand. The keys and values may be rows of a
//! larger cache, which are used where they are.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;
use smallvec::SmallVec;

use super::Found;
use super::flow::{Flow, constant, rows_of_slice};
use crate::frame::Frame;
use crate::kernel::Call;
use crate::node::{FusedKernel, FusedResult};
use crate::operand::Operand;
use crate::ops::{BinaryOp, Concat, Matmul, ReadState, SliceByIndex, Softmax, softmax_rows};
use crate::state::State;
use crate::state_buffer::StateBuffer;
use crate::step::Step;
use crate::tensor::{Tensor, TensorData};
use crate::value::Value;
use crate::workspace::Workspace;
use anec_bundle::MASKED;
use anec_kernels::dispatch::{Vectorize, vectorized};
use anec_kernels::dot::MOST_COLUMNS;
use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::{product, product_of_few};
use anec_kernels::pool;
use anec_kernels::round::round_to_f16;
use anec_mil::DataType;

/// If the highest score of a token is lower than this, closed slots may count, too.
const LOWEST: f32 = -5e3;
/// First and last slot are rounded outwards to multiples of this, so that sums are made of the same parts.
const ALIGNMENT: usize = 16;
/// Rows that are computed at a time.
const ROWS: usize = 64;
/// Multiplications for which threads are worth waking.
const LARGE_WORK: usize = 1 << 19;

thread_local! {
    /// What this thread computes scores with.
    static SCRATCH: Cell<Workspace> = Cell::default();
}

/// Where a group finds what it works on.
pub(super) struct Attention {
    query: Operand,
    key: Source,
    value: Source,
    mask: Operand,
    /// How often the mask is repeated along its tokens.
    repeat: usize,
    /// What stands between the first product and the mask: steps that change each score by itself, with one number or
    /// none beside it.
    between: Vec<Step>,
    /// Declared types of the scores, the masked scores, the weights and the result.
    types: [DataType; 4],
}

/// Keys or values: rows of a tensor.
struct Source {
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

/// Looks for the form around the softmax at `at`.
pub(super) fn find(flow: &Flow<'_>, at: usize, softmax: &Softmax) -> Option<Found> {
    let steps = flow.steps;
    if ![-1, 3].contains(&softmax.axis) {
        return None;
    }
    let (masked, sum) = flow.combined_by(steps[at].operand(softmax.x), BinaryOp::Add)?;
    let (x, y) = (steps[masked].operand(sum.x), steps[masked].operand(sum.y));
    let (scores, mask) = match scores(flow, x) {
        Some(found) => (found, y),
        None => (scores(flow, y)?, x),
    };
    let (product, between) = scores;
    let mixed = flow.only_user(at)?;
    let values: &Matmul = flow.kernel(mixed)?;
    let weights_first = flow.producer(steps[mixed].operand(values.x)) == Some(at);
    if values.transpose_x || values.transpose_y || !weights_first || flow.only_user(masked) != Some(at) {
        return None;
    }
    let mut members = vec![product, masked, at, mixed];
    members.extend(&between);
    let mut copies = Vec::new();
    let keys: &Matmul = flow.kernel(product)?;
    let key = source(flow, steps[product].operand(keys.y), mixed, &mut copies);
    let value = source(flow, steps[mixed].operand(values.y), mixed, &mut copies);
    let (mask, repeat) = repeated(flow, mask, &mut copies);
    let kernel = Box::new(Attention {
        query: steps[product].operand(keys.x).clone(),
        key,
        value,
        mask,
        repeat,
        between: between.into_iter().map(|step| steps[step].clone()).collect(),
        types: [product, masked, at, mixed].map(|step| steps[step].dtype()),
    });
    Some(Found { members, copies, kernel })
}

/// The product of queries and keys that an operand comes from, and what stands between (in order): ops that change each
/// element by itself. Nothing else uses any of it.
fn scores(flow: &Flow<'_>, operand: &Operand) -> Option<(usize, Vec<usize>)> {
    let mut between = Vec::new();
    let mut operand = operand;
    loop {
        let producer = flow.producer(operand)?;
        flow.only_user(producer)?;
        if let Some(product) = flow.kernel::<Matmul>(producer) {
            between.reverse();
            return (!product.transpose_x && product.transpose_y).then_some((producer, between));
        }
        let step = &flow.steps[producer];
        let mut changing = step.operands.iter().filter(|operand| constant(operand).is_none_or(|t| t.data.len() != 1));
        let (one, others) = (changing.next()?, changing.next());
        one.slot()?;
        if step.kernel.elementwise().is_none() || others.is_some() {
            return None;
        }
        between.push(producer);
        operand = one;
    }
}

/// Rows of a tensor, seen through the slices that give an operand. A state that is read stays readable until `until`
/// unless these rows of it are written before; then the slices are left to be made.
fn source(flow: &Flow<'_>, operand: &Operand, until: usize, copies: &mut Vec<usize>) -> Source {
    let (mut base, mut rows, mut seen) = (operand, None::<Range<usize>>, Vec::new());
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
    if let Some((read, ReadState { name: state })) = flow.produced_by(base) {
        let stays = |written: Option<Range<usize>>| {
            written
                .zip(rows.as_ref())
                .is_some_and(|(written, rows)| written.end <= rows.start || rows.end <= written.start)
        };
        if !flow.writes(state, read..until).all(|write| stays(flow.written_rows(write))) {
            return Source { base: Base::Value(operand.clone()), rows: None };
        }
        copies.extend(seen);
        copies.push(read);
        return Source { base: Base::State(state.clone()), rows };
    }
    copies.extend(seen);
    Source { base: Base::Value(base.clone()), rows }
}

/// A mask that is joined to itself along its tokens, and how often.
fn repeated(flow: &Flow<'_>, mask: &Operand, copies: &mut Vec<usize>) -> (Operand, usize) {
    let whole = (mask.clone(), 1);
    let Some((at, concat)) = flow.produced_by::<Concat>(mask) else { return whole };
    let parts = &flow.steps[at].operands[concat.values.places.clone()];
    match parts {
        [first @ Operand::Slot { slot, .. }, others @ ..]
            if [2, -2].contains(&concat.axis)
                && !concat.interleave
                && others.iter().all(|other| other.slot() == Some(*slot)) =>
        {
            copies.push(at);
            (first.clone(), parts.len())
        }
        _ => whole,
    }
}

impl FusedKernel for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    /// Gives the result, `[1, Q, T, D]`.
    fn run(&self, _: &[Step], frame: &mut Frame<'_>) -> Option<FusedResult> {
        let (query, mask) = (frame.peek(&self.query)?, frame.peek(&self.mask)?);
        let (key, value) = (self.key.buffer(frame)?, self.value.buffer(frame)?);
        let [1, heads, tokens, width] = query.shape[..] else { return None };
        let [1, 1, mask_rows, slots] = mask.shape[..] else { return None };
        let (key, value) = (Heads::of(&key, &self.key.rows)?, Heads::of(&value, &self.value.rows)?);
        let fits = key.count == value.count
            && (key.count == heads || key.count == 1)
            && (key.slots, value.slots, key.width) == (slots, slots, width)
            && (mask_rows * self.repeat == tokens || mask_rows * self.repeat == 1);
        let (query, mask) = (query.floats()?, mask.floats()?);
        if !fits || heads * tokens * width * value.width == 0 {
            return None;
        }
        let open = OpenSlots::of(mask, slots)?;
        let rounds = Rounds { half: frame.half, of: self.types.map(|dtype| frame.rounds(dtype)) };
        let rows = heads * tokens / key.count;
        let done = AtomicBool::new(true);
        // some rows of a head, from `first` on
        let part = |head: usize, first: usize, out: &mut [f32]| {
            let query = &query[(head * rows + first) * width..][..out.len() / value.width * width];
            // the tokens that the rows are for, in order but for a step back at the end of each head
            let token = |row: usize| (first + row) % tokens % mask_rows;
            let count = out.len() / value.width;
            let own = match (token(0), token(count - 1)) {
                (from, to) if from <= to && count <= mask_rows => from..to + 1,
                _ => 0..mask_rows,
            };
            let open = open.to(own);
            let mask = |row: usize| &mask[token(row) * slots..][open.clone()];
            let parts = key.part(head, &open).zip(value.part(head, &open));
            // as products with weights do, few tokens give each the bits that it has alone
            let few = tokens <= MOST_COLUMNS;
            let block = |(key, value)| self.block((query, width), (key, slots), mask, (value, out), (&rounds, few));
            if parts.and_then(block).is_none() {
                done.store(false, Ordering::Relaxed);
            }
        };
        let threads = heads * tokens * width * open.to(0..mask_rows).len() > LARGE_WORK;
        let of_head = rows * value.width;
        let result = frame.workspace.pool.written(&[1, heads, tokens, value.width], |out| {
            if rows <= ROWS && threads {
                // a row of few tokens has the same bits whatever is beside it, so that those of a single head can be divided, too
                let divides = key.count == 1 && tokens <= MOST_COLUMNS;
                let of_part = if divides { rows.div_ceil(pool::threads()) } else { rows };
                pool::for_each_chunk(out, of_part * value.width, |i, out| {
                    part(i * of_part / rows, i * of_part % rows, out);
                });
                return;
            }
            let blocks = out.chunks_exact_mut(of_head).enumerate().flat_map(|(head, out)| {
                let blocks = out.chunks_mut(ROWS * value.width).enumerate();
                blocks.map(move |(block, out)| (head, block * ROWS, out))
            });
            if threads {
                let mut tasks: Vec<_> = blocks.collect();
                pool::for_each_mut(&mut tasks, |_, (head, first, out)| part(*head, *first, out));
            } else {
                blocks.for_each(|(head, first, out)| part(head, first, out));
            }
        });
        if done.into_inner() {
            return Some(FusedResult::Tensor(result));
        }
        frame.workspace.pool.recycle(result);
        None
    }
}

impl Attention {
    /// Some rows of queries, of `width` each, over the open slots of one head, of all its slots; the result is as long as
    /// the values are wide for each.
    fn block<'m>(
        &self,
        (query, width): (&[f32], usize),
        (key, all): (Elements<'_>, usize),
        mask: impl Fn(usize) -> &'m [f32],
        (value, out): (Elements<'_>, &mut [f32]),
        (rounds, few): (&Rounds, bool),
    ) -> Option<()> {
        let (rows, slots) = (query.len() / width, key.len() / width);
        let by_row = |width: usize| MatrixLayout { row: width, column: 1 };
        let mut workspace = SCRATCH.take();
        workspace.pool.begin_run();
        // with room for all slots: the next token may see more of them
        let scores = workspace.pool.written_within(rows * all, &[1, 1, rows, slots], |scores| {
            let transposed = MatrixLayout { row: 1, column: width };
            key.multiplied((rows, width, slots), (query, by_row(width)), transposed, scores, few);
            rounds.apply(0, scores);
        });
        let mut steps = self.between.iter();
        let scores = steps.try_fold(scores, |scores, step| change(step, scores, rounds.half, &mut workspace));
        let weights = scores.and_then(|mut scores| match &mut workspace.pool.make_mut(&mut scores).data {
            TensorData::F32(values) => weigh(values, slots, mask, rounds).map(|()| scores),
            _ => None,
        });
        let done = weights.map(|weights| {
            let width = out.len() / rows;
            let values = weights.floats().unwrap_or_default();
            value.multiplied((rows, slots, width), (values, by_row(slots)), by_row(width), out, few);
            rounds.apply(3, out);
            workspace.pool.recycle(weights);
        });
        SCRATCH.set(workspace);
        done
    }
}

/// Scores to weights, row by row of so many slots; `None` if slots that are closed may count.
fn weigh<'m>(scores: &mut [f32], slots: usize, mask: impl Fn(usize) -> &'m [f32], rounds: &Rounds) -> Option<()> {
    vectorized(AddMask { scores, slots, mask });
    rounds.apply(1, scores);
    // a row that sees no open slot
    if softmax_rows(scores, slots) < LOWEST {
        return None;
    }
    rounds.apply(2, scores);
    Some(())
}

/// Adds each row's mask to its scores.
struct AddMask<'a, M> {
    scores: &'a mut [f32],
    slots: usize,
    mask: M,
}

impl<'m, M: Fn(usize) -> &'m [f32]> Vectorize for AddMask<'_, M> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (row, scores) in self.scores.chunks_exact_mut(self.slots).enumerate() {
            scores.iter_mut().zip((self.mask)(row)).for_each(|(score, mask)| *score += mask);
        }
    }
}

/// Scores after a step that stands between the product and the mask, whose one operand that is computed they are.
fn change(step: &Step, scores: Arc<Tensor>, half: bool, workspace: &mut Workspace) -> Option<Arc<Tensor>> {
    let Workspace { values, results, pool, .. } = workspace;
    let mut scores = Some(scores);
    values.clear();
    values.extend(step.operands.iter().map(|operand| match operand {
        Operand::Constant(value) => Some(value.clone()),
        Operand::Slot { .. } => scores.take().map(Value::Tensor),
    }));
    let (mut state, takes_state) = (State::default(), false);
    let mut call = Call { values, state: &mut state, takes_state, results };
    step.kernel.run(&mut call, pool).ok()?;
    let mut result = results.pop()?;
    if half
        && step.dtype() == DataType::Fp16
        && let TensorData::F32(values) = &mut pool.make_mut(&mut result).data
    {
        round_to_f16(values);
    }
    Some(result)
}

/// What is rounded to fp16.
struct Rounds {
    half: bool,
    /// The scores, the masked scores, the weights and the result.
    of: [bool; 4],
}

impl Rounds {
    fn apply(&self, which: usize, values: &mut [f32]) {
        if self.of[which] {
            round_to_f16(values);
        }
    }
}

impl Source {
    fn buffer(&self, frame: &Frame<'_>) -> Option<StateBuffer> {
        match &self.base {
            Base::Value(operand) => frame.peek(operand).map(StateBuffer::Tensor),
            Base::State(name) => frame.state.share(name),
        }
    }
}

/// Keys or values.
#[derive(Clone, Copy)]
enum Elements<'a> {
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

    fn len(self) -> usize {
        match self {
            Elements::Single(values) => values.len(),
            Elements::Half(values) => values.len(),
        }
    }

    /// `out = a self`; the rows of `out` have the bits that they have alone if it is a product of few.
    fn multiplied(
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

/// The heads of keys or values `[1, rows, slots, width]`.
struct Heads<'a> {
    elements: Elements<'a>,
    count: usize,
    slots: usize,
    width: usize,
}

impl<'a> Heads<'a> {
    fn of(buffer: &'a StateBuffer, rows: &Option<Range<usize>>) -> Option<Self> {
        let [1, all, slots, width] = *buffer.shape() else { return None };
        let rows = rows.clone().unwrap_or(0..all);
        let elements = Elements::of(buffer)?.part(rows.start * slots * width..rows.end * slots * width)?;
        Some(Heads { elements, count: rows.len(), slots, width })
    }

    /// Some slots of a head.
    fn part(&self, head: usize, slots: &Range<usize>) -> Option<Elements<'a>> {
        let start = (head * self.slots + slots.start) * self.width;
        self.elements.part(start..start + slots.len() * self.width)
    }
}

/// Which slots a mask opens to each of its tokens: from the first to the last of them.
struct OpenSlots {
    of_tokens: SmallVec<[Range<usize>; 8]>,
    slots: usize,
}

/// A token's row of a mask, to be looked through for its first and its last open slot.
struct OpenInRow<'a>(&'a [f32]);

impl Vectorize for OpenInRow<'_> {
    type Output = Option<Range<usize>>;

    #[inline(always)]
    fn run(self) -> Option<Range<usize>> {
        /// Slots that are looked at together.
        const TOGETHER: usize = 64;
        let OpenInRow(row) = self;
        // a mask that is no number is one to be computed with
        let is_open = |value: &f32| !(*value <= MASKED);
        let any = |part: &&[f32]| part.iter().fold(false, |any, value| any | is_open(value));
        let closed_before = row.chunks(TOGETHER).take_while(|part| !any(part)).count() * TOGETHER;
        let start = closed_before + row.get(closed_before..)?.iter().position(is_open)?;
        let closed_after = row.rchunks(TOGETHER).take_while(|part| !any(part)).count() * TOGETHER;
        let end = row[..row.len() - closed_after].iter().rposition(is_open)? + 1;
        Some(start..end)
    }
}

impl OpenSlots {
    /// Those of a mask with so many slots for each token; `None` if a token sees none.
    fn of(mask: &[f32], slots: usize) -> Option<Self> {
        let of_token = |row| vectorized(OpenInRow(row));
        let of_tokens = mask.chunks_exact(slots.max(1)).map(of_token).collect::<Option<_>>()?;
        Some(OpenSlots { of_tokens, slots })
    }

    /// From the first to the last slot that is open to one of some tokens, rounded outwards.
    fn to(&self, tokens: Range<usize>) -> Range<usize> {
        let of_tokens = &self.of_tokens[tokens];
        let start = of_tokens.iter().map(|open| open.start).min().unwrap_or(0);
        let end = of_tokens.iter().map(|open| open.end).max().unwrap_or(0);
        start / ALIGNMENT * ALIGNMENT..end.next_multiple_of(ALIGNMENT).min(self.slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_opens_to_each_token_what_lies_between_its_first_and_last_open_slot() {
        let slots = 200;
        let mask = |open: &[Range<usize>]| -> Vec<f32> {
            let of_token = |open: &Range<usize>| {
                let open = open.clone();
                (0..slots).map(move |slot| if open.contains(&slot) { 0.0 } else { MASKED })
            };
            open.iter().flat_map(of_token).collect()
        };
        // a window of 70, and tokens at the ends of what is looked at together
        let open = [0..1, 0..64, 0..65, 64..128, 130..200, 199..200];
        let found = OpenSlots::of(&mask(&open), slots).unwrap();
        assert_eq!(found.of_tokens[..], open);
        assert_eq!([found.to(0..1), found.to(0..3), found.to(3..4), found.to(4..5)], [0..16, 0..80, 64..128, 128..200]);
        assert_eq!(found.to(0..open.len()), 0..slots);
        assert!(OpenSlots::of(&mask(&[0..1, 3..3]), slots).is_none(), "a token that sees nothing");
        let holes: Vec<f32> = (0..slots).map(|slot| if [5, 190].contains(&slot) { 0.0 } else { MASKED }).collect();
        let found = OpenSlots::of(&holes, slots).unwrap();
        assert_eq!(found.of_tokens.iter().map(|open| (open.start, open.end)).collect::<Vec<_>>(), [(5, 191)]);
        assert_eq!(OpenSlots::of(&[MASKED, f32::NAN, MASKED], 3).unwrap().to(0..1), 0..3, "what is no number counts");
    }
}
