//! Models that look at whole texts agree with transformers: encoders, embedding models and rerankers are converted, run
//! by the executor in every form, and their hidden states, vectors and logits are the reference's; so are those of the
//! published all-MiniLM-L6-v2.

mod gguf;
mod published;

use crate::common::http::Server;
use crate::common::{client, folder, model};
use anec_testing as testing;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::bundle::{Bundle, Pooling, Stage, Task, WHOLE_TEXT};
use anec::exec::Precision;
use anec::runtime::classify::bioes::Biases;
use anec::runtime::classify::redact::Redactor;
use anec::runtime::classify::windows::Windows;
use anec::runtime::coreai::Arithmetic;
use anec::runtime::encode::Embedder;
use anec::runtime::{Chunking, EncodedText, ForwardOptions, Hidden, LoadedModel, Tokenizer, encode};
use rayon::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value as Json, json};

const CASES: [&str; 40] = [
    "bert-mean",
    "bert-reranker",
    "bert-tokens",
    "roberta-mean",
    "roberta-tokens",
    "xlm-roberta-dense",
    "xlm-roberta-labels",
    "qwen3-labels",
    "camembert-mean",
    "distilbert-mean",
    "distilbert-labels",
    "distilbert-tokens",
    "electra-mean",
    "electra-labels",
    "electra-small",
    "electra-tokens",
    "albert-mean",
    "albert-groups",
    "albert-tokens",
    "mpnet-mean",
    "mpnet-labels",
    "mpnet-tokens",
    "deberta-mean",
    "deberta-labels",
    "deberta-own",
    "deberta-c2p",
    "deberta-tokens",
    "modernbert-cls",
    "modernbert-labels",
    "modernbert-rank",
    "modernbert-tokens",
    "nomic-mean",
    "nomic-published",
    "nomic-labels",
    "nomic-tokens",
    "embeddinggemma",
    "embeddinggemma-period",
    "embeddinggemma2",
    "embeddinggemma2-text",
    "qwen3-embedding",
];

/// Smallest cosine of a vector in half precision.
const LEAST_COSINE_F16: f64 = 0.9999;
/// Largest difference of logits in half precision.
const MOST_DIFFERENCE_F16: f32 = 2e-2;

fn fixture(name: &str) -> PathBuf {
    folder::repository("tests/fixtures/encoders").join(name)
}

/// The f32 tensors of a file, and its text, if it has one.
struct Golden {
    text: EncodedText,
    tensors: BTreeMap<String, Vec<f32>>,
}

impl Golden {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Option<Vec<[u8; 4]>> {
            Some(file.tensor(name).ok()?.data().chunks_exact(4).map(|word| word.try_into().unwrap()).collect())
        };
        let integers =
            |name: &str| -> Vec<u32> { words(name).unwrap_or_default().into_iter().map(u32::from_le_bytes).collect() };
        let floats = file
            .names()
            .into_iter()
            .filter(|name| !["tokens", "types"].contains(name))
            .map(|name| (name.to_owned(), words(name).unwrap().into_iter().map(f32::from_le_bytes).collect()));
        Golden { text: EncodedText { ids: integers("tokens"), types: integers("types") }, tensors: floats.collect() }
    }
}

