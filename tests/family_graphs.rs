//! Every family builds in every form that a manifest can ask for, from either kind of source, and the verifier has
//! nothing to say about the graph: not with the symbol T, nor with any number in its place.

use crate::common::covering::covering;
use crate::common::emitted;
use crate::common::forms::FORM;
use crate::common::fp16_literals::Fp16Literals;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::sync::LazyLock;

use anec::base::Result;
use anec::bundle::{Port, PortDim, PortRole, Stage, TokenCount};
use anec::family::{FamilyModel, FunctionRequest, LoweringOptions, Purpose};
use anec::manifest::{
    ActivationForm, AttentionForm, HeadOutputs, KvWrite, Largest, Layout, LinearForm, NormForm, RecurrentForm,
    RopeForm, StateForm,
};
use anec::mil::verify::{infer_types, verify_function};
use anec::mil::{Binding, Symbol, ValueId};
use anec::source::{Ledger, Source};
use rayon::prelude::*;

/// Forms in which any two choices meet.
static FORMS: LazyLock<Vec<LoweringOptions>> = LazyLock::new(|| {
    let bodies = [
        (LinearForm::Conv, NormForm::Accurate),
        (LinearForm::Conv, NormForm::Naive),
        (LinearForm::Linear, NormForm::LayerNormConcat),
        (LinearForm::Matmul, NormForm::Prescale),
    ];
    let form = |choice: Vec<usize>| {
        let (linear, norm) = bodies[choice[4]];
        LoweringOptions {
            layout: [Layout::Bcs1, Layout::Bc1s][choice[0]],
            linear,
            norm,
            attention: [AttentionForm::PerHead, AttentionForm::Grouped][choice[1]],
            activations: [ActivationForm::Stable, ActivationForm::Native][choice[5]],
            rope: [RopeForm::Halves, RopeForm::Product][choice[6]],
            state: [StateForm::PerLayer, StateForm::Unified, StateForm::Host][choice[2]],
            recurrent_states: [RecurrentForm::State, RecurrentForm::InputOutput][choice[3]],
            ..FORM
        }
    };
    covering(&[2, 2, 3, 2, 4, 2, 2], 2).into_iter().map(form).collect()
});

