use super::super::fake::{self, FakeFailure, FakeOptions};
use super::super::forward::{Chunking, Hidden};
use super::super::plan::CallPlan;
use super::*;
use anec_bundle::{Stage, TokenCount};

const TEXT: [u32; 11] = [3, 1, 4, 1, 5, 2, 6, 5, 3, 0, 7];

fn fixed(sizes: &[u64]) -> Vec<TokenCount> {
    sizes.iter().map(|size| TokenCount::Fixed(*size)).collect()
}

/// The double computes in one fixed order, so every route gives the same bits.
fn assert_same_as_reference(form: &FakeOptions, tokens: &[u32], chunking: Chunking) {
    let (model, _) = fake::model(form);
    let mut session = model.start(tokens.len() as u64).unwrap();
    let ask = ForwardOptions::all(chunking).recording(Hidden::BetweenLayers);
    let (hidden, logits) = fake::reference(tokens, tokens.len() as u64);
    for _ in 0..2 {
        let answer = session.forward(tokens, &ask).unwrap();
        assert_eq!(answer.logits, logits);
        assert_eq!(answer.hidden, hidden);
        // the second time starts from the states of the first, unless reset clears them
        session.reset().unwrap();
    }
}

#[test]
fn every_chunking_gives_the_same_logits() {
    for sizes in [vec![1], vec![2], vec![3], vec![4], vec![3, 1, 2, 4]] {
        assert_same_as_reference(&FakeOptions::default(), &TEXT, Chunking::Pattern(sizes));
    }
    assert_same_as_reference(&FakeOptions::default(), &TEXT, Chunking::Largest);
}

#[test]
fn hidden_states_between_functions_need_no_look_inside() {
    let (model, _) = fake::model(&FakeOptions::default());
    let ask = ForwardOptions::default().recording(Hidden::BetweenFunctions);
    let found = model.start(TEXT.len() as u64).unwrap().forward(&TEXT, &ask).unwrap().hidden;
    let mut expected = fake::reference(&TEXT, TEXT.len() as u64).0;
    // layers 0 and 1 are one function
    expected[1].clear();
    assert_eq!(found, expected);
}

#[test]
fn fixed_sizes_write_at_a_position() {
    let form =
        FakeOptions { layer_tokens: fixed(&[1, 4]), head_tokens: fixed(&[1]), slice: true, ..FakeOptions::default() };
    assert_same_as_reference(&form, &TEXT, Chunking::Largest);
}

#[test]
fn padding_leaves_no_trace() {
    for slice in [false, true] {
        let form = FakeOptions { layer_tokens: fixed(&[8]), head_tokens: fixed(&[8]), slice, ..FakeOptions::default() };
        assert_same_as_reference(&form, &TEXT, Chunking::Largest);
    }
}

#[test]
fn a_filled_up_call_that_writes_at_a_position_must_fit_the_cache() {
    let form = FakeOptions { layer_tokens: fixed(&[8]), contexts: vec![12], slice: true, ..FakeOptions::default() };
    let error = fake::model(&form).0.start(11).unwrap().forward(&TEXT, &ForwardOptions::last()).unwrap_err();
    assert_eq!(error.to_string(), "the text needs 16 tokens, but the bundle's largest context has 12");
}

#[test]
fn rotary_rows_are_those_of_the_texts_length() {
    let short = &TEXT[..fake::SHORT as usize];
    assert_same_as_reference(&FakeOptions::default(), short, Chunking::Largest);
    // the same tokens use other rotary rows as the beginning of a longer text
    let (model, _) = fake::model(&FakeOptions::default());
    let long = model.start(10).unwrap().forward(short, &ForwardOptions::all(Chunking::Largest)).unwrap();
    assert_eq!(long.logits, fake::reference(short, 10).1);
    assert_ne!(long.logits, fake::reference(short, short.len() as u64).1);
}

#[test]
fn generation_asks_the_head_for_the_last_token_only() {
    let (model, calls) = fake::model(&FakeOptions::default());
    let answer = model.start(16).unwrap().forward(&TEXT[..6], &ForwardOptions::last()).unwrap();
    assert_eq!(answer.logits, fake::reference(&TEXT[..6], 16).1[5 * fake::VOCAB..]);
    let calls = calls.lock().unwrap();
    let expected = [
        ("layers_0_2_of_16", 4),
        ("layers_2_3_of_16", 4),
        ("layers_0_2_of_16", 2),
        ("layers_2_3_of_16", 2),
        ("head_0_5", 1),
        ("head_5_8", 1),
    ];
    assert!(calls.iter().map(|(name, t)| (name.as_str(), *t)).eq(expected), "{calls:?}");
}

#[test]
fn the_smallest_context_that_fits_is_used() {
    let form = FakeOptions { contexts: vec![16, 8], ..FakeOptions::default() };
    let (model, calls) = fake::model(&form);
    let mut session = model.start(11).unwrap();
    for (tokens, name) in
        [(&TEXT[..5], "layers_0_2_of_8"), (&TEXT[5..8], "layers_0_2_of_8"), (&TEXT[8..], "layers_0_2_of_16")]
    {
        calls.lock().unwrap().clear();
        session.forward(tokens, &ForwardOptions::last()).unwrap();
        assert_eq!(calls.lock().unwrap()[0].0, name);
    }
    assert_eq!((session.limit(), model.start(8).unwrap().limit()), (16, 8));
    assert_same_as_reference(&form, &TEXT, Chunking::Largest);
}

