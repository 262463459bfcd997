//! The book's page on bundles is enough to write a runtime: tests/reader was written from its words alone, in Python with
//! numpy, and gives the logits of anec's own runtime and those of transformers.

use crate::common::{coremltools, folder};

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use folder::{repository, run};
use safetensors::SafeTensors;
use serde_json::json;

/// A model, how it is converted, how many tokens of the golden text are run (all if 0), and in calls of how many.
struct Case {
    model: &'static str,
    changes: &'static [&'static str],
    tokens: usize,
    chunk: Option<usize>,
    /// Least cosine with transformers, at every position.
    cosine: f64,
}

const EXACT: f64 = 0.9999;

const CASES: &[Case] = &[
    // several contexts, calls of one and four tokens that write at a position; a text that fits the smaller context
    Case {
        model: "llama-default",
        changes: &["lengths={fixed: [1, 4]}", "context=[24, 40]"],
        tokens: 23,
        chunk: None,
        cosine: EXACT,
    },
    Case {
        model: "llama-default",
        changes: &["lengths={fixed: [1, 4]}", "context=[24, 40]"],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    // every call is filled up, with a position and with a mask
    Case {
        model: "qwen3-default",
        changes: &["lengths={fixed: [7]}", "context=64"],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    Case {
        model: "qwen3-default",
        changes: &["lengths={fixed: [7]}", "context=64", "kv_write=mask"],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    // parts of the head with an index of the largest logit
    Case {
        model: "granite-default",
        changes: &["context=40", "lm_head={split: 3, argmax: true}"],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    // rings of two sizes, tables of their own for layers with a window, in either layout
    Case {
        model: "gemma3-default",
        changes: &["context=48", "layout=bc1s", "state=unified"],
        tokens: 0,
        chunk: Some(3),
        cosine: EXACT,
    },
    Case {
        model: "mistral-window",
        changes: &["context=[24, 40]", "lengths={fixed: [1, 4]}"],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    // tables by the length of the text
    Case { model: "phi3-longrope", changes: &["context=40"], tokens: 0, chunk: None, cosine: EXACT },
    // recurrences: states, inputs and outputs, in packages of a layer each
    Case { model: "qwen3_5-default", changes: &["context=40"], tokens: 0, chunk: None, cosine: EXACT },
    Case {
        model: "qwen3_5-default",
        changes: &[
            "context=[24, 40]",
            "lengths={fixed: [1, 4]}",
            "recurrent_states=input_output",
            "shards.layers=[[0, 1], [1, 2], [2, 4]]",
        ],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    Case { model: "lfm2-default", changes: &["context=40", "state=unified"], tokens: 0, chunk: Some(2), cosine: EXACT },
    // experts in the layers' functions, in their own, in one function for each; a router that hands on what it saw
    Case {
        model: "lfm2_moe-default",
        changes: &["context=[24, 40]", "lengths={fixed: [1, 4]}", "experts=split"],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    Case { model: "lfm2_moe-default", changes: &["context=40"], tokens: 0, chunk: None, cosine: EXACT },
    Case {
        model: "zaya-sliding",
        changes: &["context=40", "experts=routed", "recurrent_states=input_output"],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    // a text in windows through layers that look both ways
    Case {
        model: "privacy_filter-default",
        changes: &["context=48", "lengths.range=[1, 48]"],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    Case {
        model: "privacy_filter-default",
        changes: &["context=48", "lengths={fixed: [8, 17]}", "experts=split"],
        tokens: 0,
        chunk: None,
        cosine: EXACT,
    },
    // weights of a byte
    Case {
        model: "olmo2-default",
        changes: &["context=40", "quant.weights=int8"],
        tokens: 0,
        chunk: None,
        cosine: 0.99,
    },
];

/// Tokens and logits of a file, and the width of the logits.
fn logits(path: &Path) -> (Vec<i32>, Vec<f32>, usize) {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let four = |name: &str| -> Vec<[u8; 4]> {
        tensors.tensor(name).unwrap().data().chunks_exact(4).map(|bytes| bytes.try_into().unwrap()).collect()
    };
    let width = tensors.tensor("logits").unwrap().shape()[1];
    let tokens = four("tokens").into_iter().map(i32::from_le_bytes).collect();
    (tokens, four("logits").into_iter().map(f32::from_le_bytes).collect(), width)
}

/// The least cosine of two rows.
fn cosine(a: &[f32], b: &[f32], width: usize) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let rows = a.chunks_exact(width).zip(b.chunks_exact(width));
    rows.map(|(a, b)| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()).fold(f64::INFINITY, f64::min)
}

/// What the reader gives for bundles: it is one process for all.
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
        let (bundle_name, own_name) = (bundle.to_str().unwrap(), own.to_str().unwrap());
        let mut command = vec!["convert", "--source", &source, "--out", bundle_name, "--no-compile"];
        for change in ["quant.weights=none"].iter().chain(case.changes) {
            command.extend(["--set", change]);
        }
        let (code, _, stderr) = run(&command);
        assert_eq!(code, 0, "{} {:?}: {stderr}", case.model, case.changes);
        let (mut tokens, ..) = logits(&repository(&source).join("golden.safetensors"));
        if case.tokens > 0 {
            tokens.truncate(case.tokens);
        }
        let list = tokens.iter().map(i32::to_string).collect::<Vec<_>>().join(",");
        let (code, _, stderr) =
            run(&["logits", bundle_name, "--tokens", &list, "--out", own_name, "--precision", "f32"]);
        assert_eq!(code, 0, "{} {:?}: {stderr}", case.model, case.changes);
        calls.push(json!({"bundle": bundle, "tokens": tokens, "chunk": case.chunk, "out": path(index, "read")}));
    }
    read(&python, &calls.into());
    for (index, case) in CASES.iter().enumerate() {
        let name = format!("{} {:?}", case.model, case.changes);
        let bytes = std::fs::read(path(index, "read")).unwrap();
        let read: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let (_, own, width) = logits(&path(index, "own.safetensors"));
        // anec doesn't round products of bytes and scales
        let (least, most) = if case.changes.contains(&"quant.weights=int8") { (0.9999, 0.1) } else { (0.999999, 1e-3) };
        let apart = own.iter().zip(&read).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let found = cosine(&read, &own, width);
        assert!(found > least && apart < most, "{name}: anec's logits differ: cosine {found}, {apart}");
        let golden = repository("tests/fixtures/families").join(case.model).join("golden.safetensors");
        let (_, reference, _) = logits(&golden);
        let found = cosine(&read, &reference[..read.len()], width);
        assert!(found > case.cosine, "{name}: transformers' logits differ: cosine {found}");
    }
}
