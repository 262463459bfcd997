//! Tokenizers of valid steps: every kind of step that a `tokenizer.json` may have, with unusual values.

use serde_json::{Value as Json, json};

use super::mutate::Random;

/// Texts and expressions of steps.
const TEXTS: [&str; 16] =
    ["", " ", "a", "▁", "ä", "🙂", "Ġ", "##", "</w>", "aa", "<unk>", "^", "$", "a*", "\\s+", "x|"];

fn text(random: &mut Random) -> &'static str {
    TEXTS[random.below(TEXTS.len())]
}

fn pattern(random: &mut Random) -> Json {
    let kind = if random.chance(0.5) { "String" } else { "Regex" };
    json!({kind: text(random)})
}

/// Returns a small tokenizer with a model and steps.
pub fn tokenizer(random: &mut Random) -> Json {
    let tokens = ["<unk>", "a", "b", "c", "ab", "abc", "▁a", "▁", "##b", "</w>", "Ġ", "Ġa", "ä", "[X]", "</s>", "H"];
    let vocab: serde_json::Map<String, Json> =
        tokens.iter().zip(0..).map(|(token, id): (_, u32)| ((*token).to_owned(), json!(id))).collect();
    let maybe = |random: &mut Random| if random.chance(0.6) { Json::Null } else { json!(text(random)) };
    let model = match random.below(5) {
        0 | 1 => json!({
            "type": "BPE", "dropout": *random.pick(&[None, Some(0.0), Some(1.0), Some(0.5)]), "unk_token": maybe(random),
            "continuing_subword_prefix": maybe(random), "end_of_word_suffix": maybe(random),
            "fuse_unk": random.chance(0.5), "byte_fallback": random.chance(0.5), "ignore_merges": random.chance(0.5),
            "vocab": vocab,
            "merges": if random.chance(0.7) { json!([["a", "b"], ["ab", "c"]]) } else { json!(["a b", "ab c"]) },
        }),
        2 => json!({
            "type": "WordPiece", "unk_token": text(random), "continuing_subword_prefix": text(random),
            "max_input_chars_per_word": random.below(200), "vocab": vocab,
        }),
        3 => json!({
            "type": "Unigram", "unk_id": *random.pick(&[None, Some(0), Some(15), Some(16)]),
            "byte_fallback": random.chance(0.5),
            "vocab": tokens.iter().map(|token| json!([token, -(random.below(20) as f64)])).collect::<Vec<_>>(),
        }),
        _ => json!({"type": "WordLevel", "vocab": vocab, "unk_token": text(random)}),
    };
    let added: Vec<Json> = (0..random.below(5))
        .map(|index| {
            let content = *random.pick(&["[X]", "</s>", "", " ", "a", "<|im_end|>", "🙂"]);
            json!({
                "id": if random.chance(0.8) { index + 13 } else { random.below(1 << 32) }, "content": content,
                "single_word": random.chance(0.3), "lstrip": random.chance(0.3), "rstrip": random.chance(0.3),
                "normalized": random.chance(0.5), "special": random.chance(0.5),
            })
        })
        .collect();
    let chance = |random: &mut Random, step: fn(&mut Random, usize) -> Json| match random.chance(0.7) {
        true => step(random, 0),
        false => Json::Null,
    };
    json!({
        "version": "1.0", "truncation": truncation(random), "padding": padding(random), "added_tokens": added,
        "normalizer": chance(random, normalizer), "pre_tokenizer": chance(random, pre_tokenizer),
        "post_processor": chance(random, post_processor), "decoder": chance(random, decoder), "model": model,
    })
}

fn truncation(random: &mut Random) -> Json {
    if random.chance(0.8) {
        return Json::Null;
    }
    let (most, stride) = (random.below(600), random.below(600));
    json!({"direction": "Right", "max_length": most, "strategy": "LongestFirst", "stride": stride})
}

fn padding(random: &mut Random) -> Json {
    if random.chance(0.8) {
        return Json::Null;
    }
    let length = random.below(3000);
    json!({
        "strategy": if random.chance(0.5) { json!("BatchLongest") } else { json!({"Fixed": length}) },
        "direction": "Right", "pad_to_multiple_of": *random.pick(&[None, Some(0), Some(8)]), "pad_id": 0,
        "pad_type_id": 0, "pad_token": text(random),
    })
}

fn several(random: &mut Random, depth: usize, step: fn(&mut Random, usize) -> Json) -> Vec<Json> {
    if depth > 2 {
        return Vec::new();
    }
    (0..random.below(4)).map(|_| step(random, depth + 1)).collect()
}

fn normalizer(random: &mut Random, depth: usize) -> Json {
    match random.below(14) {
        0 | 1 => json!({"type": "Sequence", "normalizers": several(random, depth, normalizer)}),
        2 | 3 => json!({"type": "Replace", "pattern": pattern(random), "content": text(random)}),
        4 => json!({"type": "Prepend", "prepend": text(random)}),
        5 => json!({"type": "Strip", "strip_left": random.chance(0.5), "strip_right": random.chance(0.5)}),
        6 => json!({
            "type": "BertNormalizer", "clean_text": random.chance(0.5), "handle_chinese_chars": random.chance(0.5),
            "strip_accents": *random.pick(&[None, Some(true), Some(false)]), "lowercase": random.chance(0.5),
        }),
        7 => json!({"type": "Precompiled", "precompiled_charsmap": charsmap(random)}),
        8 => json!({"type": "ByteLevel"}),
        9 => json!({"type": "StripAccents"}),
        10 => json!({"type": "Lowercase"}),
        11 => json!({"type": "Nmt"}),
        _ => json!({"type": random.pick(&["NFC", "NFD", "NFKC", "NFKD"])}),
    }
}

