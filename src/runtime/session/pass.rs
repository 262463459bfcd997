//! Forward pass through all layers and the LM head, whole or call by call.

use super::{PreviousHidden, PreviousRows, TokenSession};
use crate::error::RuntimeError;
use crate::forward::{ForwardOptions, ForwardOutput, Hidden, Positions};
use crate::head::HeadRows;
use crate::hidden::{HiddenFrame, Record};
use anec_base::Result;

/// Forward pass in progress; see [`TokenSession::begin`].
pub struct ForwardPass<'t> {
    tokens: &'t [u32],
    ask: &'t ForwardOptions,
    record: Option<Record>,
    answer: ForwardOutput,
    /// Number of computed tokens.
    done: usize,
    turn: usize,
}

impl ForwardPass<'_> {
    /// Returns the number of computed tokens.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Returns the logits computed since the last call of this function.
    pub fn take_logits(&mut self) -> Vec<f32> {
        std::mem::take(&mut self.answer.logits)
    }
}

impl TokenSession {
    /// Computes `tokens` after those before.
    ///
    /// # Errors
    /// If `tokens` is empty, they don't fit, a token doesn't exist, or a function fails. After a failure the session
    /// holds the tokens of the successful calls.
    pub fn forward(&mut self, tokens: &[u32], ask: &ForwardOptions) -> Result<ForwardOutput> {
        let mut output = ForwardOutput::default();
        self.forward_into(tokens, ask, &mut output)?;
        Ok(output)
    }

    /// Computes `tokens` as [`forward`](TokenSession::forward) does and overwrites `output`, whose memory is reused.
    ///
    /// # Errors
    /// Returns any error of [`forward`](TokenSession::forward).
    pub fn forward_into(&mut self, tokens: &[u32], ask: &ForwardOptions, output: &mut ForwardOutput) -> Result<()> {
        let mut pass = self.begin(tokens, ask)?;
        (pass.answer.logits, pass.answer.tokens) =
            (std::mem::take(&mut output.logits), std::mem::take(&mut output.tokens));
        pass.answer.logits.clear();
        pass.answer.tokens.clear();
        while self.advance(&mut pass)? {}
        *output = self.finish(pass)?;
        Ok(())
    }

    /// Computes `tokens` in a [draft layer](crate::LoadedModel::draft_layer), after those before.
    ///
    /// # Errors
    /// Returns any error of [`forward`](TokenSession::forward); also if there isn't one row per token.
    pub fn forward_behind(
        &mut self,
        previous: PreviousHidden<'_>,
        tokens: &[u32],
        ask: &ForwardOptions,
    ) -> Result<ForwardOutput> {
        let rows = HiddenFrame::of(&self.model).enter(previous.rows);
        self.previous = Some(PreviousRows { rows, first: self.position(), drafted: previous.drafted });
        let output = self.forward(tokens, ask);
        self.previous = None;
        output
    }

    /// Begins [`forward`](TokenSession::forward), to be computed call by call.
    ///
    /// # Errors
    /// Returns any error of [`forward`](TokenSession::forward) except those of functions.
    pub fn begin<'t>(&mut self, tokens: &'t [u32], ask: &'t ForwardOptions) -> Result<ForwardPass<'t>> {
        if tokens.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        let end = self.position() + tokens.len() as u64;
        if end > self.limit {
            return Err(RuntimeError::ContextFull { tokens: end, context: self.limit }.into());
        }
        let mut answer = ForwardOutput::default();
        if ask.logits != Positions::None {
            HeadRows::of(&self.model, ask.largest, &mut answer)?;
        }
        if self.poisoned {
            self.restore(self.tokens.len())?;
        }
        self.make_room(end)?;
        let record = (ask.hidden != Hidden::No).then(|| Record::new(&self.model.bundle, self.route(), ask.hidden));
        Ok(ForwardPass { tokens, ask, record, answer, done: 0, turn: 0 })
    }

    /// Computes the next call of a pass begun with this session; returns false if none is left.
    ///
    /// # Errors
    /// Returns any error of [`forward`](TokenSession::forward).
    pub fn advance(&mut self, pass: &mut ForwardPass<'_>) -> Result<bool> {
        let rest = &pass.tokens[pass.done..];
        if rest.is_empty() {
            return Ok(false);
        }
        let model = self.model.clone();
        let chunk = self.next_chunk(rest.len() as u64, pass.ask.chunking.wish(pass.turn))?;
        self.make_room_for(chunk)?;
        let route = &model.plan.routes[self.route];
        let (now, later) = rest.split_at(chunk.real as usize);
        // states written by position can be written again
        self.poisoned = !model.rewindable;
        let left = self.layers(&model, route, now, chunk, pass.record.as_mut())?;
        self.poisoned = false;
        self.tokens.extend(now);
        let real = chunk.real as usize;
        let wanted = pass.ask.logits.of_call(real, later.is_empty());
        if !wanted.is_empty() {
            let mut rows = HeadRows::of(&model, pass.ask.largest, &mut pass.answer)?;
            self.head(&model, route, &left, wanted, &mut rows)?;
        }
        pass.done += real;
        pass.turn += 1;
        Ok(true)
    }

    /// Returns the remaining results of a pass.
    ///
    /// # Errors
    /// If a requested hidden state wasn't recorded.
    pub fn finish(&self, pass: ForwardPass<'_>) -> Result<ForwardOutput> {
        let ForwardPass { record, mut answer, done, .. } = pass;
        if let Some(record) = record {
            answer.hidden = record.finish(done, &self.model.bundle.model, &HiddenFrame::of(&self.model))?;
        }
        Ok(answer)
    }
}
