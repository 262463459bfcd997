//! Attention under a mask, `softmax(q kᵀ + mask) v`, computed for the slots that the mask opens.
//!
//! `q` is `[1, Q, T, D]`, `k` and `v` are `[1, K, S, D]` with K = Q or K = 1, the mask is `[1, 1, T, S]`. A slot that
//! the mask closes ([`MASKED`]) to every token has the weight `exp(score + mask - highest)`, which is 0 in f32 unless
//! its score exceeds those of all open slots by almost the mask's magnitude. Slots before the first and after the last
//! open one are skipped; slots between them are computed normally. Keys and values may be rows of a larger cache, which
//! are read in place, joined with those of this call.

mod open_slots;
mod source;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use self::open_slots::OpenSlots;
use self::source::{HeadSlots, KeyValueSource};
use super::GroupMatch;
use super::flow::{Flow, constant};
use crate::frame::Frame;
use crate::kernel::Call;
use crate::node::{FusedKernel, FusedResult};
use crate::operand::Operand;
use crate::ops::{BinaryOp, Concat, Matmul, Softmax, softmax_rows};
use crate::state::State;
use crate::step::Step;
use crate::tensor::{Tensor, TensorData};
use crate::value::Value;
use crate::workspace::Workspace;
use anec_kernels::dispatch::{Vectorize, vectorized};
use anec_kernels::dot::MAX_COLUMNS;
use anec_kernels::layout::MatrixLayout;
use anec_kernels::pool;
use anec_kernels::round::round_to_f16;
use anec_mil::DataType;

/// Threshold for the highest score of a token below which closed slots may count.
const LOWEST: f32 = -5e3;
/// Rows that are computed at a time.
const ROWS: usize = 64;
/// Minimum multiplications for which threads are used.
const MIN_PARALLEL_WORK: usize = 1 << 19;

thread_local! {
    /// Memory for scores of this thread.
    static SCRATCH: Cell<Workspace> = Cell::default();
}

/// Operands of a fused attention.
pub(super) struct FusedAttention {
    query: Operand,
    key: KeyValueSource,
    value: KeyValueSource,
    mask: Operand,
    /// Number of copies of the mask along its tokens.
    repeat: usize,
    /// Steps between the first product and the mask: each changes a score by itself, alone or with one number.
    between: Vec<Step>,
    /// Declared types of the scores, the masked scores, the weights and the result.
    types: [DataType; 4],
}

/// Matches the pattern around the softmax at `at`.
pub(super) fn find(flow: &Flow<'_>, at: usize, softmax: &Softmax) -> Option<GroupMatch> {
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
    let key = KeyValueSource::of(flow, steps[product].operand(keys.y), mixed, &mut copies);
    let value = KeyValueSource::of(flow, steps[mixed].operand(values.y), mixed, &mut copies);
    let (mask, repeat) = repeated(flow, mask, &mut copies);
    let kernel = Box::new(FusedAttention {
        query: steps[product].operand(keys.x).clone(),
        key,
        value,
        mask,
        repeat,
        between: between.into_iter().map(|step| steps[step].clone()).collect(),
        types: [product, masked, at, mixed].map(|step| steps[step].dtype()),
    });
    Some(GroupMatch { members, copies, kernel })
}

/// Product of queries and keys that an operand comes from, and the elementwise ops between them, in order. Nothing else
/// uses any of their results.
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

/// Mask that is concatenated with itself along its tokens, and the number of copies.
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

