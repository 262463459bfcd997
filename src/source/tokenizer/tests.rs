//! Comparison with llama.cpp: its test texts and their ids for the vocabularies it publishes, and the pieces that its
//! patterns give.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::{Value as Json, json};
use tokenizers::{
    NormalizedString, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _,
    PreTokenizerWrapper,
};

use super::pre_tokenizer::PreTokenizer;
use super::{GgufTokenizer, Steps};
use crate::Source;

/// Mark between texts in llama.cpp's `.inp` files.
const BETWEEN: &str = "\n__ggml_vocab_test__\n";

/// Vocabularies in the folder whose texts have ids, and their number.
const VOCABULARIES: usize = 15;

fn of_file(path: &Path) -> tokenizers::Tokenizer {
    let source = Source::open_path(path).unwrap();
    let own = GgufTokenizer::read(source.gguf().unwrap()).unwrap().unwrap();
    let file = own.file().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    tokenizers::Tokenizer::from_bytes(file.to_json()).unwrap()
}

#[test]
fn ids_are_llama_cpps_on_its_own_texts() {
    let Some(folder) = anec_testing::real_model("llama.cpp-vocabularies") else { return };
    let mut vocabularies = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let Ok(texts) = fs::read_to_string(path.with_added_extension("inp")) else { continue };
        let mut tokenizer = of_file(&path);
        // llama.cpp's test takes special tokens in texts for letters
        tokenizer.set_encode_special_tokens(true);
        let expected = fs::read_to_string(path.with_added_extension("out")).unwrap();
        let texts: Vec<&str> = texts.split(BETWEEN).collect();
        let expected: Vec<&str> = expected.split('\n').collect();
        assert!(expected.len() >= texts.len(), "{}", path.display());
        let composes = matches!(tokenizer.get_normalizer(), Some(NormalizerWrapper::NFC(_)));
        for (text, expected) in texts.iter().zip(expected) {
            let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
            let found = tokenizer.encode(*text, false).unwrap();
            let mut composed = NormalizedString::from(*text);
            composed.nfc();
            if composes && composed.get() != *text {
                // as the models' own tokenizers do, and llama.cpp doesn't
                let of_composed = tokenizer.encode(composed.get(), false).unwrap();
                assert_eq!(found.get_ids(), of_composed.get_ids(), "{}: {text:?}", path.display());
                continue;
            }
            assert_eq!(found.get_ids(), expected, "{}: {text:?}", path.display());
        }
        vocabularies += 1;
    }
    assert_eq!(vocabularies, VOCABULARIES);
}

/// Returns the pieces of a text by the rules of a name.
fn pieces(name: &str, text: &str) -> Vec<String> {
    let rules = PreTokenizer::of(name).unwrap();
    let step: PreTokenizerWrapper = serde_json::from_value(Steps::byte_level(rules, None).pre_tokenizer).unwrap();
    let mut divided = PreTokenizedString::from(text);
    step.pre_tokenize(&mut divided).unwrap();
    let ranges = divided.get_splits(OffsetReferential::Original, OffsetType::Byte);
    ranges.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
}

/// `tests/fixtures/gguf/pieces.py` computes the pieces with Python's `regex` from llama.cpp's own spelling of the
/// patterns.
#[test]
fn pieces_are_those_of_llama_cpps_patterns() {
    let path = anec_testing::root().join("tests/fixtures/gguf/pieces.json");
    let golden: Json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let texts: Vec<&str> = golden["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    let mut unlisted: BTreeSet<&str> =
        PreTokenizer::names().filter(|name| !PreTokenizer::of(name).unwrap().utf8).collect();
    for entry in golden["types"].as_array().unwrap() {
        // llama.cpp knows some names of models that aren't supported here
        let names = entry["names"].as_array().unwrap().iter().filter_map(|name| unlisted.take(name.as_str()?));
        for name in names.collect::<Vec<_>>() {
            for (text, expected) in texts.iter().zip(entry["pieces"].as_array().unwrap()) {
                assert_eq!(&json!(pieces(name, text)), expected, "{name}: {text:?}");
            }
        }
    }
    // llama.cpp calls it dbrx
    assert_eq!(unlisted, BTreeSet::from(["olmo2"]));
}
