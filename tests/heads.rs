//! The LM head in every form: whole, in pieces, with the index of the largest logit or the largest ones instead of all,
//! and in one package with the layers. The texts are the same, and the logits, to the last bit.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::bundle::Bundle;
use anec::exec::Precision;
use anec::package::{self, WriteOptions};
use anec::runtime::sampling::Sampling;
use anec::runtime::{
    Chunking, ForwardOptions, Generation, GenerationRequest, LoadedModel, NextTokens, Positions, forward_together,
};
use anec::validate::parity::{self, Candidate, parity};
use anec::validate::verdict::{GateReport, Verdict};
use anec::validate::{Golden, Thresholds};
use anec::{Converter, Gate, Manifest, Validator};
use rayon::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value as Json, json};

use crate::common::folder::{repository, run};
use crate::common::http::Server;
use crate::common::model::{copy, edit_tensors};

/// Form with all logits, to which others are compared.
const LOGITS: &str = "lm_head={split: 1}";

fn converted(source: &Path, room: &Path, name: &str, sets: &[&str]) -> Arc<LoadedModel> {
    let sets: Vec<String> =
        ["quant.weights=none", "context=64"].iter().chain(sets).map(|set| set.to_string()).collect();
    let manifest = Manifest::from_yaml(&format!("source: {}", source.display()), "heads", &sets).unwrap();
    let out = room.join(name);
    Converter::new(manifest).out(&out).compile(false).convert().unwrap_or_else(|error| panic!("{name}: {error}"));
    LoadedModel::on_cpu(&out, Precision::F32).unwrap()
}

/// Folders of all decoders that are compared with transformers, with the tokens of a golden text.
fn decoders() -> Vec<(PathBuf, Vec<u32>)> {
    let root = repository("tests/fixtures/families");
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(root.join("cases.json")).unwrap()).unwrap();
    let case = |case: &serde_json::Value| {
        let folder = root.join(case["hugging_face"].as_str()?);
        let bytes = std::fs::read(root.join(case["goldens"][0]["file"].as_str()?)).ok()?;
        let golden = SafeTensors::deserialize(&bytes).ok()?;
        let tokens = golden.tensor("tokens").ok()?.data().as_chunks::<4>().0.iter().copied().map(u32::from_le_bytes);
        Some((folder, tokens.collect()))
    };
    cases["cases"].as_array().unwrap().iter().filter_map(case).collect()
}

fn greedy(model: &Arc<LoadedModel>, prompt: &[u32]) -> Vec<u32> {
    written(model, prompt, Sampling::default())
}

fn written(model: &Arc<LoadedModel>, prompt: &[u32], sampling: Sampling) -> Vec<u32> {
    let prompt = prompt.to_vec();
    let request = GenerationRequest { prompt, max_tokens: 12, sampling, ..GenerationRequest::default() };
    request.start(model).unwrap().run().unwrap().ids
}

#[test]
fn greedy_texts_by_index_are_those_by_logits_in_every_family() {
    let decoders = decoders();
    assert!(decoders.len() > 60, "{}", decoders.len());
    let room = tempfile::tempdir().unwrap();
    decoders.par_iter().enumerate().for_each(|(number, (folder, tokens))| {
        let prompt = &tokens[..tokens.len().min(17)];
        let form = |name: &str, sets: &[&str]| converted(folder, room.path(), &format!("{number}-{name}"), sets);
        let expected = greedy(&form("logits", &[LOGITS]), prompt);
        let top = format!("lm_head={{top_k: 40, split: {}}}", 1 + number % 5);
        let pieces = (1..=5).map(|pieces| format!("lm_head={{argmax: true, split: {pieces}}}"));
        for (index, set) in pieces.chain([top, "lm_head={argmax: true, split: none}".to_owned()]).enumerate() {
            let name = format!("largest-{index}");
            let model = form(&name, &[&set]);
            assert!(!model.gives_logits() && model.largest_logits().is_some());
            assert_eq!(greedy(&model, prompt), expected, "{}: {set}", folder.display());
            std::fs::remove_dir_all(room.path().join(format!("{number}-{name}"))).unwrap();
        }
    });
}