/// Returns SentencePiece's table of characters, in base64: a length, units of four bytes, texts that end in zero.
fn charsmap(random: &mut Random) -> String {
    let units = if random.chance(0.5) { 512 } else { random.below(600) };
    let mut table: Vec<u32> = vec![0; units];
    if units == 512 {
        table[0] = 256 << 10;
        table[256 ^ 0x61] = 1 << 10 | 1 << 8 | 0x61;
        table[256 ^ 0x60] = 1 << 31;
    }
    for _ in 0..random.below(3) {
        let at = random.below(units);
        if let Some(unit) = table.get_mut(at) {
            *unit = random.below(1 << 32) as u32;
        }
    }
    let announced = if random.chance(0.8) { 4 * units as u32 } else { random.below(1 << 32) as u32 };
    let units = table.iter().flat_map(|unit| unit.to_le_bytes());
    let bytes: Vec<u8> = announced.to_le_bytes().into_iter().chain(units).chain("ä\0xyz\0".bytes()).collect();
    base64(&bytes)
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0usize, |bits, i| bits << 8 | usize::from(group.get(i).copied().unwrap_or(0)));
        (0..=group.len()).for_each(|i| text.push(char::from(DIGITS[bits >> (18 - 6 * i) & 63])));
        (group.len()..3).for_each(|_| text.push('='));
    }
    text
}

fn pre_tokenizer(random: &mut Random, depth: usize) -> Json {
    let behavior = *random.pick(&["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]);
    let scheme = *random.pick(&["always", "never", "first"]);
    match random.below(12) {
        0 | 1 => json!({"type": "Sequence", "pretokenizers": several(random, depth, pre_tokenizer)}),
        2 | 3 => {
            json!({"type": "Split", "pattern": pattern(random), "behavior": behavior, "invert": random.chance(0.5)})
        }
        4 => json!({
            "type": "ByteLevel", "add_prefix_space": random.chance(0.5), "trim_offsets": random.chance(0.5),
            "use_regex": random.chance(0.5),
        }),
        5 => json!({
            "type": "Metaspace", "replacement": random.pick(&["▁", "_", "🙂"]), "prepend_scheme": scheme,
            "split": random.chance(0.5),
        }),
        6 => json!({"type": "CharDelimiterSplit", "delimiter": random.pick(&["a", " ", "🙂"])}),
        7 => json!({"type": "Punctuation", "behavior": behavior}),
        8 => json!({"type": "Digits", "individual_digits": random.chance(0.5)}),
        9 => json!({"type": "FixedLength", "length": *random.pick(&[0, 1, 2, 1000])}),
        10 => json!({"type": "UnicodeScripts"}),
        _ => json!({"type": random.pick(&["BertPreTokenizer", "Whitespace", "WhitespaceSplit"])}),
    }
}

fn post_processor(random: &mut Random, depth: usize) -> Json {
    let pair = |random: &mut Random| json!([text(random), random.below(20)]);
    match random.below(6) {
        0 => json!({"type": "Sequence", "processors": several(random, depth, post_processor)}),
        1 => json!({"type": "BertProcessing", "sep": pair(random), "cls": pair(random)}),
        2 => json!({
            "type": "RobertaProcessing", "sep": pair(random), "cls": pair(random), "trim_offsets": random.chance(0.5),
            "add_prefix_space": random.chance(0.5),
        }),
        3 => json!({
            "type": "ByteLevel", "add_prefix_space": random.chance(0.5), "trim_offsets": random.chance(0.5),
            "use_regex": random.chance(0.5),
        }),
        _ => {
            let mut pieces = || -> Vec<Json> {
                let piece = |random: &mut Random| match random.chance(0.5) {
                    true => json!({"Sequence": {"id": random.pick(&["A", "B"]), "type_id": random.below(3)}}),
                    false => json!({"SpecialToken": {"id": random.pick(&["[X]", "[Y]", ""]), "type_id": 0}}),
                };
                (0..random.below(5)).map(|_| piece(random)).collect()
            };
            let (single, both) = (pieces(), pieces());
            let ids: Vec<usize> = (0..random.below(4)).map(|_| random.below(40)).collect();
            let names = vec!["[X]"; if random.chance(0.8) { ids.len() } else { random.below(4) }];
            json!({
                "type": "TemplateProcessing", "single": single, "pair": both,
                "special_tokens": {"[X]": {"id": "[X]", "ids": ids, "tokens": names}},
            })
        }
    }
}

fn decoder(random: &mut Random, depth: usize) -> Json {
    match random.below(10) {
        0 | 1 => json!({"type": "Sequence", "decoders": several(random, depth, decoder)}),
        2 => json!({"type": "Replace", "pattern": pattern(random), "content": text(random)}),
        3 => {
            let content = *random.pick(&["a", " ", "▁", "🙂"]);
            json!({"type": "Strip", "content": content, "start": random.below(4), "stop": random.below(4)})
        }
        4 => json!({"type": "WordPiece", "prefix": text(random), "cleanup": random.chance(0.5)}),
        5 => json!({"type": "BPEDecoder", "suffix": text(random)}),
        6 => json!({
            "type": "CTC", "pad_token": text(random), "word_delimiter_token": text(random), "cleanup": random.chance(0.5),
        }),
        7 => json!({
            "type": "Metaspace", "replacement": random.pick(&["▁", "_"]), "prepend_scheme": "always",
            "split": random.chance(0.5),
        }),
        8 => json!({"type": "Fuse"}),
        _ => {
            json!({"type": random.pick(&["ByteFallback", "ByteLevel"]), "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
        }
    }
}
