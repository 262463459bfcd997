//! Generated text: deltas that never split a character, up to a stop string.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::detokenizer::Detokenizer;
use super::error::RuntimeError;
use super::generation::{Finish, GeneratedToken, Generation};
use super::tokenizer::Tokenizer;
use anec_base::Result;

/// Piece of text with the tokens that begin in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextDelta {
    /// Text of the piece.
    pub text: String,
    /// Tokens of the piece. A token whose text is incomplete comes with the piece in which its text begins.
    pub tokens: Vec<GeneratedToken>,
}

/// Converts tokens to pieces of text. Text that may become a stop string is held back; returned text never changes.
pub struct TextStream {
    detokenizer: Detokenizer,
    stops: Vec<String>,
    /// Text held back.
    held: String,
    /// Number of returned bytes.
    given: usize,
    /// Tokens not returned yet, with the byte offset of each.
    waiting: VecDeque<(usize, GeneratedToken)>,
}

impl TextStream {
    /// Creates a stream for the tokens after `before`. It ends before the first of `stops`. Special tokens give no
    /// text, except those `shown`.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn after(
        tokenizer: &Arc<Tokenizer>,
        before: &[u32],
        stops: &[String],
        shown: &[u32],
    ) -> Result<Self, RuntimeError> {
        let detokenizer = Detokenizer::after(tokenizer, before, shown)?;
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Ok(TextStream { detokenizer, stops, held: String::new(), given: 0, waiting: VecDeque::new() })
    }

    /// Returns the text that a token completes; breaks at a stop string.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn push(&mut self, token: GeneratedToken) -> Result<ControlFlow<TextDelta, TextDelta>, RuntimeError> {
        let start = self.given + self.held.len();
        let id = token.id;
        self.waiting.push_back((start, token));
        let new = self.detokenizer.push(id)?;
        self.held.push_str(&new);
        if let Some(end) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(end);
            let end = self.given + end;
            self.waiting.retain(|(start, _)| *start < end);
            return Ok(ControlFlow::Break(self.give(self.held.len())));
        }
        let waits = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        Ok(ControlFlow::Continue(self.give(self.held.len() - waits)))
    }

    /// Returns the remaining text after the last token: the beginning of a stop string that never came, and U+FFFD for
    /// incomplete characters.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn finish(&mut self) -> Result<TextDelta, RuntimeError> {
        let rest = self.detokenizer.finish()?;
        self.held.push_str(&rest);
        let text = std::mem::take(&mut self.held);
        self.given += text.len();
        Ok(TextDelta { text, tokens: self.waiting.drain(..).map(|(_, token)| token).collect() })
    }

    fn give(&mut self, length: usize) -> TextDelta {
        let text: String = self.held.drain(..length).collect();
        self.given += text.len();
        let begun = self.waiting.iter().take_while(|(start, _)| *start < self.given).count();
        TextDelta { text, tokens: self.waiting.drain(..begun).map(|(_, token)| token).collect() }
    }
}

/// Returns the length of the longest end of `text` that begins `stop`.
pub(super) fn overlap(text: &str, stop: &str) -> usize {
    let most = text.len().min(stop.len() - 1);
    (1..=most).rev().find(|n| stop.is_char_boundary(*n) && text.ends_with(&stop[..*n])).unwrap_or(0)
}

/// Generation as text: an iterator over deltas, one per token, up to a stop string. Like [`Generation`], it can be
/// advanced one model call at a time.
pub struct TextGeneration {
    generation: Generation,
    stream: TextStream,
    ready: VecDeque<TextDelta>,
    /// Whether the last delta was returned or is ready.
    over: bool,
    detokenizing: Duration,
}

