//! Streaming redaction: bytes in, kept text and spans out, in order and with bounded memory.
//!
//! ```text
//! bytes ─ tokens of blocks ─ logits by windows ─ labels by Viterbi ─ spans ─ kept text, spans
//! ```
//!
//! The text is cut into blocks between two words, where the tokenizer starts afresh anyway. Offsets count bytes of the
//! original text. Bytes that are not UTF-8 pass through unchanged; the model sees a `?` for each.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::bioes::{Biases, BioesTag, Scheme, Viterbi};
use super::windows::Windows;
use crate::error::RuntimeError;
use crate::forward::Hidden;
use crate::model::LoadedModel;
use crate::tokenizer::{TokenEntry, Tokenizer};
use anec_base::Result;
use anec_base::listing::list;

/// Approximate size of a tokenized block in bytes.
const BLOCK: usize = 1 << 14;
/// Number of bytes at the end of a block whose words may continue in the next block.
const MARGIN: usize = 1 << 8;

/// Span of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of its kind in [`Scheme::kinds`].
    pub kind: usize,
    /// Byte range, without white space at its ends.
    pub range: Range<u64>,
}

impl Span {
    /// Returns the name of its kind.
    pub fn label<'s>(&self, scheme: &'s Scheme) -> &'s str {
        &scheme.kinds()[self.kind]
    }

    /// Returns the text in place of the span, `<KIND>`.
    pub fn placeholder(&self, scheme: &Scheme) -> String {
        format!("<{}>", self.label(scheme).to_uppercase())
    }
}

