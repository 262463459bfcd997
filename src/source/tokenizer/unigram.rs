//! SentencePiece's unigram model (XLM-RoBERTa), which picks the segmentation with the best sum of scores.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::{Value as Json, json};

use super::{Ends, GgufTokenizer, TokenizerFile, TokenizerModel, strip_whitespace};
use crate::error::{Result, SourceError};
use crate::gguf::{GgufArray, GgufValue};

/// `token_type` of unused ids.
const UNUSED: i64 = 5;

/// Pieces and their scores.
#[derive(Serialize)]
pub(super) struct Unigram<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    unk_id: u64,
    byte_fallback: bool,
    pub(super) vocab: Vec<(&'a str, f64)>,
}

impl GgufTokenizer<'_> {
    /// Returns the tokenizer of XLM-RoBERTa or DeBERTa.
    pub(super) fn unigram(&self) -> Result<TokenizerFile<'_>> {
        let scores = self.scores()?;
        let unused = |id: usize| self.types.get(id) == Some(&UNUSED);
        let of_used = scores.iter().enumerate().filter(|(id, _)| !unused(*id)).map(|(_, score)| *score);
        // the unknown token scores below the worst piece; unused ids don't count
        let worst = of_used.fold(0.0, f32::min);
        let score = |id: usize| f64::from(if unused(id) { worst } else { scores[id] });
        let vocab = self.tokens.iter().enumerate().map(|(id, token)| (token, score(id))).collect();
        let unknown = self.token(&["tokenizer.ggml.unknown_token_id"], &["<unk>"])?;
        let begin = self.token(&["tokenizer.ggml.bos_token_id", "tokenizer.ggml.cls_token_id"], &["<s>"])?;
        // DeBERTa joins pairs as BERT does
        let (between, second_type) = if begin.is_some_and(|(token, _)| token == "[CLS]") { (1, 1) } else { (2, 0) };
        let ends = Ends {
            begin,
            end: self.token(&["tokenizer.ggml.eos_token_id", "tokenizer.ggml.seperator_token_id"], &["</s>"])?,
            between,
            second_type,
        };
        let mut normalizers = Vec::new();
        if let Some(map) = self.precompiled_charsmap()? {
            normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": map}));
        }
        if self.metadata.bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(true) {
            normalizers.extend(strip_whitespace());
        }
        let prefix = self.metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let prepend = if prefix { "always" } else { "never" };
        let spaces = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": prepend, "split": true});
        Ok(TokenizerFile {
            version: "1.0",
            truncation: (),
            padding: (),
            added_tokens: self.added_tokens(),
            normalizer: match normalizers.is_empty() {
                true => Json::Null,
                false => json!({"type": "Sequence", "normalizers": normalizers}),
            },
            pre_tokenizer: spaces.clone(),
            post_processor: ends.template(),
            decoder: spaces,
            model: TokenizerModel::Unigram(Unigram {
                kind: "Unigram",
                unk_id: unknown.map_or(0, |(_, id)| id),
                byte_fallback: false,
                vocab,
            }),
        })
    }

    /// Returns SentencePiece's character map as `tokenizer.json` encodes it.
    pub(super) fn precompiled_charsmap(&self) -> Result<Option<String>> {
        const KEY: &str = "tokenizer.ggml.precompiled_charsmap";
        match self.metadata.get(KEY) {
            None => Ok(None),
            Some(GgufValue::Array(GgufArray::U8(bytes))) => Ok(Some(STANDARD.encode(bytes))),
            // signed and unsigned bytes are the same
            Some(GgufValue::Array(GgufArray::I8(bytes))) => {
                Ok(Some(STANDARD.encode(bytes.iter().map(|byte| byte.cast_unsigned()).collect::<Vec<u8>>())))
            }
            Some(other) => {
                let problem = format!("the value is {other}, expected an array of bytes");
                Err(SourceError::key(self.metadata.path(), KEY, problem))
            }
        }
    }
}
