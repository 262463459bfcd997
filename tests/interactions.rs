//! Forms of a model in combinations that nobody chose: experts, states, writes, lengths of calls and number formats are drawn at
//! random for every family, and the bundle still computes what transformers does, in calls of every size and with other texts.
//!
//! `ANEC_SEED` draws others, `ANEC_COMBINATIONS` so many. What fails is printed with the manifest keys that show it again.

use std::collections::BTreeMap;
use std::path::Path;

use anec::bundle::Stage;
use anec::exec::Precision;
use anec::runtime::{Chunking, ForwardOptions, LoadedModel, NextTokens, forward_together};
use anec::{Converter, Manifest};
use rayon::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value as Json;

use crate::common::folder::{json, repository};

/// Combinations of a run: every family twice, in seconds.
const COMBINATIONS: usize = 60;

/// The seed of a run that names none.
const SEED: u64 = 14;

/// Number formats, and how near the logits stay to those of unquantized weights at least, over a whole text. The weights of
/// these models are noise, which few levels hold badly, and a router may choose another expert.
const QUANTS: [(&str, f64); 8] = [
    ("{weights: none}", 0.99999),
    ("{weights: int8}", 0.97),
    ("{weights: int8, granularity: per_channel}", 0.98),
    ("{weights: int8, granularity: {block: 8}}", 0.98),
    ("{weights: palette8, row_scale: true}", 0.98),
    ("{weights: palette6, granularity: {group: 8}}", 0.95),
    ("{weights: int4, granularity: per_channel}", 0.6),
    ("{weights: palette4, row_scale: true}", 0.7),
];

/// Numbers that look random: SplitMix64.
struct Draw(u64);