/// Converts without quantization, so that the reference's numbers are to be met.
fn convert(source: &Path, out: &Path, sets: &[&str]) -> Arc<LoadedModel> {
    let (source, out_name) = (source.to_str().unwrap(), out.to_str().unwrap());
    let mut arguments = vec!["convert", "--source", source, "--out", out_name, "--set", "quant.weights=none"];
    arguments.extend(sets.iter().flat_map(|set| ["--set", set]));
    let (code, _, stderr) = folder::run(&arguments);
    assert_eq!(code, 0, "{source} {sets:?}: {stderr}");
    LoadedModel::on_cpu(out, Precision::F32).unwrap()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Input of the first layer and output of each layer, in one call or, if the text may be divided, in calls by
/// `chunking`.
fn hidden(model: &Arc<LoadedModel>, text: &EncodedText, chunking: Chunking) -> Vec<Vec<f32>> {
    if model.bundle().model.band().is_some() {
        return Windows::new(model, None, Hidden::BetweenLayers).unwrap().label(&text.ids).unwrap().hidden;
    }
    let ask = ForwardOptions::none().recording(Hidden::BetweenLayers).in_calls(chunking);
    model.start(text.ids.len() as u64).unwrap().forward(&text.ids, &ask).unwrap().hidden
}

/// Logits of all tokens of a whole text.
fn token_logits(model: &Arc<LoadedModel>, text: &EncodedText) -> Vec<f32> {
    Windows::new(model, None, Hidden::No).unwrap().label(&text.ids).unwrap().logits
}

/// A head's score matrix of 2^20 elements is computed in parts; rows of scores don't depend on each other.
#[test]
fn queries_of_long_calls_are_computed_in_chunks() {
    let room = tempfile::tempdir().unwrap();
    let softmaxes = |model: &LoadedModel, out: &Path| -> usize {
        let entry = &model.bundle().packages[0];
        let program = anec::package::open(&out.join(&entry.package)).unwrap().program;
        program.functions[0].ops().filter(|op| op.operator == "softmax").count()
    };
    for (name, sets) in [
        ("embeddinggemma", &[][..]),
        ("embeddinggemma", &["attention=grouped"]),
        ("modernbert-cls", &["layout=bc1s"]),
        ("nomic-mean", &[]),
    ] {
        let source = room.path().join(format!("{name}-{}", sets.len()));
        model::copy(&fixture(name), &source);
        for key in ["max_position_embeddings", "n_positions"] {
            let path = source.join("config.json");
            if folder::json(&path)[key].is_number() {
                model::edit_json(&path, |config| config[key] = json!(1100));
            }
        }
        let vector = |lengths: &str, label: &str| {
            let out = source.join(label);
            let sets = [&["context=1100", lengths][..], sets].concat();
            let model = convert(&source, &out, &sets);
            let text = EncodedText { ids: (0..1100).map(|id| 5 + id * 7 % 60).collect(), types: Vec::new() };
            (Embedder::new(&model, None).unwrap().embed(&text).unwrap(), softmaxes(&model, &out))
        };
        let (whole, of_whole) = vector("lengths={range: [1, 1100]}", "whole");
        let (chunked, of_chunks) = vector("lengths={fixed: [1100]}", "chunked");
        assert_eq!(of_chunks, 2 * of_whole, "{name}");
        assert!(largest_difference(&whole, &chunked) < 1e-5, "{name}: {}", largest_difference(&whole, &chunked));
    }
}

/// Decoders, with sinks and with several query heads for each head of keys.
#[test]
fn queries_of_long_prefill_calls_are_computed_in_chunks() {
    let room = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..1100).map(|id| 5 + id * 7 % 60).collect();
    for (family, attention) in
        [("gpt_oss-default", "per_head"), ("gpt_oss-default", "grouped"), ("qwen3-default", "grouped")]
    {
        let source = room.path().join(format!("{family}-{attention}"));
        model::copy(&folder::repository("tests/fixtures/families").join(family), &source);
        model::edit_json(&source.join("config.json"), |config| config["max_position_embeddings"] = json!(1200));
        let attention = format!("attention={attention}");
        let last = |lengths: &str, label: &str| {
            let model = convert(&source, &source.join(label), &["context=1100", &attention, lengths]);
            let ask = ForwardOptions::last();
            model.start(1100).unwrap().forward(&tokens, &ask).unwrap().logits
        };
        let found = cosine(&last("lengths={fixed: [1, 1100]}", "long"), &last("lengths={range: [1, 4]}", "short"));
        assert!(found > 0.999_999, "{family}, {attention}: {found}");
    }
}

#[test]
fn hidden_states_vectors_and_logits_agree_with_transformers_in_every_form() {
    let forms: [&[&str]; 5] = [
        &[],
        &["layout=bc1s", "attention=grouped", "linear=linear", "shards.layers=each"],
        &["linear=matmul", "norm=layer_norm_concat"],
        &["numerics.scale=0.125", "attention=grouped", "shards.layers=each"],
        &["context=64", "lengths.fixed=[48, 64]", "norm=naive"],
    ];
    let all: Vec<_> = CASES.iter().flat_map(|case| forms.map(|form| (*case, form))).collect();
    let compared = all.par_iter().map(|(case, form)| {
        let golden = Golden::read(&fixture(case).join("golden.safetensors"));
        let config = folder::json(&fixture(case).join("config.json"));
        let config = config.get("text_config").unwrap_or(&config);
        let layers = ["num_hidden_layers", "n_layers", "n_layer"].iter().find_map(|key| config[key].as_u64()).unwrap();
        let each = (0..layers).map(|layer| [layer, layer + 1]).collect::<Vec<_>>();
        let each = format!("shards.layers={}", serde_json::to_string(&each).unwrap());
        let mut sets: Vec<&str> =
            form.iter().map(|set| if *set == "shards.layers=each" { each.as_str() } else { *set }).collect();
        // fp16 doesn't hold the epsilons of some norms in the form that needs them whole
        let tiny = ["bert-mean", "bert-tokens", "distilbert", "electra", "albert", "nomic"]
            .iter()
            .any(|name| case.starts_with(name));
        let small = tiny || ["bert", "deberta", "embeddinggemma"].iter().any(|name| case.starts_with(name));
        if form.contains(&"norm=layer_norm_concat") && small {
            sets.retain(|set| *set != "norm=layer_norm_concat");
        }
        // nor the root of the smallest, scaled
        if tiny {
            sets.retain(|set| *set != "numerics.scale=0.125");
        }
        let room = tempfile::tempdir().unwrap();
        let model = convert(&fixture(case), &room.path().join("b"), &sets);
        let name = format!("{case} {form:?}");
        let facts = &model.bundle().model;
        // the types of a pair are no matter of plain runs
        if golden.text.types.is_empty() {
            let chunks = if sets.iter().any(|set| set.contains("fixed")) {
                Chunking::Largest
            } else {
                Chunking::Pattern(vec![3, 1, 4])
            };
            // of causal classifiers, the head norms the last ones
            let causal = facts.sequence_classification().is_some_and(|found| found.causal);
            let count = if causal { layers as usize } else { usize::MAX };
            for (layer, found) in hidden(&model, &golden.text, chunks).iter().enumerate().take(count) {
                let expected = &golden.tensors[&format!("hidden.{layer}")];
                let rows = found.chunks(facts.hidden_size as usize).zip(expected.chunks(facts.hidden_size as usize));
                let worst = rows.map(|(found, expected)| cosine(found, expected)).fold(1.0, f64::min);
                assert!(worst > 0.99999, "{name}: hidden {layer}: {worst}");
            }
        }
        match &facts.task {
            Task::TextEmbedding(embedding) => {
                assert!(model.bundle().functions.iter().all(|entry| matches!(entry.stage, Stage::Layers { .. })));
                assert_eq!(embedding.bidirectional, *case != "qwen3-embedding");
                let embedder = Embedder::new(&model, None).unwrap();
                let (found, expected) = (embedder.embed(&golden.text).unwrap(), &golden.tensors["embedding"]);
                assert_eq!(found.len(), embedder.dimension());
                assert!(cosine(&found, expected) > 0.99999, "{name}");
                assert!(largest_difference(&found, expected) < 2e-3, "{name}: of the same length, too");
                let states = embedder.states(&golden.text).unwrap();
                assert!(cosine(&states, &golden.tensors[&format!("hidden.{layers}")]) > 0.99999, "{name}");
            }
            Task::SequenceClassification(classification) => {
                let (found, expected) = (encode::classify(&model, &golden.text).unwrap(), &golden.tensors["logits"]);
                assert_eq!(found.len(), classification.labels.len());
                assert!(largest_difference(&found, expected) < 3e-3, "{name}: {found:?} {expected:?}");
            }
            Task::TokenClassification(classification) => {
                let (found, expected) = (token_logits(&model, &golden.text), &golden.tensors["logits"]);
                assert_eq!(found.len(), classification.label_set.labels.len() * golden.text.ids.len());
                assert!(cosine(&found, expected) > 0.99999, "{name}");
                assert!(largest_difference(&found, expected) < 5e-3, "{name}");
            }
            other => panic!("{name}: {other:?}"),
        }
        1
    });
    assert_eq!(compared.sum::<usize>(), CASES.len() * forms.len());
}

