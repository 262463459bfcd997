//! Session: a text with its states. Tokens go in and logits come out, in calls of as many tokens as the functions take.

use std::ops::Range;
use std::sync::Arc;

use super::backend::{FunctionCall, Phase, Watch};
use super::buffers::{CallBuffers, HeadBuffers};
use super::call::{after, prepare};
use super::error::RuntimeError;
use super::forward::ForwardOptions;
use super::head::HeadRows;
use super::hidden::{Columns, Flow, HiddenFrame, Record};
use super::host::RopeChoice;
use super::inputs::InputBuilder;
use super::model::LoadedModel;
use super::plan::{self, Chunk, Route, Step};
use super::states::States;
use anec_base::Result;
use anec_bundle::Task;
use anec_exec::Tensor;
use smallvec::SmallVec;

mod forced;
mod pass;

pub use pass::ForwardPass;

/// Text: its tokens and the states that they lead to.
pub struct TokenSession {
    model: Arc<LoadedModel>,
    pub(super) states: States,
    /// Current context, which grows with the text.
    pub(super) route: usize,
    /// Context that the text began in.
    first_route: usize,
    phase: Phase,
    rope: Arc<RopeChoice>,
    pub(super) tokens: Vec<u32>,
    /// Hidden states before the next tokens, for a draft layer's next pass.
    previous: Option<PreviousRows>,
    limit: u64,
    /// Checkpoints, ascending; only for models whose states aren't all written by position.
    checkpoints: Vec<Checkpoint>,
    /// Whether other texts may share this beginning, so that rewinding to the end of the prompt should be cheap.
    pub(super) kept: bool,
    /// Whether a call failed midway: the states disagree on the position until the session is rewound or reset.
    pub(super) poisoned: bool,
    pub(super) buffers: CallBuffers,
}

/// Input of a [draft layer](LoadedModel::draft_layer) beside tokens.
#[derive(Clone, Copy, Debug)]
pub struct PreviousHidden<'a> {
    /// Output of the last layer for the token before each token, one row each.
    pub rows: &'a [f32],
    /// Whether the draft layer produced the rows, rather than the model's last layer.
    pub drafted: bool,
}

/// Hidden states before the tokens of a pass.
struct PreviousRows {
    /// Rows in the functions' frame.
    rows: Vec<f32>,
    /// Position of the first token.
    first: u64,
    drafted: bool,
}

impl PreviousRows {
    /// Returns the columns of a call's tokens from a position on.
    fn columns(&self, position: u64, channels: usize, tokens: usize) -> Option<Columns> {
        let first = position.checked_sub(self.first)? as usize * channels;
        Some(Columns::of_rows(self.rows.get(first..first + tokens * channels)?, channels))
    }
}

/// States after a number of tokens, and the context that they are for.
struct Checkpoint {
    position: usize,
    route: usize,
    states: States,
}

/// Maximum number of checkpoints: at the end of the prompt and at the beginning of the last call.
const CHECKPOINTS: usize = 2;

impl LoadedModel {
    /// Begins a text of up to `length` tokens, prompt and continuation, with the rotary tables of that length. It runs
    /// in the smallest context that holds its tokens so far and moves to the next one as it grows.
    ///
    /// # Errors
    /// If it doesn't fit, the backend can't allocate states, or the model has bidirectional attention.
    pub fn start(self: &Arc<Self>, length: u64) -> Result<TokenSession> {
        if self.bundle.model.band().is_some() {
            self.continues_texts()?;
        }
        self.session(length)
    }

    /// Checks that the model continues texts.
    ///
    /// # Errors
    /// Names the model's actual task otherwise.
    pub fn continues_texts(&self) -> Result<(), RuntimeError> {
        let path = self.folder.clone();
        match &self.bundle.model.task {
            Task::TextGeneration => Ok(()),
            Task::TokenClassification(_) => Err(RuntimeError::LabelsTokens { path }),
            Task::TextEmbedding(_) => Err(RuntimeError::GivesVectors { path }),
            Task::SequenceClassification(_) => Err(RuntimeError::LabelsTexts { path }),
        }
    }

    /// Begins a text as [`LoadedModel::start`] does, whatever the model's task.
    pub(super) fn session(self: &Arc<Self>, length: u64) -> Result<TokenSession> {
        let rope = self.host.choose_rope(length)?;
        let limit = self.limit(length, &rope)?;
        // bidirectional attention takes the whole text in one call and one context
        let route = if self.bundle.model.band().is_some() { self.plan.route(length)? } else { 0 };
        Ok(TokenSession {
            model: self.clone(),
            states: States::new(self.backend.sequence()?),
            route,
            first_route: route,
            phase: Phase::default(),
            rope: Arc::new(rope),
            // decoding appends without allocating
            tokens: Vec::with_capacity(limit as usize),
            previous: None,
            limit,
            checkpoints: Vec::new(),
            kept: false,
            poisoned: false,
            buffers: CallBuffers::default(),
        })
    }

