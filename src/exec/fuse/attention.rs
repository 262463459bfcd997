//! Attention under a mask, `softmax(q kᵀ + mask) v`, computed for the slots that the mask opens.
//!
//! `q` is `[1, Q, T, D]`, `k` and `v` are `[1, K, S, D]` with K = Q or K = 1, the mask is `[1, 1, T, S]`. A slot that the
//! mask closes ([`CLOSED`]) to every token gets a weight of `exp(score + mask - highest)`, which is 0 in f32 unless its
//! score is higher than those of all open slots by almost as much as the mask takes off. Slots before the first and
//! after the last open one are left out; those between are computed as they stand. The keys and values may be rows of a
//! larger cache, which are used where they are.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Flow, Form, Found, constant, flag, integers, rows_of_slice};
use crate::ops::{Call, Value, softmax_rows};
use crate::state::State;
use crate::step::{Frame, Operand, Step};
use crate::tensor::{Tensor, TensorData};
use anec_kernels::matrix::product;
use anec_kernels::layout::Layout;
use anec_kernels::reduce::max;
use anec_kernels::round::round_to_f16;
use anec_kernels::team;
use anec_mil::DataType;

/// What a mask holds where a slot is closed, or less.
const CLOSED: f32 = -1e4;
/// If the highest score of a token is lower than this, closed slots may count, too.
const LOWEST: f32 = -5e3;
/// First and last slot are rounded outwards to multiples of this, so that sums are made of the same parts.
const ALIGNMENT: usize = 16;
/// Rows that are computed at a time.
const ROWS: usize = 128;
/// Multiplications for which threads are worth waking.
const LARGE_WORK: usize = 1 << 19;

/// Operators that may stand between the product of queries and keys and the mask, with one number beside the scores.
const ELEMENTWISE: &[&str] = &["add", "clip", "mul", "real_div", "sub", "tanh"];

