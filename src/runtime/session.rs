//! A text on its way through a bundle: tokens in, logits out, in calls of as many tokens as the functions take.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::backend::{FunctionCall, Phase, Watch};
use super::buffers::{CallBuffers, HeadBuffers};
use super::call::{after, place_logits, prepare, result};
use super::error::RuntimeError;
use super::forward::ForwardOptions;
use super::hidden::{Columns, Flow, HiddenFrame, Record};
use super::host::RopeChoice;
use super::inputs::InputBuilder;
use super::model::LoadedModel;
use super::plan::{self, Chunk, Route, Step};
use super::states::States;
use anec_base::Result;
use anec_bundle::{PortRole, Task};
use anec_exec::{ProductMemo, Tensor};
use smallvec::SmallVec;

mod forced;
mod pass;

pub use forced::ForcedPass;
pub use pass::ForwardPass;

/// A text: its states and the tokens that they come from.
pub struct TokenSession {
    model: Arc<LoadedModel>,
    pub(super) states: States,
    /// The context that it is in, which grows with it.
    pub(super) route: usize,
    /// The context that a text begins in.
    first_route: usize,
    phase: Phase,
    /// Where products are remembered.
    memo: Option<Arc<ProductMemo>>,
    rope: Arc<RopeChoice>,
    pub(super) tokens: Vec<u32>,
    /// Of a layer that drafts: the hidden states before those of the next tokens, which the next pass takes.
    previous: Option<GivenHidden>,
    limit: u64,
    /// Ascending; only for models whose states aren't all written by position.
    checkpoints: Vec<Checkpoint>,
    /// Other texts may begin as this one does: going back to the end of a prompt should cost nothing.
    pub(super) kept: bool,
    /// A call failed midway, so the states disagree on the position: the session must be rewound or reset.
    pub(super) poisoned: bool,
    pub(super) buffers: CallBuffers,
}

/// What a [layer that drafts](LoadedModel::draft_layer) reads beside tokens.
#[derive(Clone, Copy, Debug)]
pub struct PreviousHidden<'a> {
    /// For each token a row: what left the last layer for the token before it.
    pub rows: &'a [f32],
    /// The last layer was the one that drafts, not that of the model.
    pub drafted: bool,
}

/// The same, of a pass.
struct GivenHidden {
    /// As functions have them.
    rows: Vec<f32>,
    /// The position of the first token.
    first: u64,
    drafted: bool,
}

impl GivenHidden {
    /// Those of the tokens of a call at a position.
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

/// Checkpoints that a session keeps: where the prompt ended, and where the last call began.
const CHECKPOINTS: usize = 2;

impl LoadedModel {
    /// Begins a text of up to `length` tokens, prompt and continuation, with the rotary tables that belong to that length.
    /// It is computed in the smallest context that holds what there is of it, and moves on to the next one when it has
    /// become longer.
    ///
    /// # Errors
    /// When it doesn't fit, the backend has no room, or the model looks at texts in both directions.
    pub fn start(self: &Arc<Self>, length: u64) -> Result<TokenSession> {
        if self.bundle.model.band().is_some() {
            self.continues_texts()?;
        }
        self.session(length)
    }

    /// Refuses a model that doesn't continue texts, by what it does instead.
    ///
    /// # Errors
    /// When that is what it is.
    pub fn continues_texts(&self) -> Result<(), RuntimeError> {
        let path = self.folder.clone();
        match &self.bundle.model.task {
            Task::TextGeneration => Ok(()),
            Task::TokenClassification(_) => Err(RuntimeError::LabelsTokens { path }),
            Task::TextEmbedding(_) => Err(RuntimeError::GivesVectors { path }),
            Task::SequenceClassification(_) => Err(RuntimeError::LabelsTexts { path }),
        }
    }

    /// As [`LoadedModel::start`], whatever the model is for.
    pub(super) fn session(self: &Arc<Self>, length: u64) -> Result<TokenSession> {
        let rope = self.host.choose_rope(length)?;
        let limit = self.limit(length, &rope)?;
        // what is seen in both directions goes through one call, for which all of the context is
        let route = if self.bundle.model.band().is_some() { self.plan.route(length)? } else { 0 };
        Ok(TokenSession {
            model: self.clone(),
            states: States::new(self.backend.sequence()?),
            route,
            first_route: route,
            phase: Phase::default(),
            memo: None,
            rope: Arc::new(rope),
            // what decoding appends to allocates nothing
            tokens: Vec::with_capacity(limit as usize),
            previous: None,
            limit,
            checkpoints: Vec::new(),
            kept: false,
            poisoned: false,
            buffers: CallBuffers::default(),
        })
    }

