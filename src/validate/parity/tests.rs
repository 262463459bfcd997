use super::*;
use crate::{Greedy, Thresholds};
use anec_bundle::TokenCount;
use anec_manifest::Gates;
use anec_runtime::fake::{self, FakeOptions};

const TEXT: [u32; 9] = [3, 1, 4, 1, 5, 2, 6, 5, 3];

fn golden() -> Golden {
    let (hidden, logits) = fake::reference(&TEXT, TEXT.len() as u64);
    Golden {
        tokens: TEXT.to_vec(),
        texts: Vec::new(),
        positions: (0..TEXT.len()).collect(),
        logits,
        vocab_size: fake::VOCAB,
        hidden: hidden.into_iter().enumerate().collect(),
        losses: None,
        greedy: Some(greedy(&[1, 2], 3)),
        metadata: Default::default(),
    }
}

/// Greedy continuation of the double.
fn greedy(prompt: &[u32], count: usize) -> Greedy {
    let mut text = prompt.to_vec();
    // the last token isn't an input; the length of the whole text selects the rotary table
    let length = (prompt.len() + count).saturating_sub(1) as u64;
    for _ in 0..count {
        let (_, logits) = fake::reference(&text, length);
        text.push(anec_runtime::sampling::argmax(&logits[logits.len() - fake::VOCAB..]));
    }
    Greedy { prompt: prompt.to_vec(), ids: text.split_off(prompt.len()) }
}

fn gate(form: &FakeOptions, golden: &Golden) -> GateReport {
    let candidate = Candidate { name: "double".into(), model: fake::model(form).0, layers: true };
    parity(&[candidate], golden, &Thresholds::of(&Gates::default()).parity).unwrap()
}

#[test]
fn the_reference_agrees_with_itself_in_every_way_of_calling() {
    let report = gate(&FakeOptions::default(), &golden());
    assert_eq!(report.verdict, Verdict::Passed, "{report:#?}");
    let layers: Vec<usize> = report.checks.iter().filter_map(|check| check.layer).collect();
    assert_eq!(layers, [0, 1, 2]);
    let others = report.checks.iter().filter(|check| check.layer.is_none());
    let subjects: Vec<&str> = others.map(|check| check.subject.as_str()).collect();
    let expected = [
        "double, T = 1",
        "double, T = 2",
        "double, T = 3",
        "double, T = 4",
        "double, T = 3, 4, 1, 2 …",
        "double",
        "double, tokens",
        "double, layers 0..2",
        "double, layers 2..3",
        "double, head 0..5",
        "double, head 5..8",
        "double, positions",
        "double, layers 0..2 forced, T = 1",
        "double, layers 0..2 forced, T = 2",
        "double, layers 0..2 forced, T = 3",
        "double, layers 0..2 forced, T = 4",
        "double, layers 0..2 forced, T = 3, 4, 1, 2 …",
        "double, layers 2..3 forced, T = 1",
        "double, layers 2..3 forced, T = 2",
        "double, layers 2..3 forced, T = 3",
        "double, layers 2..3 forced, T = 4",
        "double, layers 2..3 forced, T = 3, 4, 1, 2 …",
        "double, head forced",
        "double, T = 2, last slots",
        "double, T = 3, last slots",
        "double, T = 4, last slots",
        "double",
    ];
    assert_eq!(subjects, expected);
    let positions = report.checks.iter().find(|check| check.subject == "double, positions").unwrap();
    assert_eq!((positions.positions.len(), positions.positions[5].token), (9, 2));
    assert!(positions.positions.iter().all(|at| at.top1 && at.cosine > 0.999999 && at.kl.abs() < 1e-9));
    assert_eq!(report.checks[0].measured["max_abs"], 0.0);
}

#[test]
fn a_single_size_is_tried_with_filled_up_calls() {
    let tokens = vec![TokenCount::Fixed(4)];
    let form = FakeOptions { layer_tokens: tokens.clone(), head_tokens: tokens, ..FakeOptions::default() };
    let report = gate(&form, &golden());
    assert_eq!((report.verdict, report.checks[0].subject.as_str()), (Verdict::Passed, "double, T = 4"));
}

#[test]
fn a_wrong_position_fails_the_gate() {
    let mut golden = golden();
    let row = &mut golden.logits[5 * fake::VOCAB..6 * fake::VOCAB];
    row.reverse();
    let report = gate(&FakeOptions::default(), &golden);
    assert_eq!(report.verdict, Verdict::Failed);
    assert!(report.checks[0].detail.as_deref().unwrap().starts_with("cosine "), "{report:?}");
}

