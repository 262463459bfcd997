//! GGUF files of encoders: conversion of their keys to those of `config.json`.
//!
//! llama.cpp has two architectures for them: `bert`, also used for RoBERTa and XLM-RoBERTa (unused rows of positions
//! are omitted from the file), and `modern-bert`. `bert` files have no key for the activation: it is the exact GELU.

use serde_json::{Map, Value as Json, json};

use super::bert;
use super::modernbert;
use crate::FamilyModel;
use crate::config::gguf::json_of;
use crate::error::FamilyError;
use anec_base::Result;
use anec_source::gguf::GgufMetadata;
use anec_source::sentence_transformers::GGUF_RANK;
use anec_source::{Ledger, SourceTensor};

/// Architecture of BERT, RoBERTa and XLM-RoBERTa.
const BERT: &str = "bert";

/// Architecture of ModernBERT.
const MODERN_BERT: &str = "modern-bert";

/// Keys below `{architecture}.` and their names in `config.json`.
const KEYS: &[(&str, &str)] = &[
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
];

/// Keys of a single architecture.
fn own_keys(architecture: &str) -> &'static [(&'static str, &'static str)] {
    match architecture {
        BERT => &[("attention.layer_norm_epsilon", "layer_norm_eps"), ("hidden_activation", "hidden_act")],
        _ => &[
            ("attention.layer_norm_epsilon", "norm_eps"),
            // the converter also writes the epsilon under the key of RMS norms
            ("attention.layer_norm_rms_epsilon", "norm_eps"),
            ("attention.sliding_window", "local_attention"),
            ("attention.sliding_window_pattern", "global_attn_every_n_layers"),
            ("rope.freq_base", "global_rope_theta"),
            ("rope.freq_base_swa", "local_rope_theta"),
            ("hidden_activation", "hidden_activation"),
        ],
    }
}

/// Returns whether an architecture is an encoder's.
pub(crate) fn is_architecture(architecture: &str) -> bool {
    [BERT, MODERN_BERT].contains(&architecture)
}

/// Architecture of a family's GGUF files.
pub(super) fn architecture_of(family: &str) -> &'static str {
    if family == modernbert::ROPE.name { MODERN_BERT } else { BERT }
}

/// Opens the encoder of a GGUF file; `asked` is the manifest's family.
pub(crate) fn open(
    place: &str,
    metadata: &GgufMetadata,
    architecture: &str,
    ledger: &mut Ledger<'_>,
    asked: Option<&str>,
    acknowledged: &[String],
) -> Result<Box<dyn FamilyModel>> {
    if let Some(asked) = asked.filter(|asked| !super::is_encoder(asked) || architecture_of(asked) != architecture) {
        let (place, asked, found) = (place.to_owned(), asked.to_owned(), architecture.to_owned());
        return Err(FamilyError::OtherFamily { place, asked, found }.into());
    }
    let config = configuration(place, metadata, architecture, ledger)?;
    let encoder = match architecture {
        BERT => bert::open(&bert::GGUF, place, &config, ledger, acknowledged)?,
        _ => modernbert::open(place, &config, ledger, acknowledged)?,
    };
    Ok(Box::new(encoder))
}