fn check(model: &dyn FamilyModel, form: LoweringOptions) -> Result<()> {
    let facts = model.facts();
    let range = TokenCount::Range(1, 4);
    let sliced = LoweringOptions { kv_write: KvWrite::Slice, ..form };
    // fp16 holds a small epsilon's root only
    if form.norm == NormForm::LayerNormConcat && facts.hidden_scale != 1.0 {
        let stage = Stage::Layers { first: 0, end: facts.num_layers };
        let (name, default_tokens) = ("main".into(), 1);
        let request = FunctionRequest {
            name,
            stage,
            tokens: range,
            default_tokens,
            context: 64,
            most_tokens: 4,
            head: HeadOutputs::default(),
        };
        let refused = model.build(&form, &request, &mut Fp16Literals).unwrap_err().to_string();
        assert!(refused.contains("which fp16 doesn't hold"), "{refused}");
        return Ok(());
    }
    for (form, tokens) in [(form, range), (sliced, TokenCount::Fixed(3)), (form, TokenCount::Fixed(1))] {
        let (layers, rows) = (facts.num_layers, facts.head_rows());
        let one = (facts.purpose == Purpose::TextGeneration).then_some(Stage::Model { layers, rows });
        let head = HeadOutputs { logits: one.is_none(), largest: Some(Largest::TopK(2)) };
        let apart = [Stage::Layers { first: 0, end: layers }, Stage::Layers { first: 1, end: 2 }];
        for stage in apart.into_iter().chain([Stage::Head { first: 3, end: rows }]).chain(one) {
            let (name, default_tokens) = ("main".into(), tokens.least());
            let request = FunctionRequest { name, stage, tokens, default_tokens, context: 64, most_tokens: 4, head };
            let graph = model.build(&form, &request, &mut Fp16Literals)?;
            assert_eq!(verify_function(&graph.function), [], "{form:?} {request:?}");
            assert_eq!(graph.states.len(), graph.function.states().count());
            let states = |ports: &[Port]| -> Vec<(PortRole, Vec<PortDim>)> {
                let states = ports.iter().filter(|port| matches!(port.role, PortRole::State { .. }));
                states.map(|port| (port.role.clone(), port.shape.clone())).collect()
            };
            assert_eq!(states(&graph.inputs), states(&graph.outputs), "what comes in goes out");
            let caches = graph.states.iter().filter(|state| state.name.contains("cache")).count();
            let rows = |ports: &[Port]| -> Vec<String> {
                let cache = ports.iter().filter_map(|port| match &port.role {
                    PortRole::Cache { id, .. } | PortRole::CacheRows { id, .. } => Some(id.clone()),
                    _ => None,
                });
                cache.collect()
            };
            assert_eq!(rows(&graph.inputs), rows(&graph.outputs), "caches that are read get rows");
            if form.state == StateForm::Host {
                assert!(graph.states.is_empty());
            } else if form.recurrent_states == RecurrentForm::InputOutput {
                assert_eq!(graph.states.len(), caches, "only caches are states");
            } else {
                assert_eq!(states(&graph.inputs), []);
            }
            for size in [1, 4] {
                let fixed = infer_types(&graph.function.with_length(&Symbol::new("T"), size))?;
                assert!(!fixed.is_symbolic());
                assert_eq!(verify_function(&fixed), [], "T = {size}, {form:?} {request:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn every_family_builds_in_every_form() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let cases = std::fs::read_to_string(root.join("cases.json")).expect("the list of cases");
    let cases: serde_json::Value = serde_json::from_str(&cases).expect("JSON");
    let [decoders, classifiers] = ["cases", "classifiers"].map(|key| cases[key].as_array().expect("a list").as_slice());
    let cases = [decoders, classifiers].concat();
    assert!(cases.len() >= 20);
    cases.par_iter().enumerate().for_each(|(index, case)| {
        let family = case["family"].as_str();
        // the cases of a family share its forms
        let siblings: Vec<usize> = (0..cases.len()).filter(|other| cases[*other]["family"] == case["family"]).collect();
        let own = siblings.iter().position(|other| *other == index).expect("its own");
        for path in ["hugging_face", "gguf"].into_iter().filter_map(|key| case[key].as_str()) {
            let source = Source::open_path(&root.join(path)).expect(path);
            let mut ledger = Ledger::new(&source);
            let model = anec::family::open(&mut ledger, family, &[]).unwrap_or_else(|e| panic!("{path}: {e}"));
            let totals = ledger.finish().unwrap_or_else(|e| panic!("{path}: {e}"));
            // images, the token after the next, and masks of attention
            let behind = format!("blk.{}.", model.facts().num_layers);
            let known = [
                "vision_tower.",
                "multi_modal_projector.",
                "model.visual.",
                "model.vision_tower.",
                "model.vision_embedder.",
                "model.multi_modal_projector.",
                "model.embed_vision.",
                "model.embed_audio.",
                "mtp.",
                &behind,
            ];
            let masks = [".attention.bias", ".attention.masked_bias", ".attn.bias"];
            let other = |name: &String| {
                !known.iter().any(|prefix| name.starts_with(prefix)) && !masks.iter().any(|end| name.ends_with(end))
            };
            assert!(!totals.ignored.keys().any(other), "{path}: {totals:?}");
            // the graph doesn't depend on the kind of source (see below)
            let count = if case["hugging_face"] == path { usize::MAX } else { 1 };
            for form in FORMS.iter().skip(own).step_by(siblings.len()).take(count) {
                check(&*model, *form).unwrap_or_else(|e| panic!("{path}: {form:?}: {e}"));
            }
        }
    });
}

#[test]
fn both_kinds_of_source_give_the_same_graph() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let cases = std::fs::read_to_string(root.join("cases.json")).expect("the list of cases");
    let cases: serde_json::Value = serde_json::from_str(&cases).expect("JSON");
    let cases = cases["cases"].as_array().expect("a list").iter().filter(|case| case["gguf"].is_string());
    let compared = cases.map(|case| {
        let [hugging_face, gguf] = ["hugging_face", "gguf"].map(|key| {
            let source = Source::open_path(&root.join(case[key].as_str().expect("a path"))).expect("a source");
            let mut ledger = Ledger::new(&source);
            let model = anec::family::open(&mut ledger, case["family"].as_str(), &[]).expect("a model");
            let facts = model.facts().clone();
            let stages =
                [Stage::Layers { first: 0, end: facts.num_layers }, Stage::Head { first: 0, end: facts.vocab_size }];
            let tokens = TokenCount::Range(1, 4);
            stages.map(|stage| {
                let name = "main".into();
                let (context, default_tokens) = (64, tokens.least());
                let request = FunctionRequest {
                    name,
                    stage,
                    tokens,
                    default_tokens,
                    context,
                    most_tokens: 4,
                    head: HeadOutputs::default(),
                };
                model.build(&FORMS[0], &request, &mut Fp16Literals).expect("a graph").function
            })
        });
        assert!(hugging_face == gguf, "{}", case["name"]);
    });
    assert!(compared.count() >= 15);
}

/// How often each op occurs in the packages of the first case of each family, as converted by default. Whatever is a
/// projection is a convolution, in every case.
#[test]
fn every_projection_is_a_convolution() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let cases = std::fs::read_to_string(root.join("cases.json")).expect("the list of cases");
    let cases: serde_json::Value = serde_json::from_str(&cases).expect("JSON");
    let mut families = BTreeSet::new();
    let mut census = String::new();
    let all = ["cases", "classifiers"].into_iter().flat_map(|kind| cases[kind].as_array().expect("a list"));
    for case in all {
        let (family, model) =
            (case["family"].as_str().expect("a name"), case["hugging_face"].as_str().expect("a path"));
        let manifest = emitted::manifest(&format!("tests/fixtures/families/{model}"), &["context=32"]);
        let mut counts = BTreeMap::new();
        for (package, program) in emitted::programs(&manifest) {
            for function in &program.functions {
                let weights: BTreeSet<ValueId> = function
                    .ops()
                    .filter(|op| op.is_const() || op.is_constexpr())
                    .flat_map(|op| op.outputs.clone())
                    .collect();
                for op in function.ops() {
                    let is_weight = |p: &&str| matches!(op.input(p), Some(Binding::Value(id)) if weights.contains(id));
                    let projects = op.operator == "matmul" && ["x", "y"].iter().any(is_weight);
                    assert!(
                        !projects && op.operator != "linear",
                        "{model}, {package}: `{}` is no convolution",
                        op.name
                    );
                    if !op.is_const() && !op.is_constexpr() {
                        *counts.entry(op.operator.clone()).or_insert(0) += 1;
                    }
                }
            }
        }
        if families.insert(family) {
            let counts: Vec<String> = counts.iter().map(|(operator, count)| format!("{operator} {count}")).collect();
            writeln!(census, "{family} ({model}): {}", counts.join(", ")).expect("a string");
        }
    }
    insta::assert_snapshot!(census);
}

#[test]
fn configurations_that_change_the_maths_are_refused_by_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let cases = std::fs::read_to_string(root.join("cases.json")).expect("the list of cases");
    let cases: serde_json::Value = serde_json::from_str(&cases).expect("JSON");
    let mut messages = String::new();
    for bad in cases["bad"].as_array().expect("a list") {
        let folder = tempfile::tempdir().expect("a folder");
        let config = root.join(bad["config"].as_str().expect("a path"));
        std::fs::copy(&config, folder.path().join("config.json")).expect("copied");
        let weights = root.join(bad["weights_of"].as_str().expect("a case"));
        for file in std::fs::read_dir(&weights).expect("a folder").flatten() {
            let name = file.file_name().into_string().unwrap_or_default();
            if name.contains("safetensors") && !name.contains("golden") {
                std::fs::copy(file.path(), folder.path().join(name)).expect("copied");
            }
        }
        let refused = (|| -> anec::base::Result<_> {
            let source = Source::open_path(folder.path())?;
            let mut ledger = Ledger::new(&source);
            anec::family::open(&mut ledger, None, &[])?;
            Ok(ledger.finish()?)
        })();
        let error = refused.expect_err(&format!("{} must be refused: {}", bad["config"], bad["fault"]));
        let text = error.to_string().replace(&folder.path().display().to_string(), "MODEL");
        messages += &format!("{}: {text}\n", config.parent().and_then(|p| p.file_name()).unwrap_or_default().display());
    }
    insta::assert_snapshot!(messages);
}
