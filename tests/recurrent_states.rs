//! Recurrent state kept in Core ML states, or carried by the host as inputs and outputs: both give the same text to the
//! last bit, in calls of every size, after resets, and with tokens taken back, drafted or reused from earlier prompts.

use crate::common::folder;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::bundle::Bundle;
use anec::bundle::FunctionEntry;
use anec::bundle::{PortDim, PortRole};
use anec::exec::Precision;
use anec::runtime::sampling::Sampling;
use anec::runtime::{Chunking, ForwardOptions, GenerationRequest, LoadedModel, PrefixCache};
use folder::run;
use serde_json::Value as Json;

/// A fixture of each family with a recurrence, and the layouts that its bundles have.
const CASES: [(&str, &[&str]); 12] = [
    ("lfm2-default", &["state=per_layer"]),
    ("lfm2-first", &["state=unified", "layout=bc1s", "lengths={fixed: [1, 3]}"]),
    ("lfm2_moe-default", &["state=unified"]),
    ("lfm2_moe-split", &["state=per_layer", "experts=routed", "lengths={fixed: [1, 4]}", "context=[32, 64]"]),
    ("qwen3_5-default", &["state=unified", "lengths={fixed: [1, 4]}"]),
    ("qwen3_5-grouped", &["state=per_layer", "shards.layers=[[0, 2], [2, LAYERS]]"]),
    ("qwen3_next-default", &["state=per_layer", "experts=split", "lengths={fixed: [1, 3]}"]),
    ("granitemoehybrid-default", &["state=unified", "experts=routed"]),
    ("granitemoehybrid-dense", &["state=per_layer", "layout=bc1s", "lengths={fixed: [1, 4]}"]),
    ("falcon_h1-grouped", &["state=unified", "shards.layers=[[0, 1], [1, LAYERS]]"]),
    ("zaya-default", &["state=per_layer", "shards.layers=[[0, 1], [1, LAYERS]]"]),
    ("zaya-sliding", &["state=unified", "lengths={fixed: [1, 2]}", "numerics.scale=0.125"]),
];

const TEXT: [u32; 19] = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3, 14, 15, 9, 26, 5, 4];