/// Every encoder on Apple's Core AI runtime: in single precision as exact as the executor, and in half precision but
/// for its products.
#[test]
fn vectors_and_logits_agree_with_transformers_on_apples_runtime() {
    let Some(options) = crate::coreai_runtime::runtime() else { return };
    let compare = |case: &&str| {
        let golden = Golden::read(&fixture(case).join("golden.safetensors"));
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("b");
        convert(&fixture(case), &path, &["context=64", "lengths.fixed=[48, 64]"]);
        let problem = |(how, least, most): (Arithmetic, f64, f32)| {
            let model = crate::coreai_runtime::opened(&path, &options, how).unwrap_or_else(|e| panic!("{case}: {e}"));
            let (found, expected) = match &model.bundle().model.task {
                Task::TextEmbedding(_) => (Embedder::new(&model, None).unwrap().embed(&golden.text), "embedding"),
                Task::TokenClassification(_) => (Ok(token_logits(&model, &golden.text)), "logits"),
                _ => (encode::classify(&model, &golden.text), "logits"),
            };
            let (found, expected) = (found.unwrap(), &golden.tensors[expected]);
            let classes = matches!(model.bundle().model.task, Task::SequenceClassification(_));
            let wrong = match classes {
                true => largest_difference(&found, expected) > most,
                false => !(cosine(&found, expected) > least),
            };
            wrong.then(|| format!("{case}, {how:?}: {found:?}"))
        };
        let of_half = (Arithmetic::Own, LEAST_COSINE_F16, MOST_DIFFERENCE_F16);
        [(Arithmetic::Single, 0.99999, 3e-3), of_half].into_iter().find_map(problem)
    };
    let problems: Vec<String> = CASES.par_iter().filter_map(compare).collect();
    assert!(problems.is_empty(), "{problems:#?}");
}

/// Biases and scores of distances are those of the last bucket for all tokens that are farther apart than its distance.
#[test]
fn scores_of_distant_tokens_agree_with_transformers() {
    for (case, last) in [("mpnet-mean", "hidden.2"), ("deberta-mean", "hidden.3")] {
        let golden = Golden::read(&fixture(case).join("golden-long.safetensors"));
        assert_eq!(golden.text.ids.len(), 150);
        for sets in [
            &[][..],
            &["attention=grouped", "layout=bc1s"],
            &["lengths.fixed=[48, 160]"],
            &["lengths.fixed=[150, 155]", "context=155", "attention=grouped"],
        ] {
            let room = tempfile::tempdir().unwrap();
            let model = convert(&fixture(case), &room.path().join("b"), sets);
            let embedder = Embedder::new(&model, None).unwrap();
            let (found, states) = (embedder.embed(&golden.text).unwrap(), embedder.states(&golden.text).unwrap());
            assert!(cosine(&found, &golden.tensors["embedding"]) > 0.99999, "{case} {sets:?}");
            assert!(cosine(&states, &golden.tensors[last]) > 0.99999, "{case} {sets:?}");
        }
    }
}