impl Draw {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % count as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// A model in a form.
struct Combination {
    model: String,
    sets: Vec<String>,
    /// Sizes of calls, beside one token at a time or the only size there is.
    sizes: Vec<u64>,
    least: f64,
}

/// A fixture of a family in a form that a manifest may ask for.
fn combination(draw: &mut Draw, cases: &[&Json]) -> Combination {
    let case = cases[draw.below(cases.len())];
    let model = case["hugging_face"].as_str().unwrap().to_owned();
    let config = json(&repository("tests/fixtures/families").join(&model).join("config.json"));
    let text = config.get("text_config").unwrap_or(&config);
    let has = |key: &str| text.get(key).is_some_and(|value| !value.is_null() && *value != 0);
    let tokens = case["goldens"][0]["tokens"].as_u64().unwrap();
    // a dynamic RoPE is that of the longest text
    let dynamic = ["rope_scaling", "rope_parameters"].iter().any(|key| {
        let scaling = &text[*key];
        scaling["rope_type"] == "dynamic" || scaling["type"] == "dynamic"
    });
    let mut sets = vec![format!("context={}", if dynamic { tokens } else { 48 })];
    let mut set = |key: &str, value: &str| sets.push(format!("{key}={value}"));

    if has("num_experts") || has("num_local_experts") {
        let experts = draw.one_of(&["packed", "split", "routed"]);
        set("experts", experts);
        if experts == "split" {
            set("shards.max_experts", &(1 + draw.below(4)).to_string());
        }
    }
    let family = case["family"].as_str().unwrap();
    let recurrent = ["conv_L_cache", "linear_num_key_heads", "cca_time0", "mamba_n_heads"].iter().any(|key| has(key))
        || ["lfm2", "qwen3_5", "qwen3_next", "zaya"].iter().any(|name| family.starts_with(name));
    let state = draw.one_of(&["per_layer", "unified", "host"]);
    set("state", state);
    if recurrent && state != "host" {
        set("recurrent_states", draw.one_of(&["state", "input_output"]));
    }
    // a recurrence can't be given tokens that aren't there, so that it needs calls of one; nor has a context that ends with the
    // text room for them
    let lengths = draw.below(if recurrent || dynamic { 4 } else { 5 });
    let (lengths, sizes): (&str, &[u64]) = [
        ("{range: [1, 4]}", &[4, 3, 1][..]),
        ("{range: [1, 16]}", &[7, 16]),
        ("{fixed: [1, 4]}", &[4, 1]),
        ("{fixed: [1, 2, 5]}", &[5, 2, 1]),
        ("{fixed: [7]}", &[7]),
    ][lengths];
    set("lengths", lengths);
    if state != "host" {
        let fixed = lengths.contains("fixed");
        set("kv_write", draw.one_of(if fixed { &["mask", "slice"][..] } else { &["mask"] }));
    }
    set("layout", draw.one_of(&["bcs1", "bc1s"]));
    set("attention", draw.one_of(&["per_head", "grouped"]));
    let (quant, least) = draw.one_of(&QUANTS);
    set("quant", quant);
    set("shards.divide", draw.one_of(&["none", "none", "attention_mlp"]));
    Combination { model, sets, sizes: sizes.to_vec(), least }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Least cosine of two texts' logits over positions.
fn least_cosine(a: &[f32], b: &[f32], positions: usize) -> f64 {
    assert_eq!(a.len(), b.len());
    let width = a.len() / positions;
    a.chunks(width).zip(b.chunks(width)).map(|(a, b)| cosine(a, b)).fold(1.0, f64::min)
}

/// Converts and runs a combination; gives what is wrong with it.
fn fault(combination: &Combination, golden: &Path, out: &Path) -> Result<(), String> {
    let Combination { model, sets, sizes, least } = combination;
    let bytes = std::fs::read(golden).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let numbers = |name: &str| tensors.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    let tokens: Vec<u32> = numbers("tokens").into_iter().map(u32::from_le_bytes).collect();
    let expected: Vec<f32> = numbers("logits").into_iter().map(f32::from_le_bytes).collect();

    let source = repository("tests/fixtures/families").join(model);
    let manifest = Manifest::from_yaml(&format!("source: {}", source.display()), model, sets);
    let manifest = manifest.map_err(|error| format!("the manifest: {error}"))?;
    let converter = Converter::new(manifest).out(out).compile(false);
    converter.convert().map_err(|error| format!("the conversion: {error}"))?;
    let loaded = LoadedModel::on_cpu(out, Precision::F32).map_err(|error| format!("opening: {error}"))?;
    let logits = |chunking: Chunking| -> Result<Vec<f32>, String> {
        let problem = |error: &dyn std::fmt::Display| format!("{chunking:?}: {error}");
        let mut session = loaded.start(tokens.len() as u64).map_err(|error| problem(&error))?;
        let all = ForwardOptions::all(chunking.clone());
        Ok(session.forward(&tokens, &all).map_err(|error| problem(&error))?.logits)
    };
    let found = logits(Chunking::Pattern(sizes.clone()))?;
    let exact = *least > 0.9999;
    let near = if exact { least_cosine(&found, &expected, tokens.len()) } else { cosine(&found, &expected) };
    if near.is_nan() || near < *least {
        return Err(format!("calls of {sizes:?}: cosine {near} with transformers, expected {least}"));
    }
    // whatever the weights are, the size of calls doesn't matter
    let smallest = *sizes.iter().min().unwrap();
    for chunking in [Chunking::Pattern(vec![smallest]), Chunking::Largest] {
        let same = least_cosine(&logits(chunking.clone())?, &found, tokens.len());
        if same.is_nan() || same < 0.99999 {
            return Err(format!("{chunking:?}: cosine {same} with calls of {sizes:?}"));
        }
    }
    // nor do texts that are computed with it, to the last bit
    let (begin, next) = (&tokens[..tokens.len() / 2], tokens[tokens.len() / 2]);
    let texts = [begin, &begin[1..], &begin[..begin.len() - 2]];
    let start = |text: &[u32]| {
        let mut session = loaded.start(tokens.len() as u64)?;
        session.forward(text, &ForwardOptions::none())?;
        anec::base::Result::Ok(session)
    };
    let sessions = || texts.iter().map(|text| start(text)).collect::<anec::base::Result<Vec<_>>>();
    let problem = |error: anec::base::Error| format!("texts computed together: {error}");
    let (mut together, apart) = (sessions().map_err(problem)?, sessions().map_err(problem)?);
    let calls = together.iter_mut().map(|session| NextTokens { session, tokens: std::slice::from_ref(&next) });
    let shared = forward_together(&mut calls.collect::<Vec<_>>());
    for (shared, mut session) in shared.into_iter().zip(apart) {
        let alone = session.forward(&[next], &ForwardOptions::last()).map_err(problem)?.logits;
        if shared.map_err(problem)? != alone {
            return Err("texts computed together have other logits than alone".into());
        }
    }
    Ok(())
}

/// The fixtures of each family that has some of Hugging Face.
fn families(listed: &Json) -> BTreeMap<&str, Vec<&Json>> {
    let mut families = BTreeMap::<&str, Vec<&Json>>::new();
    for case in listed["cases"].as_array().unwrap() {
        if case["hugging_face"].is_string() {
            families.entry(case["family"].as_str().unwrap()).or_default().push(case);
        }
    }
    families
}

/// What is wrong with combinations, each with its keys.
fn faults(listed: &Json, cases: &[Combination]) -> Vec<String> {
    let root = repository("tests/fixtures/families");
    let room = tempfile::tempdir().unwrap();
    let fault = |(index, case): (usize, &Combination)| {
        let entry = listed["cases"].as_array().unwrap().iter().find(|entry| entry["hugging_face"] == *case.model);
        let golden = root.join(entry.unwrap()["goldens"][0]["file"].as_str().unwrap());
        let out = room.path().join(index.to_string());
        let failure = fault(case, &golden, &out).err();
        let _ = std::fs::remove_dir_all(&out);
        failure.map(|failure| format!("{} {}: {failure}", case.model, case.sets.join(" ")))
    };
    cases.par_iter().enumerate().filter_map(fault).collect()
}

#[test]
fn every_family_is_divided_into_attention_and_feed_forward_networks() {
    let listed = json(&repository("tests/fixtures/families").join("cases.json"));
    let cases = families(&listed).into_values().map(|cases| {
        let tokens = cases[0]["goldens"][0]["tokens"].as_u64().unwrap();
        let sets = [
            format!("context={tokens}"),
            "lengths={range: [1, 4]}".into(),
            "quant.weights=none".into(),
            "shards.divide=attention_mlp".into(),
        ];
        let model = cases[0]["hugging_face"].as_str().unwrap().to_owned();
        // weights are rounded to fp16
        Combination { model, sets: sets.to_vec(), sizes: vec![3, 1, 4, 2], least: 0.99995 }
    });
    let cases: Vec<Combination> = cases.collect();
    let failures = faults(&listed, &cases);
    assert!(failures.is_empty(), "{} of {}\n{}", failures.len(), cases.len(), failures.join("\n"));
    cases.par_iter().for_each(|case| {
        let room = tempfile::tempdir().unwrap();
        let logits = |division: &str| -> Vec<f32> {
            let source = repository("tests/fixtures/families").join(&case.model);
            let sets = [case.sets.clone(), vec![format!("shards.divide={division}")]].concat();
            let manifest = Manifest::from_yaml(&format!("source: {}", source.display()), &case.model, &sets).unwrap();
            let out = room.path().join(division);
            Converter::new(manifest).out(&out).compile(false).convert().unwrap();
            let loaded = LoadedModel::on_cpu(&out, Precision::F32).unwrap();
            let divided = loaded.bundle().functions.iter().any(|f| matches!(f.stage, Stage::FeedForward { .. }));
            assert_eq!(divided, division != "none", "{}", case.model);
            let tokens: Vec<u32> = (1..9).map(|token| token * 5 % 50).collect();
            let ask = ForwardOptions::all(Chunking::Pattern(case.sizes.clone()));
            loaded.start(tokens.len() as u64).unwrap().forward(&tokens, &ask).unwrap().logits
        };
        let [whole, divided] = ["none", "attention_mlp"].map(logits);
        assert!(whole.iter().map(|v| v.to_bits()).eq(divided.iter().map(|v| v.to_bits())), "{}", case.model);
    });
}

#[test]
fn forms_meet_at_random() {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().expect(name));
    let seed = number("ANEC_SEED", SEED);
    let count = number("ANEC_COMBINATIONS", COMBINATIONS as u64) as usize;
    println!("ANEC_SEED={seed} ANEC_COMBINATIONS={count}");

    let listed = json(&repository("tests/fixtures/families").join("cases.json"));
    let families = families(&listed);
    let mut draw = Draw(seed);
    let cases: Vec<Combination> =
        families.values().cycle().take(count).map(|cases| combination(&mut draw, cases)).collect();
    assert!(count < families.len() || cases.len() >= families.len());
    let failures = faults(&listed, &cases);
    assert!(failures.is_empty(), "seed {seed}: {} of {count}\n{}", failures.len(), failures.join("\n"));
}
