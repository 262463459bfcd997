//! A text on its way through a model that looks both ways, of any length through a token classifier: tokens in, logits of
//! the labels out, in order and with bounded memory.
//!
//! A function's layers see a band of the text on each side of a token: its *halo*. Each function is called with windows
//! of the hidden states that the one before gave, overlapping so that every token lies a halo away from the ends of some
//! window, or from the end of the text; there its result is what a single call with the whole text would give. Hidden
//! states are kept only as long as a later window needs them.
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
use crate::hidden::{Columns, HiddenFrame, Record};
use crate::host::TokenRun;
use crate::inputs::InputBuilder;
use crate::model::LoadedModel;
use crate::plan::{Chunk, Step};
use crate::session::TokenSession;
use anec_base::Result;

/// A text on its way through a token classifier.
pub struct Windows {
    model: Arc<LoadedModel>,
    session: TokenSession,
    /// One for each function of the layers, then that of the head, which has only what it is given.
    waiting: Vec<Waiting>,
    /// Tokens of the largest call of each function, if fewer than it takes are wished for.
    wish: Option<u64>,
    record: Option<Record>,
    /// Tokens that came so far.
    count: u64,
    ended: bool,
    /// The head is left out.
    headless: bool,
}

/// Hidden states before a function.
#[derive(Default)]
struct Waiting {
    /// `[tokens, hidden]`, row-major.
    rows: Vec<f32>,
    /// Position of the first.
    first: u64,
    /// Position of the first whose result is still due.
    next: u64,
}

impl Windows {
    /// A new text. `window` bounds the tokens of a call further than the functions do; hidden states are recorded if
    /// `hidden` asks for them, which takes memory for all of the text.
    ///
    /// # Errors
    /// When the model has no labels, or the backend no room.
    pub fn new(model: &Arc<LoadedModel>, window: Option<u64>, hidden: Hidden) -> Result<Self> {
        if model.bundle().model.band().is_none() {
            return Err(RuntimeError::NoLabels { path: model.folder().to_owned() }.into());
        }
        // rotary rows are those of a window, whatever the length of the text
        let session = model.session(model.context())?;
        let count = session.route().layers.len() + 1;
        let record = (hidden != Hidden::No).then(|| Record::new(model.bundle(), session.route(), hidden));
        let waiting = (0..count).map(|_| Waiting::default()).collect();
        Ok(Windows {
            model: model.clone(),
            session,
            waiting,
            wish: window,
            record,
            count: 0,
            ended: false,
            headless: false,
        })
    }

    /// A new text of which the final hidden states are wanted, whatever the model's head makes of them.
    pub(crate) fn of_texts(model: &Arc<LoadedModel>) -> Result<Self> {
        Ok(Windows { headless: true, ..Windows::new(model, None, Hidden::No)? })
    }

    /// The final hidden states of a whole text.
    pub(crate) fn states(mut self, text: &EncodedText) -> Result<Vec<f32>> {
        if text.ids.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        let mut states = Vec::new();
        self.take(&text.ids, &text.types, &mut states)?;
        self.finish(&mut states)?;
        Ok(states)
    }

    /// The logits of a whole text, and the hidden states if they were asked for.
    ///
    /// # Errors
    /// As [`Windows::push`].
    pub fn label(mut self, tokens: &[u32]) -> Result<ForwardOutput> {
        if tokens.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        let mut logits = Vec::new();
        self.push(tokens, &mut logits)?;
        self.finish(&mut logits)?;
        let (facts, frame) = (&self.model.bundle().model, HiddenFrame::of(&self.model));
        let hidden = self.record.map_or_else(|| Ok(Vec::new()), |record| record.finish(tokens.len(), facts, &frame))?;
        Ok(ForwardOutput { logits, hidden })
    }

    /// Goes on with more tokens. Appends the logits that are certain by now, a row of the labels' number for each token.
    ///
    /// # Errors
    /// When a token doesn't exist, a function fails, or the functions' calls are too small for so long a text.
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
        // not more at once than a window or so: what comes in is kept until it has gone through
        let most = self.model.context().max(1) as usize;
        for (index, tokens) in tokens.chunks(most).enumerate() {
            let mut values = vec![0.0; width * tokens.len()];
            let types = types.get(index * most..).unwrap_or_default();
            let text = TokenRun { tokens, types, position: self.count };
            self.model.host().embed(text, tokens.len(), &mut values)?;
            let columns = Columns::of_values(values, width, tokens.len());
            self.count += tokens.len() as u64;
            if let Some(record) = &mut self.record {
                record.add(0, &columns, 0..tokens.len());
            }
            self.waiting[0].take(&columns, 0..tokens.len());
            self.work(logits)?;
        }
        Ok(())
    }

    /// The text ends here. Appends the logits that are still due.
    ///
    /// # Errors
    /// As [`Windows::push`].
    pub fn finish(&mut self, logits: &mut Vec<f32>) -> Result<()> {
        self.ended = true;
        self.work(logits)
    }

    /// Numbers that wait for their turn: what the text takes in memory.
    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(|waiting| waiting.rows.len()).sum()
    }

    fn width(&self) -> usize {
        self.model.bundle().model.hidden_size as usize
    }

    /// Calls every function as often as there is enough for it.
    fn work(&mut self, logits: &mut Vec<f32>) -> Result<()> {
        let model = self.model.clone();
        let route = self.session.route().clone();
        for (index, step) in route.layers.iter().enumerate() {
            while self.call(&model, index, step, route.context)? {}
        }
        let last = self.waiting.last_mut().map(|waiting| std::mem::take(&mut waiting.rows)).unwrap_or_default();
        if !last.is_empty() {
            // the rows are in the functions' unit already
            let columns = Columns::of_rows(&last, self.width());
            match self.headless {
                true => logits.extend(HiddenFrame::of(&model).leave(&last)),
                false => self.session.head(&model, &route, &columns, logits)?,
            }
        }
        Ok(())
    }

    /// One call of a function of the layers, if there is enough for it.
    fn call(&mut self, model: &LoadedModel, index: usize, step: &Step, context: u64) -> Result<bool> {
        let width = self.width();
        if model.longest_text().is_some() && !self.ended {
            // every token sees all of the text
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
        // where the text goes on, the last results don't count
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
        let mut feed = InputBuilder::new(model.host(), &rope, &[], 0, Chunk { real: count, size }, context);
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
