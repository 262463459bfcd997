//! Rebuilds a `tokenizer.json` from the tokenizer that a GGUF file carries.
//!
//! GGUF holds the vocabulary, its merges or scores and the *name* of the text splitting; the rules behind the names are
//! those of the model's own `tokenizer.json`. A name that is not in the table is an error: a tokenizer that splits
//! text wrongly gives wrong ids without any other sign.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value as Json, json};

use super::error::{Result, SourceError};
use super::gguf::Metadata;

/// What to do about a tokenizer that can't be rebuilt.
const FROM_HUGGING_FACE: &str = "convert the model's Hugging Face folder instead, which has its tokenizer.json";

/// `token_type` values of GGUF.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// A `tokenizer.json` built from metadata, or nothing if the file carries no tokenizer.
///
/// # Errors
/// When the tokenizer is of an unknown kind or contradicts itself.
pub fn from_gguf(metadata: &Metadata) -> Result<Option<Json>> {
    let Some(model) = metadata.str("tokenizer.ggml.model")? else { return Ok(None) };
    let Some(tokens) = metadata.strings("tokenizer.ggml.tokens")? else { return Ok(None) };
    let types = metadata.i64s("tokenizer.ggml.token_type")?.unwrap_or_default();
    if !types.is_empty() && types.len() != tokens.len() {
        let problem = format!("{} token types for {} tokens", types.len(), tokens.len());
        return Err(SourceError::key(metadata.path(), "tokenizer.ggml.token_type", problem));
    }
    let vocabulary = Vocabulary { metadata, tokens: tokens.into(), types };
    match model {
        "gpt2" => vocabulary.byte_level().map(Some),
        "llama" => vocabulary.with_visible_spaces().sentence_piece().map(Some),
        other => {
            let problem = format!("\"{other}\", expected \"gpt2\" or \"llama\"");
            Err(SourceError::key(metadata.path(), "tokenizer.ggml.model", problem).advise(FROM_HUGGING_FACE))
        }
    }
}

/// Ids of the tokens that end a text, as far as the metadata names them.
///
/// # Errors
/// When a key holds something else than a number.
pub fn end_tokens(metadata: &Metadata) -> Result<Vec<u64>> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ids.extend(metadata.u64(key)?);
    }
    ids.dedup();
    Ok(ids)
}

struct Vocabulary<'a> {
    metadata: &'a Metadata,
    tokens: Cow<'a, [String]>,
    types: Vec<i64>,
}