#[test]
fn a_model_in_one_package_has_the_logits_of_one_in_pieces_to_the_last_bit() {
    let room = tempfile::tempdir().unwrap();
    decoders().par_iter().enumerate().for_each(|(number, (folder, tokens))| {
        let tokens = &tokens[..tokens.len().min(24)];
        let lengths = ["lengths={range: [1, 4]}", "lengths={fixed: [1, 4]}"][number % 2];
        let contexts = if number % 2 == 1 { "context=[32, 64]" } else { "context=64" };
        let logits =
            |name: &str, split: &str| -> Vec<Vec<f32>> {
                let model = converted(folder, room.path(), &format!("{number}-{name}"), &[lengths, contexts, split]);
                let of_chunks = |chunk: u64| {
                    let ask = ForwardOptions::all(Chunking::Pattern(vec![chunk]));
                    model.start(tokens.len() as u64).unwrap().forward(tokens, &ask).unwrap().logits
                };
                // texts that share their calls, too
                let mut sessions = [model.start(20).unwrap(), model.start(20).unwrap()];
                let texts = sessions
                    .iter_mut()
                    .zip([&tokens[..5], &tokens[1..6]])
                    .map(|(session, tokens)| NextTokens { session, tokens, logits: Positions::Last, largest: false });
                let together = forward_together(texts.collect()).into_iter().map(|output| output.unwrap().logits);
                [of_chunks(1), of_chunks(4)].into_iter().chain(together).collect()
            };
        let one = logits("one", "lm_head.split=none");
        assert!(one == logits("pieces", "lm_head.split=3"), "{} {lengths}", folder.display());
        let bundle = Bundle::read(&room.path().join(format!("{number}-one"))).unwrap();
        assert_eq!(bundle.packages.len(), 1);
        assert!(bundle.check().is_empty());
    });
}

/// A model in which every row of the head is there twice, so that every logit has an equal one.
fn with_ties(room: &Path) -> PathBuf {
    let folder = room.join("ties");
    copy(&repository("tests/fixtures/families/llama-bias"), &folder);
    edit_tensors(&folder.join("model.safetensors"), |tensors| {
        let head = tensors.iter_mut().find(|(name, ..)| name == "lm_head.weight").unwrap();
        let (rows, bytes) = (head.2[0], head.3.len() / head.2[0]);
        for row in rows / 2..rows / 2 * 2 {
            let twin = row - rows / 2;
            head.3.copy_within(twin * bytes..(twin + 1) * bytes, row * bytes);
        }
    });
    folder
}

#[test]
fn of_equal_logits_the_lowest_token_wins_everywhere() {
    let room = tempfile::tempdir().unwrap();
    let source = with_ties(room.path());
    let prompt: Vec<u32> = (3..12).collect();
    let plain = converted(&source, room.path(), "plain", &[LOGITS]);
    let half = plain.bundle().model.vocab_size as u32 / 2;
    let expected = greedy(&plain, &prompt);
    let warm = |seed| Sampling { temperature: 1.5, top_k: 7, top_p: 0.9, seed, ..Sampling::default() };
    let sampled: Vec<Vec<u32>> = (0..8).map(|seed| written(&plain, &prompt, warm(seed))).collect();
    assert!(sampled.iter().flatten().any(|token| *token >= half), "the other twin is drawn, too");
    assert!(expected.iter().all(|token| *token < half), "the first of two twins");
    for split in ["1", "2", "3", "4", "5", "none"] {
        let index = converted(
            &source,
            room.path(),
            &format!("argmax-{split}"),
            &[&format!("lm_head={{argmax: true, split: {split}}}")],
        );
        assert_eq!(greedy(&index, &prompt), expected, "{split}");
        let top = converted(
            &source,
            room.path(),
            &format!("top-{split}"),
            &[&format!("lm_head={{top_k: 9, split: {split}}}")],
        );
        assert_eq!(greedy(&top, &prompt), expected, "{split}");
        for (seed, expected) in sampled.iter().enumerate() {
            assert_eq!(written(&top, &prompt, warm(seed as u64)), *expected, "{split}, seed {seed}");
        }
    }
}