/// Difference of two of transformers' logits at the end of a text, in several forms of the graph.
#[test]
fn a_decoder_scores_pairs_by_two_logits() {
    let source = folder::repository("tests/fixtures/families/qwen3-default");
    let golden = Golden::read(&source.join("golden.safetensors"));
    let (tokens, logits) = (golden.text.ids.len(), &golden.tensors["logits"]);
    let last = &logits[logits.len() - logits.len() / tokens..];
    let reranker = "reranker={positive: 7, negative: 12, prompt: {text: '{query} {document}'}}";
    for form in
        [&[][..], &["state=unified", "lengths.fixed=[1, 8]"], &["attention=grouped", "layout=bc1s", "state=host"]]
    {
        let room = tempfile::tempdir().unwrap();
        let model = convert(&source, &room.path().join("b"), &[&[reranker, "context=64"], form].concat());
        let found = encode::classify(&model, &golden.text).unwrap();
        assert_eq!(found.len(), 1);
        assert!((found[0] - (last[7] - last[12])).abs() < 3e-3, "{form:?}: {found:?} {} {}", last[7], last[12]);
    }
}

#[test]
fn a_reranker_joins_pairs_by_its_prompt() {
    let source = folder::repository("tests/fixtures/families/qwen2-tokenizer");
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("b");
    let prompt = "{before: \"<|im_start|>user\\n\", text: \"Q: {query}\\nD: {document}\", after: \"<|im_end|>\"}";
    let reranker = format!("reranker={{positive: 7, negative: 12, prompt: {prompt}}}");
    let model = convert(&source, &out, &[&reranker, "context=64", "name=reranker"]);
    let tokenizer = Tokenizer::of(model.bundle(), model.folder()).unwrap();
    // special tokens in what a client sends are letters
    let document = "a <|im_end|> b {query}";
    let pair = encode::text_or_pair(&model, &tokenizer, "the sea", Some(document), false).unwrap();
    let whole = format!("<|im_start|>user\nQ: the sea\nD: {document}<|im_end|>");
    assert_eq!(tokenizer.decode(&pair.ids, true).unwrap(), whole);
    let end = tokenizer.id("<|im_end|>").unwrap();
    assert_eq!((pair.ids.iter().filter(|id| **id == end).count(), pair.ids.last()), (1, Some(&end)));
    // a text alone is taken as it is
    let alone = encode::text_or_pair(&model, &tokenizer, "the sea", None, false).unwrap();
    assert_eq!(tokenizer.decode(&alone.ids, true).unwrap(), "the sea");

    let server = Server::start(&out, &[]);
    let body = json!({"query": "the sea", "documents": ["the sea is singing", document]});
    let answer = server.post("/v1/rerank", &body).json();
    let score = |index: u64| {
        let results = answer["results"].as_array().unwrap();
        results.iter().find(|result| result["index"] == index).unwrap()["relevance_score"].as_f64().unwrap()
    };
    let logit = f64::from(encode::classify(&model, &pair).unwrap()[0]);
    assert!((score(1) - 1.0 / (1.0 + (-logit).exp())).abs() < 1e-6, "{answer}");
    assert_ne!(score(0), score(1));
    assert!(server.post("/v1/completions", &json!({"prompt": "a"})).status == 400);

    let refused = |source: &Path, set: &str| {
        let (source, out) = (source.to_str().unwrap(), room.path().join("refused"));
        let (code, _, stderr) =
            folder::run(&["convert", "--source", source, "--out", out.to_str().unwrap(), "--set", set]);
        assert_ne!(code, 0, "{set}");
        stderr
    };
    let beyond = reranker.replace("positive: 7", "positive: 700000");
    assert!(refused(&source, &beyond).contains("token 700000 is beyond its"));
    assert!(refused(&source, &reranker.replace("{query}", "")).contains("it needs {query} exactly once"));
    assert!(refused(&source, &reranker.replace("12", "7")).contains("reranker.negative"));
    assert!(refused(&fixture("bert-mean"), &reranker).contains("it doesn't continue texts"));

    // a folder that names its tokens is no generator of text, and its tokens are the manifest's
    let scoring = room.path().join("scoring");
    model::copy(&source, &scoring);
    let modules = json!([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
    ]);
    std::fs::write(scoring.join("modules.json"), modules.to_string()).unwrap();
    std::fs::create_dir(scoring.join("1_LogitScore")).unwrap();
    let name = |positive: u64, negative: Option<u64>| {
        let tokens = json!({"true_token_id": positive, "false_token_id": negative});
        std::fs::write(scoring.join("1_LogitScore/config.json"), tokens.to_string()).unwrap();
    };
    name(7, Some(12));
    let unset = refused(&scoring, "context=64");
    assert!(unset.contains("`reranker` isn't set") && unset.contains("positive: 7, negative: 12"), "{unset}");
    convert(&scoring, &room.path().join("scored"), &[&reranker, "context=64"]);
    name(7, Some(13));
    assert!(refused(&scoring, &reranker).contains("`reranker` names others"));
    name(7, None);
    assert!(refused(&scoring, &reranker).contains("a score by token 7 alone isn't supported"));
}

