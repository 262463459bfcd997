//! Private spans are taken out of texts: all bytes outside of them stay, places are right in any script, texts of any
//! length go through in bounded memory and come out as if they were looked at as a whole. The model is random: what it
//! takes for private is nonsense, which makes no difference here.

use crate::common::folder;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anec::exec::Precision;
use anec::runtime::classify::bioes::Biases;
use anec::runtime::classify::redact::{Piece, RedactionSummary, Redactor, Span};
use anec::runtime::classify::windows::Windows;
use anec::runtime::{Hidden, LoadedModel, Tokenizer};
use serde_json::Value as Json;

const TEXT: &str = "Dear Ms. Zoë Müller-Łukasz,\nyour parcel 4711 waits at 12 Rue de l'Église; call +49 (0)30 1234-567 or \
    write to zoe.mueller@example.org before 2026-03-15.\r\n\n海は静かだった。山田太郎さんの電話番号は 03-1234-5678 です。 \
    🚀🙂 Привет, Анна Каренина! \t my key is sk-abc123… \u{202e}and\u{a0}more \u{1F468}\u{200D}\u{1F469}\u{200D}\u{1F467}.\n";

/// The bundle of the random model with a tokenizer, made once.
fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUNDLE.get_or_init(|| {
        let room = tempfile::tempdir().unwrap();
        let out = room.path().join("filter.anec");
        let source = "tests/fixtures/families/privacy_filter-default";
        let sets = ["context=96", "lengths.range=[1,96]", "shards.layers=[[0,1],[1,3]]", "quant.weights=none"];
        let mut arguments = vec!["convert", "--source", source, "--out", out.to_str().unwrap()];
        arguments.extend(sets.iter().flat_map(|set| ["--set", set]));
        let (code, _, stderr) = folder::run(&arguments);
        assert_eq!(code, 0, "{stderr}");
        (room, out)
    });
    path
}

fn model() -> Arc<LoadedModel> {
    LoadedModel::on_cpu(bundle(), Precision::F32).unwrap()
}

/// Runs the verb on a text in a file; returns stdout's bytes and stderr.
fn redact(text: &[u8], more: &[&str]) -> (Vec<u8>, String) {
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("text");
    std::fs::write(&file, text).unwrap();
    let mut command = folder::anec();
    let output = command.arg("redact").arg(bundle()).arg(&file).args(more).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    (output.stdout, stderr)
}

/// Label, start and end of each span.
type Spans = Vec<(String, usize, usize)>;

fn spans(text: &[u8], more: &[&str]) -> Spans {
    let lines = String::from_utf8(redact(text, &[more, &["--json"]].concat()).0).unwrap();
    let span = |line: &str| {
        let json: Json = serde_json::from_str(line).unwrap();
        let place = |key: &str| json[key].as_u64().unwrap() as usize;
        (json["label"].as_str().unwrap().to_owned(), place("start"), place("end"))
    };
    lines.lines().map(span).collect()
}

/// The text without all that isn't ASCII.
fn ascii() -> Vec<u8> {
    TEXT.bytes().filter(u8::is_ascii).collect()
}

/// The text with a placeholder for each span, by slicing.
fn replaced(text: &[u8], spans: &Spans) -> Vec<u8> {
    let mut out = Vec::new();
    let mut done = 0;
    for (label, start, end) in spans {
        assert!(*start >= done && end > start, "{label} {start}..{end} after {done}");
        out.extend(&text[done..*start]);
        out.extend(format!("<{}>", label.to_uppercase()).bytes());
        done = *end;
    }
    out.extend(&text[done..]);
    out
}

/// The spans of a text by the book: all tokens at once, all logits at once, a Viterbi of its own over all of them, and
/// then the spans of whole tokens without white space at their ends.
fn by_the_book(text: &str) -> Spans {
    let model = model();
    let labels = model.bundle().model.classification().unwrap().label_set.labels.clone();
    let tokens = Tokenizer::of(model.bundle(), model.folder()).unwrap().tokens(text).unwrap().0;
    let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
    let logits = Windows::new(&model, None, Hidden::No).unwrap().label(&ids).unwrap().logits;
    let follows = |before: &str, after: &str| match (&before[..1], &after[..1]) {
        ("B" | "I", "I" | "E") => before[1..] == after[1..],
        ("O" | "E" | "S", "O" | "B" | "S") => true,
        _ => false,
    };
    let mut scores: Vec<f64> = labels.iter().map(|l| if follows("O", l) { 0.0 } else { f64::NEG_INFINITY }).collect();
    let mut back: Vec<Vec<usize>> = Vec::new();
    for (index, row) in logits.chunks(labels.len()).enumerate() {
        let mut next = scores.clone();
        let mut from = vec![0; labels.len()];
        if index > 0 {
            for (after, label) in labels.iter().enumerate() {
                let before = (0..labels.len()).filter(|b| follows(&labels[*b], label));
                from[after] = before.max_by(|a, b| scores[*a].total_cmp(&scores[*b])).unwrap();
                next[after] = scores[from[after]];
            }
        }
        back.push(from);
        scores = next.iter().zip(row).map(|(score, logit)| score + f64::from(*logit)).collect();
    }
    let ends = (0..labels.len()).filter(|l| follows(&labels[*l], "O"));
    let mut path = vec![ends.max_by(|a, b| scores[*a].total_cmp(&scores[*b])).unwrap()];
    for from in back.iter().skip(1).rev() {
        path.push(from[path[path.len() - 1]]);
    }
    path.reverse();
    let (mut spans, mut first) = (Vec::<(String, usize, usize)>::new(), 0);
    for (index, label) in path.iter().map(|label| &labels[*label]).enumerate() {
        if label.starts_with(['B', 'S']) {
            first = index;
        }
        if label.starts_with(['E', 'S']) {
            // a character that two spans share belongs to the first
            let taken = spans.last().map_or(0, |(_, _, end)| *end);
            let start = (tokens[first].range.start as usize).max(taken);
            let inside = text.get(start..(tokens[index].range.end as usize).max(start)).unwrap();
            let (front, whole) = (inside.len() - inside.trim_start().len(), inside.trim().len());
            if whole > 0 {
                spans.push((label[2..].to_owned(), start + front, start + front + whole));
            }
        }
    }
    spans
}

