//! Forms of a model in combinations that nobody chose: the forms of operations, experts, states, writes, lengths of
//! calls and number formats are drawn at random for every family, encoders among them, and the bundle still computes
//! what transformers does, in calls of every size and with other texts.
//!
//! `ANEC_SEED` draws others, `ANEC_COMBINATIONS` so many. What fails is printed with the manifest keys that show it
//! again.

pub(crate) mod draw;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anec::bundle::Stage;
use anec::exec::Precision;
use anec::runtime::classify::windows::Windows;
use anec::runtime::encode::Embedder;
use anec::runtime::{
    Chunking, EncodedText, ForwardOptions, Hidden, LoadedModel, NextTokens, Positions, encode, forward_together,
};
use anec::{Converter, Manifest};
use rayon::prelude::*;
use safetensors::SafeTensors;

use draw::{Combination, Draw, Fixture, Kind, combination, fixtures};

/// Combinations of a run: every family several times.
const COMBINATIONS: usize = 200;

/// The seed of a run that names none.
const SEED: u64 = 14;

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

/// Reference computed by transformers for a fixture.
struct Golden {
    text: EncodedText,
    output: Vec<f32>,
}

impl Golden {
    fn read(fixture: &Fixture) -> Self {
        let bytes = std::fs::read(&fixture.golden).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let numbers = |name: &str| Some(tensors.tensor(name).ok()?.data().as_chunks::<4>().0.to_vec());
        let integers = |name: &str| numbers(name).unwrap_or_default().into_iter().map(u32::from_le_bytes).collect();
        let output = if fixture.kind == Kind::Embedder { "embedding" } else { "logits" };
        let output = numbers(output).unwrap().into_iter().map(f32::from_le_bytes).collect();
        Golden { text: EncodedText { ids: integers("tokens"), types: integers("types") }, output }
    }
}

/// The model of a combination. A form that can't hold the epsilon of the model's norms is refused, and taken back.
pub(crate) fn converted(combination: &Combination, out: &Path) -> Result<Arc<LoadedModel>, String> {
    let Combination { fixture, sets, .. } = combination;
    let convert = |more: &[&str]| {
        let sets: Vec<String> = sets.iter().cloned().chain(more.iter().map(|set| set.to_string())).collect();
        let manifest = Manifest::from_yaml(&format!("source: {}", fixture.folder.display()), "fixture", &sets);
        let manifest = manifest.map_err(|error| format!("the manifest: {error}"))?;
        let converter = Converter::new(manifest).out(out).compile(false);
        converter.convert().map(|_| ()).map_err(|error| format!("the conversion: {error}"))
    };
    match convert(&[]) {
        Err(error) if error.contains("which fp16 doesn't hold") => convert(&["norm=accurate"])?,
        other => other?,
    }
    LoadedModel::on_cpu(out, Precision::F32).map_err(|error| format!("opening: {error}"))
}

/// Converts and runs a combination; returns what is wrong with it.
fn fault(combination: &Combination, out: &Path) -> Result<(), String> {
    let loaded = converted(combination, out)?;
    let golden = Golden::read(&combination.fixture);
    let problem = |error: anec::base::Error| error.to_string();
    let (found, tolerance) = match combination.fixture.kind {
        Kind::Decoder => return decoder_fault(combination, &loaded, &golden),
        Kind::TokenClassifier => {
            let windows = Windows::new(&loaded, None, Hidden::No).map_err(problem)?;
            (windows.label(&golden.text.ids).map_err(problem)?.logits, None)
        }
        Kind::Embedder => {
            let embedder = Embedder::new(&loaded, None).map_err(problem)?;
            (embedder.embed(&golden.text).map_err(problem)?, None)
        }
        // of one label there is no direction
        Kind::TextClassifier => {
            let tolerance = if combination.least > 0.9999 { 3e-3 } else { 0.3 };
            (encode::classify(&loaded, &golden.text).map_err(problem)?, Some(tolerance))
        }
    };
    let (near, least) = match tolerance {
        Some(tolerance) => {
            assert_eq!(found.len(), golden.output.len());
            let apart = found.iter().zip(&golden.output).map(|(a, b)| f64::from((a - b).abs()));
            (-apart.fold(0.0, f64::max), -tolerance)
        }
        None => (cosine(&found, &golden.output), combination.least),
    };
    if near.is_nan() || near < least {
        return Err(format!("{near} with transformers, expected {least}"));
    }
    Ok(())
}

