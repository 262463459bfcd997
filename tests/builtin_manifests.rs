//! Conversion of every built-in manifest's model: its graphs are planned in full depth and width from the published
//! configuration, a third of them are built, and packages of a few layers and a shard of the LM head are written from
//! random weights.

use crate::common::synthetic;

use std::collections::BTreeSet;

use anec::advice::rules::Severity;
use anec::advice::search::{SearchLimits, search};
use anec::advice::{ChipTable, forecast};
use anec::bundle::Stage;
use anec::convert::emit::Emitter;
use anec::convert::functions::build_package;
use anec::convert::open::{open_model, resolve};
use anec::convert::plan::ConvertPlan;
use anec::family::published;
use anec::manifest::{Granularity, Manifest, Transform, Transforms, WeightFormat, builtin};
use anec::package::{self, WriteOptions};
use rayon::prelude::*;
use serde_json::Value as Json;

/// Rules that a form of the manifest can avoid.
const AVOIDABLE: [&str; 5] =
    ["input-channels", "range-beside-fixed", "state-last-axis", "state-shapes", "weights-above-1400-mb"];

/// Models with wider networks than `input-channels` allows: two dense ones, and one that computes all experts at once.
const WIDE: [&str; 3] = ["mistral-small-3.1-24b", "privacy-filter", "seed-oss-36b"];

/// Layers of the written package: the least with weights of every role.
const LAYERS: usize = 1;

fn converts(name: &str) {
    let found = builtin::find(name).unwrap();
    let mut manifest = Manifest::from_yaml(found.text, name, &[]).unwrap();
    let config = published::configuration(found).unwrap();
    let source = synthetic::source(name, config.clone());
    // a learned rotation would read all weights of the model
    let recipe = open_model(&source, &manifest).unwrap().0.transformed().done;
    let random = |transform: Transform| if transform.rotation().is_some() { Transform::Rotate } else { transform };
    manifest.transforms = Transforms::List(recipe.into_iter().map(random).collect());
    let (model, ledger) = open_model(&source, &manifest).unwrap();
    let facts = model.facts();
    assert_eq!(Some(&facts.family), manifest.family.as_ref());
    let text = config.get("text_config").unwrap_or(&config);
    assert_eq!(Json::from(facts.num_layers), text["num_hidden_layers"]);
    assert!(text.get("vocab_size").is_none_or(|size| *size == facts.vocab_size));
    assert_eq!(ledger.used + ledger.ignored.len(), source.tensors().len());
    assert!(ledger.ignored.keys().all(|name| name.starts_with("mtp.")), "{:?}", ledger.ignored);
    assert!(manifest.context.all().iter().all(|context| *context <= facts.max_position_embeddings));

    // plan the whole model and build every third package, because most are alike
    let full = ConvertPlan::new(&manifest, &*model).unwrap();
    assert!(full.packages.iter().all(|package| package.weight_bytes as f64 <= manifest.shards.max_mb * 1e6));
    let mut falls = BTreeSet::new();
    for package in full.packages.iter().step_by(3) {
        let mut emitter = Emitter::new(&manifest.quant);
        let (program, _) = build_package(&*model, &full.form, package, &mut emitter).unwrap();
        assert!(program.functions.iter().all(|f| f.block.ops.len() > 3));
        for finding in forecast(&package.name, &program, package.weight_bytes, &[]) {
            let avoidable = AVOIDABLE.contains(&finding.rule.as_str()) && !WIDE.contains(&name);
            assert!(!avoidable && finding.severity != Severity::Wrong, "{name}: {finding:?}");
            if finding.severity == Severity::Falls {
                falls.insert(finding.rule);
            }
        }
    }
    let doubted: BTreeSet<String> = found.doubted().map(str::to_owned).collect();
    assert_eq!(falls, doubted, "{name}: `# doubted:` must name the first");

    // write a few layers and the last shard of the LM head
    let parts = if manifest.experts.is_packed() {
        vec![[0, LAYERS], [LAYERS, facts.num_layers]]
    } else {
        // parts end before calls of experts' packages
        (0..facts.num_layers).map(|layer| [layer, layer + 1]).collect()
    };
    manifest.shards.layers = Some(parts);
    manifest.shards.max_mb = 40.0;
    let manifest = resolve(&manifest, &source, &*model);
    let plan = ConvertPlan::new(&manifest, &*model).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for package in [&plan.packages[0], plan.packages.last().unwrap()] {
        let mut emitter = Emitter::new(&manifest.quant);
        let (program, functions) = build_package(&*model, &plan.form, package, &mut emitter).unwrap();
        let path = folder.path().join("p.mlpackage");
        let written = package::write(&program, &path, &WriteOptions::default()).unwrap();
        assert_eq!(written.weight_bytes, package.weight_bytes, "{name}: the plan is a dry run of the build");
        for tensor in emitter.reports() {
            let loss = tensor.loss.unwrap();
            // one scale per tensor has no answer to the folded gains of a norm within a block
            let least = if manifest.quant.granularity == Granularity::PerTensor { 0.998 } else { 0.9995 };
            assert!(loss.cosine > least, "{name} {}: {loss:?}", tensor.name);
        }
        let outputs = &functions[0].outputs;
        match package.stage {
            Stage::Layers { .. } | Stage::FeedForward { .. } | Stage::Experts { .. } => {
                assert_eq!(outputs[0].name, "hidden_out");
            }
            Stage::Head { end, .. } => assert_eq!(end, facts.head_rows()),
            Stage::Model { rows, .. } => assert_eq!(rows, facts.head_rows()),
        }
        std::fs::remove_dir_all(path).unwrap();
    }
}

