//! Conversion of a GGUF file's tokenizer to a `tokenizer.json`.
//!
//! GGUF holds the vocabulary, its merges or scores and the *name* of the pre-tokenizer; the rules behind the names are
//! those of the models' own `tokenizer.json`. Unknown names are errors, because a wrong pre-tokenizer gives wrong ids
//! without any other sign.
//!
//! | `tokenizer.ggml.model` | |
//! |---|---|
//! | `gpt2` | byte-level BPE: merges are given, the pre-tokenizer goes by name |
//! | `gemma4` | BPE over UTF-8: merges are given |
//! | `llama` | SentencePiece's BPE: merges follow from scores |
//! | `bert` | WordPiece (`word_piece`) |
//! | `t5` | SentencePiece's unigram model (`unigram`) |

mod ends;
pub mod folder;
mod merges;
mod pre_tokenizer;
mod unigram;
mod vocab;
mod word_piece;

use std::borrow::Cow;
use std::cmp::Reverse;

use serde::Serialize;
use serde_json::{Map, Value as Json, json};

use super::error::{Result, SourceError};
use super::gguf::{GgufMetadata, Strings};
use super::ledger::nearest;
use ends::Ends;
use merges::{Merges, pair_of};
use pre_tokenizer::{Bos, PreTokenizer};
use unigram::Unigram;
use vocab::Vocab;
use word_piece::WordPiece;

/// Advice for a tokenizer that can't be rebuilt.
const FROM_HUGGING_FACE: &str = "convert the model's Hugging Face folder instead, which has its tokenizer.json";

/// `token_type` values of GGUF.
const NORMAL: i64 = 1;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// `tokenizer.ggml.model` of a BPE over UTF-8 with given merges.
const GEMMA4: &str = "gemma4";

/// Steps of a tokenizer around its model.
struct Steps {
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
}

impl Steps {
    /// Returns the steps of a BPE over GPT-2's letters for bytes.
    fn byte_level(rules: &PreTokenizer, template: Option<Json>) -> Self {
        let byte_level = |prefix: bool, trim: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": regex});
        let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let mut pre_tokenizers: Vec<Json> = rules.patterns.iter().map(split).collect();
        if rules.single_digits {
            pre_tokenizers.push(json!({"type": "Digits", "individual_digits": true}));
        }
        pre_tokenizers.push(byte_level(false, true, rules.patterns.is_empty()));
        let processors: Vec<Json> = [byte_level(true, false, true)].into_iter().chain(template).collect();
        Steps {
            normalizer: if rules.nfc { json!({"type": "NFC"}) } else { Json::Null },
            pre_tokenizer: json!({"type": "Sequence", "pretokenizers": pre_tokenizers}),
            post_processor: json!({"type": "Sequence", "processors": processors}),
            decoder: byte_level(true, true, true),
        }
    }

    /// Returns the steps of a BPE over UTF-8, as SentencePiece's, which takes a text whole. With `prefix`, a space
    /// precedes every text.
    fn sentence_piece(prefix: bool, template: Option<Json>) -> Self {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
        let normalizer = if prefix {
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, replace]})
        } else {
            replace
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        Steps {
            normalizer,
            pre_tokenizer: Json::Null,
            post_processor: template.unwrap_or_default(),
            decoder: json!({"type": "Sequence", "decoders": decoders}),
        }
    }
}

/// A `tokenizer.json`. Its vocabulary and merges, which can be hundreds of thousands, are serialized in place.
#[derive(Serialize)]
pub struct TokenizerFile<'a> {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: Vec<Json>,
    normalizer: Json,
    pre_tokenizer: Json,
    /// Special tokens around a text.
    pub post_processor: Json,
    decoder: Json,
    model: TokenizerModel<'a>,
}

