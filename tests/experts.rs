//! Mixtures of experts in every form that a manifest can ask for: all give the same text, they differ in what a call
//! reads.

use crate::common::folder;
use crate::common::synthetic;

use std::path::Path;

use anec::advice::forecast;
use anec::bundle::Stage;
use anec::convert::emit::Emitter;
use anec::convert::functions::build_package;
use anec::convert::open::open_model;
use anec::convert::plan::ConvertPlan;
use anec::convert::{Estimate, FormEstimate};
use anec::exec::Precision;
use anec::manifest::{ExpertsForm, Manifest, builtin};
use anec::report;
use anec::runtime::{ForwardOptions, LoadedModel};
use folder::{json, run};
use serde_json::Value as Json;

/// Converts a fixture of families; returns its folder and what its bundle says.
fn convert(model: &str, out: &Path, sets: &[&str]) -> (String, Json) {
    let folder = format!("tests/fixtures/families/{model}");
    let sets = sets.iter().chain(&["quant.weights=none", "context=64"]).flat_map(|set| ["--set", set]);
    let command: Vec<&str> =
        ["convert", "--source", &folder, "--out", out.to_str().unwrap()].into_iter().chain(sets).collect();
    let (code, _, stderr) = run(&command);
    assert_eq!(code, 0, "{model}: {stderr}");
    (folder, json(&out.join("bundle.json")))
}

/// Gates that run on any machine.
const GATES: [&str; 3] = ["--structure", "--numerics", "--parity"];

/// Validates a bundle against transformers; returns the claims that hold.
fn validate(folder: &str, bundle: &Path, gates: &[&str]) -> Vec<String> {
    let golden = format!("{folder}/golden.safetensors");
    let rest = ["--golden", &golden, "--allow-unproven", "--json", "-"];
    let (code, stdout, stderr) = run(&[&["validate", bundle.to_str().unwrap()], gates, &rest[..]].concat());
    assert_eq!(code, 0, "{folder}: {stdout}{stderr}");
    let report: Json = serde_json::from_str(&stdout).unwrap();
    let checks = report["gates"].as_array().unwrap().iter().flat_map(|gate| gate["checks"].as_array().unwrap());
    let passed = checks.filter(|check| check["verdict"] == "passed");
    passed.map(|check| check["subject"].as_str().unwrap().to_owned()).collect()
}

/// A router that adds up what those of the layers before saw gets it across packages.
#[test]
fn what_routers_gather_goes_from_package_to_package() {
    for model in ["zaya-default", "zaya-sliding", "zaya-single"] {
        let room = tempfile::tempdir().unwrap();
        let out = room.path().join("bundle");
        let config = json(&Path::new("tests/fixtures/families").join(model).join("config.json"));
        let shards = format!("shards.layers=[[0, 1], [1, 2], [2, {}]]", config["num_hidden_layers"]);
        let (folder, bundle) = convert(model, &out, &[&shards]);
        let ports = |function: usize, side: &str| -> usize {
            let ports = bundle["functions"][function][side].as_array().unwrap().iter();
            ports.filter(|port| port["role"] == "router_state").count()
        };
        assert_eq!([0, 1, 2, 3].map(|function| ports(function, "inputs")), [0, 1, 1, 0], "{model}");
        assert_eq!([0, 1, 2, 3].map(|function| ports(function, "outputs")), [1, 1, 0, 0], "{model}");
        let passed = validate(&folder, &out, &GATES);
        assert!(passed.iter().any(|check| check.starts_with("f32, layers 2..")), "{passed:#?}");
    }
}

