//! Fast reader of `tokenizer.json` with byte-pair encoding. The tokenizers crate copies vocabulary and merges several
//! times before it knows the model's type, which dominates the program's start. This reader deserializes them once.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer};

/// Reads a tokenizer without its truncation and padding; `None` if the model has another type or the file is damaged,
/// which the crate's own reader reports.
pub(super) fn read(bytes: &[u8]) -> Option<Tokenizer> {
    let file: File = serde_json::from_slice(bytes).ok()?;
    let mut tokenizer = Tokenizer::new(file.model.build()?);
    tokenizer.with_normalizer(file.normalizer).ok()?;
    tokenizer.with_pre_tokenizer(file.pre_tokenizer);
    tokenizer.with_post_processor(file.post_processor);
    tokenizer.with_decoder(file.decoder);
    tokenizer.add_tokens(file.added_tokens).ok()?;
    Some(tokenizer)
}

/// Steps of a tokenizer beside the vocabulary.
#[derive(Deserialize)]
pub(super) struct Steps {
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) pre_tokenizer: Option<PreTokenizerWrapper>,
    pub(super) post_processor: Option<PostProcessorWrapper>,
    pub(super) decoder: Option<DecoderWrapper>,
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "version")]
    _version: Version,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    decoder: Option<DecoderWrapper>,
    model: Model,
}

#[derive(Deserialize)]
enum Version {
    #[serde(rename = "1.0")]
    One,
}

#[derive(Deserialize)]
enum Kind {
    #[serde(rename = "BPE")]
    Bpe,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    _kind: Kind,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: Vocab,
    #[serde(deserialize_with = "merges")]
    merges: Vec<(String, String)>,
}

impl Model {
    fn build(self) -> Option<BPE> {
        let mut builder = BpeBuilder::new()
            .fuse_unk(self.fuse_unk.unwrap_or_default())
            .byte_fallback(self.byte_fallback.unwrap_or_default())
            .ignore_merges(self.ignore_merges.unwrap_or_default())
            .vocab_and_merges(self.vocab, self.merges);
        if let Some(dropout) = self.dropout {
            builder = builder.dropout(dropout);
        }
        if let Some(token) = self.unk_token {
            builder = builder.unk_token(token);
        }
        if let Some(prefix) = self.continuing_subword_prefix {
            builder = builder.continuing_subword_prefix(prefix);
        }
        if let Some(suffix) = self.end_of_word_suffix {
            builder = builder.end_of_word_suffix(suffix);
        }
        builder.build().ok()
    }
}

/// Reads pairs of tokens: `["a", "b"]`, or `"a b"` in older files.
fn merges<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, String)>, D::Error> {
    struct All;
    impl<'de> Visitor<'de> for All {
        type Value = Vec<(String, String)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "merges")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut merges: A) -> Result<Self::Value, A::Error> {
            let mut all = Vec::new();
            while let Some(Merge(pair)) = merges.next_element()? {
                all.extend(pair);
            }
            Ok(all)
        }
    }
    deserializer.deserialize_seq(All)
}

/// Pair of tokens; `None` for the version line of older files.
struct Merge(Option<(String, String)>);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "two tokens")
            }

            fn visit_str<E: Error>(self, line: &str) -> Result<Merge, E> {
                if line.starts_with("#version") {
                    return Ok(Merge(None));
                }
                match line.split_once(' ') {
                    Some((a, b)) if !b.contains(' ') => Ok(Merge(Some((a.to_owned(), b.to_owned())))),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(line), &self)),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<Merge, A::Error> {
                let missing = || A::Error::custom("a merge of fewer than two tokens");
                let a = pair.next_element()?.ok_or_else(missing)?;
                let b = pair.next_element()?.ok_or_else(missing)?;
                match pair.next_element::<serde::de::IgnoredAny>()? {
                    None => Ok(Merge(Some((a, b)))),
                    Some(_) => Err(A::Error::custom("a merge of more than two tokens")),
                }
            }
        }
        deserializer.deserialize_any(One)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn file(merges: Value) -> Value {
        json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [{"id": 4, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "normalizer": {"type": "NFC"}, "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": "a", "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": false, "ignore_merges": true,
                      "vocab": {"a": 0, "b": 1, "ab": 2, "abab": 3}, "merges": merges},
        })
    }

    #[test]
    fn both_readers_agree() {
        for merges in [json!([["a", "b"], ["ab", "ab"]]), json!(["#version: 0.2", "a b", "ab ab"])] {
            let bytes = file(merges).to_string().into_bytes();
            let expected = Tokenizer::from_bytes(&bytes).unwrap();
            let found = read(&bytes).unwrap();
            assert_eq!(serde_json::to_value(&found).unwrap(), serde_json::to_value(&expected).unwrap());
            let ids = found.encode("ababb<end>", false).unwrap().get_ids().to_vec();
            assert_eq!(ids, expected.encode("ababb<end>", false).unwrap().get_ids());
            assert_eq!(found.token_to_id("<end>"), Some(4));
        }
    }

    #[test]
    fn other_models_are_left_to_the_crate() {
        let merges = || json!([["a", "b"]]);
        let with = |change: &dyn Fn(&mut Value)| {
            let mut file = file(merges());
            change(&mut file);
            read(file.to_string().as_bytes()).is_some()
        };
        assert!(with(&|_| {}));
        assert!(!with(&|file| file["model"]["type"] = json!("WordPiece")));
        assert!(!with(&|file| drop(file["model"].as_object_mut().unwrap().remove("type"))));
        assert!(!with(&|file| file["version"] = json!("2.0")));
        for wrong in [json!([["a", "none"]]), json!([["a"]]), json!([["a", "b", "b"]]), json!(["a b b"])] {
            assert!(!with(&|file| file["model"]["merges"] = wrong.clone()), "{wrong}");
        }
    }
}