/// Model of `tokenizer.json`.
#[derive(Serialize)]
#[serde(untagged)]
enum TokenizerModel<'a> {
    Bpe(Bpe<'a>),
    WordPiece(WordPiece<'a>),
    Unigram(Unigram<'a>),
}

impl TokenizerFile<'_> {
    /// Returns the file's content.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain data with text for keys becomes JSON")
    }

    /// Returns the content without the model: normalization, pre-tokenization, decoding and special tokens.
    pub fn steps_to_json(&self) -> Vec<u8> {
        let TokenizerFile { normalizer, pre_tokenizer, post_processor, decoder, .. } = self;
        let steps = json!({
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": decoder,
        });
        steps.to_string().into_bytes()
    }

    /// Returns the largest id of a token.
    pub fn largest_id(&self) -> Option<u64> {
        let tokens = match &self.model {
            TokenizerModel::Bpe(model) => model.vocab.tokens.len(),
            TokenizerModel::WordPiece(model) => model.vocab.tokens.len(),
            TokenizerModel::Unigram(model) => model.vocab.len(),
        };
        (tokens as u64).checked_sub(1)
    }
}

/// Byte-pair encoding: pieces are merged in the order of the merges until none applies.
#[derive(Serialize)]
struct Bpe<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: (),
    unk_token: Option<&'a str>,
    continuing_subword_prefix: (),
    end_of_word_suffix: (),
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Vocab<'a>,
    merges: Merges<'a>,
}

/// Tokenizer of a GGUF file.
pub struct GgufTokenizer<'a> {
    metadata: &'a GgufMetadata,
    model: &'a str,
    tokens: Cow<'a, Strings>,
    types: Vec<i64>,
}

/// Returns the ids of tokens that end a text, as far as the metadata names them.
///
/// # Errors
/// Returns an error if a key isn't a number.
pub fn end_tokens(metadata: &GgufMetadata) -> Result<Vec<u64>> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ids.extend(metadata.u64(key)?);
    }
    let Some(tokens) = metadata.strings("tokenizer.ggml.tokens")? else { return Ok(ids) };
    let decoder = matches!(metadata.str("tokenizer.ggml.model")?, Some("gpt2" | "llama" | GEMMA4));
    for (token, id) in tokens.iter().zip(0..).filter(|_| decoder) {
        if END_TOKENS.contains(&token) {
            ids.push(id);
        }
    }
    let has = |spelt: &str| ids.iter().any(|id| tokens.get(*id as usize) == Some(spelt));
    // where calls and answers have ends of their own, `<|end|>` ends a message; a file that has Gemma's mark of calls
    // or PLaMo's end holds `</s>` as text
    let ends_messages = has("<|call|>") && has("<|return|>") || has("<|calls|>") && has("<|flush|>");
    let holds_html = has("<|tool_response>") || tokens.iter().any(|token| token == "<|plamo:eos|>");
    let named = ids.first().copied();
    ids.retain(|id| match tokens.get(*id as usize) {
        Some("<|end|>") => !ends_messages,
        Some("</s>") => !holds_html || named == Some(*id),
        _ => true,
    });
    let mut seen = std::collections::BTreeSet::new();
    ids.retain(|id| seen.insert(*id));
    Ok(ids)
}

/// Spellings of tokens that end an answer, whatever the metadata says of them; as llama.cpp collects them.
const END_TOKENS: [&str; 26] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

/// Returns the normalizers that remove spaces around a text, and all but one within it.
fn strip_whitespace() -> [Json; 2] {
    [
        json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}),
    ]
}

/// Returns an entry of `added_tokens`.
fn added_token(id: usize, content: &str, special: bool) -> Json {
    json!({
        "id": id,
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": special,
    })
}