/// Configuration for the metadata of a file.
fn configuration(
    place: &str,
    metadata: &GgufMetadata,
    architecture: &str,
    ledger: &Ledger<'_>,
) -> Result<Map<String, Json>> {
    let wrong = |key: &str, found: String, expected: &str| FamilyError::Value {
        place: place.to_owned(),
        key: key.to_owned(),
        found,
        expected: expected.to_owned(),
    };
    let (prefix, own_keys) = (format!("{architecture}."), own_keys(architecture));
    let mut config = Map::new();
    for (key, value) in metadata.iter() {
        let Some(own) = key.strip_prefix(&prefix) else { continue };
        let json = json_of(value);
        let unless = |expected: Json| Some(expected).filter(|expected| json != *expected);
        let renamed = KEYS.iter().chain(own_keys).find(|(gguf, _)| *gguf == own);
        let expected = match (own, renamed) {
            // several keys may have the same meaning
            (_, Some((_, name))) => config.insert((*name).to_owned(), json.clone()).and_then(unless),
            ("attention.causal", _) => unless(json!(false)),
            ("attention.head_count_kv", _) => {
                unless(json!(metadata.u64(&format!("{prefix}attention.head_count"))?.unwrap_or_default()))
            }
            ("rope.scaling.type", _) => unless(json!("none")),
            // read with the head, with the pooling, or from tensors
            ("pooling_type" | "classifier.output_labels" | "vocab_size", _) => None,
            ("dense_2_feat_in" | "dense_2_feat_out" | "dense_3_feat_in" | "dense_3_feat_out", _) => None,
            _ => {
                // unknown keys keep their name; the reader refuses them unless the user has acknowledged them
                config.insert(key.to_owned(), json.clone());
                None
            }
        };
        if let Some(expected) = expected {
            return Err(wrong(key, json.to_string(), &expected.to_string()).into());
        }
    }
    if let Some(Json::Array(slides)) = config.get("global_attn_every_n_layers") {
        let kind = |slides: &Json| if slides == &json!(true) { "sliding_attention" } else { "full_attention" };
        let kinds: Vec<&str> = slides.iter().map(kind).collect();
        config.insert("layer_types".into(), json!(kinds));
        config.remove("global_attn_every_n_layers");
    }
    let rows = |name: &str| ledger.source().tensor(name).map(SourceTensor::rows);
    config.insert("vocab_size".into(), json!(rows("token_embd.weight").unwrap_or_default()));
    if architecture == BERT {
        let types = rows("token_types.weight");
        const TYPES: &str = "tokenizer.ggml.token_type_count";
        if let Some(count) = metadata.u64(TYPES)?.filter(|count| types.is_some_and(|rows| rows != *count)) {
            let expected = format!("{}, the rows of token_types.weight", types.unwrap_or_default());
            return Err(wrong(TYPES, count.to_string(), &expected).into());
        }
        config.insert("type_vocab_size".into(), json!(types.unwrap_or(1)));
    } else {
        for (key, tensor) in [
            ("norm_bias", "output_norm"),
            ("attention_bias", "blk.0.attn_output"),
            ("mlp_bias", "blk.0.ffn_down"),
            ("classifier_bias", "cls"),
        ] {
            config.insert(key.into(), json!(ledger.has(&format!("{tensor}.bias"))));
        }
    }
    config.extend(head(place, metadata, architecture, ledger)?);
    Ok(config)
}

/// Configuration keys of a sequence classification head, if there is one.
fn head(place: &str, metadata: &GgufMetadata, architecture: &str, ledger: &Ledger<'_>) -> Result<Map<String, Json>> {
    let mut config = Map::new();
    let labels = ledger.source().tensor("cls.output.weight").map(SourceTensor::rows);
    match metadata.u64(&format!("{architecture}.pooling_type"))? {
        Some(GGUF_RANK) => {}
        None if labels.is_some() => {}
        _ => return Ok(config),
    }
    let partial = |problem: String| Err(FamilyError::PartialHead { place: place.to_owned(), problem }.into());
    if let Some(missing) = ["cls.weight", "cls.output.weight"].into_iter().find(|tensor| !ledger.has(tensor)) {
        return partial(format!(
            "`{missing}` is missing: the head is a layer and the labels, and llama.cpp's converter leaves the layer out of \
             classifiers of BERT"
        ));
    }
    if architecture == BERT && !ledger.has("token_types.weight") {
        return partial("`token_types.weight` is missing: the head is DistilBERT's, which isn't known".to_owned());
    }
    config.insert("architectures".into(), json!(["ForSequenceClassification"]));
    if architecture == MODERN_BERT {
        // GGUF has no key for it: llama.cpp uses mean pooling
        config.insert("classifier_pooling".into(), json!("mean"));
    }
    let (key, value) = match metadata.strings(&format!("{architecture}.classifier.output_labels"))? {
        Some(names) => {
            let by_number = names.iter().enumerate().map(|(number, name)| (number.to_string(), json!(name)));
            ("id2label", Json::Object(by_number.collect()))
        }
        None => ("num_labels", json!(labels)),
    };
    config.insert(key.into(), value);
    Ok(config)
}
