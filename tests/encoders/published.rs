//! Encoders as people publish them: a checkpoint of PyTorch with a vocabulary, a folder of safetensors with a head for
//! masked tokens, ONNX exports in fp32 and with int8 weights; and the small exports of tests/fixtures/onnx_encoders.
//! What is right comes from transformers and ONNX Runtime.

use std::path::Path;

use anec::bundle::Task;
use anec::runtime::encode::{self, Embedder};
use anec::runtime::{EncodedText, Tokenizer};
use anec_testing as testing;

use super::{Golden, convert, cosine, fixture, largest_difference, token_logits};
use crate::common::folder;

/// Model of `tests/models.py`, and its file if it isn't the folder.
const REAL: [(&str, &str); 4] = [
    ("rxnfp-classifier", ""),
    ("splade-tiny", ""),
    ("paraphrase-minilm-l3-onnx", "paraphrase-MiniLM-L3-v2.onnx"),
    ("minilm-int8-onnx", "model.onnx"),
];

#[test]
fn published_encoders_give_what_their_own_libraries_give() {
    let golden = folder::json(&folder::repository("tests/fixtures/real_encoders/golden.json"));
    for (name, file) in REAL {
        let Some(source) = testing::real_model(name) else { return };
        let room = tempfile::tempdir().unwrap();
        let model = convert(&source.join(file), &room.path().join("b"), &[]);
        for text in golden[name].as_array().unwrap() {
            let ids: Vec<u32> = serde_json::from_value(text["ids"].clone()).unwrap();
            let expected: Vec<f32> = serde_json::from_value(text["vector"].clone()).unwrap();
            let text = EncodedText { ids, types: Vec::new() };
            let found = match &model.bundle().model.task {
                Task::SequenceClassification(_) => encode::classify(&model, &text).unwrap(),
                _ => {
                    let states = Embedder::new(&model, None).unwrap().states(&text).unwrap();
                    let rows = states.chunks(expected.len());
                    let count = rows.len() as f32;
                    rows.fold(vec![0.0; expected.len()], |sum, row| {
                        sum.iter().zip(row).map(|(sum, value)| sum + value / count).collect()
                    })
                }
            };
            assert!(cosine(&found, &expected) > 0.99999, "{name}, {} tokens", text.ids.len());
            // weights are rounded to fp16
            let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
            assert!(largest_difference(&found, &expected) < 3e-3 * largest, "{name}, {} tokens", text.ids.len());
        }
    }
}

/// Numbers of the built-in manifest's comment: why encoders have a scale for each channel.
#[test]
fn one_scale_for_each_tensor_moves_the_vectors_of_an_encoder() {
    let Some(source) = testing::real_model("all-minilm-l6-v2") else { return };
    let room = tempfile::tempdir().unwrap();
    let texts = [
        "The lady of the house sat by the fire and read.",
        "def f(x):\n    return x ** 2  # squared",
        "Москва и 東京 are cities",
        "How do I reset my password?",
        "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when it was checked \
         by a violent gust of wind which swept up the streets.",
        "{\"name\": \"anec\", \"n\": [1, 2, 3]}",
        "Quarterly revenue rose 4.2 % to 1,234,567 euros.",
        "hi",
        "The mitochondria is the powerhouse of the cell, and it has its own DNA.",
        "SELECT name FROM users WHERE id = 7;",
    ];
    let vectors = |name: &str, sets: &[&str]| -> Vec<Vec<f32>> {
        let out = room.path().join(name);
        let model = convert(&source, &out, &[&["context=128"], sets].concat());
        let (tokenizer, embedder) =
            (Tokenizer::of(model.bundle(), &out).unwrap(), Embedder::new(&model, None).unwrap());
        let text = |text: &&str| EncodedText { ids: tokenizer.encode(text).unwrap(), types: Vec::new() };
        texts.iter().map(|of| embedder.embed(&text(of)).unwrap()).collect()
    };
    let exact = vectors("exact", &[]);
    let [per_channel, per_tensor] = ["per_channel", "per_tensor"].map(|granularity| {
        let sets = ["quant.weights=int8".to_owned(), format!("quant.granularity={granularity}")];
        let found = vectors(granularity, &sets.each_ref().map(String::as_str));
        let cosines = found.iter().zip(&exact).map(|(found, exact)| cosine(found, exact));
        cosines.fold(f64::INFINITY, f64::min)
    });
    assert!((0.9975..0.9995).contains(&per_channel), "{per_channel}");
    assert!((0.93..0.96).contains(&per_tensor), "{per_tensor}");
}