#[test]
fn every_byte_outside_of_spans_stays() {
    let spans = spans(TEXT.as_bytes(), &[]);
    assert!(spans.len() > 5, "{spans:?}");
    let (out, report) = redact(TEXT.as_bytes(), &[]);
    assert_eq!(String::from_utf8(out).unwrap().as_bytes(), replaced(TEXT.as_bytes(), &spans));
    for (label, start, end) in &spans {
        let span = TEXT.get(*start..*end).unwrap_or_else(|| panic!("{label} {start}..{end} cuts a character"));
        assert_eq!(span.trim(), span);
    }
    let kept: usize = TEXT.len() - spans.iter().map(|(_, start, end)| end - start).sum::<usize>();
    assert!(kept > TEXT.len() / 10, "nothing is kept");
    assert!(report.starts_with(&format!("{} spans in ", spans.len())), "{report}");
}

#[test]
fn a_long_text_comes_out_as_if_it_were_looked_at_as_a_whole() {
    // no two passages are the same, so that nothing repeats
    let passage = |i: usize| format!("{i} {TEXT}{}\n", "—".repeat(i % 7));
    let long: String = (0..120).map(passage).collect();
    let expected = by_the_book(&long);
    assert!(expected.len() > 300 && long.len() > 40_000);
    assert_eq!(spans(long.as_bytes(), &[]), expected);
    assert_eq!(redact(long.as_bytes(), &[]).0, replaced(long.as_bytes(), &expected));
    // whatever the windows
    let short: String = (0..9).map(passage).collect();
    assert_eq!(spans(short.as_bytes(), &["--window", "31"]), by_the_book(&short));
}

#[test]
fn only_the_wanted_kinds_are_taken_out() {
    // in other scripts tokens share characters, which go to the first span that is wanted
    let text = ascii();
    let all = spans(&text, &[]);
    let wanted = [all[0].0.as_str(), "private_email"];
    let of_wanted: Spans = all.iter().filter(|(label, ..)| wanted.contains(&label.as_str())).cloned().collect();
    assert!(!of_wanted.is_empty() && of_wanted.len() < all.len());
    let list = wanted.join(",");
    assert_eq!(spans(&text, &["--labels", &list]), of_wanted);
    let (out, _) = redact(&text, &["--labels", &list]);
    assert_eq!(out, replaced(&text, &of_wanted));
}

#[test]
fn bytes_that_are_no_text_pass_through() {
    // every byte there is, characters cut in all places, and a word longer than any block
    let mut bytes: Vec<u8> = (0..=255).collect();
    for (at, _) in TEXT.bytes().enumerate().step_by(3) {
        bytes.extend(&TEXT.as_bytes()[at / 2..at]);
    }
    bytes.extend([b'a'; 40_000]);
    bytes.extend([0xf0, 0x9f]);
    let spans = spans(&bytes, &[]);
    assert!(spans.len() > 50);
    assert_eq!(redact(&bytes, &[]).0, replaced(&bytes, &spans));
    for text in [&b""[..], b" ", b"\n", "\u{feff}".as_bytes(), b"\xff"] {
        assert_eq!(redact(text, &[]).0, replaced(text, &self::spans(text, &[])));
    }
}

