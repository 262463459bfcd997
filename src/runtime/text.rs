//! A continuation as text: pieces that never cut a character, and that end before a stop string.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::error::RuntimeError;
use super::generate::{Choice, Finish, Generation, Generator};
use super::session::Session;
use super::tokenizer::{Detokenizer, Tokenizer};
use anec_base::Result;

/// A part of a text, with the tokens that begin in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// The tokens. One whose text isn't finished yet comes with the piece that its text begins in.
    pub tokens: Vec<Choice>,
}

/// Turns tokens into pieces of text. Text that may become a stop string waits; what was given never changes.
pub struct TextStream {
    detokenizer: Detokenizer,
    stops: Vec<String>,
    /// Text that wasn't given yet.
    held: String,
    /// Bytes that were.
    given: usize,
    /// Tokens that weren't given yet, with the byte of the text at which each begins.
    waiting: VecDeque<(usize, Choice)>,
}

impl TextStream {
    /// A stream for what follows the tokens `before`. It ends before the first of `stops`. Special tokens give no text,
    /// but for those `shown`.
    ///
    /// # Errors
    /// When the tokenizer fails.
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

    /// The text that a token makes certain; it breaks at a stop string.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn push(&mut self, choice: Choice) -> Result<ControlFlow<Piece, Piece>, RuntimeError> {
        let start = self.given + self.held.len();
        let id = choice.id;
        self.waiting.push_back((start, choice));
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

    /// The rest, when no more tokens come: what might have become a stop string, and bytes that never became a character,
    /// as U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn finish(&mut self) -> Result<Piece, RuntimeError> {
        let rest = self.detokenizer.finish()?;
        self.held.push_str(&rest);
        let text = std::mem::take(&mut self.held);
        self.given += text.len();
        Ok(Piece { text, tokens: self.waiting.drain(..).map(|(_, choice)| choice).collect() })
    }

    fn give(&mut self, length: usize) -> Piece {
        let text: String = self.held.drain(..length).collect();
        self.given += text.len();
        let begun = self.waiting.iter().take_while(|(start, _)| *start < self.given).count();
        Piece { text, tokens: self.waiting.drain(..begun).map(|(_, choice)| choice).collect() }
    }
}

/// Bytes at the end of `text` that `stop` begins with.
pub(super) fn overlap(text: &str, stop: &str) -> usize {
    let most = text.len().min(stop.len() - 1);
    (1..=most).rev().find(|n| stop.is_char_boundary(*n) && text.ends_with(&stop[..*n])).unwrap_or(0)
}

/// Lets a generator continue its prompt, as text up to a stop string. `each` gets the pieces as they come.
///
/// # Errors
/// When a function or the tokenizer fails.
pub fn generate_text(
    mut generator: Generator,
    session: &mut Session,
    tokenizer: &Arc<Tokenizer>,
    stops: &[String],
    mut each: impl FnMut(&Piece) -> ControlFlow<()>,
) -> Result<(Generation, String)> {
    let mut stream = TextStream::after(tokenizer, generator.prompt(), stops, &[])?;
    let mut text = String::new();
    let mut choices = Vec::new();
    let mut end = None;
    while end.is_none() {
        end = generator.step(session, &mut choices)?;
        for choice in choices.drain(..) {
            let piece = stream.push(choice)?;
            let stopped = piece.is_break();
            let (ControlFlow::Break(piece) | ControlFlow::Continue(piece)) = piece;
            text.push_str(&piece.text);
            if each(&piece).is_break() {
                end = Some(Finish::Interrupted);
                break;
            }
            if stopped {
                return Ok((generator.finish(Finish::Stop), text));
            }
        }
    }
    let rest = stream.finish()?;
    text.push_str(&rest.text);
    let _ = each(&rest);
    Ok((generator.finish(end.unwrap_or(Finish::Length)), text))
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

    /// Streams a text; gives the pieces, the tokens and whether it was stopped.
    fn stream(text: &str, stops: &[&str]) -> (Vec<String>, Vec<u32>, bool) {
        let tokenizer = tokenizer();
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stream = TextStream::after(&tokenizer, &[], &stops, &[]).unwrap();
        let (mut pieces, mut ids) = (Vec::new(), Vec::new());
        let mut take = |piece: Piece| {
            pieces.push(piece.text);
            ids.extend(piece.tokens.iter().map(|choice| choice.id));
        };
        for id in tokenizer.encode_rest(text).unwrap() {
            match stream.push(Choice { id, logprobs: None }).unwrap() {
                ControlFlow::Continue(piece) => take(piece),
                ControlFlow::Break(piece) => {
                    take(piece);
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
    fn what_may_become_a_stop_string_waits_and_comes_if_it_doesnt() {
        let (pieces, _, stopped) = stream("a lighthouse", &["lights", "housemaid"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("a lighthouse", false));
        assert_eq!(overlap("xaab", "aabc"), 3);
        assert_eq!(overlap("ab", "ab"), 0, "a whole stop string is no beginning of one");
    }
}