    /// Returns the maximum number of tokens of a text that was begun with `length`: the size of the smallest context
    /// that holds it.
    fn limit(&self, length: u64, rope: &RopeChoice) -> Result<u64, RuntimeError> {
        Ok(self.plan.routes[self.plan.route(length)?].context.min(rope.rows))
    }
}

impl TokenSession {
    /// Returns the number of tokens computed so far: the position of the next one.
    pub fn position(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// Returns the tokens computed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the maximum number of tokens.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the functions of the current context.
    pub fn route(&self) -> &Route {
        &self.model.plan.routes[self.route]
    }

    /// Returns the rotary tables of the text.
    pub(super) fn rope(&self) -> &RopeChoice {
        &self.rope
    }

    /// Returns the model.
    pub fn model(&self) -> &Arc<LoadedModel> {
        &self.model
    }

    /// Clears the text.
    ///
    /// # Errors
    /// If the backend can't reset its states.
    pub fn reset(&mut self) -> Result<()> {
        self.states.reset()?;
        self.route = self.first_route;
        self.poisoned = false;
        self.tokens.clear();
        self.checkpoints.clear();
        Ok(())
    }

    /// Returns whether a text of `length` tokens would use the same rotary tables. Only then can one reuse the states
    /// of the other.
    pub fn is_compatible_with(&self, length: u64) -> bool {
        let same_context = self.first_route == 0 || self.model.plan.route(length).is_ok_and(|r| r == self.route);
        same_context
            && self.model.plan.route(length).is_ok()
            && self.model.host.choose_rope(length).is_ok_and(|rope| rope == *self.rope)
    }

    /// Makes this a text of `length` tokens, with which it [is compatible](TokenSession::is_compatible_with).
    ///
    /// # Errors
    /// If so many tokens don't fit.
    pub fn set_length(&mut self, length: u64) -> Result<()> {
        self.limit = self.model.limit(length, &self.rope)?;
        Ok(())
    }

    /// Sets the phase of the following tokens.
    pub(super) fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.states.sequence.enter(phase);
    }

    /// Moves to the smallest context that holds `length` tokens, with all states. The text continues as if it had begun
    /// there.
    ///
    /// # Errors
    /// If no context is large enough, or the backend can't allocate states.
    pub(super) fn make_room(&mut self, length: u64) -> Result<()> {
        let route = self.model.plan.route(length)?;
        if route <= self.route {
            return Ok(());
        }
        let routes = &self.model.plan.routes;
        self.states = match self.tokens.len() {
            0 => States::new(self.model.backend.sequence()?),
            position => self.states.moved(&self.model, &routes[self.route], &routes[route], position)?,
        };
        self.states.sequence.enter(self.phase);
        self.route = route;
        Ok(())
    }

    /// Returns the next call when `left` tokens remain, at most `wish` of them.
    ///
    /// # Errors
    /// If no function takes so many.
    pub(super) fn next_chunk(&self, left: u64, wish: Option<u64>) -> Result<Chunk, RuntimeError> {
        let fill = match (self.model.fills, self.model.writes_slices) {
            (false, _) => 0,
            (true, false) => u64::MAX,
            // padding is written behind the text, so there has to be room for it
            (true, true) => self.model.context().saturating_sub(self.position()),
        };
        let most = self.model.ring.map_or(left, |ring| ring.at(self.position()));
        plan::chunk(&self.route().layers, left.min(most), wish, fill)
    }

    /// Moves to a context that holds a call's tokens, including padding that is written.
    pub(super) fn make_room_for(&mut self, chunk: Chunk) -> Result<()> {
        let count = if self.model.writes_slices { chunk.size } else { chunk.real };
        self.make_room(self.position() + count)
    }

    /// Returns whether another token can follow the first `position` ones: the length limit allows it, and the smallest
    /// call fits where calls write all their tokens.
    pub(super) fn holds_another(&self, position: u64) -> bool {
        position < self.limit && (position + self.written_at_least()).max(position + 1) <= self.model.context()
    }

    /// Returns the number of tokens that even the smallest call writes. A text that begins at a multiple of it fits to
    /// the end.
    pub(super) fn written_at_least(&self) -> u64 {
        match self.model.writes_slices {
            true => self.next_chunk(1, None).map_or(1, |chunk| chunk.size),
            false => 1,
        }
    }

