//! Every built-in manifest converts the model it is for: its graphs are planned in full depth and width from the published
//! configuration, a third of them are built, and packages of a few layers and a piece of the LM head are written from synthesised weights.

use crate::common::synthetic;

use anec::bundle::Stage;
use anec::convert::ConvertPlan;
use anec::convert::emit::Emitter;
use anec::convert::functions::build_package;
use anec::convert::open::{open_model, resolve};
use anec::family::published;
use anec::manifest::{Manifest, builtin};
use anec::package::{self, WriteOptions};
use serde_json::Value as Json;

/// Layers of the package that is written: the least that has weights of every role.
const LAYERS: usize = 1;

fn converts(name: &str) {
    let found = builtin::find(name).unwrap();
    let mut manifest = Manifest::from_yaml(found.text, name, &[]).unwrap();
    let config = published::configuration(found).unwrap();
    let source = synthetic::source(name, config.clone());
    let (model, ledger) = open_model(&source, &manifest).unwrap();
    let facts = model.facts();
    assert_eq!(Some(&facts.family), manifest.family.as_ref());
    let text = config.get("text_config").unwrap_or(&config);
    assert_eq!(Json::from(facts.num_layers), text["num_hidden_layers"]);
    assert!(text.get("vocab_size").is_none_or(|size| *size == facts.vocab_size));
    assert_eq!(ledger.used + ledger.ignored.len(), source.tensors().len());
    assert!(ledger.ignored.keys().all(|name| name.starts_with("mtp.")), "{:?}", ledger.ignored);
    assert!(manifest.context.all().iter().all(|context| *context <= facts.max_position_embeddings));

    // the whole model, planned; every third package built, for most are alike
    let full = ConvertPlan::new(&manifest, &*model).unwrap();
    assert!(full.packages.iter().all(|package| package.weight_bytes as f64 <= manifest.shards.max_mb * 1e6));
    for package in full.packages.iter().step_by(3) {
        let mut emitter = Emitter::new(&manifest.quant);
        let (program, _) = build_package(&*model, &full.form, package, &mut emitter).unwrap();
        assert!(program.functions.iter().all(|f| f.block.ops.len() > 3));
    }

    // a few layers and the last piece of the LM head, written
    let parts = if manifest.experts.is_packed() {
        vec![[0, LAYERS], [LAYERS, facts.num_layers]]
    } else {
        // a part ends where experts of packages of their own are called
        (0..facts.num_layers).map(|layer| [layer, layer + 1]).collect()
    };
    manifest.shards.layers = Some(parts);
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
            assert!(loss.cosine > 0.9995, "{name} {}: {loss:?}", tensor.name);
        }
        let outputs = &functions[0].outputs;
        match package.stage {
            Stage::Layers { .. } | Stage::FeedForward { .. } | Stage::Experts { .. } => {
                assert_eq!(outputs[0].name, "hidden_out");
            }
            Stage::Head { end, .. } => assert_eq!(end, facts.head_rows()),
        }
        std::fs::remove_dir_all(path).unwrap();
    }
}

macro_rules! each {
    ($($test:ident: $name:literal),* $(,)?) => {
        $(#[test] fn $test() { converts($name) })*

        #[test]
        fn every_built_in_manifest_is_tested() {
            let mut tested = vec!["demo", $($name),*];
            tested.sort_unstable();
            assert_eq!(builtin::names().collect::<Vec<_>>(), tested);
        }
    };
}

each! {
    all_minilm_l6_v2: "all-minilm-l6-v2",
    bge_m3: "bge-m3",
    command_r7b: "command-r7b",
    embeddinggemma_300m: "embeddinggemma-300m",
    ernie_4_5_0_3b: "ernie-4.5-0.3b",
    exaone_4_1_2b: "exaone-4-1.2b",
    falcon_h1_0_5b: "falcon-h1-0.5b",
    gemma_2_2b: "gemma-2-2b",
    gemma_2b: "gemma-2b",
    gemma_3_1b: "gemma-3-1b",
    gemma_3_270m: "gemma-3-270m",
    gemma_3_4b: "gemma-3-4b",
    gemma_4_26b_a4b: "gemma-4-26b-a4b",
    gemma_4_e2b: "gemma-4-e2b",
    gemma_4_e4b: "gemma-4-e4b",
    glm_4_9b: "glm-4-9b",
    gpt_oss_20b: "gpt-oss-20b",
    granite_3_1_1b_a400m: "granite-3.1-1b-a400m",
    granite_3_3_2b: "granite-3.3-2b",
    granite_4_0_h_tiny: "granite-4.0-h-tiny",
    hy_mt_1_5_1_8b: "hy-mt-1.5-1.8b",
    lfm2_5_1_2b: "lfm2.5-1.2b",
    lfm2_5_8b_a1b: "lfm2.5-8b-a1b",
    llama_3_2_1b: "llama-3.2-1b",
    llama_3_2_3b: "llama-3.2-3b",
    ministral_3_3b: "ministral-3-3b",
    mistral_7b: "mistral-7b",
    mistral_small_3_1_24b: "mistral-small-3.1-24b",
    modernbert_embed_base: "modernbert-embed-base",
    olmo_3_7b: "olmo-3-7b",
    olmoe_1b_7b: "olmoe-1b-7b",
    phi_2: "phi-2",
    phi4_mini: "phi4-mini",
    privacy_filter: "privacy-filter",
    pythia_410m: "pythia-410m",
    qwen1_5_moe_a2_7b: "qwen1.5-moe-a2.7b",
    qwen2_5_0_5b: "qwen2.5-0.5b",
    qwen2_5_coder_0_5b: "qwen2.5-coder-0.5b",
    qwen3_0_6b: "qwen3-0.6b",
    qwen3_1_7b: "qwen3-1.7b",
    qwen3_30b_a3b: "qwen3-30b-a3b",
    qwen3_4b: "qwen3-4b",
    qwen3_embedding_0_6b: "qwen3-embedding-0.6b",
    qwen3_5_0_8b: "qwen3.5-0.8b",
    qwen3_5_2b: "qwen3.5-2b",
    qwen3_5_35b_a3b: "qwen3.5-35b-a3b",
    qwen3_next_80b_a3b: "qwen3-next-80b-a3b",
    qwen3_vl_30b_a3b: "qwen3-vl-30b-a3b",
    qwen3_vl_4b: "qwen3-vl-4b",
    qwen3_5_4b: "qwen3.5-4b",
    qwen3_5_9b: "qwen3.5-9b",
    smollm2_1_7b: "smollm2-1.7b",
    smollm3_3b: "smollm3-3b",
    stablelm_2_1_6b: "stablelm-2-1.6b",
    starcoder2_3b: "starcoder2-3b",
    zaya1_8b: "zaya1-8b",
}