/// Experts in functions of their own: every position's logits are transformers', in both arithmetics, in calls of every
/// size, after resets.
#[test]
fn experts_apart_write_the_same_text() {
    for (model, sets, groups) in [
        ("lfm2_moe-default", &["experts=split"][..], 1),
        ("lfm2_moe-default", &["experts=routed"], 5),
        ("lfm2_moe-one", &["experts=split", "shards.max_mb=0.0148"], 2),
        ("lfm2_moe-split", &["experts=routed", "layout=bc1s", "lengths={fixed: [1, 3]}"], 4),
        ("gpt_oss-default", &["experts=split"], 1),
        ("gpt_oss-clamped", &["experts=routed", "attention=grouped"], 6),
        ("qwen3_moe-plain", &["experts=routed", "layout=bc1s"], 5),
        ("qwen3_next-plain", &["experts=split", "shards.max_experts=3"], 2),
        ("granitemoehybrid-default", &["experts=routed"], 6),
        ("gemma4-experts", &["experts=split"], 1),
        ("zaya-default", &["experts=split"], 1),
        ("zaya-default", &["experts=routed", "numerics.scale=0.125"], 5),
        ("zaya-sliding", &["experts=routed", "lengths={fixed: [1, 4]}"], 4),
        ("zaya-single", &["experts=routed", "layout=bc1s"], 7),
    ] {
        let room = tempfile::tempdir().unwrap();
        let out = room.path().join("bundle");
        let (folder, bundle) = convert(model, &out, sets);
        let stages = bundle["functions"].as_array().unwrap().iter().map(|function| &function["stage"]);
        let last = bundle["model"]["num_layers"].as_u64().unwrap() - 1;
        let mut own: Vec<&Json> = stages.filter(|stage| stage["kind"] == "experts" && stage["layer"] == last).collect();
        own.dedup();
        assert_eq!(own.len(), groups, "{model} {sets:?}: {own:?}");
        let passed = validate(&folder, &out, &GATES);
        assert!(passed.iter().any(|check| check.contains(", experts 0..")), "{model} {sets:?}: {passed:#?}");
    }
}

/// Experts that no token of a call is routed to aren't called.
#[test]
fn a_token_calls_the_experts_that_it_was_given() {
    for (model, layers, per_token) in [("lfm2_moe-default", 2, 2), ("lfm2_moe-split", 3, 3), ("zaya-default", 4, 1)] {
        let room = tempfile::tempdir().unwrap();
        let (_, bundle) = convert(model, room.path(), &["experts=routed"]);
        let (model, profile) = LoadedModel::on_cpu(room.path(), Precision::F32).unwrap().profiled().unwrap();
        let mut session = model.start(32).unwrap();
        let mut skipped = false;
        for token in 0..20 {
            profile.lock().unwrap().clear();
            session.forward(&[token], &ForwardOptions::none()).unwrap();
            let calls = profile.lock().unwrap();
            let of_experts = |function: &&usize| bundle["functions"][**function]["stage"]["kind"] == "experts";
            let count = calls.keys().filter(of_experts).count();
            // the router of the last can choose to skip them all
            assert!(count <= layers * per_token, "{count}");
            assert!(per_token == 1 || count == layers * per_token, "{count}");
            skipped |= count < layers * per_token;
        }
        assert_eq!(skipped, per_token == 1);
    }
}

#[test]
fn a_package_ends_where_experts_are_left_out() {
    let folder = "tests/fixtures/families/lfm2_moe-default";
    let sets = ["--set", "experts=routed", "--set", "shards.layers=[[0, 4]]"];
    let (code, _, stderr) = run(&[&["plan", "--source", folder], &sets[..]].concat());
    assert_eq!(code, 2);
    assert!(
        stderr.contains("the package of layers 0..4 continues after layer 2, whose experts are in other packages"),
        "{stderr}"
    );
    assert!(stderr.contains("end a range of `shards.layers` with 3"), "{stderr}");
}

/// A classifier's experts, too: whole documents in windows, each call with the experts that its tokens were given.
#[test]
fn experts_of_a_classifier_apart_give_the_same_labels() {
    for (model, sets, groups) in [
        ("privacy_filter-default", &["experts=split", "lengths.range=[1, 48]", "shards.max_experts=4"][..], 2),
        ("privacy_filter-clamped", &["experts=routed", "lengths.range=[1, 64]", "layout=bc1s"], 5),
        ("privacy_filter-plain", &["experts=split", "lengths={fixed: [16, 64]}", "shards.max_experts=1"], 7),
    ] {
        let room = tempfile::tempdir().unwrap();
        let out = room.path().join("bundle");
        let (folder, bundle) = convert(model, &out, sets);
        let stages = bundle["functions"].as_array().unwrap().iter().map(|function| &function["stage"]);
        let mut own: Vec<&Json> = stages.filter(|stage| stage["kind"] == "experts" && stage["layer"] == 1).collect();
        own.dedup();
        assert_eq!(own.len(), groups, "{model} {sets:?}: {own:?}");
        // not the numerics: half precision gives a token of these random models another expert, packed or not
        assert!(!validate(&folder, &out, &["--structure", "--parity"]).is_empty());
    }
}