#[test]
fn a_full_context_is_an_error_that_says_so() {
    let (model, _) = fake::model(&FakeOptions::default());
    let error = model.start(17).err().unwrap();
    assert_eq!(error.to_string(), "the text needs 17 tokens, but the bundle's largest context has 16");
    let mut session = model.start(16).unwrap();
    session.forward(&[1; 16], &ForwardOptions::last()).unwrap();
    assert!(session.forward(&[1], &ForwardOptions::last()).is_err());
    assert_eq!(session.position(), 16);
}

/// Appends tokens and rewinds them repeatedly, and compares with a text that never had them.
fn assert_rewinds(form: &FakeOptions) {
    let (model, _) = fake::model(form);
    let fresh = |tokens: &[u32]| model.start(16).unwrap().forward(tokens, &ForwardOptions::last()).unwrap().logits;
    let mut session = model.start(16).unwrap();
    let mut fork = None;
    for end in 1..TEXT.len() {
        session.forward(&TEXT[end - 1..end], &ForwardOptions::none()).unwrap();
        session.checkpoint().unwrap();
        session.forward(&[6, 6, 2], &ForwardOptions::none()).unwrap();
        session.rewind(end as u64 + 1).unwrap();
        session.rewind(end as u64).unwrap();
        assert_eq!(session.tokens(), &TEXT[..end]);
        let mut twin = session.fork().unwrap();
        assert_eq!(twin.is_some(), form.forks);
        if let Some(twin) = &mut twin {
            let text = [&TEXT[..end], &[2]].concat();
            assert_eq!(
                twin.forward(&[2], &ForwardOptions::last()).unwrap().logits,
                fresh(&text),
                "a copy goes its own way"
            );
        }
        fork = twin;
    }
    session.rewind(4).unwrap();
    let logits = session.forward(&TEXT[4..6], &ForwardOptions::last()).unwrap().logits;
    assert_eq!(logits, fresh(&TEXT[..6]));
    session.rewind(0).unwrap();
    assert_eq!(session.forward(&TEXT[..1], &ForwardOptions::last()).unwrap().logits, fresh(&TEXT[..1]));
    assert_eq!(fork.is_some(), form.forks);
}

#[test]
fn rewound_tokens_leave_no_trace() {
    for (slice, recurrent, forks) in
        [(false, false, true), (true, false, false), (false, true, true), (false, true, false)]
    {
        assert_rewinds(&FakeOptions { slice, recurrent, forks, ..FakeOptions::default() });
    }
}

/// A call fails in the middle of a text. Earlier results hold, and the text can continue.
#[test]
fn after_a_failure_the_text_can_go_on() {
    for (failure, recurrent, forks) in [
        (FakeFailure::Error, false, true),
        (FakeFailure::Short, false, true),
        (FakeFailure::Error, true, true),
        (FakeFailure::Short, true, false),
    ] {
        // calls of a text of eleven tokens: two shards for each of 4, 4 and 3 tokens, then two head parts
        for at in 0..8 {
            let (model, _) =
                fake::model(&FakeOptions { script: vec![(at, failure)], recurrent, forks, ..FakeOptions::default() });
            let mut session = model.start(TEXT.len() as u64).unwrap();
            let error = session.forward(&TEXT, &ForwardOptions::last()).unwrap_err().to_string();
            let expected = match failure {
                FakeFailure::Error => "backend double: the device is busy",
                _ => "numbers for",
            };
            assert!(error.contains(expected), "{error}");
            let known = session.position();
            assert_eq!(known, (at as u64 / 2 * 4).min(11), "whole calls count, at {at}");
            let rest = known.min(10);
            session.rewind(rest).unwrap();
            let logits = session.forward(&TEXT[rest as usize..], &ForwardOptions::last()).unwrap().logits;
            let (unharmed, _) = fake::model(&FakeOptions { recurrent, ..FakeOptions::default() });
            assert_eq!(logits, unharmed.start(11).unwrap().forward(&TEXT, &ForwardOptions::last()).unwrap().logits);
        }
    }
}

#[test]
fn a_checkpoint_saves_computing() {
    let form = FakeOptions { recurrent: true, ..FakeOptions::default() };
    let (model, calls) = fake::model(&form);
    let mut session = model.start(16).unwrap();
    session.forward(&TEXT[..8], &ForwardOptions::none()).unwrap();
    session.checkpoint().unwrap();
    session.forward(&[1, 2], &ForwardOptions::none()).unwrap();
    calls.lock().unwrap().clear();
    session.rewind(8).unwrap();
    assert!(calls.lock().unwrap().is_empty(), "the states were kept");
    session.rewind(7).unwrap();
    assert_eq!(calls.lock().unwrap().len(), 4, "seven tokens in two calls of two shards");
}

#[test]
fn a_token_outside_the_vocabulary_is_refused() {
    let (model, _) = fake::model(&FakeOptions::default());
    let error = model.start(4).unwrap().forward(&[8], &ForwardOptions::last()).unwrap_err();
    assert_eq!(error.to_string(), "token 8 doesn't exist: the vocabulary has 8 tokens, 0 to 7");
    assert!(model.start(4).unwrap().forward(&[], &ForwardOptions::last()).is_err());
}

#[test]
fn a_bundle_with_a_gap_is_refused() {
    let mut bundle = fake::bundle(&FakeOptions::default());
    bundle.functions.retain(|f| f.stage != (Stage::Layers { first: 2, end: 3 }));
    bundle.packages.retain(|p| p.package != "layers_2_3.mlpackage");
    let error = CallPlan::new(&bundle, std::path::Path::new("b")).unwrap_err().to_string();
    assert_eq!(error, "b/bundle.json: layers of context 16: they end at 2 of 3");
}
