//! Single parts of the layers, or the LM head, run on given hidden states to locate errors.

use super::TokenSession;
use crate::error::RuntimeError;
use crate::forward::{Chunking, Hidden};
use crate::hidden::{Columns, HiddenFrame, Record};
use crate::inputs::InputBuilder;
use crate::plan::Step;
use anec_base::Result;
use anec_bundle::PortRole;

/// Pass of one part on given hidden states; see [`TokenSession::begin_forced`].
pub struct ForcedPass<'t> {
    part: usize,
    chunking: &'t Chunking,
    given: Columns,
    record: Record,
    /// Number of computed tokens.
    done: usize,
    turn: usize,
}

impl ForcedPass<'_> {
    /// Returns the number of computed tokens.
    pub fn done(&self) -> usize {
        self.done
    }
}

impl TokenSession {
    /// Runs one part of the layers on given hidden states `[tokens, hidden_size]`, row-major, instead of the output of
    /// the parts before it. `part` indexes the parts of [`TokenSession::route`]. Returns the output of its last layer,
    /// and other states if `wanted` requests them, in their places of
    /// [`ForwardOutput::hidden`](crate::forward::ForwardOutput::hidden).
    ///
    /// # Errors
    /// Returns any error of [`TokenSession::forward`].
    pub fn force_layers(
        &mut self,
        part: usize,
        hidden: &[f32],
        wanted: Hidden,
        chunking: &Chunking,
    ) -> Result<Vec<Vec<f32>>> {
        let mut pass = self.begin_forced(part, hidden, wanted, chunking)?;
        while self.advance_forced(&mut pass)? {}
        self.finish_forced(pass)
    }

    /// Begins [`force_layers`](TokenSession::force_layers), to be computed call by call.
    ///
    /// # Errors
    /// If so many tokens don't fit.
    pub fn begin_forced<'t>(
        &mut self,
        part: usize,
        hidden: &[f32],
        wanted: Hidden,
        chunking: &'t Chunking,
    ) -> Result<ForcedPass<'t>> {
        let model = &self.model;
        let width = model.bundle.model.hidden_size as usize;
        let count = hidden.len() / width.max(1);
        let end = self.position() + count as u64;
        if end > self.limit {
            return Err(RuntimeError::ContextFull { tokens: end, context: self.limit }.into());
        }
        let given = Columns::of_rows(&HiddenFrame::of(model).enter(hidden), width);
        self.make_room(end)?;
        let mut record = Record::new(&self.model.bundle, self.route(), wanted);
        record.only(&self.route().layers[part]);
        Ok(ForcedPass { part, chunking, given, record, done: 0, turn: 0 })
    }

    /// Computes the next call of a pass begun with this session; returns false if none is left.
    ///
    /// # Errors
    /// If a function fails.
    pub fn advance_forced(&mut self, pass: &mut ForcedPass<'_>) -> Result<bool> {
        let left = pass.given.count - pass.done;
        if left == 0 {
            return Ok(false);
        }
        let (model, rope) = (self.model.clone(), self.rope.clone());
        let route = &model.plan.routes[self.route];
        let chunk = self.next_chunk(left as u64, pass.chunking.wish(pass.turn))?;
        let real = chunk.real as usize;
        let mut feed = InputBuilder::new(&model.host, &rope, &[], self.position(), chunk, route.context);
        let columns = pass.given.range(pass.done..pass.done + real, chunk.size as usize);
        self.recorded(&model, &route.layers[pass.part], columns.into(), &mut feed, 0..real, Some(&mut pass.record))?;
        // token ids don't matter here
        self.tokens.resize(self.tokens.len() + real, 0);
        pass.done += real;
        pass.turn += 1;
        Ok(true)
    }

    /// Returns the result of a pass.
    ///
    /// # Errors
    /// If a requested hidden state wasn't recorded.
    pub fn finish_forced(&self, pass: ForcedPass<'_>) -> Result<Vec<Vec<f32>>> {
        Ok(pass.record.finish(pass.done, &self.model.bundle.model, &HiddenFrame::of(&self.model))?)
    }

    /// Returns whether a part takes only hidden states from the part before it, so that it can run alone.
    pub fn stands_alone(&self, part: usize) -> bool {
        let step = &self.route().layers[part];
        let functions = step.with_followers().flat_map(Step::functions);
        let mut inputs = functions.flat_map(|function| &self.model.bundle.functions[function].inputs);
        // a parallel layer's network reads its input from the same part
        let from_before = |role: &PortRole| role.is_carried() && *role != PortRole::FeedForwardInput;
        inputs.all(|port| !from_before(&port.role) && !matches!(port.role, PortRole::PerLayerInput { .. }))
    }

    /// Runs the LM head on given hidden states `[tokens, hidden_size]`; returns `[tokens, vocab_size]`.
    ///
    /// # Errors
    /// If a function fails.
    pub fn force_head(&mut self, hidden: &[f32]) -> Result<Vec<f32>> {
        let model = self.model.clone();
        let route = &model.plan.routes[self.route];
        let given = Columns::of_rows(&HiddenFrame::of(&model).enter(hidden), model.bundle.model.hidden_size as usize);
        let mut logits = Vec::new();
        self.head(&model, route, &given, &mut logits)?;
        Ok(logits)
    }
}