impl FusedKernel for FusedAttention {
    fn name(&self) -> &'static str {
        "attention"
    }

    /// Computes the result, `[1, Q, T, D]`.
    fn run(&self, _: &[Step], frame: &mut Frame<'_>) -> Option<FusedResult> {
        let (query, mask) = (frame.peek(&self.query)?, frame.peek(&self.mask)?);
        let (keys, values) = (self.key.buffers(frame)?, self.value.buffers(frame)?);
        let [1, heads, tokens, width] = query.shape[..] else { return None };
        let [1, 1, mask_rows, slots] = mask.shape[..] else { return None };
        let (key, value) = (self.key.heads(&keys)?, self.value.heads(&values)?);
        let (count, value_width) = (key.count(), value.width());
        let [earlier, appended] = key.slots();
        let fits = count == value.count()
            && (count == heads || count == 1)
            && value.slots() == [earlier, appended]
            && (earlier + appended, key.width()) == (slots, width)
            && (mask_rows * self.repeat == tokens || mask_rows * self.repeat == 1);
        let (query, mask) = (query.floats()?, mask.floats()?);
        if !fits || heads * tokens * width * value_width == 0 {
            return None;
        }
        let open = OpenSlots::of(mask, [earlier, appended])?;
        let rounds = RoundedResults { half: frame.half, of: self.types.map(|dtype| frame.rounds(dtype)) };
        let rows = heads * tokens / count;
        let done = AtomicBool::new(true);
        // some rows of a head, from `first` on
        let part = |head: usize, first: usize, out: &mut [f32]| {
            let query = &query[(head * rows + first) * width..][..out.len() / value_width * width];
            // tokens of the rows: ascending within each head
            let token = |row: usize| (first + row) % tokens % mask_rows;
            let own_rows = out.len() / value_width;
            let own = match (token(0), token(own_rows - 1)) {
                (from, to) if from <= to && own_rows <= mask_rows => from..to + 1,
                _ => 0..mask_rows,
            };
            let open = open.to(own);
            let mask = |row: usize| {
                let (of_earlier, of_appended) = mask[token(row) * slots..][..slots].split_at(earlier);
                [&of_earlier[open[0].clone()], &of_appended[open[1].clone()]]
            };
            let parts = key.part(head, &open).zip(value.part(head, &open));
            // as in products with weights, each of a few tokens gets the bits that it has alone
            let few = tokens <= MAX_COLUMNS;
            let block = |(key, value)| self.block((query, width), (key, slots), mask, (value, out), (&rounds, few));
            if parts.and_then(block).is_none() {
                done.store(false, Ordering::Relaxed);
            }
        };
        let threads = heads * tokens * width * open.to(0..mask_rows).iter().map(|open| open.len()).sum::<usize>()
            > MIN_PARALLEL_WORK;
        let of_head = rows * value_width;
        let result = frame.workspace.pool.written(&[1, heads, tokens, value_width], |out| {
            if rows <= ROWS && threads {
                // rows of few tokens have the same bits in any division, so a single head can be divided
                let divides = count == 1 && tokens <= MAX_COLUMNS;
                let of_part = if divides { rows.div_ceil(pool::threads()) } else { rows };
                pool::for_each_chunk(out, of_part * value_width, |i, out| {
                    part(i * of_part / rows, i * of_part % rows, out);
                });
                return;
            }
            let blocks = out.chunks_exact_mut(of_head).enumerate().flat_map(|(head, out)| {
                let blocks = out.chunks_mut(ROWS * value_width).enumerate();
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

impl FusedAttention {
    /// Attention of some rows of queries, `width` each, over the open slots of one head. The result has the width of
    /// the values in each row.
    fn block<'m>(
        &self,
        (query, width): (&[f32], usize),
        (key, all): (HeadSlots<'_>, usize),
        mask: impl Fn(usize) -> [&'m [f32]; 2],
        (value, out): (HeadSlots<'_>, &mut [f32]),
        (rounds, few): (&RoundedResults, bool),
    ) -> Option<()> {
        let rows = query.len() / width;
        let value_width = out.len() / rows;
        let by_row = |width: usize| MatrixLayout { row: width, column: 1 };
        let mut workspace = SCRATCH.take();
        workspace.pool.begin_run();
        let key = key.in_one(all * width, &mut workspace.pool);
        let slots = key.elements().len() / width;
        // capacity for all slots: the next token may see more of them
        let scores = workspace.pool.written_within(rows * all, &[1, 1, rows, slots], |scores| {
            let transposed = MatrixLayout { row: 1, column: width };
            key.elements().multiplied((rows, width, slots), (query, by_row(width)), transposed, scores, few);
            rounds.apply(0, scores);
        });
        key.recycle(&mut workspace.pool);
        let mut steps = self.between.iter();
        let scores = steps.try_fold(scores, |scores, step| change(step, scores, rounds.half, &mut workspace));
        let weights = scores.and_then(|mut scores| match &mut workspace.pool.make_mut(&mut scores).data {
            TensorData::F32(values) => softmax_weights(values, slots, mask, rounds).map(|()| scores),
            _ => None,
        });
        let done = weights.map(|weights| {
            let value = value.in_one(all * value_width, &mut workspace.pool);
            let factors = (weights.floats().unwrap_or_default(), by_row(slots));
            value.elements().multiplied((rows, slots, value_width), factors, by_row(value_width), out, few);
            rounds.apply(3, out);
            value.recycle(&mut workspace.pool);
            workspace.pool.recycle(weights);
        });
        SCRATCH.set(workspace);
        done
    }
}

/// Converts scores to weights, row by row of `slots`; `None` if closed slots may count.
fn softmax_weights<'m>(
    scores: &mut [f32],
    slots: usize,
    mask: impl Fn(usize) -> [&'m [f32]; 2],
    rounds: &RoundedResults,
) -> Option<()> {
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

impl<'m, M: Fn(usize) -> [&'m [f32]; 2]> Vectorize for AddMask<'_, M> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (row, scores) in self.scores.chunks_exact_mut(self.slots).enumerate() {
            let [of_earlier, of_appended] = (self.mask)(row);
            let (earlier, appended) = scores.split_at_mut(of_earlier.len());
            earlier.iter_mut().zip(of_earlier).for_each(|(score, mask)| *score += mask);
            appended.iter_mut().zip(of_appended).for_each(|(score, mask)| *score += mask);
        }
    }
}

/// Applies a step between product and mask to the scores, its only computed operand.
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

/// Results that are rounded to fp16.
struct RoundedResults {
    half: bool,
    /// Scores, masked scores, weights and result.
    of: [bool; 4],
}

impl RoundedResults {
    fn apply(&self, which: usize, values: &mut [f32]) {
        if self.of[which] {
            round_to_f16(values);
        }
    }
}