impl TextGeneration {
    /// Creates the text of a generation, up to the first of `stops`. Special tokens give no text, except those `shown`.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn new(
        generation: Generation,
        tokenizer: &Arc<Tokenizer>,
        stops: &[String],
        shown: &[u32],
    ) -> Result<Self, RuntimeError> {
        let stream = TextStream::after(tokenizer, &generation.request().prompt, stops, shown)?;
        Ok(TextGeneration { generation, stream, ready: VecDeque::new(), over: false, detokenizing: Duration::ZERO })
    }

    /// Returns the generation.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// Returns the generation, to be computed together with others.
    pub fn generation_mut(&mut self) -> &mut Generation {
        &mut self.generation
    }

    /// Returns the generation and drops the remaining deltas.
    pub fn into_generation(self) -> Generation {
        self.generation
    }

    /// Returns the time spent on detokenizing.
    pub fn detokenizing(&self) -> Duration {
        self.detokenizing
    }

    /// Makes one model call, as [`Generation::step`] does; its text is ready for the iterator afterwards.
    ///
    /// # Errors
    /// If a function or the tokenizer fails; the generation ends then.
    pub fn step(&mut self) -> Result<Option<Finish>> {
        let stepped = self.advance();
        self.over |= stepped.is_err();
        stepped
    }

    fn advance(&mut self) -> Result<Option<Finish>> {
        let mut finish = self.generation.step()?;
        let start = Instant::now();
        while let (false, Some(token)) = (self.over, self.generation.ready()) {
            match self.stream.push(token)? {
                ControlFlow::Continue(delta) => self.ready.push_back(delta),
                ControlFlow::Break(delta) => {
                    self.ready.push_back(delta);
                    self.over = true;
                    self.generation.end_at_stop_string();
                    finish = Some(Finish::Stop);
                }
            }
        }
        if finish.is_some() && !self.over {
            self.over = true;
            self.ready.push_back(self.stream.finish()?);
        }
        self.detokenizing += start.elapsed();
        Ok(finish)
    }

    /// Returns whether no step follows; ready deltas may remain.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Returns the next ready delta.
    pub fn ready(&mut self) -> Option<TextDelta> {
        self.ready.pop_front()
    }
}

impl Iterator for TextGeneration {
    type Item = Result<TextDelta>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(delta) = self.ready() {
                return Some(Ok(delta));
            }
            if self.over {
                return None;
            }
            if let Err(error) = self.step() {
                return Some(Err(error));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn tokenizer() -> Arc<Tokenizer> {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/families/qwen2-tokenizer/tokenizer.json");
        Arc::new(Tokenizer::open(&path).unwrap())
    }

    /// Streams a text; returns the pieces, the tokens and whether a stop string ended it.
    fn stream(text: &str, stops: &[&str]) -> (Vec<String>, Vec<u32>, bool) {
        let tokenizer = tokenizer();
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stream = TextStream::after(&tokenizer, &[], &stops, &[]).unwrap();
        let (mut pieces, mut ids) = (Vec::new(), Vec::new());
        let mut take = |delta: TextDelta| {
            pieces.push(delta.text);
            ids.extend(delta.tokens.iter().map(|token| token.id));
        };
        for id in tokenizer.encode_rest(text).unwrap() {
            match stream.push(GeneratedToken { id, logprobs: None }).unwrap() {
                ControlFlow::Continue(delta) => take(delta),
                ControlFlow::Break(delta) => {
                    take(delta);
                    return (pieces, ids, true);
                }
            }
        }
        take(stream.finish().unwrap());
        (pieces, ids, false)
    }

    #[test]
    fn without_stops_every_text_and_token_arrives() {
        for text in ["The sea was calm.", "海は静か 🙂🚀 größte", "", "aaa"] {
            let (pieces, ids, stopped) = stream(text, &[]);
            assert_eq!((pieces.concat().as_str(), stopped), (text, false));
            assert_eq!(ids, tokenizer().encode_rest(text).unwrap());
            assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')));
        }
    }

    #[test]
    fn a_text_ends_before_the_first_stop_string_wherever_tokens_divide_it() {
        for (text, stops, expected) in [
            ("one two three", &["two"][..], "one "),
            ("one two three", &["three", "two"], "one "),
            ("one two three", &["o t"], "one tw"),
            ("aaaab", &["aab"], "aa"),
            ("STOP at once", &["STOP"], ""),
            ("ein 🙂 und", &["🙂"], "ein "),
        ] {
            let (pieces, ids, stopped) = stream(text, stops);
            assert!(stopped, "{text:?} {stops:?}");
            assert_eq!(pieces.concat(), expected);
            let whole = tokenizer().encode_rest(text).unwrap();
            assert!(whole.starts_with(&ids) && ids.len() < whole.len(), "tokens of the stop string aren't shown");
        }
    }

    #[test]
    fn text_that_may_become_a_stop_string_is_held_back() {
        let (pieces, _, stopped) = stream("a lighthouse", &["lights", "housemaid"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("a lighthouse", false));
        assert_eq!(overlap("xaab", "aabc"), 3);
        assert_eq!(overlap("ab", "ab"), 0, "a whole stop string is no beginning of one");
    }
}