#[test]
fn what_needs_all_logits_is_refused_with_the_reason_and_the_remedy() {
    let room = tempfile::tempdir().unwrap();
    let source = repository("tests/fixtures/families/llama-default");
    let [index, top] = [("argmax", "lm_head.argmax=true"), ("top", "lm_head.top_k=4")]
        .map(|(name, set)| converted(&source, room.path(), name, &[set]));
    let both = converted(&source, room.path(), "both", &["lm_head={top_k: 4, logits: true}"]);
    let plain = converted(&source, room.path(), "plain", &[LOGITS]);
    let prompt = vec![3, 5, 8];
    let request = || GenerationRequest { prompt: prompt.clone(), max_tokens: 6, ..GenerationRequest::default() };
    let sampling = |sampling| GenerationRequest { sampling, ..request() };
    let warm = |top_k| sampling(Sampling { temperature: 1.0, top_k, ..Sampling::default() });
    let ids = |model: &Arc<LoadedModel>, request: GenerationRequest| {
        let ids = request.start(model).and_then(|mut generation| generation.run()).map(|output| output.ids);
        ids.map_err(|error| (error.to_string(), error.help().unwrap_or_default()))
    };
    for (request, what) in [
        (GenerationRequest { logprobs: Some(2), ..request() }, "log-probabilities need"),
        (GenerationRequest { logit_bias: vec![(3, 1.0)], ..request() }, "biases of tokens need"),
        (sampling(Sampling { repetition_penalty: 1.2, ..Sampling::default() }), "penalties need"),
        (warm(0), "sampling"),
        (warm(5), "sampling"),
    ] {
        let (problem, remedy) = ids(&index, request.clone()).unwrap_err();
        assert!(problem.starts_with(what) && problem.ends_with("gives only the largest one"), "{problem}");
        assert_eq!(remedy, "generate greedily (`temperature` 0), or convert the model with `lm_head.logits: true`");
        let (problem, remedy) = ids(&top, request.clone()).unwrap_err();
        assert!(problem.starts_with(what) && problem.ends_with("gives only the 4 largest ones"), "{problem}");
        assert!(remedy.contains("`top_k`") && remedy.contains("`lm_head.logits: true`"), "{remedy}");
        // with the logits beside them, everything is as without them
        assert_eq!(ids(&both, request.clone()).unwrap(), ids(&plain, request).unwrap());
    }
    // one of one is greedy
    assert_eq!(ids(&index, warm(1)).unwrap(), ids(&plain, request()).unwrap());
    for k in 1..=4 {
        assert_eq!(ids(&top, warm(k)).unwrap(), ids(&plain, warm(k)).unwrap());
    }
    // a pass that wants logits
    let problem = index.start(8).unwrap().forward(&prompt, &ForwardOptions::last()).unwrap_err().to_string();
    assert_eq!(problem, "the call needs the logits of all tokens, and the bundle's head gives only the largest one");
}

#[test]
fn drafts_and_shared_calls_change_no_token() {
    let room = tempfile::tempdir().unwrap();
    let source = repository("tests/fixtures/families/llama-default");
    let index = converted(&source, room.path(), "index", &["lm_head={argmax: true, split: 3}"]);
    let plain = converted(&source, room.path(), "plain", &[LOGITS]);
    let prompts: [&[u32]; 3] = [&[3, 5, 8, 3, 5, 8, 3], &[1, 2, 9], &[7, 7, 7, 7, 2]];
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&plain, prompt)).collect();
    let request = |prompt: &&[u32]| GenerationRequest {
        prompt: prompt.to_vec(),
        max_tokens: 12,
        speculation: 3,
        ..GenerationRequest::default()
    };
    let start = |prompt| request(prompt).start(&index).unwrap().with_draft(&index, 3).unwrap();
    let mut texts: Vec<Generation> = prompts.iter().map(start).collect();
    while texts.iter().any(Generation::is_unfinished) {
        Generation::compute_together(&mut texts);
        for text in &mut texts {
            text.step().unwrap();
        }
    }
    let found: Vec<Vec<u32>> = texts.iter().map(|text| text.output().ids).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_head_without_logits_is_judged_by_those_inside_it() {
    let room = tempfile::tempdir().unwrap();
    let source = repository("tests/fixtures/families/qwen3-default");
    converted(&source, room.path(), "plain", &[LOGITS]);
    let golden = Golden::read(&source.join("golden.safetensors")).unwrap();
    let validated = |name: &str| {
        let report = Validator::new(room.path().join(name)).golden_data(golden.clone()).run().unwrap().report;
        report.gates.into_iter().find(|gate| gate.gate == parity::GATE).unwrap()
    };
    let judged = |gate: &GateReport| gate.checks.iter().filter(|check| check.verdict == Verdict::Passed).count();
    let plain = validated("plain");
    for (name, set) in [("argmax", "lm_head={argmax: true, split: 3}"), ("one", "lm_head={top_k: 5, split: none}")] {
        let model = converted(&source, room.path(), name, &[set]);
        // the CPU executor sees the logits inside of the program: as much is measured as of logits that are outputs
        let gate = validated(name);
        assert_eq!(gate.verdict, plain.verdict, "{set}: {gate:#?}");
        let claim = "the head gives the tokens of the largest logits";
        let own = gate.checks.iter().filter(|check| check.claim == claim && check.verdict == Verdict::Passed);
        assert_eq!(own.count(), 2, "in both precisions: {gate:#?}");
        assert!(judged(&gate) > judged(&plain) - 10);
        // where only the outputs are seen, tokens are compared, and the rest is unproven
        let outputs = [Candidate { name: "outputs".into(), model, layers: false }];
        let gate = parity(&outputs, &golden, &Thresholds::built_in().parity).unwrap();
        assert_eq!(gate.verdict, Verdict::Unproven, "{gate:#?}");
        let unproven: Vec<_> = gate.checks.iter().filter(|check| check.verdict == Verdict::Unproven).collect();
        assert!(unproven.iter().any(|check| check.detail.as_ref().is_some_and(|why| why.contains("lm_head.logits"))));
        assert!(gate.checks.iter().any(|check| check.claim == "the likeliest tokens are the golden's"));
    }
}