/// Where a group finds what it works on.
pub(super) struct Attention {
    query: Operand,
    key: Source,
    value: Source,
    mask: Operand,
    /// How often the mask is repeated along its tokens.
    repeat: usize,
    /// What stands between the first product and the mask, and the slot in which each finds the scores.
    between: Vec<(Step, usize)>,
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
pub(super) fn find(flow: &Flow<'_>, at: usize) -> Option<Found> {
    let steps = flow.steps;
    let last_axis = steps[at].argument("axis").is_none_or(|axis| integers(axis).is_some_and(|a| a == [-1] || a == [3]));
    let masked = flow.produced_by(steps[at].argument("x")?, "add").filter(|_| last_axis)?;
    let (x, y) = (steps[masked].argument("x")?, steps[masked].argument("y")?);
    let (scores, mask) = match scores(flow, x) {
        Some(found) => (found, y),
        None => (scores(flow, y)?, x),
    };
    let (product, between) = scores;
    let mixed = flow.only_user(at).filter(|user| steps[*user].operator == "matmul")?;
    let straight = ["transpose_x", "transpose_y"].iter().all(|name| flag(&steps[mixed], name) == Some(false));
    let weights_first = flow.producer(steps[mixed].argument("x")?) == Some(at);
    if !straight || !weights_first || flow.only_user(masked) != Some(at) {
        return None;
    }
    let mut members = vec![product, masked, at, mixed];
    members.extend(between.iter().map(|(step, _)| *step));
    let mut copies = Vec::new();
    let key = source(flow, steps[product].argument("y")?, mixed, &mut copies);
    let value = source(flow, steps[mixed].argument("y")?, mixed, &mut copies);
    let (mask, repeat) = repeated(flow, mask, &mut copies);
    let form = Form::Attention(Attention {
        query: steps[product].argument("x")?.clone(),
        key,
        value,
        mask,
        repeat,
        between: between.into_iter().map(|(step, slot)| (steps[step].clone(), slot)).collect(),
        types: [product, masked, at, mixed].map(|step| steps[step].dtype()),
    });
    Some(Found { members, copies, form })
}

/// The product of queries and keys that an operand comes from, and what stands between (in order): ops that change each
/// element by itself. Nothing else uses any of it.
fn scores(flow: &Flow<'_>, operand: &Operand) -> Option<(usize, Vec<(usize, usize)>)> {
    let mut between = Vec::new();
    let mut operand = operand;
    loop {
        let producer = flow.producer(operand)?;
        flow.only_user(producer)?;
        let step = &flow.steps[producer];
        if step.operator == "matmul" {
            let form = (flag(step, "transpose_x"), flag(step, "transpose_y"));
            between.reverse();
            return (form == (Some(false), Some(true))).then_some((producer, between));
        }
        let mut changing = step.operands().filter(|operand| constant(operand).is_none_or(|t| t.data.len() != 1));
        let (one, others) = (changing.next()?, changing.next());
        if !ELEMENTWISE.contains(&step.operator.as_str()) || others.is_some() {
            return None;
        }
        between.push((producer, one.slot()?));
        operand = one;
    }
}

/// Rows of a tensor, seen through the slices that give an operand. A state that is read stays readable until `until`
/// unless these rows of it are written before; then the slices are left to be made.
fn source(flow: &Flow<'_>, operand: &Operand, until: usize, copies: &mut Vec<usize>) -> Source {
    let (mut base, mut rows, mut seen) = (operand, None::<Range<usize>>, Vec::new());
    while let Some(at) = flow.producer(base) {
        let (Some(taken), Some(x)) = (rows_of_slice(&flow.steps[at]), flow.steps[at].argument("x")) else { break };
        rows = match rows {
            None => Some(taken),
            Some(inner) if inner.end <= taken.len() => Some(taken.start + inner.start..taken.start + inner.end),
            Some(_) => break,
        };
        seen.push(at);
        base = x;
    }
    let read = flow.produced_by(base, "read_state").zip(rows.as_ref());
    if let Some((read, rows)) = read
        && let Some(state) = flow.steps[read].state()
    {
        let mut writes = flow.writes(state, read..until).map(|write| flow.written_rows(write)).peekable();
        if writes.peek().is_some() {
            let disjoint = |w: Option<Range<usize>>| w.is_some_and(|w| w.end <= rows.start || rows.end <= w.start);
            if !writes.all(disjoint) {
                return Source { base: Base::Value(operand.clone()), rows: None };
            }
            copies.extend(seen);
            copies.push(read);
            return Source { base: Base::State(state.clone()), rows: Some(rows.clone()) };
        }
    }
    copies.extend(seen);
    Source { base: Base::Value(base.clone()), rows }
}

/// A mask that is joined to itself along its tokens, and how often.
fn repeated(flow: &Flow<'_>, mask: &Operand, copies: &mut Vec<usize>) -> (Operand, usize) {
    let whole = (mask.clone(), 1);
    let Some(at) = flow.produced_by(mask, "concat") else { return whole };
    let step = &flow.steps[at];
    let along = step.argument("axis").and_then(integers).is_some_and(|axis| axis == [2] || axis == [-2]);
    let parts = step.arguments.iter().find(|(name, _)| name == "values").map_or(&[][..], |(_, parts)| parts);
    match parts {
        [first @ Operand::Slot { slot, .. }, others @ ..]
            if along && flag(step, "interleave") == Some(false) && others.iter().all(|o| o.slot() == Some(*slot)) =>
        {
            copies.push(at);
            (first.clone(), parts.len())
        }
        _ => whole,
    }
}

impl Attention {
    /// The result, `[1, Q, T, D]`.
    pub fn run(&self, frame: &Frame<'_>) -> Option<Tensor> {
        let (query, mask) = (frame.peek(&self.query)?, frame.peek(&self.mask)?);
        let (key, value) = (self.key.tensor(frame)?, self.value.tensor(frame)?);
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
        let open = opened(mask, slots)?;
        let rounds = Rounds { half: frame.half, of: self.types.map(|dtype| frame.rounds(dtype)) };
        let rows = heads * tokens / key.count;
        let mut out = vec![0.0; heads * tokens * value.width];
        let mut tasks = Vec::new();
        for (head, out) in out.chunks_exact_mut(rows * value.width).enumerate() {
            for (block, out) in out.chunks_mut(ROWS * value.width).enumerate() {
                tasks.push((head, block * ROWS, out));
            }
        }
        let done = AtomicBool::new(true);
        let part = |_, (head, first, out): &mut (usize, usize, &mut [f32])| {
            let query = &query[(*head * rows + *first) * width..][..out.len() / value.width * width];
            let mask = |row: usize| &mask[(*first + row) % tokens % mask_rows * slots..][open.clone()];
            let (key, value) = (key.part(*head, &open), value.part(*head, &open));
            if self.block((query, width), key, mask, (value, &mut **out), &rounds).is_none() {
                done.store(false, Ordering::Relaxed);
            }
        };
        if tasks.len() > 1 && heads * tokens * width * open.len() > LARGE_WORK {
            team::for_each_mut(&mut tasks, part);
        } else {
            tasks.iter_mut().enumerate().for_each(|(i, task)| part(i, task));
        }
        done.into_inner().then(|| Tensor::new([1, heads, tokens, value.width], out))
    }