impl<'a> GgufTokenizer<'a> {
    /// Returns the tokenizer of a file, if it has one.
    ///
    /// # Errors
    /// Returns an error if its kind is unknown or it contradicts itself.
    pub fn read(metadata: &'a GgufMetadata) -> Result<Option<Self>> {
        let Some(model) = metadata.str("tokenizer.ggml.model")? else { return Ok(None) };
        let Some(tokens) = metadata.strings("tokenizer.ggml.tokens")? else { return Ok(None) };
        let types = metadata.i64s("tokenizer.ggml.token_type")?.unwrap_or_default();
        if !types.is_empty() && types.len() != tokens.len() {
            let problem = format!("{} token types for {} tokens", types.len(), tokens.len());
            return Err(SourceError::key(metadata.path(), "tokenizer.ggml.token_type", problem));
        }
        let tokens = match model {
            "bert" => Cow::Owned(word_piece::respelt(tokens, &types)),
            // GGUF spells user-defined SentencePiece tokens with spaces; in the vocabulary a space is always U+2581
            "llama" => {
                let spelt = |(id, token): (usize, &'a str)| match types.get(id) {
                    Some(&USER_DEFINED) => Cow::Owned(token.replace(' ', "\u{2581}")),
                    _ => Cow::Borrowed(token),
                };
                Cow::Owned(tokens.iter().enumerate().map(spelt).collect())
            }
            _ => Cow::Borrowed(tokens),
        };
        Ok(Some(GgufTokenizer { metadata, model, tokens, types }))
    }