/// The privacy filter by its published shapes: what is added up over a layer's experts has 81,920 channels, more than a
/// convolution is known to take. Groups of sixteen have 10,240, and each is what was planned.
#[test]
fn groups_of_experts_have_fewer_channels() {
    let config = std::fs::read("src/manifest/manifests/configs/privacy-filter.json").unwrap();
    let source = synthetic::source("privacy-filter", serde_json::from_slice(&config).unwrap());
    let sets = |sets: &[&str]| sets.iter().map(|set| set.to_string()).collect::<Vec<_>>();
    let text = builtin::find("privacy-filter").unwrap().text;
    let wide = |sets: Vec<String>, packages: usize| {
        let manifest = Manifest::from_yaml(text, "privacy-filter", &sets).unwrap();
        let (model, _) = open_model(&source, &manifest).unwrap();
        let plan = ConvertPlan::new(&manifest, &*model).unwrap();
        assert_eq!(plan.packages.len(), packages, "{sets:?}");
        let of_layer = plan.packages.iter().filter(|package| {
            matches!(package.stage, Stage::Layers { first: 3, .. } | Stage::Experts { layer: 3, .. })
        });
        let mut found = Vec::new();
        for package in of_layer {
            let mut emitter = Emitter::new(&manifest.quant);
            let (program, _) = build_package(&*model, &plan.form, package, &mut emitter).unwrap();
            let findings = forecast(&package.name, &program, package.weight_bytes, &[]);
            found.extend(
                findings.into_iter().filter(|finding| finding.rule == "input-channels").map(|_| package.name.clone()),
            );
        }
        found
    };
    // in functions of 128 and of 512 tokens
    assert_eq!(wide(sets(&[]), 8 + 1), ["layers_3_4"; 2]);
    assert_eq!(wide(sets(&["experts=split", "shards.max_experts=16"]), 8 * 9 + 1), [""; 0]);
}

/// ZAYA1-8B by its published shapes: what a token reads in each form, and the packages of the largest.
#[test]
fn forms_of_experts_differ_in_what_a_token_reads() {
    let config = std::fs::read("src/manifest/manifests/configs/zaya1-8b.json").unwrap();
    let source = synthetic::source("zaya1-8b", serde_json::from_slice(&config).unwrap());
    let manifest = Manifest::from_yaml(builtin::find("zaya1-8b").unwrap().text, "zaya1-8b", &[]).unwrap();
    let (model, _) = open_model(&source, &manifest).unwrap();
    let forms = FormEstimate::of(&manifest, &*model);
    let plan = ConvertPlan::new(&manifest, &*model).unwrap();
    let text = report::plan(&manifest, model.facts(), &plan, &Estimate::of(&plan), &forms);
    insta::assert_snapshot!(text.split("\n\n").last().unwrap());

    let bytes = |form: ExpertsForm| forms.iter().find(|f| f.experts == form).unwrap().estimate.weight_bytes_per_token;
    // fifteen of sixteen experts of forty layers, three matrices of 2048 x 2048 bytes each
    let idle = 40 * 15 * 3 * 2048 * 2048;
    let saved = bytes(ExpertsForm::Packed) - bytes(ExpertsForm::Routed);
    assert!(saved.abs_diff(idle) < 20_000_000, "{saved} {idle}");

    // a limit that no layer stays under: its experts are divided, with functions for calls of 1 and of 16 tokens
    for (experts, packages, functions) in [(ExpertsForm::Split, 3, 6), (ExpertsForm::Routed, 3, 32)] {
        let mut manifest = Manifest { experts, ..manifest.clone() };
        manifest.shards.max_mb = 80.0;
        let plan = ConvertPlan::new(&manifest, &*model).unwrap();
        let own: Vec<_> = plan.packages.iter().filter(|package| package.name.starts_with("experts_07")).collect();
        assert_eq!(own.len(), packages);
        assert_eq!(own.iter().map(|package| package.functions.len()).sum::<usize>(), functions);
        for package in own {
            assert!(package.weight_bytes <= 80_000_000);
            let mut emitter = Emitter::new(&manifest.quant);
            build_package(&*model, &plan.form, package, &mut emitter).unwrap();
        }
    }
}
