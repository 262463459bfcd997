//! The whole line on real models, Qwen2.5-Coder-0.5B-Instruct and Gemma 3 270M in Q4_K_M and SmolLM2-135M-Instruct in
//! Q4_1: from their GGUF to text. What is right comes from transformers (folders of the same names in tests/fixtures).
//! Without the models every test says loudly that it didn't run.

use crate::common::folder;
use anec_testing as testing;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anec::exec::Precision;
use anec::runtime::chat::{Chat, ChatTemplate, Message};
use anec::runtime::{Chunking, ForwardOptions, GenerationRequest, LoadedModel, Tokenizer};
use anec::validate::LogitMeasures;
use folder::{json, repository, run};
use serde_json::Value as Json;

/// A model: its file and the folder of what is expected.
struct Real {
    file: &'static str,
    fixture: &'static str,
}

const QWEN: Real = Real { file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", fixture: "qwen2.5-coder-0.5b" };
const GEMMA: Real = Real { file: "gemma-3-270m-q4_k_m.gguf", fixture: "gemma-3-270m" };
const SMOLLM2: Real = Real { file: "smollm2-135m-instruct-q4_1.gguf", fixture: "smollm2-135m" };

/// Ways of dividing 64 tokens into calls of at most 4.
const CHUNKINGS: [&[u64]; 3] = [&[1], &[4], &[3, 1, 4, 2]];

impl Real {
    fn fixture(&self, name: &str) -> PathBuf {
        repository("tests/fixtures").join(self.fixture).join(name)
    }
}

/// Converts a source into `out`.
fn convert(source: &Path, out: &Path, sets: &[&str]) {
    // the name is part of a package: it must not be the source's
    let mut arguments = vec!["convert", "--no-measure", "--set", "name=qwen", "--source", source.to_str().unwrap()];
    arguments.extend(["--out", out.to_str().unwrap()]);
    arguments.extend(sets.iter().flat_map(|set| ["--set", set]));
    let (code, _, stderr) = run(&arguments);
    assert_eq!(code, 0, "{stderr}");
}

/// Prints past the test harness, which would keep it to itself.
fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Logits of transformers in logits.safetensors: tokens, the positions with all logits, those logits, and the five best
/// tokens at every position.
struct Reference {
    tokens: Vec<u32>,
    positions: Vec<usize>,
    logits: Vec<f32>,
    best: Vec<[u32; 5]>,
}

impl Reference {
    fn of(real: &Real) -> Self {
        let bytes = std::fs::read(real.fixture("logits.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let integers = |name: &str| -> Vec<u32> {
            let words = file.tensor(name).unwrap().data().chunks_exact(4);
            words.map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
        };
        let halves = file.tensor("logits").unwrap().data().chunks_exact(2);
        Reference {
            tokens: integers("tokens"),
            positions: integers("positions").iter().map(|position| *position as usize).collect(),
            logits: halves.map(|half| half::f16::from_le_bytes(half.try_into().unwrap()).to_f32()).collect(),
            best: integers("top_ids").chunks_exact(5).map(|ids| ids.try_into().unwrap()).collect(),
        }
    }

    /// The rows of `logits`, which has one for every token, that the reference has.
    fn same_positions(&self, logits: &[f32]) -> Vec<f32> {
        let width = self.width();
        self.positions.iter().flat_map(|position| &logits[position * width..(position + 1) * width]).copied().collect()
    }

    fn width(&self) -> usize {
        self.logits.len() / self.positions.len()
    }

    /// How far `logits`, which has a row for every token, are from the reference's.
    fn measure(&self, logits: &[f32]) -> LogitMeasures {
        LogitMeasures::of(&self.same_positions(logits), &self.logits, self.width())
    }
}

fn logits(model: &Arc<LoadedModel>, tokens: &[u32], chunking: &[u64]) -> Vec<f32> {
    let ask = ForwardOptions::all(Chunking::Pattern(chunking.to_vec()));
    model.start(tokens.len() as u64).unwrap().forward(tokens, &ask).unwrap().logits
}

fn largest(row: &[f32]) -> u32 {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32
}

#[test]
fn without_quantization_qwen_says_what_transformers_says() {
    let Some(source) = testing::real_model(QWEN.file) else { return };
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("fp16");
    without_quantization(&QWEN, &source, &out);
    in_half_precision(&QWEN, &out);
    let folder = room.path().join("folder");
    if hugging_face_folder(&source, &folder) {
        let twin = room.path().join("twin");
        convert(&folder, &twin, &["quant.weights=none"]);
        same_packages(&out, &twin);
    }
}

#[test]
fn without_quantization_gemma_says_what_transformers_says() {
    let Some(source) = testing::real_model(GEMMA.file) else { return };
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("fp16");
    without_quantization(&GEMMA, &source, &out);
    // its own hidden states reach 104,000, more than fp16 can hold
    in_half_precision(&GEMMA, &out);
}

#[test]
fn without_quantization_smollm2_says_what_transformers_says() {
    let Some(source) = testing::real_model(SMOLLM2.file) else { return };
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("fp16");
    without_quantization(&SMOLLM2, &source, &out);
    in_half_precision(&SMOLLM2, &out);
}

/// Converts a model with fp16 weights; the logits and the continuations are transformers'.
fn without_quantization(real: &Real, source: &Path, out: &Path) {
    convert(source, out, &["quant.weights=none"]);
    let model = LoadedModel::on_cpu(out, Precision::F32).unwrap();
    let reference = Reference::of(real);
    for chunking in CHUNKINGS {
        let found = logits(&model, &reference.tokens, chunking);
        let measures = reference.measure(&found);
        let name = real.fixture;
        tell(&format!(
            "{name}, fp16 weights, T = {chunking:?}: cosine {:.7} with transformers' logits",
            measures.cosine
        ));
        assert!(measures.cosine > 0.99999, "T = {chunking:?}: {measures:?}");
        assert!(measures.norm_ratio[0] > 0.999 && measures.norm_ratio[1] < 1.001, "{measures:?}");
        let rows = found.chunks_exact(reference.width());
        assert_eq!(rows.len(), reference.tokens.len());
        let same = rows.zip(&reference.best).filter(|(row, best)| largest(row) == best[0]).count();
        assert_eq!(same, reference.tokens.len(), "the likeliest tokens are transformers'");
    }
    greedy_texts(real, &model, out);
}

/// With every result rounded to half precision, as on the Neural Engine, the logits stay close.
fn in_half_precision(real: &Real, out: &Path) {
    let reference = Reference::of(real);
    let half = LoadedModel::on_cpu(out, Precision::F16).unwrap();
    let measures = reference.measure(&logits(&half, &reference.tokens, &[4]));
    tell(&format!("{}, fp16 weights and arithmetic: cosine {:.6}", real.fixture, measures.cosine));
    assert!(measures.cosine > 0.999, "{measures:?}");
}

/// How many texts are written to their end; of the others, so many tokens.
const WHOLE_TEXTS: usize = 3;
const BEGINNING: usize = 24;

/// Greedy texts equal transformers' token by token, and so do the tokens of the prompts.
fn greedy_texts(real: &Real, model: &Arc<LoadedModel>, bundle: &Path) {
    let tokenizer = Tokenizer::of(model.bundle(), bundle).unwrap();
    let golden = json(&real.fixture("golden.json"));
    let ids = |json: &Json| -> Vec<u32> { serde_json::from_value(json.clone()).unwrap() };
    let prompts = golden["prompts"].as_array().unwrap();
    assert!(prompts.len() >= 7);
    for (index, golden) in prompts.iter().enumerate() {
        let name = golden["name"].as_str().unwrap();
        let text = golden["prompt"].as_str().unwrap();
        let prompt = match golden.get("messages") {
            Some(messages) => {
                let template = ChatTemplate::of(model.bundle(), bundle, &tokenizer).unwrap();
                let messages: Vec<Message> = serde_json::from_value(messages.clone()).unwrap();
                let chat = Chat::new(messages);
                assert_eq!(template.render(&chat).unwrap(), text, "{name}");
                template.encode(&tokenizer, &chat).unwrap()
            }
            None => tokenizer.encode(text).unwrap(),
        };
        assert_eq!(prompt, ids(&golden["prompt_ids"]), "{name}");
        let mut expected = ids(&golden["greedy"]);
        let is_whole = index < WHOLE_TEXTS;
        if !is_whole {
            expected.truncate(BEGINNING);
        }
        let request = GenerationRequest { prompt, max_tokens: expected.len(), ..GenerationRequest::default() };
        let generation = request.start(model).unwrap().run().unwrap();
        assert_eq!(generation.ids, expected, "{name}");
        if is_whole {
            assert_eq!(tokenizer.decode(&generation.ids, true).unwrap(), golden["text"].as_str().unwrap(), "{name}");
        }
        let rate = generation.timings.decode_tps;
        tell(&format!("{name}: {} tokens are transformers', {rate:.1} per second", expected.len()));
    }
}

/// Writes the model as a Hugging Face folder with gguf-py, if there is a Python that has it.
fn hugging_face_folder(source: &Path, folder: &Path) -> bool {
    let Some(python) = std::env::var_os("ANEC_PYTHON") else {
        tell("!!! SKIPPED: the real model as a Hugging Face folder: ANEC_PYTHON is not set !!!");
        return false;
    };
    let output = Command::new(python).arg(QWEN.fixture("hf_folder.py")).arg(source).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    true
}

/// Two bundles have the same packages and host tensors, byte for byte.
fn same_packages(a: &Path, b: &Path) {
    let [a, b] = [a, b].map(|folder| json(&folder.join("bundle.json")));
    for key in ["packages", "functions", "host"] {
        assert_eq!(a[key], b[key], "{key}");
    }
    let packages = a["packages"].as_array().unwrap();
    assert!(packages.len() >= 4 && packages.iter().all(|p| p["files"][0]["digest"].is_string()));
    tell(&format!("the Hugging Face folder gives the same {} packages, byte for byte", packages.len()));
}

#[test]
fn int8_keeps_qwen_close() {
    let Some(source) = testing::real_model(QWEN.file) else { return };
    let [per_tensor, per_channel] = int8(&QWEN, &source);
    assert!(per_channel > 0.999, "per_channel: {per_channel}");
    // 0.89 without the transforms
    assert!(per_tensor > 0.998, "per_tensor: {per_tensor}");
}

#[test]
fn int8_keeps_gemma_close_per_channel() {
    let Some(source) = testing::real_model(GEMMA.file) else { return };
    let [per_tensor, per_channel] = int8(&GEMMA, &source);
    assert!(per_channel > 0.995, "per_channel: {per_channel}");
    // 0.991 without the transforms
    assert!(per_tensor > 0.998, "per_tensor: {per_tensor}");
}

/// Least cosines of the logits with transformers', over two ways of dividing the text into calls: for one scale for
/// each tensor, and one for each channel.
fn int8(real: &Real, source: &Path) -> [f64; 2] {
    let room = tempfile::tempdir().unwrap();
    let reference = Reference::of(real);
    let width = reference.width();
    ["per_tensor", "per_channel"].map(|granularity| {
        let out = room.path().join(granularity);
        convert(source, &out, &[&format!("quant.granularity={granularity}")]);
        let model = LoadedModel::on_cpu(&out, Precision::F32).unwrap();
        let found = [CHUNKINGS[0], CHUNKINGS[2]].map(|chunking| logits(&model, &reference.tokens, chunking));
        // however the text is divided into calls, the same is computed
        let same = LogitMeasures::of(&found[0], &found[1], width);
        assert!(same.cosine > 0.99999, "{granularity}: {same:?}");
        // and with activations of 16 bits nearly so, nearer than in half precision
        let [short, half] = [Precision::I16, Precision::F16].map(|precision| {
            let model = LoadedModel::on_cpu(&out, precision).unwrap();
            LogitMeasures::of(&found[1], &logits(&model, &reference.tokens, CHUNKINGS[2]), width)
        });
        assert!(short.cosine > 0.99999 && short.cosine >= half.cosine, "{granularity}: {short:?} {half:?}");
        tell(&format!(
            "{}, int8 {granularity}: cosine of i16 with f32 {:.7}, of f16 {:.7}",
            real.fixture, short.cosine, half.cosine
        ));
        let mut cosines = Vec::new();
        for (found, chunking) in found.iter().zip([CHUNKINGS[0], CHUNKINGS[2]]) {
            let measures = reference.measure(found);
            let rows = found.chunks_exact(width).zip(&reference.best);
            let top1 = rows.filter(|(row, best)| largest(row) == best[0]).count();
            let each: Vec<String> = reference
                .same_positions(found)
                .chunks_exact(width)
                .zip(reference.logits.chunks_exact(width))
                .zip(&reference.positions)
                .map(|((a, b), position)| format!("{:.5} at {position}", LogitMeasures::of(a, b, width).cosine))
                .collect();
            let tokens = reference.tokens.len();
            tell(&format!(
                "{}, int8 {granularity}, T = {chunking:?}: cosine {}; likeliest token at {top1} of {tokens}",
                real.fixture,
                each.join(", ")
            ));
            cosines.push(measures.cosine);
        }
        cosines.into_iter().fold(f64::INFINITY, f64::min)
    })
}

/// A script of the model's fixture, run by the Python that `ANEC_GENAI_PYTHON` names; returns what it prints.
fn genai(arguments: &[&str]) -> Option<String> {
    let Some(python) = std::env::var_os("ANEC_GENAI_PYTHON") else {
        let what = "a bundle of onnxruntime-genai: ANEC_GENAI_PYTHON names no Python with onnxruntime-genai, torch, transformers, gguf";
        anec::base::skipped(what);
        return None;
    };
    let output = Command::new(python).arg(QWEN.fixture("genai.py")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// A bundle as onnxruntime-genai's builder writes it, 4-bit matrices in blocks of 32: what follows each prompt is what
/// onnxruntime-genai writes with it.
fn genai_bundle_says_what_onnx_runtime_says(options: &[&str]) {
    let Some(_) = testing::real_model(QWEN.file) else { return };
    let room = tempfile::tempdir().unwrap();
    let (source, out) = (room.path().join("genai"), room.path().join("bundle"));
    if genai(&[&["build", source.to_str().unwrap()], options].concat()).is_none() {
        return;
    }
    let written: Json = serde_json::from_str(&genai(&["greedy", source.to_str().unwrap()]).unwrap()).unwrap();
    convert(&source, &out, &["quant.weights=none", "context=512"]);
    let model = LoadedModel::on_cpu(&out, Precision::F32).unwrap();
    let ids = |json: &Json| -> Vec<u32> { serde_json::from_value(json.clone()).unwrap() };
    let prompts = written["prompts"].as_array().unwrap();
    assert!(prompts.len() >= 7);
    for prompt in prompts {
        let (name, expected) = (&prompt["name"], ids(&prompt["greedy"]));
        let asked = GenerationRequest {
            prompt: ids(&prompt["prompt_ids"]),
            max_tokens: expected.len(),
            ..GenerationRequest::default()
        };
        let generation = asked.start(&model).unwrap().run().unwrap();
        assert_eq!(generation.ids, expected, "{name}");
        tell(&format!("{name}: {} tokens are onnxruntime-genai's", expected.len()));
    }
}

#[test]
fn a_genai_bundle_of_qwen_says_what_onnx_runtime_says() {
    genai_bundle_says_what_onnx_runtime_says(&[]);
}

#[test]
fn a_genai_bundle_with_one_quantized_matrix_for_embedding_and_head_does_so_too() {
    genai_bundle_says_what_onnx_runtime_says(&["--shared"]);
}