/// A fixture, converted.
fn convert(case: &str, changes: &[&str], form: &str, room: &Path) -> PathBuf {
    let source = format!("tests/fixtures/families/{case}");
    let config = std::fs::read(format!("{source}/config.json")).unwrap();
    let config: Json = serde_json::from_slice(&config).unwrap();
    let layers = config["num_hidden_layers"].to_string();
    let out = room.join(format!("{case}-{form}"));
    let context = (!changes.iter().any(|change| change.starts_with("context"))).then_some("context=64");
    let changes = changes.iter().copied().chain(context).map(|change| change.replace("LAYERS", &layers));
    let mut command: Vec<String> =
        ["convert", "--source", &source, "--out", out.to_str().unwrap()].map(Into::into).into();
    for change in changes.chain([format!("recurrent_states={form}"), "quant.weights=none".into()]) {
        command.extend(["--set".into(), change]);
    }
    let (code, _, stderr) = run(&command.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(code, 0, "{command:?}: {stderr}");
    out
}

/// Logits of all tokens, twice: the second time starts from what the first left behind, unless a reset forgets it.
fn logits(model: &Arc<LoadedModel>, chunking: &Chunking) -> [Vec<f32>; 2] {
    let mut session = model.start(TEXT.len() as u64).unwrap();
    [(); 2].map(|()| {
        session.reset().unwrap();
        session.forward(&TEXT, &ForwardOptions::all(chunking.clone())).unwrap().logits
    })
}

#[test]
fn what_the_host_carries_gives_the_same_logits() {
    let room = tempfile::tempdir().unwrap();
    for (case, changes) in CASES {
        let [ours, theirs] = ["input_output", "state"].map(|form| convert(case, changes, form, room.path()));
        for precision in [Precision::F32, Precision::F16] {
            let [host, states] = [&ours, &theirs].map(|folder| LoadedModel::on_cpu(folder, precision).unwrap());
            let mut seen = Vec::new();
            for sizes in [vec![1], vec![2], vec![3], vec![4], vec![1, 4, 2, 3], vec![4, 4, 1]] {
                let fits = |size: &u64| host.bundle().functions.iter().any(|entry| entry.tokens.allows(*size));
                if sizes.iter().all(fits) {
                    let chunking = Chunking::Pattern(sizes);
                    let (found, expected) = (logits(&host, &chunking), logits(&states, &chunking));
                    assert!(expected[0].iter().any(|logit| *logit != 0.0));
                    assert!(found == expected, "{case} {precision:?} {chunking:?}");
                    seen.push(found);
                }
            }
            assert!(seen.len() >= 2, "{case}");
            assert!(logits(&host, &Chunking::Largest) == logits(&states, &Chunking::Largest), "{case} {precision:?}");
        }
    }
}

/// The bundle says all: which inputs and outputs are one state, and that caches are states still.
#[test]
fn the_bundle_says_what_the_host_carries() {
    let room = tempfile::tempdir().unwrap();
    let mut said = String::new();
    for (case, changes) in CASES {
        let [ours, theirs] =
            ["input_output", "state"].map(|form| Bundle::read(&convert(case, changes, form, room.path())).unwrap());
        for (function, with_states) in ours.functions.iter().zip(&theirs.functions) {
            let carried = carried(function);
            let mut all: BTreeMap<String, Vec<u64>> = carried.clone();
            all.extend(function.states.iter().map(|state| (state.name.clone(), state.shape.clone())));
            let expected: BTreeMap<String, Vec<u64>> =
                with_states.states.iter().map(|state| (state.name.clone(), state.shape.clone())).collect();
            assert_eq!(all, expected, "{case}: what were states are states or carried, in the same shape");
            assert!(function.states.iter().all(|state| state.name.contains("cache")), "{case}");
            if !expected.is_empty() {
                let names = |of: Vec<&str>| if of.is_empty() { "none".into() } else { of.join(" ") };
                said += &format!(
                    "{case} {} {}: states {}; carried {}\n",
                    function.package,
                    function.function,
                    names(function.states.iter().map(|state| state.name.as_str()).collect()),
                    names(carried.keys().map(String::as_str).collect())
                );
            }
        }
        if case == "qwen3_5-default" {
            let first = &ours.functions[0];
            let state = |port: &&anec::bundle::Port| matches!(port.role, PortRole::State { .. });
            let ports: Vec<_> = first.inputs.iter().filter(state).chain(first.outputs.iter().filter(state)).collect();
            said += &serde_json::to_string_pretty(&ports).unwrap();
            said += "\n";
        }
    }
    insta::assert_snapshot!(said);
}

/// States that a function takes and gives back, with their shapes.
fn carried(function: &FunctionEntry) -> BTreeMap<String, Vec<u64>> {
    let states = |ports: &[anec::bundle::Port], end: &str| -> BTreeMap<String, Vec<u64>> {
        let state = |port: &anec::bundle::Port| {
            let PortRole::State { id, .. } = &port.role else { return None };
            let name = port.name.strip_suffix(end).expect("a name");
            assert_eq!(*id, anec::bundle::state_id(name, function.context));
            let shape = port.shape.iter().map(|extent| match extent {
                PortDim::Fixed(size) => *size,
                PortDim::Tokens(_) => panic!("{}: a state has no tokens", port.name),
            });
            Some((name.to_owned(), shape.collect()))
        };
        ports.iter().filter_map(state).collect()
    };
    let inputs = states(&function.inputs, "");
    assert_eq!(inputs, states(&function.outputs, "_out"));
    inputs
}

/// Tokens that are taken back, texts that are copied, guesses that were wrong and beginnings that were said before:
/// none leaves a trace in what the host carries.
#[test]
fn what_is_taken_back_leaves_no_trace() {
    let room = tempfile::tempdir().unwrap();
    for (case, changes) in CASES {
        let model = LoadedModel::on_cpu(&convert(case, changes, "input_output", room.path()), Precision::F32).unwrap();
        let one = Chunking::Pattern(vec![1]);
        let ask = ForwardOptions::last().in_calls(one.clone());
        let fresh = |tokens: &[u32]| model.start(24).unwrap().forward(tokens, &ask).unwrap().logits;
        let mut session = model.start(24).unwrap();
        for end in 1..TEXT.len() {
            session.forward(&TEXT[end - 1..end], &ask).unwrap();
            assert!(session.checkpoint().unwrap());
            let mut copy = session.fork().unwrap().expect("states can be copied");
            session.forward(&[6, 6, 2], &ask).unwrap();
            session.rewind(end as u64).unwrap();
            let expected = fresh(&[&TEXT[..end], &[2]].concat());
            assert_eq!(copy.forward(&[2], &ask).unwrap().logits, expected, "{case}: a copy goes its own way");
        }
        // further back than any checkpoint: computed again, in calls of another size, which round otherwise
        session.rewind(4).unwrap();
        let (found, expected) = (session.forward(&TEXT[4..9], &ask).unwrap().logits, fresh(&TEXT[..9]));
        let largest = expected.iter().fold(0f32, |largest, logit| largest.max(logit.abs()));
        let differs = found.iter().zip(&expected).any(|(a, b)| (a - b).abs() > 1e-4 * largest);
        assert!(!differs, "{case}: {found:?}, expected {expected:?}");

        let request = |prompt: &[u32], speculation| GenerationRequest {
            prompt: prompt.to_vec(),
            max_tokens: 12,
            sampling: Sampling::default(),
            speculation,
            ..GenerationRequest::default()
        };
        let write = |request: &GenerationRequest| request.clone().start(&model).unwrap().run().unwrap();
        let expected = write(&request(&TEXT, 0));
        for speculation in [1, 3] {
            assert_eq!(write(&request(&TEXT, speculation)).ids, expected.ids, "{case}, {speculation} guesses");
        }
        // a conversation goes on, and begins again from the middle
        let mut cache = PrefixCache::new(model.clone(), 2);
        let mut cached = 0;
        let text = [&TEXT[..], &expected.ids].concat();
        for prompt in [&TEXT[..], &text, &TEXT[..12]] {
            let request = request(prompt, 0);
            let session = cache.take(&request.prompt, request.length(&model)).unwrap();
            let mut generation = session.generate(request.clone()).unwrap();
            let found = generation.run().unwrap();
            cache.put(generation.into_session());
            assert_eq!(found.ids, write(&request).ids, "{case}");
            cached += found.timings.cached_tokens;
        }
        assert!(cached > 0, "{case}");
    }
}

/// The gates say the same of both, to the last digit of the distance to transformers.
#[test]
fn the_gates_say_the_same() {
    let room = tempfile::tempdir().unwrap();
    for (case, changes) in CASES {
        let golden = format!("tests/fixtures/families/{case}/golden.safetensors");
        let reports = ["input_output", "state"].map(|form| {
            let out = convert(case, changes, form, room.path());
            let gates = ["--structure", "--parity", "--golden", &golden, "--json", "-"];
            let (_, stdout, stderr) = run(&[&["validate", out.to_str().unwrap()], &gates[..]].concat());
            let report: Json = serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{case}: {e}: {stderr}"));
            let [structure, parity] = ["structure", "parity"].map(|name| {
                let gates = report["gates"].as_array().unwrap();
                gates.iter().find(|gate| gate["gate"] == name).unwrap().clone()
            });
            assert_eq!(structure["verdict"], "passed", "{case}: {structure:#}");
            let checks = parity["checks"].as_array().unwrap();
            let whole = |check: &&Json| check["subject"].as_str().is_some_and(|subject| subject.starts_with("f32"));
            assert!(checks.iter().filter(whole).all(|check| check["verdict"] == "passed"), "{case}: {parity:#}");
            assert!(checks.iter().filter(whole).count() >= 3, "{case}: {parity:#}");
            parity
        });
        assert_eq!(reports[0], reports[1], "{case}");
    }
}

/// A bundle that takes a state and doesn't give it back is refused when it is opened.
#[test]
fn a_state_that_is_not_given_back_is_refused() {
    let room = tempfile::tempdir().unwrap();
    let out = convert("lfm2-default", &["state=unified"], "input_output", room.path());
    let mut bundle = Bundle::read(&out).unwrap();
    let outputs = &mut bundle.functions[0].outputs;
    let given = outputs.len();
    outputs.retain(|port| !matches!(port.role, PortRole::State { .. }));
    assert!(outputs.len() < given);
    std::fs::write(out.join("bundle.json"), serde_json::to_vec(&bundle).unwrap()).unwrap();
    let error = LoadedModel::on_cpu(&out, Precision::F32).err().unwrap().to_string();
    assert!(error.contains("gives back other states than it takes: takes conv_state_0_"), "{error}");
    assert!(error.ends_with("gives none"), "{error}");
}
