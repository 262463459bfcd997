//! Apple's contract for language models: signatures and logits of Apple's own exporter (`tests/fixtures/coreai_llm`),
//! and goldens of transformers, with the calls of Apple's engine in Python (`tests/coreai_llm.py`) on Apple's runtime.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anec::Converter;
use anec::base::Progress;
use anec::convert::coreai_llm;
use anec::coreai::lower::LoweringChoices;
use anec::coreai::{self, AssetOptions, in_single_precision};
use anec::exec::Precision;
use anec::manifest::Manifest;
use anec::runtime::{Chunking, ForwardOptions, LoadedModel};
use anec::validate::Golden;
use rayon::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::common::folder::{json, repository, run};
use crate::coreai_runtime::{compared, runtime};

/// Smallest cosine between the logits of a position of our asset and of Apple's, both in half precision; measured:
/// 3.8e-5 from 1.
const LEAST_COSINE: f64 = 0.99995;

/// Smallest cosine between the logits of a position and the executor's, both in single precision.
const LEAST_SINGLE_COSINE: f64 = 0.99999;

/// Smallest cosine with transformers' logits, whose embeddings aren't rounded to int8.
const LEAST_ROUNDED_COSINE: f64 = 0.98;

/// Families that the contract is for.
const FAMILIES: [&str; 12] = [
    "gemma3-default",
    "gemma3-linear",
    "llama-default",
    "llama-llama3",
    "mistral-default",
    "mistral-window",
    "phi3-default",
    "qwen2-window",
    "qwen2-yarn",
    "qwen3-default",
    "seed_oss-default",
    "smollm3-interval",
];

/// A model converted for the contract.
fn converted(source: &Path, out: &Path, sets: &[&str]) -> PathBuf {
    let mut all = vec![format!("source={}", source.display())];
    all.extend(sets.iter().map(|set| (*set).to_owned()));
    let manifest = Manifest::from_yaml("{contract: coreai-llm, quant: {weights: none}}", "test", &all).unwrap();
    let path = out.join("model.anec");
    Converter::new(manifest)
        .out(&path)
        .compile(false)
        .convert()
        .unwrap_or_else(|error| panic!("{}: {error}", source.display()));
    path
}

/// The asset of a bundle, exported into a folder.
fn exported(bundle: &Path, out: &Path, choices: LoweringChoices) -> anec::base::Result<PathBuf> {
    let done = coreai_llm::export(bundle, out, choices, &Progress::hidden())?;
    Ok(out.join(done.asset))
}

/// The form of an asset that the runtime for Linux runs in full.
fn for_linux() -> LoweringChoices {
    let mut choices = LoweringChoices::wide_products(true);
    choices.plain_memory = true;
    choices
}

/// The asset in single precision.
fn single(asset: &Path) -> PathBuf {
    let wide = in_single_precision(&coreai::open(asset).unwrap().module).unwrap();
    let path = asset.with_file_name("single.aimodel");
    coreai::write(&wide, &path, &AssetOptions::default()).unwrap();
    path
}

/// Output of Apple's side.
fn python(arguments: &[&str]) -> Vec<u8> {
    let python = std::env::var_os("ANEC_PYTHON").expect("the runtime was there");
    let output = Command::new(python).arg(repository("tests/coreai_llm.py")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Positions and logits of each text of a file.
type Logits = BTreeMap<String, (Vec<i32>, Vec<f32>)>;

fn logits(path: &Path) -> Logits {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |view: TensorView<'_>| -> Vec<f32> {
        let data = view.data();
        match view.dtype() {
            Dtype::F16 => data.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
            _ => data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        }
    };
    let names = file.names().into_iter().filter(|name| !name.ends_with(".positions"));
    names
        .map(|name| {
            let positions = file.tensor(&format!("{name}.positions")).unwrap();
            let positions = positions.data().as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
            (name.to_owned(), (positions, floats(file.tensor(name).unwrap())))
        })
        .collect()
}

/// Logits of an asset in the calls of Apple's engine.
fn called(asset: &Path, texts: &Path, decoded: usize) -> Logits {
    let out = asset.with_extension("logits");
    let [asset, texts, path] = [asset, texts, &out].map(|path| path.to_str().unwrap());
    python(&["logits", asset, texts, path, &decoded.to_string()]);
    logits(&out)
}

/// A file of one text.
fn text_file(path: &Path, tokens: &[u32]) {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::I32, vec![tokens.len()], &bytes).unwrap();
    safetensors::serialize_to_file([("text", view)], None, path).unwrap();
}

fn fixture(name: &str) -> PathBuf {
    repository("tests/fixtures/coreai_llm").join(name)
}