#[test]
fn a_single_bad_position_is_named() {
    // 200 positions, one slightly off: less than 1 %
    let text: Vec<u32> = TEXT.into_iter().cycle().take(16).collect();
    let golden = several(&vec![text.clone(); 13]);
    assert_eq!(golden.positions.len(), 208);
    let turned = |by: f32| {
        let mut golden = golden.clone();
        // sixth token of the third text
        let row = &mut golden.logits[37 * fake::VOCAB..38 * fake::VOCAB];
        let length = row.iter().map(|v| v * v).sum::<f32>().sqrt();
        row[7] += by * length;
        gate(&FakeOptions::default(), &golden)
    };
    let find = |report: &GateReport, subject: &str| {
        report.checks.iter().find(|check| check.subject == subject).unwrap().clone()
    };
    let little = turned(0.2);
    let positions = find(&little, "double, positions");
    assert_eq!(positions.verdict, Verdict::Passed, "{positions:#?}");
    let detail = positions.detail.unwrap();
    assert!(
        detail.starts_with("1 of 208 positions are below 0.995: text 2, position 5, token 2: cosine 0.9"),
        "{detail}"
    );
    let all = find(&little, "double, 13 texts");
    assert!(all.measured["cosine"] < 0.99 && all.measured["p1"] > 0.999999, "{all:#?}");
    assert_eq!(all.verdict, Verdict::Passed, "{all:#?}");
    // a distant position fails and is named, too
    let far = find(&turned(2.0), "double, positions");
    assert_eq!(far.verdict, Verdict::Failed);
    assert!(far.detail.unwrap().contains("text 2, position 5, token 2: cosine"));
}

#[test]
fn each_of_several_texts_begins_anew() {
    let report = gate(&FakeOptions::default(), &several(&[TEXT.to_vec(), vec![7, 7, 1, 2, 3, 4, 5], vec![6]]));
    assert_eq!(report.verdict, Verdict::Passed, "{report:#?}");
    let check = |subject: &str| report.checks.iter().find(|check| check.subject == subject).unwrap();
    assert_eq!(check("double, 3 texts").measured["positions"], 17.0);
    // the first token of a text isn't predicted
    assert_eq!(check("double, perplexity").measured["tokens"], 14.0);
    assert!(check("double, perplexity").measured["difference"].abs() < 1e-9);
    // all call sizes are tried with the first text
    assert_eq!(check("double, T = 2").measured["positions"], 9.0);
}

/// Golden of several texts by the double.
fn several(texts: &[Vec<u32>]) -> Golden {
    let mut golden =
        Golden { tokens: Vec::new(), logits: Vec::new(), hidden: Default::default(), greedy: None, ..golden() };
    for (index, text) in texts.iter().enumerate() {
        golden.texts.push(crate::GoldenText { name: format!("text {index}"), start: golden.tokens.len() });
        golden.tokens.extend(text);
        golden.logits.extend(fake::reference(text, text.len() as u64).1);
    }
    golden.positions = (0..golden.tokens.len()).collect();
    golden
}

#[test]
fn a_wrong_scale_fails_although_every_cosine_is_one() {
    let mut golden = golden();
    golden.logits.iter_mut().for_each(|v| *v *= 1.2);
    let report = gate(&FakeOptions::default(), &golden);
    assert_eq!(report.checks[0].detail.as_deref(), Some("norm ratio from 0.8333 to 0.8333, expected 0.9 to 1.1"));
}

#[test]
fn a_wrong_shard_is_named() {
    let mut golden = golden();
    golden.hidden.get_mut(&2).unwrap().iter_mut().step_by(2).for_each(|v| *v = -*v);
    let report = gate(&FakeOptions::default(), &golden);
    let failed = || report.checks.iter().filter(|c| c.verdict == Verdict::Failed);
    // expected output of layer 1 is wrong
    assert_eq!(failed().find_map(|check| check.layer), Some(1));
    let failed: Vec<&str> = failed().filter(|c| c.layer.is_none()).map(|c| c.subject.as_str()).collect();
    let (forced, free): (Vec<&str>, Vec<&str>) = failed.iter().partition(|subject| subject.contains("forced"));
    assert_eq!(free, ["double, layers 0..2"]);
    // expected output of the first shard, which is the second's input, is wrong
    assert_eq!(forced.len(), 10, "{forced:?}");
}

#[test]
fn a_layer_that_adds_something_else_is_named() {
    let mut golden = golden();
    // layers 0 and 1 are one function, with the first layer's output inside
    golden.hidden.get_mut(&1).unwrap().iter_mut().step_by(2).for_each(|v| *v = -*v);
    let report = gate(&FakeOptions::default(), &golden);
    let failed: Vec<&Check> = report.checks.iter().filter(|c| c.verdict == Verdict::Failed).collect();
    let layers: Vec<Option<usize>> = failed.iter().map(|check| check.layer).collect();
    // neither the following layer in the function nor its neighbours are blamed
    assert_eq!(layers, [Some(0)], "{failed:#?}");
    assert!(failed[0].subject.ends_with(", layer 0"), "{failed:#?}");
    assert!(failed[0].detail.as_deref().unwrap().ends_with("aren't judged"), "{failed:#?}");
}

