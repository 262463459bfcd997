//! A bias of the LM head is added to the logits, whatever the form of the head, however its rows are divided, and
//! whatever is done to the weights.

use anec::exec::Precision;
use anec::runtime::{Chunking, ForwardOptions, LoadedModel};
use anec::{Converter, Manifest};
use rayon::prelude::*;
use safetensors::Dtype;

use crate::common::folder::repository;
use crate::common::model;

const VOCAB: usize = 137;

/// One number of the bias for each token.
fn bias() -> Vec<f32> {
    (0..VOCAB).map(|token| (token as f32 * 0.37).sin()).collect()
}

#[test]
fn a_bias_of_the_head_is_added_to_the_logits() {
    let forms: [&[&str]; 6] = [
        &["quant.weights=none", "linear=conv", "lm_head.split=3"],
        &["quant.weights=none", "linear=linear", "lm_head.split=2"],
        &["quant.weights=none", "linear=matmul"],
        &["quant={weights: palette8, row_scale: true}", "linear=conv", "lm_head.split=2"],
        &["quant={weights: palette8, row_scale: true}", "linear=linear"],
        // rotates, folds and equalizes
        &["quant={weights: int8}", "transforms=auto", "lm_head.split=3"],
    ];
    let room = tempfile::tempdir().unwrap();
    let plain = repository("tests/fixtures/families/phi3-default");
    let biased = room.path().join("biased");
    model::copy(&plain, &biased);
    model::edit_json(&biased.join("config.json"), |config| config["lm_head_bias"] = true.into());
    model::edit_tensors(&biased.join("model.safetensors"), |tensors| {
        let bytes = bias().into_iter().flat_map(f32::to_le_bytes).collect();
        tensors.push(("lm_head.bias".into(), Dtype::F32, vec![VOCAB], bytes));
    });
    let tokens: Vec<u32> = (0..9).map(|token| token * 13 % VOCAB as u32).collect();
    forms.par_iter().enumerate().for_each(|(index, form)| {
        let [of_plain, of_biased] = [&plain, &biased].map(|source| {
            let sets: Vec<String> = ["context=16"].iter().chain(*form).map(|set| set.to_string()).collect();
            let manifest = Manifest::from_yaml(&format!("source: {}", source.display()), "biased", &sets).unwrap();
            let out = room.path().join(format!("{index}-{}", source == &biased));
            Converter::new(manifest).out(&out).compile(false).convert().unwrap();
            let loaded = LoadedModel::on_cpu(&out, Precision::F32).unwrap();
            let mut session = loaded.start(tokens.len() as u64).unwrap();
            session.forward(&tokens, &ForwardOptions::all(Chunking::Largest)).unwrap().logits
        });
        for (at, (biased, plain)) in of_biased.iter().zip(&of_plain).enumerate() {
            let (found, expected) = (biased - plain, bias()[at % VOCAB]);
            // the bias is held in fp16
            assert!((found - expected).abs() < 1e-3, "{form:?}: {found} at {at}, expected {expected}");
        }
    });
}