/// Redacts `copies` of the text, given in odd portions; returns the spans and the summary.
fn streamed(copies: usize) -> (Vec<Span>, RedactionSummary) {
    let mut redactor = Redactor::new(&model(), &[], Biases::default(), None).unwrap();
    let mut spans = Vec::new();
    let mut kept = 0;
    let mut sink = |piece: Piece<'_>| {
        match piece {
            Piece::Kept(text) => kept += text.len() as u64,
            Piece::Span(span) => spans.push(span.clone()),
        }
        Ok(())
    };
    let text = TEXT.repeat(copies);
    for portion in text.as_bytes().chunks(1009) {
        redactor.push(portion, &mut sink).unwrap();
    }
    let summary = redactor.finish(&mut sink).unwrap();
    assert_eq!(kept + spans.iter().map(|span| span.range.end - span.range.start).sum::<u64>(), summary.bytes);
    (spans, summary)
}

#[test]
fn memory_does_not_grow_with_the_text() {
    let (_, short) = streamed(100);
    let (spans, long) = streamed(800);
    assert_eq!(long.bytes, 8 * short.bytes);
    assert_eq!(long.spans.values().sum::<u64>(), spans.len() as u64);
    let limit = short.most_held + short.most_held / 4;
    assert!(
        long.most_held <= limit,
        "{} bytes of {} held, {} of {}",
        short.most_held,
        short.bytes,
        long.most_held,
        long.bytes
    );
    assert!((long.most_held as u64) < 20 * long.bytes);
}

#[test]
fn a_calibration_makes_for_more_or_fewer_spans() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("viterbi_calibration.json");
    let names = [
        "background_stay",
        "background_to_start",
        "inside_to_continue",
        "inside_to_end",
        "end_to_background",
        "end_to_start",
    ];
    let biases = |start: f64| -> Json {
        let bias = |name: &&str| {
            (format!("transition_bias_{name}"), if name.ends_with("to_start") { start } else { 0.0 }.into())
        };
        Json::Object(names.iter().map(bias).collect())
    };
    let points = serde_json::json!({"operating_points": {"default": {"biases": biases(-9.0)}, "eager": {"biases": biases(4.0)}}});
    std::fs::write(&path, points.to_string()).unwrap();
    let path = path.to_str().unwrap();
    let plain = spans(TEXT.as_bytes(), &[]).len();
    assert!(spans(TEXT.as_bytes(), &["--calibration", path]).len() < plain);
    assert!(spans(TEXT.as_bytes(), &["--calibration", path, "--operating-point", "eager"]).len() > plain);
}

#[test]
fn classify_labels_tokens_and_agrees_with_redact() {
    let bundle = bundle().to_str().unwrap();
    let text = String::from_utf8(ascii()).unwrap();
    let (code, stdout, stderr) = folder::run(&["classify", bundle, "--prompt", &text, "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let json: Json = serde_json::from_str(&stdout).unwrap();
    let tokens = json["tokens"].as_array().unwrap();
    assert_eq!(tokens[0]["start"], 0);
    assert_eq!(tokens.last().unwrap()["end"], text.len());
    assert!(tokens.iter().all(|t| (0.0..=1.0).contains(&t["probability"].as_f64().unwrap())));
    let begins = tokens.iter().filter(|t| t["label"].as_str().unwrap().starts_with(['B', 'S'])).count();
    let found = json["spans"].as_array().unwrap();
    assert_eq!(found.len(), begins);
    // redact leaves out spans of nothing but white space
    let solid = found.iter().filter(|span| {
        let [start, end] = ["start", "end"].map(|key| span[key].as_u64().unwrap() as usize);
        !text[start..end].trim().is_empty()
    });
    let expected: Vec<&str> = solid.map(|span| span["label"].as_str().unwrap()).collect();
    let redacted = spans(text.as_bytes(), &[]);
    assert_eq!(redacted.iter().map(|(label, ..)| label.as_str()).collect::<Vec<_>>(), expected);
    let (code, stdout, _) = folder::run(&["classify", bundle, "--ids", "5,6,7"]);
    assert_eq!((code, stdout.lines().count()), (0, 4), "{stdout}");
}

#[test]
fn verbs_that_fit_no_classifier_say_so() {
    let bundle = bundle().to_str().unwrap();
    for arguments in [&["run", bundle, "--prompt", "a"][..], &["perplexity", bundle, "--text", "README.md"]] {
        let (code, _, stderr) = folder::run(arguments);
        assert!(code == 2 && stderr.contains("labels the tokens") && stderr.contains("anec redact"), "{code} {stderr}");
    }
    let (code, _, stderr) = folder::run(&["redact", bundle, "README.md", "--labels", "private_name"]);
    assert!(code == 2 && stderr.contains("private_name") && stderr.contains("private_person"), "{code} {stderr}");
    let (code, _, stderr) = folder::run(&["redact", bundle, "README.md", "--window", "6"]);
    assert!(code == 2 && stderr.contains("calls of more than 6"), "{code} {stderr}");
}

#[test]
fn a_classifier_is_validated_against_its_golden() {
    let golden = "tests/fixtures/families/privacy_filter-default/golden.safetensors";
    let bundle = bundle().to_str().unwrap();
    let (code, stdout, stderr) = folder::run(&["validate", bundle, "--structure", "--parity", "--golden", golden]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(stdout.contains("windows of"), "{stdout}");
}