/// Golden long enough for a perplexity.
fn long_text() -> Golden {
    let tokens: Vec<u32> = TEXT.into_iter().cycle().take(16).collect();
    let (_, logits) = fake::reference(&tokens, tokens.len() as u64);
    let positions = (0..tokens.len()).collect();
    Golden { tokens, positions, logits, hidden: Default::default(), greedy: None, ..golden() }
}

#[test]
fn a_text_that_is_less_or_more_likely_than_for_the_golden_fails() {
    let check = |golden: &Golden| {
        let report = gate(&FakeOptions::default(), golden);
        report.checks.into_iter().find(|check| check.subject == "double, perplexity")
    };
    // from the logits, and from a list of losses
    let golden = long_text();
    let same = check(&golden).unwrap();
    assert_eq!((same.verdict, same.measured["tokens"]), (Verdict::Passed, 15.0));
    assert!(same.measured["difference"].abs() < 1e-9, "{same:?}");
    let listed = |change: f32| Golden {
        losses: Some(golden.losses().iter().map(|(_, loss)| *loss as f32 + change).collect()),
        positions: vec![3],
        logits: golden.logits[3 * fake::VOCAB..4 * fake::VOCAB].to_vec(),
        ..golden.clone()
    };
    assert_eq!(check(&listed(0.0)).unwrap().verdict, Verdict::Passed);
    for change in [0.1, -0.1] {
        let other = check(&listed(change)).unwrap();
        assert_eq!(other.verdict, Verdict::Failed);
        assert!((other.measured["difference"] - (f64::from(-change).exp() - 1.0)).abs() < 1e-4, "{other:?}");
    }
    // nine tokens are too few
    assert!(check(&self::golden()).is_none());
}

#[test]
fn a_continuation_may_differ_in_a_few_places_and_no_more() {
    let check = |change: &[usize], count: usize| {
        let mut golden = golden();
        let greedy = golden.greedy.insert(greedy(&[1, 2], count));
        change.iter().for_each(|at| greedy.ids[*at] = (greedy.ids[*at] + 1) % fake::VOCAB as u32);
        let report = gate(&FakeOptions::default(), &golden);
        report.checks.into_iter().find(|check| check.claim == "greedy continuation").unwrap()
    };
    assert_eq!(check(&[], 7).verdict, Verdict::Passed);
    let last = check(&[6], 7);
    assert_eq!(
        (last.verdict, last.measured["greedy_agree"], last.measured["greedy_wrong"]),
        (Verdict::Passed, 6.0, 1.0)
    );
    assert_eq!(check(&[0, 1, 2, 3, 4, 5, 6], 7).verdict, Verdict::Failed);
    assert_eq!(check(&[], 1).verdict, Verdict::Unproven);
}

#[test]
fn a_text_of_a_few_tokens_proves_little() {
    let mut golden = Golden { hidden: Default::default(), greedy: None, ..golden() };
    golden.tokens.truncate(3);
    golden.positions.truncate(3);
    golden.logits = fake::reference(&golden.tokens, 3).1;
    assert_eq!(gate(&FakeOptions::default(), &golden).verdict, Verdict::Unproven);
}

#[test]
fn comparing_nothing_is_no_success() {
    let golden = Golden { positions: Vec::new(), logits: Vec::new(), ..golden() };
    assert_eq!(gate(&FakeOptions::default(), &golden).verdict, Verdict::Failed);
    assert_eq!(without_golden(None).verdict, Verdict::Unproven);
    let missing = without_golden(Some(Path::new("golden/phi4.safetensors")));
    assert_eq!(missing.verdict, Verdict::Unproven);
    assert!(format!("{missing:?}").contains("the manifest's golden golden/phi4.safetensors isn't here"), "{missing:?}");
}

#[test]
fn some_positions_are_enough() {
    let mut golden = golden();
    golden.positions = vec![0, 8];
    golden.logits = [&golden.logits[..fake::VOCAB], &golden.logits[8 * fake::VOCAB..]].concat();
    let report = gate(&FakeOptions::default(), &golden);
    assert_eq!((report.verdict, report.checks[0].measured["positions"]), (Verdict::Passed, 2.0));
}

#[test]
fn a_golden_of_another_model_is_refused() {
    let candidate = || Candidate { name: "double".into(), model: fake::model(&FakeOptions::default()).0, layers: true };
    let thresholds = Thresholds::of(&Gates::default()).parity;
    let other = Golden { vocab_size: 9, ..golden() };
    assert!(parity(&[candidate()], &other, &thresholds).is_err());
    let other = Golden { tokens: vec![fake::VOCAB as u32; golden().tokens.len()], ..golden() };
    assert!(parity(&[candidate()], &other, &thresholds).is_err());
    let other = Golden { hidden: [(4, Vec::new())].into(), ..golden() };
    assert!(parity(&[candidate()], &other, &thresholds).is_err());
}
