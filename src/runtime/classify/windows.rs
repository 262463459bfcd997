//! Streaming pass through a model with bidirectional attention: tokens in, logits of the labels out, in order and with
//! bounded memory. A token classifier takes texts of any length.
//!
//! The layers of a function see a band of the text on each side of a token: its *halo*. Each function is called with
//! overlapping windows of the previous function's hidden states, such that every token lies a halo away from the ends
//! of some window, or of the text. There its result equals that of a single call on the whole text. Hidden states are
//! kept only as long as a later window needs them.
//!
//! ```text
//! text      ───────────────────────────────────────
//! windows   [······════······]                          ═ results that count
//!                [······════······]                     · halo
//! ```

use std::ops::Range;
use std::sync::Arc;

use crate::encoded_text::EncodedText;
use crate::error::RuntimeError;
use crate::forward::{ForwardOutput, Hidden};
use crate::head::HeadRows;
use crate::hidden::{Columns, HiddenFrame, Record};
use crate::host::TokenRun;
use crate::inputs::InputBuilder;
use crate::model::LoadedModel;
use crate::plan::{Chunk, Step};
use crate::session::TokenSession;
use anec_base::Result;
use anec_bundle::PortRole;

/// Text on its way through a token classifier.
pub struct Windows {
    model: Arc<LoadedModel>,
    session: TokenSession,
    /// Pending hidden states of each layer function, then of the head.
    waiting: Vec<Waiting>,
    /// Maximum number of tokens per call, if smaller than the functions allow.
    wish: Option<u64>,
    record: Option<Record>,
    /// Number of tokens received.
    count: u64,
    /// Tokens received, if functions of later layers take their embeddings.
    tokens: Option<Vec<u32>>,
    ended: bool,
    /// Whether the head is skipped.
    headless: bool,
}

/// Hidden states that wait for a function.
#[derive(Default)]
struct Waiting {
    /// Values `[tokens, hidden]`, row-major.
    rows: Vec<f32>,
    /// Position of the first row.
    first: u64,
    /// Position of the first row whose result is due.
    next: u64,
}

impl Windows {
    /// Begins a text. `window` limits the tokens per call below the functions' own limit. `hidden` records hidden
    /// states, which takes memory for the whole text.
    ///
    /// # Errors
    /// If the model has no labels, or the backend can't allocate states.
    pub fn new(model: &Arc<LoadedModel>, window: Option<u64>, hidden: Hidden) -> Result<Self> {
        if model.bundle().model.band().is_none() {
            return Err(RuntimeError::NoLabels { path: model.folder().to_owned() }.into());
        }
        // rotary rows are those of a window, whatever the length of the text
        let session = model.session(model.context())?;
        let count = session.route().layers.len() + 1;
        let record = (hidden != Hidden::No).then(|| Record::new(model.bundle(), session.route(), hidden));
        let waiting = (0..count).map(|_| Waiting::default()).collect();
        let mut inputs = model.bundle().functions.iter().flat_map(|function| &function.inputs);
        let tokens = inputs.any(|port| port.role == PortRole::Embedding).then(Vec::new);
        Ok(Windows {
            model: model.clone(),
            session,
            waiting,
            wish: window,
            record,
            count: 0,
            tokens,
            ended: false,
            headless: false,
        })
    }

    /// Begins a text whose final hidden states are returned instead of the head's output.
    pub(crate) fn of_texts(model: &Arc<LoadedModel>) -> Result<Self> {
        Ok(Windows { headless: true, ..Windows::new(model, None, Hidden::No)? })
    }

    /// Returns the final hidden states of a whole text.
    pub(crate) fn states(mut self, text: &EncodedText) -> Result<Vec<f32>> {
        if text.ids.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        let mut states = Vec::new();
        self.take(&text.ids, &text.types, &mut states)?;
        self.finish(&mut states)?;
        Ok(states)
    }

    /// Returns the logits of a whole text, and its hidden states if requested.
    ///
    /// # Errors
    /// Returns any error of [`Windows::push`].
    pub fn label(mut self, tokens: &[u32]) -> Result<ForwardOutput> {
        if tokens.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        let mut logits = Vec::new();
        self.push(tokens, &mut logits)?;
        self.finish(&mut logits)?;
        let (facts, frame) = (&self.model.bundle().model, HiddenFrame::of(&self.model));
        let hidden = self.record.map_or_else(|| Ok(Vec::new()), |record| record.finish(tokens.len(), facts, &frame))?;
        Ok(ForwardOutput { logits, hidden, ..ForwardOutput::default() })
    }

    /// Adds tokens and appends the logits that are certain by now: one row of labels per token.
    ///
    /// # Errors
    /// If a token doesn't exist, a function fails, or the functions' calls are too small for a text of this length.
    pub fn push(&mut self, tokens: &[u32], logits: &mut Vec<f32>) -> Result<()> {
        self.take(tokens, &[], logits)
    }