#[test]
fn a_head_that_gives_another_row_fails_the_gate() {
    let room = tempfile::tempdir().unwrap();
    let source = repository("tests/fixtures/families/qwen3-default");
    converted(&source, room.path(), "argmax", &["lm_head={argmax: true, split: 1}"]);
    let (package, changed) = (room.path().join("argmax/lm_head.mlpackage"), room.path().join("changed.mlpackage"));
    let mut program = package::open(&package).unwrap().program;
    let ops = program.functions.iter_mut().flat_map(|function| &mut function.block.ops);
    ops.filter(|op| op.operator == "reduce_argmax").for_each(|op| op.operator = "reduce_argmin".into());
    package::write(&program, &changed, &WriteOptions::default()).unwrap();
    std::fs::remove_dir_all(&package).unwrap();
    std::fs::rename(&changed, &package).unwrap();
    let validator = Validator::new(room.path().join("argmax")).golden(source.join("golden.safetensors"));
    let report = validator.gates([Gate::Parity]).run().unwrap().report;
    let failed: Vec<&str> = report.gates[0]
        .checks
        .iter()
        .filter(|check| check.verdict == Verdict::Failed)
        .map(|check| check.claim.as_str())
        .collect();
    assert_eq!(failed, ["the head gives the tokens of the largest logits"; 2], "in both precisions");
}

#[test]
fn a_server_of_the_largest_logits_samples_from_them_and_refuses_the_rest() {
    let room = tempfile::tempdir().unwrap();
    let text = |answer: &Json| answer["choices"][0]["text"].as_str().unwrap().to_owned();
    let ask = |more: Json| {
        let mut body = json!({"model": "demo", "prompt": "It was a dark night", "max_tokens": 12, "seed": 5});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let server = |name: &str, set: &str| {
        let out = room.path().join(name);
        let path = out.to_str().unwrap();
        let (code, _, stderr) = run(&["convert", "--no-measure", "-m", "demo", "--set", set, "--out", path]);
        assert_eq!(code, 0, "{stderr}");
        Server::start(&out, &[])
    };
    let [plain, index, top] = [("plain", "context=64"), ("index", "lm_head.argmax=true"), ("top", "lm_head.top_k=8")]
        .map(|(name, set)| server(name, set));
    let greedy = text(&plain.complete(ask(json!({"temperature": 0}))));
    assert_eq!(text(&index.complete(ask(json!({})))), greedy, "an index makes greedy texts by default");
    assert_eq!(text(&top.complete(ask(json!({"temperature": 0})))), greedy);
    let of_eight = json!({"temperature": 1.0, "top_k": 8, "top_p": 1.0});
    assert_eq!(text(&top.complete(ask(of_eight.clone()))), text(&plain.complete(ask(of_eight))));
    for (server, more, words) in [
        (&index, json!({"temperature": 1.0}), "sampling needs the logits of all tokens"),
        (&top, json!({"temperature": 1.0, "top_k": 9}), "sample from the 8 most likely tokens or fewer"),
        (&top, json!({"logprobs": 2}), "log-probabilities need"),
        (&index, json!({"response_format": {"type": "json_object"}}), "a grammar needs"),
    ] {
        let reply = server.post("/v1/completions", &ask(more));
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert!(reply.text().contains(words), "{}", reply.text());
    }
}

#[test]
fn heads_that_a_model_cant_have_are_refused() {
    for (source, sets, words) in [
        ("llama-default", &["lm_head.top_k=4000"][..], "`lm_head.top_k` asks for 4000 of"),
        ("llama-default", &["lm_head.split=none", "shards.max_mb=0.001"], "all layers and the LM head need"),
        ("privacy_filter-default", &["lm_head.argmax=true"], "for models that generate text"),
        ("privacy_filter-default", &["lm_head.split=none"], "for models that generate text"),
    ] {
        let source = repository(&format!("tests/fixtures/families/{source}"));
        let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
        let manifest = Manifest::from_yaml(&format!("source: {}", source.display()), "heads", &sets).unwrap();
        let room = tempfile::tempdir().unwrap();
        let error = Converter::new(manifest).out(room.path().join("out")).compile(false).convert().err().unwrap();
        assert!(error.to_string().contains(words), "{error}");
        assert!(error.help().is_some());
    }
}