/// Piece of the output.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// Text outside of the requested spans, unchanged.
    Kept(&'a [u8]),
    /// Requested span, in place of its text.
    Span(&'a Span),
}

/// Receiver of the pieces.
pub type Sink<'a> = &'a mut dyn FnMut(Piece<'_>) -> Result<()>;

/// Summary of a redaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedactionSummary {
    /// Size of the text in bytes.
    pub bytes: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of requested spans by kind.
    pub spans: BTreeMap<String, u64>,
    /// Peak number of buffered bytes: text, hidden states and labels.
    pub most_held: usize,
}

/// Text from which spans are removed.
pub struct Redactor {
    scheme: Arc<Scheme>,
    wanted: Vec<bool>,
    blocks: Blocks,
    windows: Windows,
    viterbi: Viterbi,
    /// Special tokens after a text.
    after: Vec<u32>,
    /// Number of special tokens before the text whose logits haven't come yet.
    skipped: usize,
    /// Tokens whose labels are undecided.
    tokens: VecDeque<TokenEntry>,
    /// Text from `done` on.
    text: VecDeque<u8>,
    /// Number of bytes already passed to the sink.
    done: u64,
    span: Option<OpenSpan>,
    summary: RedactionSummary,
}

/// Span that hasn't ended.
struct OpenSpan {
    kind: usize,
    /// Range of its text without white space at the ends; `None` if it is all white space so far.
    solid: Option<Range<u64>>,
}

impl Redactor {
    /// Begins a text. `kinds` are the requested spans; all if empty.
    ///
    /// # Errors
    /// If the model doesn't label spans, has no tokenizer, or has no such kind.
    pub fn new(model: &Arc<LoadedModel>, kinds: &[String], biases: Biases, window: Option<u64>) -> Result<Self> {
        let mut windows = Windows::new(model, window, Hidden::No)?;
        let scheme = Arc::new(Scheme::of(model)?);
        scheme.check(&biases)?;
        if let Some(unknown) = kinds.iter().find(|kind| !scheme.kinds().contains(kind)) {
            let problem = format!("the model has no spans `{unknown}`; it has {}", list(scheme.kinds()));
            return Err(RuntimeError::Labels { problem }.into());
        }
        let tokenizer = Arc::new(Tokenizer::of(model.bundle(), model.folder())?);
        let [before, after] = tokenizer.special_ends()?;
        windows.push(&before, &mut Vec::new())?;
        Ok(Redactor {
            after,
            skipped: before.len(),
            wanted: scheme.kinds().iter().map(|kind| kinds.is_empty() || kinds.contains(kind)).collect(),
            blocks: Blocks::new(tokenizer),
            windows,
            viterbi: Viterbi::new(scheme.clone(), biases),
            scheme,
            tokens: VecDeque::new(),
            text: VecDeque::new(),
            done: 0,
            span: None,
            summary: RedactionSummary::default(),
        })
    }

    /// Returns the labels and kinds.
    pub fn scheme(&self) -> &Arc<Scheme> {
        &self.scheme
    }

    /// Adds text and passes what is decided to the sink.
    ///
    /// # Errors
    /// If the model or the sink fails.
    pub fn push(&mut self, bytes: &[u8], sink: Sink<'_>) -> Result<()> {
        for bytes in bytes.chunks(BLOCK) {
            self.summary.bytes += bytes.len() as u64;
            self.text.extend(bytes);
            let tokens = self.blocks.push(bytes)?;
            self.label(tokens, false, sink)?;
        }
        Ok(())
    }

    /// Ends the text and passes the rest to the sink.
    ///
    /// # Errors
    /// Returns any error of [`Redactor::push`].
    pub fn finish(mut self, sink: Sink<'_>) -> Result<RedactionSummary> {
        let tokens = self.blocks.finish()?;
        self.label(tokens, true, sink)?;
        self.close(sink)?;
        self.keep(self.summary.bytes, sink)?;
        Ok(self.summary)
    }

    /// Redacts a whole text and returns it with its spans, each of which is replaced by its kind. A span that begins or
    /// ends within a character leaves U+FFFD, because tokens are bytes.
    ///
    /// # Errors
    /// If the model fails.
    pub fn redact(mut self, text: &str) -> Result<(String, Vec<Span>)> {
        let scheme = self.scheme.clone();
        let (mut kept, mut spans) = (Vec::with_capacity(text.len()), Vec::new());
        let mut sink = |piece: Piece<'_>| {
            match piece {
                Piece::Kept(bytes) => kept.extend_from_slice(bytes),
                Piece::Span(span) => {
                    kept.extend(span.placeholder(&scheme).bytes());
                    spans.push(span.clone());
                }
            }
            Ok(())
        };
        self.push(text.as_bytes(), &mut sink)?;
        self.finish(&mut sink)?;
        Ok((String::from_utf8_lossy(&kept).into_owned(), spans))
    }

    fn label(&mut self, tokens: Vec<TokenEntry>, ended: bool, sink: Sink<'_>) -> Result<()> {
        let width = self.scheme.labels().len();
        self.summary.tokens += tokens.len() as u64;
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        self.tokens.extend(tokens);
        let (mut logits, mut labels) = (Vec::new(), Vec::new());
        self.windows.push(&ids, &mut logits)?;
        if ended {
            self.windows.push(&self.after, &mut logits)?;
            self.windows.finish(&mut logits)?;
        }
        let rows = logits.chunks_exact(width);
        let skipped = self.skipped.min(rows.len());
        self.skipped -= skipped;
        rows.skip(skipped).for_each(|row| self.viterbi.push(row, &mut labels));
        if ended {
            self.viterbi.finish(&mut labels);
        }
        let held = self.text.len()
            + self.blocks.text.len()
            + 4 * (self.windows.waiting() + logits.len())
            + 2 * width * self.viterbi.open()
            + self.tokens.len() * size_of::<TokenEntry>();
        self.summary.most_held = self.summary.most_held.max(held);
        for label in labels {
            if let Some(token) = self.tokens.pop_front() {
                self.take(&token, label, sink)?;
            }
        }
        Ok(())
    }

    /// Processes a token whose label is decided.
    fn take(&mut self, token: &TokenEntry, label: u16, sink: Sink<'_>) -> Result<()> {
        let (place, kind) = self.scheme.place(label);
        if self.span.as_ref().is_some_and(|span| !self.scheme.continues(span.kind, label)) {
            self.close(sink)?;
        }
        if place == BioesTag::Outside || !self.wanted[kind] {
            // a character shared with the next token may still be part of a span
            return self.keep(token.range.start, sink);
        }
        let span = self.span.get_or_insert(OpenSpan { kind, solid: None });
        let range = token.range.start.max(self.done)..token.range.end.max(self.done);
        let text = (range.start - self.done) as usize..(range.end - self.done) as usize;
        let bytes: Vec<u8> = self.text.range(text).copied().collect();
        if let Some(found) = solid(&bytes) {
            let end = range.start + found.end as u64;
            match &mut span.solid {
                Some(solid) => solid.end = end,
                None => span.solid = Some(range.start + found.start as u64..end),
            }
        }
        match span.solid.clone() {
            // only white space so far
            None => self.keep(range.start, sink)?,
            Some(solid) => {
                self.keep(solid.start, sink)?;
                // the text of a span isn't needed any more; white space at its end may be kept
                self.forget(solid.end);
            }
        }
        if matches!(place, BioesTag::End | BioesTag::Single) {
            self.close(sink)?;
        }
        Ok(())
    }

    /// Closes the open span, if any.
    fn close(&mut self, sink: Sink<'_>) -> Result<()> {
        let Some(OpenSpan { kind, solid: Some(range) }) = self.span.take() else { return Ok(()) };
        *self.summary.spans.entry(self.scheme.kinds()[kind].clone()).or_default() += 1;
        sink(Piece::Span(&Span { kind, range }))
    }

    /// Passes the text up to `end` on unchanged.
    fn keep(&mut self, end: u64, sink: Sink<'_>) -> Result<()> {
        let count = end.saturating_sub(self.done) as usize;
        if count > 0 {
            let kept: Vec<u8> = self.text.drain(..count).collect();
            self.done = end;
            sink(Piece::Kept(&kept))?;
        }
        Ok(())
    }

    /// Drops the text up to `end`.
    fn forget(&mut self, end: u64) {
        let count = end.saturating_sub(self.done) as usize;
        self.text.drain(..count);
        self.done = self.done.max(end);
    }
}

