//! WordPiece (BERT), which takes the longest piece first within each word.
//!
//! GGUF spells pieces differently from `tokenizer.json`: with U+2581 before pieces that begin a word, and no mark on
//! continuations. It doesn't say whether letters are lowercased.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::{CONTROL, Ends, GgufTokenizer, TokenizerFile, TokenizerModel, Vocab, added_token};
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

/// Settings of a tokenizer over `vocab.txt`.
pub(super) struct VocabOptions {
    pub(super) lowercase: bool,
    /// `None` removes accents where letters are lowercased.
    pub(super) strip_accents: Option<bool>,
    /// Whether every Chinese character is a word.
    pub(super) chinese: bool,
    pub(super) unknown: String,
    pub(super) begin: String,
    pub(super) end: String,
    /// Other special tokens.
    pub(super) others: Vec<String>,
    /// Number of end tokens between two texts, and type of the second.
    pub(super) pair: (usize, u64),
}

/// Returns the `tokenizer.json` of a `vocab.txt`, or the problem of the vocabulary.
pub(super) fn of_vocab(tokens: &Strings, options: &VocabOptions) -> Result<Vec<u8>, String> {
    let vocab = Vocab::new(tokens);
    let id = |token: &str| vocab.id(token).map(|id| id as u64);
    let needed = |token: &str| id(token).ok_or_else(|| format!("it has no token {token:?}"));
    let (begin, end) = (needed(&options.begin)?, needed(&options.end)?);
    needed(&options.unknown)?;
    let (between, second_type) = options.pair;
    let ends = Ends { begin: Some((&options.begin, begin)), end: Some((&options.end, end)), between, second_type };
    let mut special: Vec<(u64, &String)> = [&options.unknown, &options.begin, &options.end]
        .into_iter()
        .chain(&options.others)
        .filter_map(|token| Some((id(token)?, token)))
        .collect();
    special.sort_unstable();
    special.dedup();
    let file = TokenizerFile {
        version: "1.0",
        truncation: (),
        padding: (),
        added_tokens: special.into_iter().map(|(id, token)| added_token(id as usize, token, true)).collect(),
        normalizer: json!({
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": options.chinese,
            "strip_accents": options.strip_accents, "lowercase": options.lowercase,
        }),
        pre_tokenizer: json!({"type": "BertPreTokenizer"}),
        post_processor: ends.template(),
        decoder: json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        model: TokenizerModel::WordPiece(WordPiece {
            kind: "WordPiece",
            unk_token: &options.unknown,
            continuing_subword_prefix: "##",
            max_input_chars_per_word: LONGEST_WORD,
            vocab,
        }),
    };
    Ok(file.to_json())
}

impl GgufTokenizer<'_> {
    /// Returns the tokenizer of BERT.
    pub(super) fn word_piece(&self) -> crate::error::Result<TokenizerFile<'_>> {
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