/// Checks a decoder; returns the first fault.
fn decoder_fault(combination: &Combination, loaded: &Arc<LoadedModel>, golden: &Golden) -> Result<(), String> {
    let Combination { sizes, least, .. } = combination;
    let (tokens, expected) = (&golden.text.ids, &golden.output);
    let logits = |chunking: Chunking| -> Result<Vec<f32>, String> {
        let problem = |error: &dyn std::fmt::Display| format!("{chunking:?}: {error}");
        let mut session = loaded.start(tokens.len() as u64).map_err(|error| problem(&error))?;
        let all = ForwardOptions::all(chunking.clone());
        Ok(session.forward(tokens, &all).map_err(|error| problem(&error))?.logits)
    };
    let found = logits(Chunking::Pattern(sizes.clone()))?;
    let exact = *least > 0.9999;
    let near = if exact { least_cosine(&found, expected, tokens.len()) } else { cosine(&found, expected) };
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
    // nor do texts that are computed with it, to the last bit: three that are written and a prompt
    let begin = &tokens[..tokens.len() / 2];
    let next = std::slice::from_ref(&tokens[begin.len()]);
    let texts = [(begin, next), (&begin[1..], next), (&begin[..begin.len() - 2], next), (&[], tokens.as_slice())];
    let start = |(text, _): &(&[u32], &[u32])| {
        let mut session = loaded.start(tokens.len() as u64)?;
        if !text.is_empty() {
            session.forward(text, &ForwardOptions::none())?;
        }
        anec::base::Result::Ok(session)
    };
    let sessions = || texts.iter().map(start).collect::<anec::base::Result<Vec<_>>>();
    let problem = |error: anec::base::Error| format!("texts computed together: {error}");
    let (mut together, apart) = (sessions().map_err(problem)?, sessions().map_err(problem)?);
    let calls = together.iter_mut().zip(&texts);
    let calls =
        calls.map(|(session, (_, tokens))| NextTokens { session, tokens, logits: Positions::Last, largest: false });
    let shared = forward_together(calls.collect());
    for ((shared, mut session), (_, tokens)) in shared.into_iter().zip(apart).zip(&texts) {
        let alone = session.forward(tokens, &ForwardOptions::last()).map_err(problem)?.logits;
        if shared.map_err(problem)?.logits != alone {
            return Err("texts computed together have other logits than alone".into());
        }
    }
    Ok(())
}

/// Faults of combinations, each with its manifest keys.
fn faults(cases: &[Combination]) -> Vec<String> {
    let room = tempfile::tempdir().unwrap();
    let fault = |(index, case): (usize, &Combination)| {
        let out = room.path().join(index.to_string());
        let failure = fault(case, &out).err();
        let _ = std::fs::remove_dir_all(&out);
        let model = case.fixture.folder.file_name().unwrap_or_default().display();
        failure.map(|failure| format!("{model} {}: {failure}", case.sets.join(" ")))
    };
    cases.par_iter().enumerate().filter_map(fault).collect()
}

#[test]
fn every_family_is_divided_into_attention_and_feed_forward_networks() {
    let decoders = fixtures().into_values().filter(|fixtures| fixtures[0].kind == Kind::Decoder);
    let cases = decoders.map(|mut fixtures| {
        let fixture = fixtures.swap_remove(0);
        let tokens = Golden::read(&fixture).text.ids.len();
        let sets = [
            format!("context={tokens}"),
            "lengths={range: [1, 4]}".into(),
            "quant.weights=none".into(),
            "shards.divide=attention_mlp".into(),
        ];
        // weights are rounded to fp16
        Combination { fixture, sets: sets.to_vec(), sizes: vec![3, 1, 4, 2], least: 0.99995 }
    });
    let cases: Vec<Combination> = cases.collect();
    let failures = faults(&cases);
    assert!(failures.is_empty(), "{} of {}\n{}", failures.len(), cases.len(), failures.join("\n"));
    cases.par_iter().for_each(|case| {
        let room = tempfile::tempdir().unwrap();
        let logits = |division: &str| -> Vec<f32> {
            let source = &case.fixture.folder;
            let sets = [case.sets.clone(), vec![format!("shards.divide={division}")]].concat();
            let manifest = Manifest::from_yaml(&format!("source: {}", source.display()), "fixture", &sets).unwrap();
            let out = room.path().join(division);
            Converter::new(manifest).out(&out).compile(false).convert().unwrap();
            let loaded = LoadedModel::on_cpu(&out, Precision::F32).unwrap();
            let divided = loaded.bundle().functions.iter().any(|f| matches!(f.stage, Stage::FeedForward { .. }));
            assert_eq!(divided, division != "none", "{}", source.display());
            let tokens: Vec<u32> = (1..9).map(|token| token * 5 % 50).collect();
            let ask = ForwardOptions::all(Chunking::Pattern(case.sizes.clone()));
            loaded.start(tokens.len() as u64).unwrap().forward(&tokens, &ask).unwrap().logits
        };
        let [whole, divided] = ["none", "attention_mlp"].map(logits);
        assert!(
            whole.iter().map(|v| v.to_bits()).eq(divided.iter().map(|v| v.to_bits())),
            "{}",
            case.fixture.folder.display()
        );
    });
}

#[test]
fn forms_meet_at_random() {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().expect(name));
    let seed = number("ANEC_SEED", SEED);
    let count = number("ANEC_COMBINATIONS", COMBINATIONS as u64) as usize;
    // past the harness, which shows what tests print only where they fail
    let _ = std::io::stderr().write_all(format!("ANEC_SEED={seed} ANEC_COMBINATIONS={count}\n").as_bytes());

    let families = fixtures();
    let mut draw = Draw(seed);
    let cases: Vec<Combination> =
        families.values().cycle().take(count).map(|fixtures| combination(&mut draw, fixtures)).collect();
    let failures = faults(&cases);
    assert!(failures.is_empty(), "seed {seed}: {} of {count}\n{}", failures.len(), failures.join("\n"));
}
