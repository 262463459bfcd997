//! Single parts of the layers, or the LM head, run on given hidden states to locate errors.

use super::TokenSession;
use crate::error::RuntimeError;
use crate::forward::{Chunking, ForwardOutput, Hidden};
use crate::head::HeadRows;
use crate::hidden::{Columns, HiddenFrame, Record};
use crate::inputs::InputBuilder;
use crate::plan::Step;
use anec_base::Result;
use anec_bundle::{FILE_NAME, PortRole};

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
        let width = self.model.bundle.model.hidden_size as usize;
        let end = self.position() + (hidden.len() / width.max(1)) as u64;
        if end > self.limit {
            return Err(RuntimeError::ContextFull { tokens: end, context: self.limit }.into());
        }
        let given = Columns::of_rows(&HiddenFrame::of(&self.model).enter(hidden), width);
        self.make_room(end)?;
        let (model, rope) = (self.model.clone(), self.rope.clone());
        let route = &model.plan.routes[self.route];
        let mut record = Record::new(&model.bundle, route, wanted);
        record.only(&route.layers[part]);
        let (mut done, mut turn) = (0, 0);
        while done < given.count {
            let chunk = self.next_chunk((given.count - done) as u64, chunking.wish(turn))?;
            let real = chunk.real as usize;
            let mut feed = InputBuilder::new(&model.host, &rope, &[], self.position(), chunk, route.context);
            let columns = given.range(done..done + real, chunk.size as usize);
            self.recorded(&model, &route.layers[part], columns.into(), &mut feed, 0..real, Some(&mut record))?;
            // token ids don't matter here
            self.tokens.resize(self.tokens.len() + real, 0);
            done += real;
            turn += 1;
        }
        Ok(record.finish(done, &model.bundle.model, &HiddenFrame::of(&model))?)
    }

    /// Returns whether a part takes only hidden states from the part before it, so that it can run alone.
    pub fn stands_alone(&self, part: usize) -> bool {
        let step = &self.route().layers[part];
        let functions = step.with_followers().flat_map(Step::functions);
        let mut inputs = functions.flat_map(|function| &self.model.bundle.functions[function].inputs);
        // a parallel layer's network reads its input from the same part
        let from_before = |role: &PortRole| role.is_carried() && *role != PortRole::FeedForwardInput;
        let of_tokens = |role: &PortRole| matches!(role, PortRole::Embedding | PortRole::PerLayerInput { .. });
        inputs.all(|port| !from_before(&port.role) && !of_tokens(&port.role))
    }

    /// Runs the LM head on given hidden states `[tokens, hidden_size]` and replaces `logits` by those of the tokens,
    /// `[tokens, vocab_size]`.
    ///
    /// # Errors
    /// If a function fails.
    pub fn force_head(&mut self, hidden: &[f32], logits: &mut Vec<f32>) -> Result<()> {
        let model = self.model.clone();
        let route = &model.plan.routes[self.route];
        let given = Columns::of_rows(&HiddenFrame::of(&model).enter(hidden), model.bundle.model.hidden_size as usize);
        if route.head.is_empty() {
            let problem = "its LM head is in the function of the layers and doesn't run alone";
            return Err(RuntimeError::bundle(model.folder.join(FILE_NAME), problem).into());
        }
        logits.clear();
        let mut output = ForwardOutput { logits: std::mem::take(logits), ..ForwardOutput::default() };
        let count = given.count;
        self.head(&model, route, &given.into(), 0..count, &mut HeadRows::of(&model, false, &mut output)?)?;
        *logits = output.logits;
        Ok(())
    }
}
