//! The book's pages on bundles and assets are enough to write a runtime: tests/reader was written from their words
//! alone, in Python with numpy, and gives the logits of anec's own runtime and those of transformers.

use crate::common::{coremltools, folder};

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use folder::{repository, run};
use safetensors::SafeTensors;
use serde_json::json;

/// A model, how it is converted, and the text that it is run on.
struct Case {
    model: &'static str,
    changes: &'static [&'static str],
    golden: &'static str,
    /// How many tokens of the golden text are run, if not all.
    tokens: Option<usize>,
    /// Tokens of a call, if fewer than possible.
    chunk: Option<usize>,
}

const fn case(model: &'static str, changes: &'static [&'static str]) -> Case {
    Case { model, changes, golden: "golden.safetensors", tokens: None, chunk: None }
}

const INT8: &str = "quant.weights=int8";
const CORE_AI: &str = "format=coreai";
const DIVIDED: &str = "shards.divide=attention_mlp";

const CASES: &[Case] = &[
    // several contexts, calls of one and four tokens that write at a position; a text that fits the smaller context
    Case { tokens: Some(23), ..case("llama-default", &["lengths={fixed: [1, 4]}", "context=[24, 40]"]) },
    case("llama-default", &["lengths={fixed: [1, 4]}", "context=[24, 40]"]),
    // every call is filled up, with a position and with a mask
    case("qwen3-default", &["lengths={fixed: [7]}", "context=64"]),
    case("qwen3-default", &["lengths={fixed: [7]}", "context=64", "kv_write=mask"]),
    // parts of the head with an index of the largest logit
    case("granite-default", &["context=40", "lm_head={split: 3, argmax: true, logits: true}"]),
    // everything in one package, with the largest logits
    case(
        "qwen3-default",
        &["context=[24, 40]", "lengths={fixed: [1, 4]}", "lm_head={split: none, top_k: 5, logits: true}"],
    ),
    case("qwen3_5-default", &["context=40", "lm_head.split=none", "state=unified"]),
    // rings, tables of their own for layers with a window, in either layout
    Case { chunk: Some(3), ..case("gemma3-default", &["context=48", "layout=bc1s", "state=unified"]) },
    case("mistral-window", &["context=[24, 40]", "lengths={fixed: [1, 4]}"]),
    // rotations by a product, activations by Core ML's ops
    case("qwen3-default", &["context=40", "rope=product", "activations=native"]),
    // learned positions
    Case { chunk: Some(5), ..case("gpt2-default", &["context=40"]) },
    case("gemma2-default", &["context=40", "rope=product", "activations=native", "norm=prescale"]),
    case("qwen3_5-default", &["context=40", "rope=product", "activations=native", "recurrent_states=input_output"]),
    // rotary tables by the length of the text
    case("phi3-longrope", &["context=40"]),
    Case { golden: "golden-short.safetensors", ..case("phi3-longrope", &["context=40"]) },
    // recurrences: states, inputs and outputs, in one package and in several
    case("qwen3_5-default", &["context=40"]),
    case(
        "qwen3_5-default",
        &[
            "context=[24, 40]",
            "lengths={fixed: [1, 4]}",
            "recurrent_states=input_output",
            "shards.layers=[[0, 1], [1, 2], [2, 4]]",
        ],
    ),
    Case { chunk: Some(2), ..case("lfm2-default", &["context=40", "state=unified"]) },
    case("granitemoehybrid-default", &["context=40", "experts=split", "recurrent_states=input_output"]),
    Case { chunk: Some(3), ..case("granitemoehybrid-dense", &["context=40", "state=unified", "layout=bc1s"]) },
    case("falcon_h1-grouped", &["context=[24, 40]", "lengths={fixed: [1, 4]}"]),
    case("qwen3_5_moe-default", &["context=40", "experts=routed", "lengths={fixed: [1, 4]}"]),
    // experts in the layers' functions, in their own, in one function for each; a router that hands on what it saw
    case("lfm2_moe-default", &["context=40"]),
    case("lfm2_moe-default", &["context=[24, 40]", "lengths={fixed: [1, 4]}", "experts=split"]),
    case("zaya-sliding", &["context=40", "experts=routed", "recurrent_states=input_output"]),
    // a text in windows through layers that look both ways
    case("privacy_filter-default", &["context=48", "lengths.range=[1, 48]"]),
    case("privacy_filter-default", &["context=48", "lengths={fixed: [8, 17]}", "experts=split"]),
    // caches that the host keeps: whole ones in several contexts, filled up, rings, beside recurrences
    case("llama-default", &["state=host", "lengths={fixed: [1, 4]}", "context=[24, 40]"]),
    case("qwen3-default", &["state=host", "lengths={fixed: [7]}", "context=64"]),
    Case { chunk: Some(3), ..case("gemma3-default", &["state=host", "context=48", "layout=bc1s"]) },
    case("zaya-sliding", &["state=host", "context=40", "attention=grouped"]),
    // vectors of tokens for layers; keys and values that functions give to those behind them, in states of each form
    case("gemma4-dense", &["context=40", "shards.layers=[[0, 3], [3, 5], [5, 6], [6, 7]]"]),
    Case { chunk: Some(3), ..case("gemma4-dense", &["context=40", "state=unified", "shards.layers=[[0, 4], [4, 7]]"]) },
    case(
        "gemma4-dense",
        &[
            "context=40",
            "state=host",
            "layout=bc1s",
            "lengths={fixed: [1, 4]}",
            "shards.layers=[[0, 3], [3, 5], [5, 7]]",
        ],
    ),
    case("gemma4-experts", &["context=40"]),
    case("gemma4-experts", &["context=40", "experts=routed", "layout=bc1s"]),
    // a layer's attention and its feed-forward network in packages of their own: a router that hands on what it saw,
    // vectors of tokens for layers, keys and values of other layers, two mixers at once, windows, experts that are
    // apart already
    case("zaya-sliding", &["context=40", DIVIDED]),
    case("gemma4-dense", &["context=40", DIVIDED, "lengths={fixed: [1, 4]}"]),
    case("falcon_h1-grouped", &["context=[24, 40]", DIVIDED, "lengths={fixed: [1, 4]}", "state=unified"]),
    case("lfm2_moe-default", &["context=40", DIVIDED, "experts=split", "state=host"]),
    case("privacy_filter-default", &["context=48", DIVIDED, "lengths={fixed: [8, 17]}"]),
    // an asset of Core AI: a function for each number of tokens, masks and states of each form, recurrences, experts,
    // windows over a whole text
    case("llama-default", &[CORE_AI, "context=40"]),
    case("qwen3-default", &[CORE_AI, "lengths={fixed: [7]}", "context=64"]),
    Case { chunk: Some(3), ..case("gemma3-default", &[CORE_AI, "context=48", "layout=bc1s", "state=unified"]) },
    case("gemma2-default", &[CORE_AI, "context=40", "rope=product", "activations=native", "state=host"]),
    case("qwen3_5-default", &[CORE_AI, "context=40", "recurrent_states=input_output"]),
    case("lfm2_moe-default", &[CORE_AI, "context=[24, 40]", "lengths={fixed: [1, 4]}", "experts=split"]),
    case("granite-default", &[CORE_AI, "context=40", "lm_head={split: 3, argmax: true, logits: true}"]),
    case("olmo2-default", &[CORE_AI, "context=40", "lm_head={split: none, top_k: 3, logits: true}"]),
    case("privacy_filter-default", &[CORE_AI, "context=48", "lengths={fixed: [8, 48]}"]),
    case("olmo2-default", &[CORE_AI, "context=40", INT8]),
    case("llama-bias", &[CORE_AI, "context=40", "quant.weights=palette8", "quant.row_scale=true"]),
    // weights of a byte
    case("olmo2-default", &["context=40", INT8]),
    // palettes of rows that have a scale, and integers of blocks
    case("llama-bias", &["context=40", "quant.weights=palette8", "quant.row_scale=true", "linear=linear"]),
];

/// Encoders of tests/fixtures/encoders: learned positions, token types, embeddings narrower than the layers, biases by
/// distance, token embeddings in functions of later layers; calls that are filled up.
const ENCODERS: &[(&str, &[&str])] = &[
    ("distilbert-labels", &[]),
    ("bert-reranker", &[]),
    ("electra-labels", &["lengths={fixed: [40]}"]),
    ("electra-small", &[]),
    ("mpnet-labels", &[]),
    ("mpnet-mean", &["lengths={fixed: [40]}", CORE_AI]),
    ("embeddinggemma2", &["lengths={fixed: [40]}", "shards.layers=[[0, 1], [1, 4]]"]),
];

/// Tokens and logits of a file, and the width of the logits.
fn logits(path: &Path) -> (Vec<i32>, Vec<f32>, usize) {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let width = tensors.tensor("logits").unwrap().shape()[1];
    (integers(&tensors, "tokens").unwrap(), floats(tensors.tensor("logits").unwrap().data()), width)
}

fn integers(tensors: &SafeTensors<'_>, name: &str) -> Option<Vec<i32>> {
    let (values, _) = tensors.tensor(name).ok()?.data().as_chunks();
    Some(values.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn convert(source: &str, out: &Path, changes: &[&str]) {
    let mut command = vec!["convert", "--source", source, "--out", out.to_str().unwrap(), "--no-compile"];
    for change in ["quant.weights=none"].iter().chain(changes) {
        command.extend(["--set", change]);
    }
    let (code, _, stderr) = run(&command);
    assert_eq!(code, 0, "{source} {changes:?}: {stderr}");
}

/// The least cosine of two rows.
fn cosine(a: &[f32], b: &[f32], width: usize) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let rows = a.chunks_exact(width).zip(b.chunks_exact(width));
    rows.map(|(a, b)| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()).fold(f64::INFINITY, f64::min)
}

/// Output of the reader for all bundles, in one process.
fn read(python: &Path, calls: &serde_json::Value) {
    let mut reader = Command::new(python)
        .arg(repository("tests/reader/reader.py"))
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("ANEC_PYTHON runs");
    serde_json::to_writer(reader.stdin.take().unwrap(), calls).unwrap();
    let output = reader.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_runtime_of_the_books_words_runs_every_bundle() {
    let Some(python) = coremltools::python() else { return };
    let room = tempfile::tempdir().unwrap();
    let path = |index: usize, name: &str| -> PathBuf { room.path().join(format!("{index}_{name}")) };
    let mut calls = Vec::new();
    for (index, case) in CASES.iter().enumerate() {
        let source = format!("tests/fixtures/families/{}", case.model);
        let (bundle, own) = (path(index, "bundle"), path(index, "own.safetensors"));
        let own_name = own.to_str().unwrap();
        convert(&source, &bundle, case.changes);
        // anec's executor runs packages, not assets
        let packages = match case.changes.contains(&CORE_AI) {
            false => bundle.clone(),
            true => {
                let packages = path(index, "packages");
                let changes: Vec<&str> = case.changes.iter().copied().filter(|change| *change != CORE_AI).collect();
                convert(&source, &packages, &changes);
                packages
            }
        };
        let packages = packages.to_str().unwrap();
        let (mut tokens, ..) = logits(&repository(&source).join(case.golden));
        tokens.truncate(case.tokens.unwrap_or(tokens.len()));
        let list = tokens.iter().map(i32::to_string).collect::<Vec<_>>().join(",");
        let (code, _, stderr) = run(&["logits", packages, "--ids", &list, "--out", own_name, "--precision", "f32"]);
        assert_eq!(code, 0, "{} {:?}: {stderr}", case.model, case.changes);
        calls.push(json!({"bundle": bundle, "tokens": tokens, "chunk": case.chunk, "out": path(index, "read")}));
    }
    read(&python, &calls.into());
    for (index, case) in CASES.iter().enumerate() {
        let name = format!("{} {:?}", case.model, case.changes);
        let read = floats(&std::fs::read(path(index, "read")).unwrap());
        let (_, own, width) = logits(&path(index, "own.safetensors"));
        // anec doesn't round products of bytes and scales, and bytes are less than transformers has
        let int8 = case.changes.iter().any(|change| change.starts_with("quant.weights"));
        // the parts that an operator is lowered to have constants in fp16
        let lowered = case.changes.contains(&CORE_AI);
        let (least, most, reference) = match (int8, lowered) {
            (true, _) => (0.99999, 0.05, 0.99),
            (false, true) => (0.999999, 5e-3, 0.9999),
            (false, false) => (0.9999999, 1e-3, 0.9999),
        };
        let apart = own.iter().zip(&read).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let found = cosine(&read, &own, width);
        assert!(found > least && apart < most, "{name}: anec's logits differ: cosine {found}, {apart}");
        let (_, golden, _) = logits(&repository("tests/fixtures/families").join(case.model).join(case.golden));
        let found = cosine(&read, &golden[..read.len()], width);
        assert!(found > reference, "{name}: transformers' logits differ: cosine {found}");
    }
    // what divides a layer differently is also typed by coremltools
    let judged = path(CASES.len(), "judged");
    std::fs::create_dir(&judged).unwrap();
    let divided = CASES.iter().enumerate().filter(|(_, case)| case.changes.contains(&DIVIDED)).take(2);
    for (index, _) in divided {
        for entry in std::fs::read_dir(path(index, "bundle")).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.extension().is_some_and(|extension| extension == "mlpackage") {
                let name = format!("{index}_{}", entry.file_name().unwrap().to_str().unwrap());
                std::fs::rename(&entry, judged.join(name)).unwrap();
            }
        }
    }
    let verdicts = coremltools::judge(&python, &judged);
    assert_eq!(verdicts.iter().map(|verdict| verdict.complaints(true)).collect::<String>(), "");
}

#[test]
fn a_runtime_of_the_books_words_reads_whole_texts() {
    let Some(python) = coremltools::python() else { return };
    let room = tempfile::tempdir().unwrap();
    let (mut calls, mut expected) = (Vec::new(), Vec::new());
    for (index, (model, changes)) in ENCODERS.iter().enumerate() {
        let [bundle, out] = ["bundle", "read"].map(|name| room.path().join(format!("{index}_{name}")));
        let source = format!("tests/fixtures/encoders/{model}");
        convert(&source, &bundle, changes);
        let bytes = std::fs::read(repository(&source).join("golden.safetensors")).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        let values = golden.tensor("logits").or(golden.tensor("embedding")).unwrap();
        let types = integers(&golden, "types").map_or(json!(0), |types| json!(types));
        calls.push(json!({"bundle": bundle, "tokens": integers(&golden, "tokens"), "types": types, "out": out}));
        expected.push((model, changes, out, floats(values.data())));
    }
    read(&python, &calls.into());
    for (model, changes, out, golden) in expected {
        let read = floats(&std::fs::read(out).unwrap());
        assert_eq!(read.len(), golden.len(), "{model}");
        let apart = golden.iter().zip(&read).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-3, "{model} {changes:?}: transformers' numbers differ by {apart}");
    }
}