/// Models of every kind of division and task.
const SEARCHED: [&str; 8] = [
    "all-minilm-l6-v2",
    "bge-m3",
    "gemma-3-270m",
    "phi-2",
    "privacy-filter",
    "qwen3-30b-a3b",
    "qwen3.5-0.8b",
    "zaya1-8b",
];

#[test]
fn the_form_for_a_chip_avoids_what_rules_doubt_of_the_default() {
    let targets = [ChipTable::built_in().target("m4@27").unwrap()];
    for name in SEARCHED {
        let found = builtin::find(name).unwrap();
        let manifest = Manifest::from_yaml(found.text, name, &[]).unwrap();
        let source = synthetic::source(name, published::configuration(found).unwrap());
        // transforms change neither shapes nor ops
        let manifest = Manifest { transforms: Transforms::None, ..manifest };
        let (model, _) = open_model(&source, &manifest).unwrap();
        let manifest = resolve(&manifest, &source, &*model);
        let searched = search(&manifest, &*model, &targets, &SearchLimits::default());
        let searched = searched.unwrap_or_else(|error| panic!("{name}: {error}")).manifest;
        let plan = ConvertPlan::new(&searched, &*model).unwrap();
        for package in plan.packages.iter().step_by(5).chain(plan.packages.last()) {
            let mut emitter = Emitter::new(&searched.quant);
            let (program, _) = build_package(&*model, &plan.form, package, &mut emitter).unwrap();
            for finding in forecast(&package.name, &program, package.weight_bytes, &targets) {
                assert!(!finding.severity.excludes(), "{name}: {finding:?}");
                // a call of 512 tokens is for texts that are as long as the model allows
                let longest = searched.context.all().last() == Some(&512);
                assert!(finding.rule != "rows-501-to-512" || longest, "{name}: {finding:?}");
            }
        }
    }
}

/// Start of the comment that gives the reason for a scale per channel.
const PER_CHANNEL: &str = "# Per channel: ";

#[test]
fn int8_is_per_tensor_where_the_stream_can_be_rotated_and_elsewhere_has_a_reason() {
    for found in builtin::all() {
        let name = found.name;
        let manifest = Manifest::from_yaml(found.text, name, &[]).unwrap();
        let source = synthetic::source(name, published::configuration(found).unwrap());
        let (model, _) = open_model(&source, &manifest).unwrap();
        let expected = match model.permits(Transform::Rotate) {
            Ok(()) => Granularity::PerTensor,
            Err(_) => Granularity::PerChannel,
        };
        assert_eq!(manifest.quant.weights, WeightFormat::Int8, "{name}");
        assert_eq!(manifest.quant.granularity, expected, "{name}");
        let reasons = found.text.lines().filter(|line| line.starts_with(PER_CHANNEL)).count();
        assert_eq!(reasons, usize::from(expected == Granularity::PerChannel), "{name}: `{PER_CHANNEL}REASON`");
    }
}

#[test]
fn every_built_in_manifest_converts() {
    let names: Vec<&str> = builtin::names().filter(|name| !name.starts_with("demo")).collect();
    let fails = |name: &&str| std::panic::catch_unwind(|| converts(name)).is_err();
    let failed: Vec<&str> = names.into_par_iter().filter(fails).collect();
    assert!(failed.is_empty(), "{failed:?}");
}