    /// Tokens of a text that was begun as one of `length` tokens: those of the smallest context that holds so many.
    fn limit(&self, length: u64, rope: &RopeChoice) -> Result<u64, RuntimeError> {
        Ok(self.plan.routes[self.plan.route(length)?].context.min(rope.rows))
    }
}

impl TokenSession {
    /// Tokens computed so far; the position of the next one.
    pub fn position(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// The tokens computed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that fit.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The functions that it runs through now.
    pub fn route(&self) -> &Route {
        &self.model.plan.routes[self.route]
    }

    /// The rotary tables that it uses.
    pub(super) fn rope(&self) -> &RopeChoice {
        &self.rope
    }

    /// The model.
    pub fn model(&self) -> &Arc<LoadedModel> {
        &self.model
    }

    /// Forgets everything; the next token is the first of a new text.
    ///
    /// # Errors
    /// When the backend can't reset its states.
    pub fn reset(&mut self) -> Result<()> {
        self.states.reset()?;
        self.route = self.first_route;
        self.poisoned = false;
        self.tokens.clear();
        self.checkpoints.clear();
        Ok(())
    }

    /// Whether a text of `length` tokens would be computed as this one: with the same rotary tables. Only then is what was
    /// computed of one of use for the other.
    pub fn is_compatible_with(&self, length: u64) -> bool {
        let same_context = self.first_route == 0 || self.model.plan.route(length).is_ok_and(|r| r == self.route);
        same_context
            && self.model.plan.route(length).is_ok()
            && self.model.host.choose_rope(length).is_ok_and(|rope| rope == *self.rope)
    }

    /// Makes it a text of `length` tokens, with which it [is compatible](TokenSession::is_compatible_with): it ends where
    /// one that was begun as such would.
    ///
    /// # Errors
    /// When so many don't fit.
    pub fn set_length(&mut self, length: u64) -> Result<()> {
        self.limit = self.model.limit(length, &self.rope)?;
        Ok(())
    }

    /// Says what the tokens that follow are for.
    pub(super) fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.states.sequence.enter(phase);
    }

    /// Bytes of its states, in f32, in the context that it is in.
    pub fn state_bytes(&self) -> u64 {
        let steps = self.route().layers.iter().flat_map(Step::with_followers);
        let functions = steps.flat_map(Step::functions).map(|function| &self.model.bundle.functions[function]);
        let states = functions.flat_map(|function| &function.states);
        let sizes: BTreeMap<&str, u64> = states.map(|state| (&*state.id, state.shape.iter().product())).collect();
        sizes.values().sum::<u64>() * size_of::<f32>() as u64
    }

    /// Shares products with weights with other sessions of the model, where the backend can: gives whether it does. What is
    /// computed is the same, bit for bit.
    pub fn remember(&mut self, memo: &Arc<ProductMemo>) -> bool {
        self.memo = Some(memo.clone());
        self.states.sequence.remember(memo)
    }

    /// Moves on to the smallest context that holds `length` tokens, with all that was computed. The text goes on as if it
    /// had begun there.
    ///
    /// # Errors
    /// When none holds them, or the backend has no room.
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
        if let Some(memo) = &self.memo {
            self.states.sequence.remember(memo);
        }
        self.route = route;
        Ok(())
    }

    /// The next call when `left` tokens are to be computed, at most `wish` of them.
    ///
    /// # Errors
    /// When no function takes so many.
    pub(super) fn next_chunk(&self, left: u64, wish: Option<u64>) -> Result<Chunk, RuntimeError> {
        let fill = match (self.model.fills, self.model.writes_slices) {
            (false, _) => 0,
            (true, false) => u64::MAX,
            // what fills the call up is written behind the text, so there has to be room for it
            (true, true) => self.model.context().saturating_sub(self.position()),
        };
        let most = self.model.ring.map_or(left, |ring| ring.at(self.position()));
        plan::chunk(&self.route().layers, left.min(most), wish, fill)
    }

