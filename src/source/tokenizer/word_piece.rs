//! WordPiece (BERT), which takes the longest piece first within each word.
//!
//! GGUF spells pieces differently from `tokenizer.json`: with U+2581 before pieces that begin a word, and no mark on
//! continuations. It doesn't say whether letters are lowercased.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::{CONTROL, Ends, GgufTokenizer, TokenizerFile, TokenizerModel, Vocab};
use crate::error::Result;
use crate::gguf::Strings;

/// Maximum length of a word in characters; longer words are unknown, as in transformers.
const LONGEST_WORD: u64 = 100;

/// Model of `tokenizer.json` for WordPiece.
#[derive(Serialize)]
pub(super) struct WordPiece<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    unk_token: &'a str,
    continuing_subword_prefix: &'static str,
    max_input_chars_per_word: u64,
    pub(super) vocab: Vocab<'a>,
}

/// Returns the pieces in the spelling of `tokenizer.json`.
pub(super) fn respelt(tokens: &Strings, types: &[i64]) -> Strings {
    tokens
        .iter()
        .enumerate()
        .map(|(id, token)| match token.strip_prefix('\u{2581}') {
            _ if types.get(id) == Some(&CONTROL) => Cow::Borrowed(token),
            Some(begins) => Cow::Borrowed(begins),
            None => Cow::Owned(format!("##{token}")),
        })
        .collect()
}

impl GgufTokenizer<'_> {
    /// Returns the tokenizer of BERT.
    pub(super) fn word_piece(&self) -> Result<TokenizerFile<'_>> {
        let unknown = self.token(&["tokenizer.ggml.unknown_token_id"], &["[UNK]"])?;
        // a vocabulary without capitals belongs to a tokenizer that lowercases
        let plain = |(id, token): &(usize, &str)| self.types.get(*id) != Some(&CONTROL) && !token.starts_with('[');
        let mut words = self.tokens.iter().enumerate().filter(plain);
        let lowercase = !words.any(|(_, token)| token.contains(|letter: char| letter.is_ascii_uppercase()));
        let ends = Ends {
            begin: self.token(&["tokenizer.ggml.cls_token_id", "tokenizer.ggml.bos_token_id"], &["[CLS]"])?,
            end: self.token(&["tokenizer.ggml.seperator_token_id", "tokenizer.ggml.eos_token_id"], &["[SEP]"])?,
            between: 1,
            second_type: 1,
        };
        Ok(TokenizerFile {
            version: "1.0",
            truncation: (),
            padding: (),
            added_tokens: self.added_tokens(),
            normalizer: json!({
                "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": Json::Null,
                "lowercase": lowercase,
            }),
            pre_tokenizer: json!({"type": "BertPreTokenizer"}),
            post_processor: ends.template(),
            decoder: json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            model: TokenizerModel::WordPiece(WordPiece {
                kind: "WordPiece",
                unk_token: unknown.map_or("[UNK]", |(token, _)| token),
                continuing_subword_prefix: "##",
                max_input_chars_per_word: LONGEST_WORD,
                vocab: Vocab::new(&self.tokens),
            }),
        })
    }
}