    /// Returns the tokenizer as a `tokenizer.json`.
    ///
    /// # Errors
    /// Returns any error from [`GgufTokenizer::read`].
    pub fn file(&self) -> Result<TokenizerFile<'_>> {
        match self.model {
            "gpt2" | GEMMA4 => self.given_merges(),
            "llama" => self.sentence_piece(),
            "bert" => self.word_piece(),
            "t5" => self.unigram(),
            other => {
                let problem = format!("\"{other}\", expected \"gpt2\", \"gemma4\", \"llama\", \"bert\" or \"t5\"");
                let wrong = SourceError::key(self.metadata.path(), "tokenizer.ggml.model", problem);
                Err(wrong.advise(FROM_HUGGING_FACE))
            }
        }
    }

    /// Returns a BPE with given merges, over GPT-2's letters for bytes or over UTF-8. The pre-tokenizer goes by name.
    fn given_merges(&self) -> Result<TokenizerFile<'_>> {
        let default = if self.model == GEMMA4 { GEMMA4 } else { pre_tokenizer::DEFAULT };
        let name = self.metadata.str("tokenizer.ggml.pre")?.unwrap_or(default);
        let rules = PreTokenizer::of(name).ok_or_else(|| {
            let similar = match &nearest(name, PreTokenizer::names(), 3)[..] {
                [] => String::new(),
                similar => format!("; similar names are {}", similar.join(", ")),
            };
            let problem = format!("\"{name}\", expected a pre-tokenizer of llama.cpp's{similar}");
            SourceError::key(self.metadata.path(), "tokenizer.ggml.pre", problem).advise(FROM_HUGGING_FACE)
        })?;
        let vocab = Vocab::new(&self.tokens);
        let merges = self.merges(&vocab)?;
        let template = match rules.between_two {
            None => self.template(rules.bos)?,
            Some(between) => {
                let begin = self.token(&["tokenizer.ggml.cls_token_id", "tokenizer.ggml.bos_token_id"], &[])?;
                let end = self.token(&["tokenizer.ggml.seperator_token_id", "tokenizer.ggml.eos_token_id"], &[])?;
                Some(Ends { begin, end, between, second_type: 0 }.template())
            }
        };
        let unk_token = if rules.utf8 { self.token(&["tokenizer.ggml.unknown_token_id"], &["<unk>"])? } else { None };
        let model = TokenizerModel::Bpe(Bpe {
            kind: "BPE",
            dropout: (),
            unk_token: unk_token.map(|(token, _)| token),
            continuing_subword_prefix: (),
            end_of_word_suffix: (),
            fuse_unk: rules.utf8,
            byte_fallback: rules.utf8,
            ignore_merges: rules.ignores_merges,
            vocab,
            merges,
        });
        let steps =
            if rules.utf8 { Steps::sentence_piece(false, template) } else { Steps::byte_level(rules, template) };
        Ok(self.assembled(steps, model))
    }

    fn assembled<'t>(&'t self, steps: Steps, model: TokenizerModel<'t>) -> TokenizerFile<'t> {
        let Steps { normalizer, pre_tokenizer, post_processor, decoder } = steps;
        TokenizerFile {
            version: "1.0",
            truncation: (),
            padding: (),
            added_tokens: self.added_tokens(),
            normalizer,
            pre_tokenizer,
            post_processor,
            decoder,
            model,
        }
    }

    /// Returns the merges, both sides of which must be tokens.
    fn merges(&self, vocab: &Vocab) -> Result<Merges<'_>> {
        const KEY: &str = "tokenizer.ggml.merges";
        let Some(merges) = self.metadata.strings(KEY)? else { return Ok(Merges::Derived(Vec::new())) };
        let mut joined = String::new();
        // merges mostly produce tokens in order, so that comparing with the next token is cheaper than looking it up
        let mut next = 0;
        for merge in merges.iter() {
            let wrong = |problem: String| SourceError::key(self.metadata.path(), KEY, problem);
            let (left, right) =
                pair_of(merge).ok_or_else(|| wrong(format!("{merge:?}, expected two tokens with a space between")))?;
            joined.clear();
            joined.extend([left, right]);
            let unknown =
                |part: &str| wrong(format!("{merge:?}, but {part:?} isn't one of the {} tokens", vocab.len()));
            if let Some(part) = [left, right].into_iter().find(|part| vocab.id(part).is_none()) {
                return Err(unknown(part));
            }
            if vocab.tokens.get(next) != Some(&joined) {
                next = vocab.id(&joined).ok_or_else(|| unknown(&joined))?;
            }
            next += 1;
        }
        Ok(Merges::Stored(merges))
    }

    /// Returns a SentencePiece BPE: merges follow from the scores of the pieces.
    fn sentence_piece(&self) -> Result<TokenizerFile<'_>> {
        let scores = self.scores()?;
        let prefix = self.metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let unknown = self.metadata.u64("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
        let strips = self.metadata.bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false);
        let charsmap = self.precompiled_charsmap()?;
        let vocab = Vocab::new(&self.tokens);
        let merges = Merges::Derived(self.merges_of_scores(&vocab, scores));
        let model = TokenizerModel::Bpe(Bpe {
            kind: "BPE",
            dropout: (),
            unk_token: self.tokens.get(unknown as usize),
            continuing_subword_prefix: (),
            end_of_word_suffix: (),
            fuse_unk: true,
            byte_fallback: true,
            ignore_merges: false,
            vocab,
            merges,
        });
        let mut steps = Steps::sentence_piece(prefix, self.template(Bos::Default)?);
        let mut before = Vec::new();
        before.extend(charsmap.map(|map| json!({"type": "Precompiled", "precompiled_charsmap": map})));
        before.extend(if strips { strip_whitespace().to_vec() } else { Vec::new() });
        if !before.is_empty() {
            before.push(steps.normalizer);
            steps.normalizer = json!({"type": "Sequence", "normalizers": before});
        }
        Ok(self.assembled(steps, model))
    }

    /// Returns one score per token.
    fn scores(&self) -> Result<&[f32]> {
        let scores = self.metadata.f32s("tokenizer.ggml.scores")?.unwrap_or_default();
        if scores.len() != self.tokens.len() {
            let problem = format!("{} scores for {} tokens", scores.len(), self.tokens.len());
            return Err(SourceError::key(self.metadata.path(), "tokenizer.ggml.scores", problem));
        }
        Ok(scores)
    }

    /// Returns the token of the first key that is present, or else the first token with one of the spellings.
    fn token(&self, keys: &[&str], spelt: &[&str]) -> Result<Option<(&str, u64)>> {
        for key in keys {
            if let Some(id) = self.metadata.u64(key)? {
                let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id)).ok_or_else(|| {
                    let problem = format!("the value is {id}, expected one of {} tokens", self.tokens.len());
                    SourceError::key(self.metadata.path(), key, problem)
                })?;
                return Ok(Some((token, id)));
            }
        }
        let mut ids = self.tokens.iter().zip(0..);
        Ok(ids.find(|(token, _)| spelt.contains(token)))
    }

    /// Returns control tokens, which decoding drops, and user-defined tokens, which aren't split.
    fn added_tokens(&self) -> Vec<Json> {
        let kinds = self.types.iter().enumerate().filter(|(_, kind)| matches!(**kind, CONTROL | USER_DEFINED));
        kinds.filter_map(|(id, kind)| Some(added_token(id, self.tokens.get(id)?, *kind == CONTROL))).collect()
    }

    /// Returns a post-processor that adds begin and end tokens as the metadata says.
    fn template(&self, bos: Bos) -> Result<Option<Json>> {
        let token = |key: &str| -> Result<Option<(&str, u64)>> {
            let id = self.metadata.u64(key)?;
            Ok(id.and_then(|id| Some((self.tokens.get(id as usize)?, id))))
        };
        let adds = |key: &str, default: bool| self.metadata.bool(key).map(|value| value.unwrap_or(default));
        let adds_bos = match bos {
            Bos::Always => true,
            Bos::Never => false,
            Bos::Default | Bos::Optional => adds("tokenizer.ggml.add_bos_token", bos == Bos::Default)?,
        };
        let bos = if adds_bos { token("tokenizer.ggml.bos_token_id")? } else { None };
        let eos =
            if adds("tokenizer.ggml.add_eos_token", false)? { token("tokenizer.ggml.eos_token_id")? } else { None };
        if bos.is_none() && eos.is_none() {
            return Ok(None);
        }
        let special = |token: &str, segment: u64| json!({"SpecialToken": {"id": token, "type_id": segment}});
        let sequence = |name: &str, segment: u64| -> Vec<Json> {
            let mut parts = Vec::new();
            parts.extend(bos.map(|(token, _)| special(token, segment)));
            parts.push(json!({"Sequence": {"id": name, "type_id": segment}}));
            parts.extend(eos.map(|(token, _)| special(token, segment)));
            parts
        };
        let tokens: Map<String, Json> = bos
            .iter()
            .chain(eos.iter())
            .map(|(token, id)| ((*token).to_owned(), json!({"id": token, "ids": [id], "tokens": [token]})))
            .collect();
        Ok(Some(json!({
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": ([sequence("A", 0), sequence("B", 1)].concat()),
            "special_tokens": tokens,
        })))
    }

    /// Returns every pair of pieces that forms a piece, by descending score, then by descending length. As in
    /// SentencePiece, user-defined pieces precede all others regardless of their scores, ordered by id.
    fn merges_of_scores(&self, vocab: &Vocab, scores: &[f32]) -> Vec<(&str, &str)> {
        let mut first: Vec<(&str, &str)> = Vec::new();
        let mut scored: Vec<(f32, &str, &str)> = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
            let mut splits: Vec<(usize, usize, &str, &str)> =
                splits.filter_map(|(left, right)| Some((vocab.id(left)?, vocab.id(right)?, left, right))).collect();
            splits.sort_unstable_by_key(|(left, right, ..)| (*left, *right));
            let pairs = splits.into_iter().map(|(_, _, left, right)| (left, right));
            match self.types.get(id) {
                Some(&CONTROL | &BYTE) => {}
                Some(&USER_DEFINED) => first.extend(pairs),
                _ => scored.extend(pairs.map(|(left, right)| (scores[id], left, right))),
            }
        }
        let length = |text: &str| text.chars().count();
        scored.sort_by_cached_key(|(_, left, right)| (Reverse(length(left)), Reverse(length(right))));
        scored.sort_by(|a, b| b.0.total_cmp(&a.0));
        let scored = scored.into_iter().map(|(_, left, right)| (left, right));
        first.into_iter().chain(scored).collect()
    }
}

#[cfg(test)]
mod tests;