#[test]
fn fp16_arithmetic_and_int8_weights_stay_close() {
    CASES.par_iter().for_each(|case| {
        let golden = Golden::read(&fixture(case).join("golden.safetensors"));
        for (set, precision, least) in [
            ("quant.weights=none", Precision::F16, 0.999),
            ("quant={weights: int8, granularity: per_channel}", Precision::F32, 0.99),
        ] {
            let room = tempfile::tempdir().unwrap();
            let out = room.path().join("b");
            convert(&fixture(case), &out, &[set]);
            let model = LoadedModel::on_cpu(&out, precision).unwrap();
            let (found, expected) = match golden.tensors.get("embedding") {
                Some(expected) => (Embedder::new(&model, None).unwrap().embed(&golden.text).unwrap(), expected),
                None if case.ends_with("tokens") => (token_logits(&model, &golden.text), &golden.tensors["logits"]),
                None => (encode::classify(&model, &golden.text).unwrap(), &golden.tensors["logits"]),
            };
            assert!(cosine(&found, expected) > least, "{case} {set}: {found:?} {expected:?}");
        }
    });
}

/// Facts of the bundle, output of the verbs, and refused requests.
#[test]
fn texts_become_files_of_vectors() {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("b");
    let model = convert(&fixture("bert-mean"), &out, &[]);
    let bundle = Bundle::read(&out).unwrap();
    let embedding = bundle.model.embedding().unwrap();
    assert_eq!((embedding.pooling, embedding.normalize, embedding.bidirectional), (Pooling::Mean, true, true));
    assert_eq!((bundle.model.contexts.as_slice(), model.longest_text()), (&[64][..], Some(64)));
    let digested: Vec<&str> = bundle.source.files.iter().map(|file| file.file.as_str()).collect();
    assert_eq!(
        digested,
        ["1_Pooling/config.json", "config.json", "model.safetensors", "modules.json", "tokenizer.json"]
    );

    let file = room.path().join("v.safetensors");
    let (bundle_path, file_path) = (out.to_str().unwrap(), file.to_str().unwrap());
    let embed = |more: &[&str]| {
        let (code, stdout, stderr) = folder::run(&[&["embed", bundle_path, "--out", file_path], more].concat());
        (code, stdout, stderr)
    };
    let shape = |name: &str| {
        SafeTensors::deserialize(&std::fs::read(&file).unwrap()).unwrap().tensor(name).unwrap().shape().to_vec()
    };
    // texts that are longer than the tokenizer's own truncation, and a text alone
    assert_eq!(embed(&["--prompt", "the sea is singing to the seas", "--prompt", "sea"]).0, 0);
    assert_eq!(shape("embedding"), [2, 24]);
    let both = Golden::read(&file).tensors.remove("embedding").unwrap();
    assert_eq!(embed(&["--prompt", "sea"]).0, 0);
    assert_eq!(shape("embedding"), [24]);
    assert_eq!(Golden::read(&file).tensors["embedding"], both[24..]);
    let tokenizer = Tokenizer::of(model.bundle(), model.folder()).unwrap();
    let text = tokenizer.encode_whole("sea", None, true).unwrap();
    assert_eq!(text, EncodedText { ids: vec![2, 59, 3], types: vec![0; 3] });
    assert_eq!(embed(&["--ids", "2,59,3", "--pooling", "none"]).0, 0);
    assert_eq!(shape("hidden"), [3, 24]);
    let states = &Golden::read(&file).tensors["hidden"];
    assert_eq!(embed(&["--ids", "2,59,3", "--pooling", "cls"]).0, 0);
    assert!(cosine(&Golden::read(&file).tensors["embedding"], &states[..24]) > 0.999_999);

    let refused = |arguments: &[&str]| {
        let (code, _, stderr) = folder::run(arguments);
        (code, stderr.lines().next().unwrap_or_default().to_owned())
    };
    let long = vec!["5"; 65].join(",");
    let (code, error) = refused(&["embed", bundle_path, "--ids", &long, "--out", file_path]);
    assert_eq!((code, error.contains("65") && error.contains("64")), (2, true), "{error}");
    let (_, _, stderr) = folder::run(&["embed", bundle_path, "--ids", &long, "--out", file_path]);
    assert!(stderr.contains("help: give a shorter text"), "{stderr}");
    // the longest text that fits, to the last token
    assert_eq!(embed(&["--ids", &vec!["5"; 64].join(",")]).0, 0);
    let (code, error) = refused(&["run", bundle_path, "--prompt", "sea"]);
    assert_eq!(
        (code, error.ends_with("the model gives vectors of texts; it doesn't continue one")),
        (2, true),
        "{error}"
    );
    let (code, error) = refused(&[
        "convert",
        "--source",
        fixture("bert-mean").to_str().unwrap(),
        "--set",
        "context=65",
        "--out",
        room.path().join("other").to_str().unwrap(),
    ]);
    assert_eq!((code, error.contains("64 learned positions, too few for a context of 65")), (2, true), "{error}");
}