    fn take(&mut self, tokens: &[u32], types: &[u32], logits: &mut Vec<f32>) -> Result<()> {
        let longest = self.model.longest_text();
        let total = self.count + tokens.len() as u64;
        if longest.is_some_and(|longest| total > longest) {
            return Err(RuntimeError::ContextFull { tokens: total, context: longest.unwrap_or(total) }.into());
        }
        let width = self.width();
        // at most about a window at a time, because input is buffered until it is processed
        let most = self.model.context().max(1) as usize;
        for (index, tokens) in tokens.chunks(most).enumerate() {
            let mut values = vec![0.0; width * tokens.len()];
            let types = types.get(index * most..).unwrap_or_default();
            let text = TokenRun { tokens, types, position: self.count };
            self.model.host().embed(text, tokens.len(), &mut values)?;
            let columns = Columns::of_values(values, width, tokens.len());
            self.count += tokens.len() as u64;
            if let Some(all) = &mut self.tokens {
                all.extend_from_slice(tokens);
            }
            if let Some(record) = &mut self.record {
                record.add(0, &columns, 0..tokens.len());
            }
            self.waiting[0].take(&columns, 0..tokens.len());
            self.work(logits)?;
        }
        Ok(())
    }

    /// Ends the text and appends the remaining logits.
    ///
    /// # Errors
    /// Returns any error of [`Windows::push`].
    pub fn finish(&mut self, logits: &mut Vec<f32>) -> Result<()> {
        self.ended = true;
        self.work(logits)
    }

    /// Returns the number of buffered values.
    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(|waiting| waiting.rows.len()).sum()
    }

    fn width(&self) -> usize {
        self.model.bundle().model.hidden_size as usize
    }

    /// Calls each function while enough input is available.
    fn work(&mut self, logits: &mut Vec<f32>) -> Result<()> {
        let model = self.model.clone();
        let route = self.session.route().clone();
        for (index, step) in route.layers.iter().enumerate() {
            while self.call(&model, index, step, route.context)? {}
        }
        let last = self.waiting.last_mut().map(|waiting| std::mem::take(&mut waiting.rows)).unwrap_or_default();
        if !last.is_empty() {
            // the rows have the functions' scale already
            let columns = Columns::of_rows(&last, self.width());
            match self.headless {
                true => logits.extend(HiddenFrame::of(&model).leave(&last)),
                false => {
                    let count = columns.count;
                    let mut rows = HeadRows::Logits(logits);
                    self.session.head(&model, &route, &columns.into(), 0..count, &mut rows)?;
                }
            }
        }
        Ok(())
    }

    /// Makes one call of a layer function if enough input is available.
    fn call(&mut self, model: &LoadedModel, index: usize, step: &Step, context: u64) -> Result<bool> {
        let width = self.width();
        if model.longest_text().is_some() && !self.ended {
            // every token sees the whole text
            return Ok(false);
        }
        let band = model.bundle().model.band().unwrap_or(0);
        let halo = band.saturating_mul(step.part.end - step.part.start);
        let most = self.wish.unwrap_or(context).min(context);
        let largest = step.largest_at_most(most).or_else(|| step.smallest_at_least(most)).unwrap_or(most);
        let waiting = &self.waiting[index];
        let have = waiting.first + (waiting.rows.len() / width) as u64;
        let start = waiting.next.saturating_sub(halo);
        let count = (have - start).min(largest);
        let reaches_end = self.ended && start + count == have;
        // unless the text ends here, the last results don't count
        let end = if reaches_end { have } else { (start + count).saturating_sub(halo) };
        if waiting.next >= have || !reaches_end && count < largest {
            return Ok(false);
        }
        if end <= waiting.next {
            return Err(RuntimeError::Window { window: largest, halo }.into());
        }
        let from = (start - waiting.first) as usize * width;
        let rows = &waiting.rows[from..from + count as usize * width];
        let size = step.smallest_at_least(count).unwrap_or(count);
        let columns = Columns::of_rows(rows, width).range(0..count as usize, size as usize);
        let counted = (waiting.next - start) as usize..(end - start) as usize;

        let rope = self.session.rope().clone();
        let tokens = self.tokens.as_deref().unwrap_or_default();
        let tokens = tokens.get(start as usize..(start + count) as usize).unwrap_or_default();
        let mut feed = InputBuilder::new(model.host(), &rope, tokens, 0, Chunk { real: count, size }, context);
        let record = self.record.as_mut();
        let out = self.session.recorded(model, step, columns.into(), &mut feed, counted.clone(), record)?;
        let waiting = &mut self.waiting[index];
        waiting.next = end;
        let kept = end.saturating_sub(halo).max(waiting.first);
        waiting.rows.drain(..(kept - waiting.first) as usize * width);
        waiting.first = kept;
        self.waiting[index + 1].take(&out.hidden, counted);
        Ok(true)
    }
}

impl Waiting {
    fn take(&mut self, columns: &Columns, counted: Range<usize>) {
        counted.for_each(|t| self.rows.extend(columns.column(t)));
    }
}