    /// Moves on to a context that holds a call's tokens, those that fill it up too if they are written.
    pub(super) fn make_room_for(&mut self, chunk: Chunk) -> Result<()> {
        let count = if self.model.writes_slices { chunk.size } else { chunk.real };
        self.make_room(self.position() + count)
    }

    /// Whether another token can follow the first `position` ones: the text may be so long, and where a call writes all its
    /// tokens, the smallest one has to fit.
    pub(super) fn holds_another(&self, position: u64) -> bool {
        position < self.limit && (position + self.written_at_least()).max(position + 1) <= self.model.context()
    }

    /// Tokens that every call writes, the smallest too. A text that begins at a multiple of it fits to the end.
    pub(super) fn written_at_least(&self) -> u64 {
        match self.model.writes_slices {
            true => self.next_chunk(1, None).map_or(1, |chunk| chunk.size),
            false => 1,
        }
    }

    /// Tokens, at most `most`, that the next call can take.
    ///
    /// # Errors
    /// When no function takes so few.
    pub fn largest_call(&self, most: u64) -> Result<u64, RuntimeError> {
        Ok(self.next_chunk(most, None)?.real)
    }

    /// A text of its own that begins with the tokens of this one; nothing where the backend can't copy states.
    ///
    /// # Errors
    /// When the backend has no room.
    pub fn fork(&self) -> Result<Option<TokenSession>> {
        Ok(self.states.fork()?.map(|states| TokenSession {
            model: self.model.clone(),
            states,
            route: self.route,
            first_route: self.first_route,
            phase: self.phase,
            memo: self.memo.clone(),
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

    /// Remembers the states as they are, where going back needs it. Gives whether [`TokenSession::rewind`] then comes here
    /// without computing: not where the backend can't copy states that it would need. A generation calls this after its prompt
    /// where the session comes from a [`PrefixCache`](super::PrefixCache).
    ///
    /// # Errors
    /// When the backend has no room.
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

    /// Goes back to the first `position` tokens, as if those after them had never been.
    ///
    /// # Errors
    /// When states have to be computed again and that fails. `position` past the end changes nothing.
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

    /// Brings back the states after the first `position` tokens.
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

    /// Goes to a position, as if zeros had been computed before it: what a validator needs to try the end of a context
    /// without computing all of it.
    ///
    /// # Errors
    /// When the position is beyond the context.
    pub fn seek(&mut self, position: u64) -> Result<()> {
        if position >= self.limit {
            return Err(RuntimeError::ContextFull { tokens: position + 1, context: self.limit }.into());
        }
        self.reset()?;
        self.make_room(position + 1)?;
        // which tokens they were is nobody's question: nothing is recalled of them
        self.tokens = vec![0; position as usize];
        Ok(())
    }

    /// Runs the layers on one chunk; gives the hidden states that leave the last.
    fn layers(
        &mut self,
        model: &LoadedModel,
        route: &Route,
        tokens: &[u32],
        chunk: Chunk,
        mut record: Option<&mut Record>,
    ) -> Result<Columns> {
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
        Ok(flow.hidden)
    }

    /// What leaves a part of the layers, recorded with what is wanted of the states inside it.
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

    /// What leaves a part of the layers, with its feed-forward network, or those of its experts that a token was given, if they are apart.
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

    /// What leaves the function of a step.
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

    /// Appends the logits of `hidden`, one row of the vocabulary's width (or the labels') for each column; the hidden states
    /// themselves where there is no head. All parts of
    /// the head are called together.
    pub(super) fn head(
        &mut self,
        model: &LoadedModel,
        route: &Route,
        hidden: &Columns,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        if !model.bundle.model.has_head() {
            // the final hidden states themselves
            let rows: Vec<f32> = (0..hidden.count).flat_map(|t| hidden.column(t)).collect();
            logits.extend(HiddenFrame::of(model).leave(&rows));
            return Ok(());
        }
        let width = model.bundle.model.head_rows() as usize;
        let base = logits.len();
        logits.resize(base + hidden.count * width, 0.0);
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
            for ((step, call), outputs) in route.head.iter().zip(&calls).zip(outputs) {
                let rows = step.part.start as usize..step.part.end as usize;
                let part = result(model, call.function, outputs, PortRole::Logits, rows.len(), size)?;
                place_logits(&part, rows, &mut logits[base + done * width..][..real * width], width);
            }
            // the functions that gave the hidden states write them again
            drop(calls);
            inputs.iter_mut().for_each(Vec::clear);
            done += real;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