/// Names, types, order and memory constraints, as Apple's compiler prints them.
#[test]
fn signatures_are_those_of_apples_exporter() {
    if runtime().is_none() {
        return;
    }
    let expected = json(&fixture("signatures.json"));
    for name in ["tied", "untied"] {
        let folder = tempfile::tempdir().unwrap();
        let bundle = converted(&fixture(name), folder.path(), &["context=512"]);
        let asset = exported(&bundle, &folder.path().join("apple"), LoweringChoices::default()).unwrap();
        let found: serde_json::Value =
            serde_json::from_slice(&python(&["signatures", asset.to_str().unwrap()])).unwrap();
        let functions = expected[name].as_object().unwrap();
        assert!(functions.len() == 16 && found.as_object().unwrap().len() == 16, "{found:#}");
        for (function, signature) in functions {
            assert_eq!(&found[function], signature, "{name}: {function}");
        }
    }
}

/// Prompts of 20, 150 and 300 tokens and four tokens after each, in contexts of 256 and 512.
#[test]
fn logits_are_those_of_apples_asset() {
    if runtime().is_none() {
        return;
    }
    for name in ["tied", "untied"] {
        let folder = tempfile::tempdir().unwrap();
        let bundle = converted(&fixture(name), folder.path(), &["context=512"]);
        let expected = logits(&fixture(&format!("logits-{name}.safetensors")));
        assert_eq!(expected.keys().collect::<Vec<_>>(), ["150", "20", "300"]);
        let asset = exported(&bundle, &folder.path().join("apple"), for_linux()).unwrap();
        let found = called(&asset, &fixture("texts.safetensors"), 4);
        for (text, (positions, expected)) in &expected {
            let (own, found) = &found[text];
            assert_eq!(own, positions, "{name}, {text}");
            let (cosine, moved) = compared(found, expected, expected.len() / positions.len());
            assert!(cosine > LEAST_COSINE && moved == 0, "{name}, {text}: cosine {cosine}, {moved} other tokens");
        }
    }
}

/// A copy of a model whose embeddings are multiples of one scale, so that an int8 table loses nothing.
fn rounded(source: &Path, out: &Path) -> PathBuf {
    let folder = out.join("source");
    std::fs::create_dir_all(&folder).unwrap();
    for entry in std::fs::read_dir(source).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_file() {
            std::fs::copy(&entry, folder.join(entry.file_name().unwrap())).unwrap();
        }
    }
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let name = file.names().into_iter().find(|name| name.ends_with("embed_tokens.weight")).unwrap().to_owned();
    let table = file.tensor(&name).unwrap();
    let data = table.data();
    let values: Vec<f32> = match table.dtype() {
        Dtype::F16 => data.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
        Dtype::BF16 => data.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
        _ => data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    };
    let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
    let scale = half::f16::from_f32(largest / 127.0).to_f32();
    let step = |value: f32| (value / scale).round().clamp(-127.0, 127.0) * scale;
    let values: Vec<f32> = values.into_iter().map(step).collect();
    let changed: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let replaced = TensorView::new(Dtype::F32, table.shape().to_vec(), &changed).unwrap();
    let tensors =
        file.tensors().into_iter().map(|(of, view)| if of == name { (of, replaced.clone()) } else { (of, view) });
    let tensors: Vec<(String, TensorView<'_>)> = tensors.collect();
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    folder
}

/// Rows of logits at positions.
fn rows(logits: &[f32], positions: &[i32], width: usize) -> Vec<f32> {
    positions.iter().flat_map(|position| &logits[*position as usize * width..][..width]).copied().collect()
}

/// Logits of the executor on a bundle, in its largest calls.
fn executed(bundle: &Path, tokens: &[u32]) -> (Vec<f32>, usize) {
    let model = LoadedModel::on_cpu(bundle, Precision::F32).unwrap();
    let all = ForwardOptions::all(Chunking::Largest);
    let logits = model.start(tokens.len() as u64).unwrap().forward(tokens, &all).unwrap().logits;
    (logits, model.bundle().model.vocab_size as usize)
}

/// Families with windows, layers without rotation, scaled embeddings, and more channels of keys than hidden ones:
/// against the executor on the exported bundle, and against transformers.
#[test]
fn families_compute_their_logits_by_the_contract() {
    if runtime().is_none() {
        return;
    }
    let room = tempfile::tempdir().unwrap();
    let families = repository("tests/fixtures/families");
    let is_wide = |family: &&str| -> bool {
        let config = json(&families.join(family).join("config.json"));
        let of = |key: &str| config[key].as_u64();
        let head_dim =
            of("head_dim").unwrap_or_else(|| of("hidden_size").unwrap() / of("num_attention_heads").unwrap());
        of("num_key_value_heads").unwrap() * head_dim > of("hidden_size").unwrap()
    };
    assert!(FAMILIES.iter().any(is_wide), "no family has more channels of keys than hidden ones");
    let fault = |family: &&str| -> Option<String> {
        let folder = room.path().join(family);
        let source = rounded(&families.join(family), &folder);
        let bundle = converted(&source, &folder, &["context=256"]);
        let asset = exported(&bundle, &folder.join("apple"), for_linux()).unwrap_or_else(|e| panic!("{family}: {e}"));
        let golden = Golden::read(&families.join(family).join("golden.safetensors")).unwrap();
        let text = folder.join("text.safetensors");
        text_file(&text, &golden.tokens);
        let (positions, found) = &called(&single(&asset), &text, 3)["text"];
        let (own, width) = executed(&bundle, &golden.tokens);
        let (cosine, moved) = compared(found, &rows(&own, positions, width), width);
        let (golden_cosine, _) = compared(found, &rows(&golden.logits, positions, width), width);
        let right = cosine > LEAST_SINGLE_COSINE && moved == 0 && golden_cosine > LEAST_ROUNDED_COSINE;
        (!right).then(|| {
            format!(
                "{family}: cosine {cosine} with the executor, {golden_cosine} with transformers, {moved} other tokens"
            )
        })
    };
    let problems: Vec<String> = FAMILIES.par_iter().filter_map(fault).collect();
    assert!(problems.is_empty(), "{problems:#?}");
}