    /// Returns the number of tokens, at most `most`, that the next call can take.
    ///
    /// # Errors
    /// If no function takes so few.
    pub fn largest_call(&self, most: u64) -> Result<u64, RuntimeError> {
        Ok(self.next_chunk(most, None)?.real)
    }

    /// Copies the session; `None` if the backend can't copy states.
    ///
    /// # Errors
    /// If the backend can't allocate states.
    pub fn fork(&self) -> Result<Option<TokenSession>> {
        Ok(self.states.fork()?.map(|states| TokenSession {
            model: self.model.clone(),
            states,
            route: self.route,
            first_route: self.first_route,
            phase: self.phase,
            rope: self.rope.clone(),
            tokens: self.tokens.clone(),
            previous: None,
            limit: self.limit,
            checkpoints: Vec::new(),
            kept: self.kept,
            poisoned: self.poisoned,
            buffers: CallBuffers::default(),
        }))
    }

    /// Saves the states where rewinding needs them. Returns whether [`TokenSession::rewind`] can then return here
    /// without computing, which takes a backend that can copy states. Generations call this after the prompt if the
    /// session comes from a [`PrefixCache`](super::PrefixCache).
    ///
    /// # Errors
    /// If the backend can't allocate states.
    pub fn checkpoint(&mut self) -> Result<bool> {
        let position = self.tokens.len();
        let known = self.checkpoints.last().is_some_and(|last| last.position == position);
        if self.model.rewindable || known {
            return Ok(true);
        }
        if self.poisoned {
            return Ok(false);
        }
        let Some(states) = self.states.fork()? else { return Ok(false) };
        if self.checkpoints.len() == CHECKPOINTS {
            self.checkpoints.remove(CHECKPOINTS - 1);
        }
        self.checkpoints.push(Checkpoint { position, route: self.route, states });
        Ok(true)
    }

    /// Rewinds to the first `position` tokens. A `position` past the end changes nothing.
    ///
    /// # Errors
    /// If states have to be computed again and that fails.
    pub fn rewind(&mut self, position: u64) -> Result<()> {
        let position = position as usize;
        if position >= self.tokens.len() {
            return Ok(());
        }
        if self.model.rewindable {
            self.tokens.truncate(position);
            return Ok(());
        }
        self.restore(position)
    }

    /// Restores the states after the first `position` tokens.
    fn restore(&mut self, position: usize) -> Result<()> {
        let mut again = std::mem::take(&mut self.tokens);
        again.truncate(position);
        self.checkpoints.retain(|checkpoint| checkpoint.position <= position);
        let copy = match self.checkpoints.last() {
            Some(checkpoint) => checkpoint.states.fork()?.map(|states| (checkpoint.position, checkpoint.route, states)),
            None => None,
        };
        match copy {
            Some((start, route, states)) => {
                (self.states, self.route, self.poisoned) = (states, route, false);
                self.states.sequence.enter(self.phase);
                self.tokens = again[..start].to_vec();
            }
            None => self.reset()?,
        }
        let rest = again.split_off(self.tokens.len());
        if rest.is_empty() { Ok(()) } else { self.forward(&rest, &ForwardOptions::none()).map(drop) }
    }

    /// Moves to a position as if zeros had been computed before it, so that a validator can test the end of a context
    /// without computing all of it.
    ///
    /// # Errors
    /// If the position is beyond the context.
    pub fn seek(&mut self, position: u64) -> Result<()> {
        if position >= self.limit {
            return Err(RuntimeError::ContextFull { tokens: position + 1, context: self.limit }.into());
        }
        self.reset()?;
        self.make_room(position + 1)?;
        // token ids don't matter here
        self.tokens = vec![0; position as usize];
        Ok(())
    }

    /// Runs the layers on one chunk and returns the output of the last.
    fn layers(
        &mut self,
        model: &LoadedModel,
        route: &Route,
        tokens: &[u32],
        chunk: Chunk,
        mut record: Option<&mut Record>,
    ) -> Result<Flow> {
        let rope = self.rope.clone();
        let width = model.bundle.model.hidden_size as usize;
        let given = self.previous.as_ref();
        let previous =
            given.and_then(|given| Some((given.columns(self.position(), width, tokens.len())?, given.drafted)));
        let mut feed = InputBuilder::new(&model.host, &rope, tokens, self.position(), chunk, route.context)
            .after(previous.as_ref().map(|(columns, drafted)| (columns, *drafted)))
            .again(std::mem::take(&mut self.buffers.tensors));
        let hidden = feed.embedding(width)?;
        if let Some(record) = record.as_deref_mut() {
            record.add(0, &hidden, 0..chunk.real as usize);
        }
        let mut flow = Flow::from(hidden);
        for step in &route.layers {
            flow = self.recorded(model, step, flow, &mut feed, 0..chunk.real as usize, record.as_deref_mut())?;
        }
        self.buffers.tensors = feed.into_tensors();
        Ok(flow)
    }

