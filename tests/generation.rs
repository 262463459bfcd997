//! The engine over the demo model: texts that are computed in different ways are the same texts.

use crate::common::folder;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anec::exec::Precision;
use anec::runtime::sampling::Sampling;
use anec::runtime::{
    Finish, ForwardOptions, GenerationOutput, GenerationRequest, LoadedModel, PrefixCache, TextGeneration, Tokenizer,
};
use folder::run;

fn model() -> &'static (Arc<LoadedModel>, Arc<Tokenizer>) {
    static MODEL: OnceLock<(Arc<LoadedModel>, Arc<Tokenizer>)> = OnceLock::new();
    MODEL.get_or_init(|| {
        let room: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("generation-{}", std::process::id()));
        let out = room.join("demo.anec");
        let (code, _, stderr) = run(&["convert", "-m", "demo", "--out", out.to_str().unwrap(), "--force"]);
        assert_eq!(code, 0, "{stderr}");
        let model = LoadedModel::on_cpu(&out, Precision::F32).unwrap();
        let tokenizer = Tokenizer::of(model.bundle(), &out).unwrap();
        (model, Arc::new(tokenizer))
    })
}

fn request(prompt: &str, max_tokens: usize, sampling: Sampling) -> GenerationRequest {
    GenerationRequest {
        prompt: model().1.encode(prompt).unwrap(),
        max_tokens,
        sampling,
        ..GenerationRequest::default()
    }
}

fn fresh(request: &GenerationRequest) -> GenerationOutput {
    request.clone().start(&model().0).unwrap().run().unwrap()
}

#[test]
fn guessing_changes_no_token_over_hundreds() {
    let warm = Sampling { temperature: 0.7, top_p: 0.9, seed: 4, ..Sampling::default() };
    let penalised = Sampling { repetition_penalty: 1.1, frequency_penalty: 0.1, ..Sampling::default() };
    for (prompt, sampling) in [
        ("It was a dark night, and the wind", Sampling::default()),
        ("one two three one two three one two", Sampling::default()),
        ("The lady said to the lady that the lady", warm),
        ("He went to the house", penalised),
    ] {
        let plain = request(prompt, 400, sampling);
        let expected = fresh(&plain);
        assert_eq!(expected.ids.len(), 400);
        for speculation in [1, 3, 8] {
            let found = fresh(&GenerationRequest { speculation, ..plain.clone() });
            assert_eq!(found.ids, expected.ids, "{prompt:?}, up to {speculation} guesses");
            assert!(found.speculation.drafted > 0 && found.speculation.accepted <= found.speculation.drafted);
        }
    }
    // a draft model that is the model itself guesses right, whatever is random
    for sampling in [Sampling::default(), warm, penalised] {
        let plain = request("The lady said to the lady that the lady", 60, sampling);
        let drafted = plain.clone().start(&model().0).unwrap().with_draft(&model().0, 4).unwrap().run().unwrap();
        assert_eq!(drafted.ids, fresh(&plain).ids);
        assert!(drafted.speculation.accepted >= 40, "{:?}", drafted.speculation);
    }
    // greedy texts of a small model go round in circles: most guesses are right
    let found = fresh(&GenerationRequest {
        speculation: 3,
        ..request("one two three one two three one two", 400, Sampling::default())
    });
    assert!(found.speculation.accepted > 100, "{:?}", found.speculation);
}

#[test]
fn a_reused_beginning_and_a_fresh_run_write_the_same() {
    let (model, tokenizer) = model();
    let mut cache = PrefixCache::new(model.clone(), 2);
    let mut text = "The captain looked at the sea".to_owned();
    let mut cached = 0;
    for turn in ["\nThen he said:", " It was late.", "\nAnd the ship"] {
        let request = request(&text, 30, Sampling::default());
        let expected = fresh(&request);
        let session = cache.take(&request.prompt, request.length(model)).unwrap();
        let mut generation = session.generate(request).unwrap();
        let found = generation.run().unwrap();
        cache.put(generation.into_session());
        assert_eq!(found.ids, expected.ids);
        cached += found.timings.cached_tokens;
        text = text + &tokenizer.decode(&found.ids, false).unwrap() + turn;
    }
    assert!(cached > 60, "{cached} tokens weren't computed again");
}

#[test]
fn what_was_taken_back_leaves_no_trace() {
    let (model, tokenizer) = model();
    let tokens =
        tokenizer.encode("It was a fine morning, and the birds were singing in the trees of the garden").unwrap();
    let mut session = model.start(128).unwrap();
    session.forward(&tokens, &ForwardOptions::none()).unwrap();
    session.forward(&[5, 6, 7, 8, 9], &ForwardOptions::none()).unwrap();
    for keep in [tokens.len(), tokens.len() / 2, 3] {
        session.rewind(keep as u64).unwrap();
        let mut twin = session.fork().unwrap().unwrap();
        let found = session.forward(&tokens[..4], &ForwardOptions::last()).unwrap().logits;
        let mut clean = model.start(128).unwrap();
        clean.forward(&tokens[..keep], &ForwardOptions::none()).unwrap();
        let expected = clean.forward(&tokens[..4], &ForwardOptions::last()).unwrap().logits;
        let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 1e-4, "{far} after keeping {keep} tokens");
        assert_eq!(twin.forward(&tokens[..4], &ForwardOptions::last()).unwrap().logits, found, "a copy is a copy");
        session.rewind(keep as u64).unwrap();
    }
}

#[test]
fn stop_strings_and_repetitions_end_texts() {
    let (model, tokenizer) = model();
    let plain = request("It was a dark night", 60, Sampling::default());
    let text = |request: &GenerationRequest, stops: &[String]| {
        let generation = request.clone().start(model).unwrap();
        let mut deltas = TextGeneration::new(generation, tokenizer, stops, &[]).unwrap();
        let text: String = deltas.by_ref().map(|delta| delta.unwrap().text).collect();
        (deltas.generation().output(), text)
    };
    let (_, whole) = text(&plain, &[]);
    let words: Vec<&str> = whole.split_whitespace().collect();
    let stop = format!("{} {}", words[6], words[7]);
    let (generation, stopped) = text(&plain, std::slice::from_ref(&stop));
    assert_eq!((stopped.as_str(), generation.finish), (&whole[..whole.find(&stop).unwrap()], Finish::Stop));
    assert!(generation.ids.len() < 60, "no more is computed than needed");
    let endless = GenerationRequest { stop_repeat_ngram: 8, max_tokens: 450, ..plain };
    let (generation, _) = text(&endless, &[]);
    if generation.finish == Finish::Repetition {
        let ids = &generation.ids;
        let last = &ids[ids.len() - 8..];
        assert_eq!(ids.windows(8).filter(|window| *window == last).count(), 2);
    } else {
        assert!(
            generation.ids.windows(8).enumerate().all(|(i, a)| !generation.ids[i + 1..].windows(8).any(|b| a == b))
        );
    }
}

#[test]
fn a_full_context_ends_a_text_and_refuses_a_prompt() {
    let (model, _) = model();
    let long = GenerationRequest { prompt: vec![5; 500], max_tokens: 100, ..GenerationRequest::default() };
    let generation = fresh(&long);
    assert_eq!(
        (generation.ids.len(), generation.finish),
        (13, Finish::Context),
        "512 slots: the last token needs none"
    );
    let error = GenerationRequest { prompt: vec![5; 513], max_tokens: 1, ..GenerationRequest::default() }
        .start(model)
        .err()
        .unwrap();
    assert_eq!(error.to_string(), "the text needs 513 tokens, but the bundle's largest context has 512");
}