impl Vocabulary<'_> {
    /// Byte-level BPE (GPT-2's): merges are given, splitting goes by name.
    fn byte_level(&self) -> Result<Json> {
        let name = self.metadata.str("tokenizer.ggml.pre")?.unwrap_or("default");
        let (_, rules) = SPLITTINGS.iter().find(|(known, _)| *known == name).ok_or_else(|| {
            let problem = format!("\"{name}\", expected one of {}", SPLITTINGS.map(|(known, _)| known).join(", "));
            SourceError::key(self.metadata.path(), "tokenizer.ggml.pre", problem).advise(FROM_HUGGING_FACE)
        })?;
        let merges = self.merges()?;
        let mut pre_tokenizers: Vec<Json> = rules
            .patterns
            .iter()
            .map(|pattern| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}))
            .collect();
        if rules.single_digits {
            pre_tokenizers.push(json!({"type": "Digits", "individual_digits": true}));
        }
        let own_regex = rules.patterns.is_empty();
        let byte_level = |prefix: bool, trim: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": regex});
        pre_tokenizers.push(byte_level(false, true, own_regex));
        let mut processors = vec![byte_level(true, false, true)];
        processors.extend(self.template(rules.adds_bos)?);
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens(),
            "normalizer": if rules.nfc { json!({"type": "NFC"}) } else { Json::Null },
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
            "post_processor": {"type": "Sequence", "processors": processors},
            "decoder": byte_level(true, true, true),
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": rules.ignores_merges,
                "vocab": self.vocab(),
                "merges": merges,
            },
        }))
    }

    /// The pairs of tokens that become one, in the order of their priority.
    fn merges(&self) -> Result<Vec<Json>> {
        const KEY: &str = "tokenizer.ggml.merges";
        let tokens: HashSet<&str> = self.tokens.iter().map(String::as_str).collect();
        let pair = |merge: &String| {
            let wrong = |problem: String| SourceError::key(self.metadata.path(), KEY, problem);
            let (left, right) = merge
                .split_once(' ')
                .ok_or_else(|| wrong(format!("{merge:?}, expected two tokens with a space between")))?;
            match [left, right, &format!("{left}{right}")].into_iter().find(|part| !tokens.contains(part)) {
                Some(part) => Err(wrong(format!("{merge:?}, but {part:?} isn't one of the {} tokens", tokens.len()))),
                None => Ok(json!([left, right])),
            }
        };
        self.metadata.strings(KEY)?.unwrap_or_default().iter().map(pair).collect()
    }

    /// GGUF spells user-defined SentencePiece tokens with spaces; in the vocabulary a space is always U+2581.
    fn with_visible_spaces(mut self) -> Self {
        for (token, kind) in self.tokens.to_mut().iter_mut().zip(&self.types) {
            if *kind == USER_DEFINED {
                *token = token.replace(' ', "\u{2581}");
            }
        }
        self
    }

    /// SentencePiece BPE: merges follow from the scores of the pieces.
    fn sentence_piece(&self) -> Result<Json> {
        let scores = self.metadata.f32s("tokenizer.ggml.scores")?.unwrap_or_default();
        if scores.len() != self.tokens.len() {
            let problem = format!("{} scores for {} tokens", scores.len(), self.tokens.len());
            return Err(SourceError::key(self.metadata.path(), "tokenizer.ggml.scores", problem));
        }
        let prefix = self.metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
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
        let unknown = self.metadata.u64("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
        let unknown = self.tokens.get(unknown as usize);
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens(),
            "normalizer": normalizer,
            "pre_tokenizer": null,
            "post_processor": self.template(true)?,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true,
                "byte_fallback": true,
                "ignore_merges": false,
                "vocab": self.vocab(),
                "merges": self.merges_of_scores(scores),
            },
        }))
    }

    fn vocab(&self) -> Json {
        let pairs = self.tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id)));
        Json::Object(pairs.collect::<Map<String, Json>>())
    }

    /// Control tokens, which a tokenizer drops from decoded text, and user-defined ones, which it keeps whole.
    fn added_tokens(&self) -> Vec<Json> {
        let kinds = self.types.iter().enumerate().filter(|(_, kind)| matches!(**kind, CONTROL | USER_DEFINED));
        kinds
            .map(|(id, kind)| {
                json!({
                    "id": id,
                    "content": self.tokens[id],
                    "single_word": false,
                    "lstrip": false,
                    "rstrip": false,
                    "normalized": false,
                    "special": *kind == CONTROL,
                })
            })
            .collect()
    }

    /// Adds the token that begins a text (and the one that ends it), where the file asks for it.
    fn template(&self, adds_bos: bool) -> Result<Option<Json>> {
        let token = |key: &str| -> Result<Option<(&String, u64)>> {
            let id = self.metadata.u64(key)?;
            Ok(id.and_then(|id| Some((self.tokens.get(id as usize)?, id))))
        };
        let adds = |key: &str, default: bool| self.metadata.bool(key).map(|value| value.unwrap_or(default));
        let bos =
            if adds("tokenizer.ggml.add_bos_token", adds_bos)? { token("tokenizer.ggml.bos_token_id")? } else { None };
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
            .map(|(token, id)| ((*token).clone(), json!({"id": token, "ids": [id], "tokens": [token]})))
            .collect();
        Ok(Some(json!({
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": ([sequence("A", 0), sequence("B", 1)].concat()),
            "special_tokens": tokens,
        })))
    }

    /// Every way to put a piece together from two others, best score first; among equals longer parts first. SentencePiece
    /// takes user-defined pieces before all others, whatever score the file gives them; among them the first id.
    fn merges_of_scores(&self, scores: &[f32]) -> Vec<Json> {
        let ids: HashMap<&str, usize> =
            self.tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
        let mut first: Vec<(&str, &str)> = Vec::new();
        let mut scored: Vec<(f32, &str, &str)> = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
            let mut splits: Vec<(usize, usize, &str, &str)> =
                splits.filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?, left, right))).collect();
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
        first.into_iter().chain(scored).map(|(left, right)| json!([left, right])).collect()
    }
}

/// How text is split before byte-level BPE.
#[derive(Clone, Copy)]
struct Splitting {
    patterns: &'static [&'static str],
    nfc: bool,
    single_digits: bool,
    ignores_merges: bool,
    adds_bos: bool,
}

const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const PLAIN: Splitting =
    Splitting { patterns: &[], nfc: false, single_digits: false, ignores_merges: false, adds_bos: false };
const LIKE_LLAMA3: Splitting = Splitting { patterns: &[LLAMA3], ignores_merges: true, adds_bos: true, ..PLAIN };
const SINGLE_DIGITS: Splitting = Splitting { single_digits: true, ..PLAIN };

/// The names that `tokenizer.ggml.pre` may have.
const SPLITTINGS: [(&str, Splitting); 11] = [
    ("gpt-2", PLAIN),
    ("qwen2", Splitting { patterns: &[QWEN2], nfc: true, ..PLAIN }),
    ("llama-bpe", LIKE_LLAMA3),
    ("llama3", LIKE_LLAMA3),
    ("llama-v3", LIKE_LLAMA3),
    ("dbrx", Splitting { patterns: &[LLAMA3], ..PLAIN }),
    ("olmo2", Splitting { patterns: &[LLAMA3], ..PLAIN }),
    ("gpt-4o", Splitting { patterns: &[GPT4O], ..PLAIN }),
    ("smollm", SINGLE_DIGITS),
    ("starcoder", SINGLE_DIGITS),
    ("refact", SINGLE_DIGITS),
];