/// Windows across contexts.
#[test]
fn windows_reach_over_contexts() {
    if runtime().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = rounded(&repository("tests/fixtures/families/mistral-window"), folder.path());
    let bundle = converted(&source, folder.path(), &["context=512"]);
    let asset = exported(&bundle, &folder.path().join("apple"), for_linux()).unwrap();
    let tokens: Vec<u32> = (0..290).map(|i| (i * 37 + 11) % 97).collect();
    let (own, width) = executed(&bundle, &tokens);
    let text = folder.path().join("text.safetensors");
    text_file(&text, &tokens);
    let (positions, found) = &called(&single(&asset), &text, 2)["text"];
    let (cosine, _) = compared(found, &rows(&own, positions, width), width);
    assert!(positions.len() > 30 && cosine > LEAST_SINGLE_COSINE, "{cosine} at {positions:?}");
}

#[test]
fn a_folder_for_apples_engine_has_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = converted(&fixture("tied"), folder.path(), &["context=256", "name=small"]);
    let out = folder.path().join("small");
    let (code, said, errors) = run(&["export", bundle.to_str().unwrap(), "--coreai-llm", out.to_str().unwrap()]);
    assert_eq!((code, said.lines().count()), (0, 1), "{said}{errors}");
    assert!(said.starts_with("small.aimodel: 10 functions, context 256, in "), "{said}");
    let metadata = json(&out.join("metadata.json"));
    assert_eq!((&metadata["metadata_version"], &metadata["kind"]), (&"0.2".into(), &"llm".into()));
    assert_eq!(metadata["assets"]["main"], "small.aimodel");
    let language = &metadata["language"];
    assert_eq!((&language["vocab_size"], &language["max_context_length"]), (&256.into(), &256.into()));
    for file in ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "small.aimodel/main.mlirb"] {
        assert!(out.join(file).exists(), "{file}");
    }
    // the same bytes again
    let again = folder.path().join("again");
    exported(&bundle, &again, LoweringChoices::default()).unwrap();
    let bytes = |folder: &Path| std::fs::read(folder.join("small.aimodel/main.mlirb")).unwrap();
    assert!(bytes(&out) == bytes(&again));
}

/// Models that Apple's engine has no place for are refused by name.
#[test]
fn models_without_a_place_are_refused() {
    let families = repository("tests/fixtures/families");
    let refused = |source: &Path, sets: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let bundle = converted(source, folder.path(), sets);
        let error = exported(&bundle, &folder.path().join("out"), LoweringChoices::default()).unwrap_err();
        assert!(!folder.path().join("out").exists());
        format!("{error}; {}", error.help().unwrap_or_default())
    };
    let text = refused(&families.join("qwen3_moe-default"), &["context=256", "experts=split"]);
    assert!(text.contains("experts in functions of their own") && text.contains("`format: coreai`"), "{text}");
    let text = refused(&families.join("gemma4-dense"), &["context=256"]);
    assert!(text.contains("embeddings for each layer"), "{text}");
    let text = refused(&families.join("qwen3-default"), &["context=256"]);
    assert!(text.contains("expected a multiple of 8"), "{text}");
    let folder = tempfile::tempdir().unwrap();
    let source = families.join("lfm2-default");
    let manifest = Manifest::from_yaml("contract: coreai-llm", "test", &[format!("source={}", source.display())]);
    let converter = Converter::new(manifest.unwrap()).out(folder.path().join("lfm2.anec")).compile(false);
    let error = converter.convert().map(drop).unwrap_err();
    assert!(error.to_string().contains("recurrent") && error.help().unwrap().contains("`contract`"), "{error}");
    let manifest = Manifest::from_yaml("context: 256", "test", &[format!("source={}", fixture("tied").display())]);
    let bundle = folder.path().join("model.anec");
    Converter::new(manifest.unwrap()).out(&bundle).compile(false).convert().unwrap();
    let error = exported(&bundle, &folder.path().join("out"), LoweringChoices::default()).unwrap_err();
    assert!(error.help().unwrap().contains("`contract: coreai-llm`"), "{error}");
}