    /// Returns the output of a step and records the requested states inside it.
    pub(super) fn recorded(
        &mut self,
        model: &LoadedModel,
        step: &Step,
        flow: Flow,
        feed: &mut InputBuilder<'_>,
        counted: Range<usize>,
        record: Option<&mut Record>,
    ) -> Result<Flow> {
        let Some(record) = record else { return self.layer(model, step, flow, feed, None) };
        let left = if record.wants_inside(step) {
            let channels = flow.hidden.channels;
            let function = step.function(flow.hidden.count as u64);
            let probes = function.map_or(&[][..], |function| &model.bundle.functions[function].probes);
            let mut watch =
                |name: &str, tensor: &Tensor| record.record(name, tensor, channels, counted.clone(), probes);
            self.layer(model, step, flow, feed, Some(&mut watch))?
        } else {
            self.layer(model, step, flow, feed, None)?
        };
        record.add(step.part.end as usize, &left.hidden, counted);
        Ok(left)
    }

    /// Returns the output of a step, including its feed-forward network or routed experts in functions of their own.
    fn layer(
        &mut self,
        model: &LoadedModel,
        step: &Step,
        flow: Flow,
        feed: &mut InputBuilder<'_>,
        watch: Option<Watch<'_>>,
    ) -> Result<Flow> {
        let mut flow = self.call(model, step, flow, feed, watch)?;
        if let Some(network) = &step.feed_forward {
            flow = self.call(model, network, flow, feed, None)?;
        }
        for group in &step.experts {
            if flow.has_share(&group.part) {
                flow = self.call(model, group, flow, feed, None)?;
            }
        }
        Ok(flow)
    }

    /// Returns the output of a step's function.
    pub(super) fn call(
        &mut self,
        model: &LoadedModel,
        step: &Step,
        flow: Flow,
        feed: &mut InputBuilder<'_>,
        watch: Option<Watch<'_>>,
    ) -> Result<Flow> {
        let CallBuffers { inputs, outputs, .. } = &mut self.buffers;
        let function = prepare(model, step, &flow, Some((feed, &self.states)), inputs)?;
        let outputs = outputs.entry(function).or_default();
        self.states.run(&model.bundle.functions[function], (function, inputs), outputs, feed.place(), watch)?;
        Ok(after(model, function, outputs, flow)?)
    }

    /// Appends the head's results for the `wanted` columns of what left the layers. Models without a head append the
    /// hidden states. All parts of the head run together.
    pub(super) fn head(
        &mut self,
        model: &LoadedModel,
        route: &Route,
        left: &Flow,
        wanted: Range<usize>,
        rows: &mut HeadRows<'_>,
    ) -> Result<()> {
        if let (false, HeadRows::Logits(logits)) = (model.bundle.model.has_head(), &mut *rows) {
            // the final hidden states themselves
            let states: Vec<f32> = wanted.flat_map(|t| left.hidden.column(t)).collect();
            logits.extend(HiddenFrame::of(model).leave(&states));
            return Ok(());
        }
        let base = rows.grow(model, wanted.len());
        if let Some((function, outputs)) = &left.head {
            return Ok(rows.take(model, (*function, &outputs[..]), left.hidden.count, wanted, base)?);
        }
        let hidden = left.hidden.range(wanted.clone(), wanted.len());
        let mut done = 0;
        while done < hidden.count {
            let chunk = plan::chunk(&route.head, (hidden.count - done) as u64, None, u64::MAX)?;
            let (real, size) = (chunk.real as usize, chunk.size as usize);
            let flow = Flow::from(hidden.range(done..done + real, size));
            let HeadBuffers { inputs, outputs } = &mut self.buffers.head;
            inputs.resize_with(route.head.len(), Vec::new);
            outputs.resize_with(route.head.len(), Vec::new);
            let mut calls = SmallVec::<[FunctionCall<'_>; 16]>::new();
            for (step, inputs) in route.head.iter().zip(inputs.iter_mut()) {
                let function = prepare(model, step, &flow, None, inputs)?;
                calls.push(FunctionCall { function, inputs });
            }
            self.states.sequence.run_together(&calls, outputs)?;
            for (call, outputs) in calls.iter().zip(outputs) {
                rows.take(model, (call.function, &outputs[..]), size, 0..real, base + done)?;
            }
            // release the previous outputs, whose memory the functions overwrite
            drop(calls);
            inputs.iter_mut().for_each(Vec::clear);
            done += real;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