/// Exports of a model give its vectors, or its labels.
#[test]
fn exports_to_onnx_give_the_vectors_of_the_exported_model() {
    let cases = [
        ("bert-eager-11", "bert-mean"),
        ("bert-dynamo", "bert-mean"),
        ("roberta-sdpa-17", "roberta-mean"),
        ("distilbert-sdpa-14", "distilbert-mean"),
        ("electra-eager-17", "electra-mean"),
        ("bert-reranker-sdpa-14", "bert-reranker"),
        ("xlm-roberta-labels-eager-17", "xlm-roberta-labels"),
        ("distilbert-labels-sdpa-14", "distilbert-labels"),
        ("electra-labels-eager-17", "electra-labels"),
        ("bert-tokens-sdpa-14", "bert-tokens"),
        ("roberta-tokens-eager-17", "roberta-tokens"),
        ("bert-int8-channels", "bert-mean"),
    ];
    for (case, model) in cases {
        let golden = Golden::read(&fixture(model).join("golden.safetensors"));
        let room = tempfile::tempdir().unwrap();
        let source = folder::repository("tests/fixtures/onnx_encoders").join(case).join("model.onnx");
        let converted = convert(&source, &room.path().join("b"), &[]);
        let (found, expected) = match &converted.bundle().model.task {
            Task::SequenceClassification(classification) => {
                let found = encode::classify(&converted, &golden.text).unwrap();
                assert_eq!(found.len(), classification.labels.len());
                (found, &golden.tensors["logits"])
            }
            Task::TokenClassification(_) => (token_logits(&converted, &golden.text), &golden.tensors["logits"]),
            _ => {
                let last = golden.tensors.keys().filter(|name| name.starts_with("hidden.")).count() - 1;
                let embedder = Embedder::new(&converted, None).unwrap();
                (embedder.states(&golden.text).unwrap(), &golden.tensors[&format!("hidden.{last}")])
            }
        };
        let least = if case.contains("int8") { 0.999 } else { 0.99999 };
        let found = cosine(&found, expected);
        assert!(found > least, "{case}: {found}");
    }
}

/// Graphs that compute something else are refused, by the operation.
#[test]
fn other_graphs_are_refused_by_their_operations() {
    let room = tempfile::tempdir().unwrap();
    let whole = folder::repository("tests/fixtures/onnx_encoders/bert-sdpa-14/model.onnx");
    let bytes = std::fs::read(whole).unwrap();
    let replaced = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let mut changed = bytes.clone();
        for at in 0..changed.len() - from.len() {
            if changed[at..].starts_with(from.as_bytes()) {
                changed[at..at + to.len()].copy_from_slice(to.as_bytes());
            }
        }
        let path = room.path().join("model.onnx");
        std::fs::write(&path, changed).unwrap();
        refusal(&path)
    };
    for (from, to, problem) in [
        ("Erf", "Cos", "isn't an activation"),
        ("Softmax", "Hardmax", "isn't a softmax"),
        ("Sqrt", "Ceil", "norm"),
        ("ReduceMean", "ReduceProd", "hidden states"),
    ] {
        let error = replaced(from, to);
        assert!(error.contains(problem), "{from}: {error}");
    }
}

fn refusal(path: &Path) -> String {
    let out = path.with_extension("anec");
    let (code, _, stderr) =
        folder::run(&["convert", "--source", path.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    assert_eq!(code, 4, "{stderr}");
    stderr
}