    /// Some rows of queries, of `width` each, over the open slots of one head; the result is as long as the values are
    /// wide for each.
    fn block<'m>(
        &self,
        (query, width): (&[f32], usize),
        key: &[f32],
        mask: impl Fn(usize) -> &'m [f32],
        (value, out): (&[f32], &mut [f32]),
        rounds: &Rounds,
    ) -> Option<()> {
        let (rows, slots) = (query.len() / width, key.len() / width);
        let by_row = |width: usize| Layout { row: width, column: 1 };
        let mut scores = vec![0.0; rows * slots];
        let turned = Layout { row: 1, column: width };
        product((rows, width, slots), (query, by_row(width)), (key, turned), &mut scores);
        rounds.apply(0, &mut scores);
        if !self.between.is_empty() {
            scores = self.elementwise(Tensor::new([1, 1, rows, slots], scores), rounds)?;
        }
        for (row, scores) in scores.chunks_exact_mut(slots).enumerate() {
            scores.iter_mut().zip(mask(row)).for_each(|(score, mask)| *score += mask);
        }
        rounds.apply(1, &mut scores);
        if scores.chunks_exact(slots).any(|scores| !(max(scores) >= LOWEST)) {
            return None;
        }
        softmax_rows(&mut scores, slots);
        rounds.apply(2, &mut scores);
        let width = out.len() / rows;
        product((rows, slots, width), (&scores, by_row(slots)), (value, by_row(width)), out);
        rounds.apply(3, out);
        Some(())
    }

    /// The scores after what stands between the product and the mask.
    fn elementwise(&self, scores: Tensor, rounds: &Rounds) -> Option<Vec<f32>> {
        let mut scores = Arc::new(scores);
        for (step, slot) in &self.between {
            let value = |operand: &Operand| match operand {
                Operand::Constant(value) => value.clone(),
                Operand::Slot { .. } => {
                    debug_assert_eq!(operand.slot(), Some(*slot));
                    Value::Tensor(scores.clone())
                }
            };
            let arguments = step.arguments.iter().map(|(name, operands)| {
                let values = operands.iter().map(value).collect();
                (name.as_str(), values)
            });
            let arguments = arguments.collect();
            let mut state = State::default();
            let mut call = Call { arguments, types: &step.types, state: &mut state, takes_state: false };
            let mut result = (step.row.kernel)(&mut call).ok()?.pop()?;
            drop(call);
            if rounds.half
                && step.dtype() == DataType::Fp16
                && let TensorData::F32(values) = &mut Arc::make_mut(&mut result).data
            {
                round_to_f16(values);
            }
            scores = result;
        }
        match Arc::unwrap_or_clone(scores).data {
            TensorData::F32(values) => Some(values),
            _ => None,
        }
    }
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
    fn tensor(&self, frame: &Frame<'_>) -> Option<Arc<Tensor>> {
        match &self.base {
            Base::Value(operand) => frame.peek(operand),
            Base::State(name) => frame.state.share(name),
        }
    }
}

/// The heads of keys or values within a tensor `[1, rows, slots, width]`.
struct Heads<'a> {
    values: &'a [f32],
    count: usize,
    slots: usize,
    width: usize,
}

impl<'a> Heads<'a> {
    fn of(tensor: &'a Tensor, rows: &Option<Range<usize>>) -> Option<Self> {
        let [1, all, slots, width] = tensor.shape[..] else { return None };
        let rows = rows.clone().unwrap_or(0..all);
        let values = tensor.floats()?.get(rows.start * slots * width..rows.end * slots * width)?;
        Some(Heads { values, count: rows.len(), slots, width })
    }

    /// Some slots of a head.
    fn part(&self, head: usize, slots: &Range<usize>) -> &'a [f32] {
        &self.values[(head * self.slots + slots.start) * self.width..][..slots.len() * self.width]
    }
}

/// From the first to the last slot that is open to any token; `None` if a token sees none.
fn opened(mask: &[f32], slots: usize) -> Option<Range<usize>> {
    // a mask that is no number is one to be computed with
    let is_open = |value: &f32| !(*value <= CLOSED);
    let mut open = slots..0;
    for row in mask.chunks_exact(slots.max(1)) {
        open.start = open.start.min(row.iter().position(is_open)?);
        open.end = open.end.max(row.iter().rposition(is_open)? + 1);
    }
    let (start, end) = (open.start / ALIGNMENT * ALIGNMENT, open.end.next_multiple_of(ALIGNMENT).min(slots));
    (start < end).then_some(start..end)
}