/// Returns the range without white space at the ends, if anything is left.
fn solid(bytes: &[u8]) -> Option<Range<usize>> {
    let mut found: Option<Range<usize>> = None;
    let mut at = 0;
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            let end = at + character.len_utf8();
            if !character.is_whitespace() {
                found = Some(found.map_or(at, |found| found.start)..end);
            }
            at = end;
        }
        if !chunk.invalid().is_empty() {
            let end = at + chunk.invalid().len();
            found = Some(found.map_or(at, |found| found.start)..end);
            at = end;
        }
    }
    found
}

/// Tokenizes a text block by block.
struct Blocks {
    tokenizer: Arc<Tokenizer>,
    /// Text that isn't tokenized yet.
    text: Vec<u8>,
    /// Offset of `text` in the whole text.
    start: u64,
}

impl Blocks {
    fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Blocks { tokenizer, text: Vec::new(), start: 0 }
    }

    /// Adds text and returns the tokens that are certain.
    fn push(&mut self, bytes: &[u8]) -> Result<Vec<TokenEntry>, RuntimeError> {
        self.text.extend(bytes);
        let mut tokens = Vec::new();
        while self.text.len() >= BLOCK {
            tokens.extend(self.cut(false)?);
        }
        Ok(tokens)
    }

    /// Returns the remaining tokens.
    fn finish(&mut self) -> Result<Vec<TokenEntry>, RuntimeError> {
        self.cut(true)
    }

    /// Returns the tokens of the buffered text up to the last word that can't depend on what follows. Byte-level
    /// tokenizers start afresh at every word, so the blocks yield the tokens of the whole text.
    fn cut(&mut self, last: bool) -> Result<Vec<TokenEntry>, RuntimeError> {
        let text = readable(&self.text);
        let (mut tokens, words) = self.tokenizer.tokens(&text)?;
        let mut end = text.len();
        if !last {
            let limit = (end - MARGIN) as u64;
            let begins = |index: &usize| tokens[*index].range.start <= limit;
            let mut starts = (1..tokens.len()).rev().filter(begins);
            let word = starts.clone().find(|index| words[*index] != words[*index - 1]);
            // a word longer than a block is cut between two of its characters
            let apart = |index: &usize| tokens[*index - 1].range.end <= tokens[*index].range.start;
            let index = word.or_else(|| starts.find(apart)).unwrap_or(tokens.len());
            end = tokens.get(index).map_or(end, |token| token.range.start as usize);
            tokens.truncate(index);
        }
        self.text.drain(..end);
        for token in &mut tokens {
            token.range = token.range.start + self.start..token.range.end + self.start;
        }
        self.start += end as u64;
        Ok(tokens)
    }
}

/// Returns text of the same length, with `?` for each byte that is not UTF-8.
fn readable(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| '?'));
    }
    text
}