/// Ids of transformers' MPNetTokenizer over this vocabulary; folders often name no class.
#[test]
fn a_vocabulary_alone_can_be_mpnets_tokenizer() {
    let room = tempfile::tempdir().unwrap();
    let source = room.path().join("mpnet");
    model::copy(&fixture("mpnet-mean"), &source);
    let words = "<s> <pad> </s> [UNK] the sea ##s is calm . <mask> la ##y".replace(' ', "\n");
    std::fs::write(source.join("vocab.txt"), words).unwrap();
    for (name, config) in [("named", json!({"tokenizer_class": "MPNetTokenizer"})), ("unnamed", json!({}))] {
        std::fs::write(source.join("tokenizer_config.json"), config.to_string()).unwrap();
        let model = convert(&source, &room.path().join(name), &[]);
        let tokenizer = Tokenizer::of(model.bundle(), model.folder()).unwrap();
        let pair = tokenizer.encode_whole("The séas is calm.", Some("lay"), false).unwrap();
        assert_eq!(pair.ids, [0, 4, 5, 6, 7, 8, 9, 2, 2, 11, 12, 2], "{name}");
        assert_eq!(pair.types, [0; 12], "{name}");
    }
}

/// Ids are SentencePiece's, with the special tokens of the class, and ALBERT's those of transformers; `spm.model` names
/// no class, as published.
#[test]
fn a_sentence_piece_model_alone_is_a_tokenizer() {
    let room = tempfile::tempdir().unwrap();
    for (case, mask, typed) in
        [("deberta-mean", "[MASK]", Some(2)), ("xlm-roberta-dense", "<mask>", None), ("albert-mean", "[MASK]", Some(3))]
    {
        let model = convert(&fixture(case), &room.path().join(case), &[]);
        let tokenizer = Tokenizer::of(model.bundle(), model.folder()).unwrap();
        let golden = folder::json(&fixture(case).join("tokenizer-golden.json"));
        for text in golden["texts"].as_array().unwrap() {
            let pair = text["pair"].as_str();
            let found = tokenizer.encode_whole(text["text"].as_str().unwrap(), pair, true).unwrap();
            assert_eq!(json!(found.ids), text["ids"], "{case}: {text}");
            if let (Some(between), Some(_)) = (typed, pair) {
                let second = found.ids.iter().position(|id| *id == between).unwrap() + 1;
                let expected: Vec<u32> = (0..found.ids.len()).map(|index| u32::from(index >= second)).collect();
                assert_eq!(found.types, expected);
            }
        }
        assert!(tokenizer.is_special(tokenizer.encode(mask).unwrap()[1]));
    }
    // other classes have other rules
    let source = room.path().join("source");
    model::copy(&fixture("deberta-mean"), &source);
    std::fs::write(source.join("tokenizer_config.json"), r#"{"tokenizer_class": "BarthezTokenizer"}"#).unwrap();
    let out = room.path().join("other");
    let (code, _, stderr) =
        folder::run(&["convert", "--source", source.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    assert!(code == 0 && stderr.contains("the rules of `BarthezTokenizer` aren't in its files"), "{stderr}");
}

/// Prompts, lower case, limits and the pooling of prompts, as sentence-transformers does it.
#[test]
fn texts_are_prepared_as_sentence_transformers_does() {
    for (settings, cut) in [("skipped", true), ("kept", true), ("bare", true)] {
        let room = tempfile::tempdir().unwrap();
        let (source, out) = (room.path().join("source"), room.path().join("b"));
        model::copy(&fixture("bert-mean"), &source);
        model::copy(&folder::repository("tests/fixtures/sentence_transformers").join(settings), &source);
        let model = convert(&source, &out, &["name=m"]);
        let (embedder, tokenizer) =
            (Embedder::new(&model, None).unwrap(), Tokenizer::of(model.bundle(), &out).unwrap());
        let golden: Json =
            serde_json::from_str(&std::fs::read_to_string(source.join("vectors.json")).unwrap()).unwrap();
        let server = Server::start(&out, &[]);
        let mut cuts = 0;
        for case in golden["cases"].as_array().unwrap() {
            let (text, prompt) = (case["text"].as_str().unwrap(), case["prompt"].as_str());
            let expected: Vec<f32> = serde_json::from_value(case["vector"].clone()).unwrap();
            let prepared = embedder.prepare(&tokenizer, text, prompt, true).unwrap();
            let found = embedder.embed_prepared(&prepared).unwrap();
            // a text that is cut within its prompt has nothing left to pool
            let length = expected.iter().map(|value| value * value).sum::<f32>().sqrt();
            let near = if length == 0.0 {
                found.iter().all(|value| *value == 0.0)
            } else {
                cosine(&found, &expected) > 0.999_99
            };
            assert!(near && largest_difference(&found, &expected) < 2e-3, "{settings} {case}: {found:?}");
            cuts += usize::from(prepared.cut > 0);
            let answer = server.post("/v1/embeddings", &json!({"input": text, "prompt_name": prompt})).json();
            let served: Vec<f32> = serde_json::from_value(answer["data"][0]["embedding"].clone()).unwrap();
            assert!(largest_difference(&found, &served) < 1e-6, "{settings} {case}: {answer}");
            assert_eq!(answer["anec"]["truncated"] == json!([0]), prepared.cut > 0, "{answer}");
            if prepared.cut > 0 {
                let whole = json!({"input": text, "prompt_name": prompt, "truncate": false});
                assert_eq!(server.post("/v1/embeddings", &whole).json()["error"]["code"], "context_length_exceeded");
            }
        }
        assert_eq!(cuts > 0, cut, "{settings}");
        let answer = server.post("/v1/embeddings", &json!({"input": "sea", "prompt_name": "other"})).json();
        assert_eq!(answer["error"]["param"], "prompt_name", "{answer}");
    }
}

/// Spans of labelled tokens are those of transformers' pipeline, and are what is redacted. The special tokens around a
/// text are the tokenizer's.
#[test]
fn tokens_are_labelled_as_transformers_pipeline_does() {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("b");
    let model = convert(&fixture("bert-tokens"), &out, &[]);
    let classification = model.bundle().model.classification().unwrap();
    assert_eq!((classification.label_set.band, classification.halo, classification.stride), (WHOLE_TEXT, 0, 0));
    assert!(folder::json(&out.join("bundle.json"))["model"]["task"].get("band").is_none());
    let out = out.to_str().unwrap();
    let golden = folder::json(&fixture("bert-tokens").join("spans-golden.json"));
    let cases = golden["texts"].as_array().unwrap();
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let (code, stdout, stderr) = folder::run(&["classify", out, "--prompt", text, "--json"]);
        assert_eq!(code, 0, "{text}: {stderr}");
        let found: Json = serde_json::from_str(&stdout).unwrap();
        let span = |span: &Json| json!({"label": span["label"], "start": span["start"], "end": span["end"]});
        let found: Vec<Json> = found["spans"].as_array().unwrap().iter().map(span).collect();
        assert_eq!(&found, case["spans"].as_array().unwrap(), "{text}");

        let redactor = Redactor::new(&model, &[], Biases::default(), None).unwrap();
        let (redacted, _) = redactor.redact(text).unwrap();
        let mut expected = text.to_owned();
        for span in found.iter().rev() {
            let [start, end] = ["start", "end"].map(|key| span[key].as_u64().unwrap() as usize);
            expected.replace_range(start..end, &format!("<{}>", span["label"].as_str().unwrap()));
        }
        assert_eq!(redacted, expected);
    }
    let outside = |case: &Json| {
        let covered = case["spans"]
            .as_array()
            .unwrap()
            .iter()
            .map(|span| span["end"].as_u64().unwrap() - span["start"].as_u64().unwrap());
        covered.sum::<u64>() < case["text"].as_str().unwrap().replace(' ', "").len() as u64
    };
    assert!(cases.iter().any(outside), "no text has tokens outside of spans");

    // longer than a call
    let (code, _, stderr) = folder::run(&["classify", out, "--prompt", &"the sea is ".repeat(40)]);
    assert_ne!(code, 0);
    assert!(stderr.contains("122 tokens"), "{stderr}");
    // a calibration is about labels that depend on each other
    let biases = Biases { background_stay: 1.0, ..Biases::default() };
    let error = Redactor::new(&model, &[], biases, None).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("B-, I-, E- and S-"), "{error}");
}

/// The gates that need no golden, and the golden that anec makes itself, pass.
#[test]
fn bundles_pass_the_gates() {
    let cases = ["bert-mean", "albert-mean", "mpnet-labels", "deberta-labels", "modernbert-labels", "qwen3-embedding"];
    for case in [&cases[..], &["distilbert-tokens", "modernbert-tokens"]].concat() {
        let room = tempfile::tempdir().unwrap();
        let out = room.path().join("b");
        convert(&fixture(case), &out, &[]);
        let out = out.to_str().unwrap();
        let (code, stdout, stderr) = folder::run(&["validate", out, "--structure", "--numerics"]);
        assert_eq!(code, 0, "{case}: {stdout}{stderr}");
        // a text goes through the one function that it fits into: those of other sizes get texts of their own
        let sizes = room.path().join("sizes");
        convert(&fixture(case), &sizes, &["lengths.fixed=[8, 24, 64]"]);
        let page = sizes.join("report.html");
        let gates = ["validate", sizes.to_str().unwrap(), "--structure", "--numerics"];
        for _ in 0..2 {
            // the report lies beside what it is about, and doesn't make that wrong
            let (code, stdout, stderr) = folder::run(&[&gates[..], &["--html", page.to_str().unwrap()]].concat());
            assert_eq!(code, 0, "{case}: {stdout}{stderr}");
        }
        let golden = room.path().join("golden.safetensors");
        let golden = golden.to_str().unwrap();
        let source = fixture(case);
        let source = source.to_str().unwrap();
        let tokens = (0..30).map(|i| (i * i % 59 + 3).to_string()).collect::<Vec<_>>().join(",");
        let (code, stdout, stderr) =
            folder::run(&["golden", "--source", source, "--ids", &tokens, "--hidden", "--out", golden]);
        assert_eq!(code, 0, "{case}: {stdout}{stderr}");
        let (code, stdout, stderr) = folder::run(&["validate", out, "--parity", "--golden", golden]);
        assert_eq!(code, 0, "{case}: {stdout}{stderr}");
    }
}

#[test]
fn the_server_gives_vectors_to_the_official_client() {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("b");
    convert(&fixture("bert-mean"), &out, &["name=minilm"]);
    let server = Server::start(&out, &[]);
    let floats = |body: Json| server.post("/v1/embeddings", &body).json();
    let answer = floats(json!({"model": "minilm", "input": ["the sea", "sea"]}));
    assert_eq!(answer["usage"]["prompt_tokens"], 7);
    assert_eq!(answer["data"][1]["embedding"].as_array().unwrap().len(), 24);
    let long = floats(json!({"input": "sea ".repeat(63), "truncate": false}));
    assert_eq!((&long["error"]["code"], &long["error"]["param"]), (&json!("context_length_exceeded"), &json!("input")));
    assert_eq!(floats(json!({"input": "sea", "dimensions": 8}))["error"]["param"], "dimensions");
    assert!(floats(json!({"input": []}))["error"]["message"].as_str().unwrap().contains("no texts"));
    let reply = server.post("/v1/rerank", &json!({"query": "sea", "documents": ["sea"]}));
    assert_eq!(reply.status, 400, "{}", reply.text());
    client::run("tests/openai_embeddings.py", &server, "minilm");
}

#[test]
fn the_server_ranks_documents() {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("b");
    let model = convert(&fixture("bert-reranker"), &out, &["name=reranker"]);
    let server = Server::start(&out, &[]);
    let documents = ["the sea is singing", "a b c", "the the the"];
    let body = json!({"query": "sea", "documents": [documents[0], {"text": documents[1]}, documents[2]], "return_documents": true});
    let answer = server.post("/v1/rerank", &body).json();
    let results = answer["results"].as_array().unwrap();
    let scores: Vec<f64> = results.iter().map(|result| result["relevance_score"].as_f64().unwrap()).collect();
    assert!(results.len() == 3 && scores.is_sorted_by(|a, b| a >= b), "{answer}");
    let tokenizer = Tokenizer::of(model.bundle(), model.folder()).unwrap();
    for result in results {
        let document = documents[result["index"].as_u64().unwrap() as usize];
        assert_eq!(result["document"]["text"], document);
        let pair = tokenizer.encode_whole("sea", Some(document), false).unwrap();
        assert_eq!((pair.types.first(), pair.types.last()), (Some(&0), Some(&1)));
        let logit = f64::from(encode::classify(&model, &pair).unwrap()[0]);
        assert!((result["relevance_score"].as_f64().unwrap() - 1.0 / (1.0 + (-logit).exp())).abs() < 1e-6);
    }
    let mut body = body;
    body["top_n"] = json!(1);
    let best = server.post("/v1/rerank", &body).json();
    assert_eq!(best["results"].as_array().unwrap().as_slice(), &results[..1]);
    // the same pair by the command
    let (code, stdout, stderr) =
        folder::run(&["classify", out.to_str().unwrap(), "--prompt", "sea", "--pair", documents[0], "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let label: Json = serde_json::from_str(&stdout).unwrap();
    let first = results.iter().find(|result| result["index"] == 0).unwrap();
    let score = label["labels"][0]["probability"].as_f64().unwrap();
    assert!((score - first["relevance_score"].as_f64().unwrap()).abs() < 1e-4, "{label}");
}

/// Texts, and transformers' vectors of them.
fn minilm_golden() -> (Vec<String>, Vec<Vec<f32>>) {
    let fixture = folder::repository("tests/fixtures/all-minilm-l6-v2");
    let texts = folder::json(&fixture.join("texts.json"));
    let texts = texts.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect();
    let golden = Golden::read(&fixture.join("embeddings.safetensors"));
    (texts, golden.tensors["embedding"].chunks(384).map(<[f32]>::to_vec).collect())
}

#[test]
fn the_published_minilm_gives_the_vectors_of_transformers() {
    let Some(source) = testing::real_model("all-minilm-l6-v2") else { return };
    let (texts, expected) = minilm_golden();
    let counts = Golden::read(&folder::repository("tests/fixtures/all-minilm-l6-v2/embeddings.safetensors")).text.ids;
    let room = tempfile::tempdir().unwrap();
    let model = convert(&source, &room.path().join("b"), &[]);
    let tokenizer = Tokenizer::of(model.bundle(), model.folder()).unwrap();
    let embedder = Embedder::new(&model, None).unwrap();
    for ((text, expected), count) in texts.iter().zip(&expected).zip(counts) {
        let text = tokenizer.encode_whole(text, None, true).unwrap();
        assert_eq!(text.ids.len(), count as usize);
        let found = cosine(&embedder.embed(&text).unwrap(), expected);
        assert!(found > 0.99999, "{count} tokens: {found}");
    }
}
