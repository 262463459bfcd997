//! Text of tokens, piece by piece.

use std::sync::Arc;

use super::error::RuntimeError;
use super::tokenizer::Tokenizer;

/// Incremental detokenizer. Returned text never changes, and no character is split: incomplete bytes wait for the next
/// token.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// Special tokens that give text.
    shown: Vec<u32>,
    /// Tokens whose text may still change, preceded by some context tokens.
    window: Vec<u32>,
    /// Number of returned bytes of the window's text.
    given: usize,
}

/// Number of context tokens that a decoder may need, such as those that strip the space of a text's first token.
const CONTEXT_TOKENS: usize = 4;

impl Detokenizer {
    /// Creates a detokenizer for the tokens after `before`. Special tokens give no text, except those `shown`.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn after(tokenizer: &Arc<Tokenizer>, before: &[u32], shown: &[u32]) -> Result<Self, RuntimeError> {
        let mut start = before.len().saturating_sub(CONTEXT_TOKENS);
        let mut text = tokenizer.decode_showing(&before[start..], shown)?;
        // start at a character boundary: trailing bytes alone would look like the beginning of another character
        while start > 0 && text.starts_with('\u{FFFD}') && before.len() - start < 2 * CONTEXT_TOKENS {
            start -= 1;
            text = tokenizer.decode_showing(&before[start..], shown)?;
        }
        Ok(Detokenizer {
            tokenizer: tokenizer.clone(),
            shown: shown.to_vec(),
            window: before[start..].to_vec(),
            given: whole(&text).len(),
        })
    }

    /// Returns the text that a token completes.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn push(&mut self, id: u32) -> Result<String, RuntimeError> {
        self.window.push(id);
        let text = self.tokenizer.decode_showing(&self.window, &self.shown)?;
        let certain = whole(&text);
        let new = certain.get(self.given..).unwrap_or_default().to_owned();
        self.given = self.given.max(certain.len());
        if certain.len() == text.len() && self.window.len() > 2 * CONTEXT_TOKENS {
            self.window.drain(..self.window.len() - CONTEXT_TOKENS);
            self.given = self.tokenizer.decode_showing(&self.window, &self.shown)?.len();
        }
        Ok(new)
    }

    /// Returns the remaining text, with U+FFFD for incomplete characters.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn finish(&mut self) -> Result<String, RuntimeError> {
        let text = self.tokenizer.decode_showing(&self.window, &self.shown)?;
        let rest = text.get(self.given..).unwrap_or_default().to_owned();
        self.given = self.given.max(text.len());
        Ok(rest)
    }
}

/// Returns `text` without trailing U+FFFD, which decoders emit for incomplete characters of up to three bytes.
fn whole(text: &str) -> &str {
    let mut end = text;
    for _ in 0..3 {
        end = end.strip_suffix('\u{FFFD}').unwrap_or(end);
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::small;

    #[test]
    fn streamed_text_is_whole_text_and_never_cuts_a_character() {
        for (name, tokenizer) in small() {
            let tokenizer = Arc::new(tokenizer);
            for text in ["海は静か 🙂🚀 größte", "The sea was calm.", " \n\n  x", "👩‍👩‍👧‍👦"]
            {
                let all = tokenizer.encode_rest(text).unwrap();
                for before in 0..all.len() {
                    // a prompt may end within a character
                    let mut stream = Detokenizer::after(&tokenizer, &all[..before], &[]).unwrap();
                    let mut out = String::new();
                    for id in &all[before..] {
                        let piece = stream.push(*id).unwrap();
                        assert!(!piece.contains('\u{FFFD}'), "{name}: {piece:?}");
                        out += &piece;
                    }
                    out += &stream.finish().unwrap();
                    assert!(text.ends_with(&out) && !out.is_empty(), "{name}: {out:?} of {text:?} from {before}");
                    assert!(before > 0 || out == text);
                }
            }
        }
    }

    #[test]
    fn bytes_that_never_become_a_character_come_at_the_end() {
        let (_, tokenizer) = small().remove(0);
        let tokenizer = Arc::new(tokenizer);
        let smile = tokenizer.encode_rest("🙂").unwrap();
        assert!(smile.len() > 1, "the fixture's vocabulary has no token for it");
        let mut stream = Detokenizer::after(&tokenizer, &[], &[]).unwrap();
        assert_eq!(stream.push(smile[0]).unwrap(), "");
        assert!(stream.finish().unwrap().contains('\u{FFFD}'));
    }
}
