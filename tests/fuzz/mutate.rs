//! Reproducible mutations of bytes and of JSON.

use anec::base::SplitMix64;
use serde_json::{Map, Value as Json, json};

/// Random numbers of one input.
pub struct Random(SplitMix64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(SplitMix64::new(SplitMix64::hash(seed)))
    }

    /// Returns a number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.0.uniform() * end as f64) as usize
    }

    /// Returns whether an event of this probability occurs.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.0.uniform() < probability
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// Integers at which sums, products and conversions break.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    7,
    63,
    64,
    255,
    65_535,
    u32::MAX as u64,
    1 << 32,
    1 << 40,
    i64::MAX as u64,
    i64::MAX as u64 + 1,
    u64::MAX,
];

/// Maximum size of a mutated input in bytes; larger seeds keep their size.
const MOST: usize = 1 << 20;

/// Changes a file in one to eight places, or joins it with another one.
pub fn bytes(random: &mut Random, seed: &[u8], other: &[u8]) -> Vec<u8> {
    let mut out = seed.to_vec();
    for _ in 0..1 + random.below(8) {
        let at = random.below(out.len());
        match random.below(10) {
            _ if out.is_empty() => out.extend_from_slice(&other[..other.len().min(64)]),
            0 | 1 => out[at] ^= 1 << random.below(8),
            2 | 3 => out[at] = random.below(256) as u8,
            4 => drop(out.remove(at)),
            5 => out.insert(at, random.below(256) as u8),
            6 => out.truncate(at.max(out.len() / 2)),
            7 if out.len() < MOST => {
                let end = (at + random.below(200)).min(out.len());
                let part = out[at..end].to_vec();
                out.splice(end..end, part);
            }
            8 if out.len() < MOST => {
                let from = random.below(other.len());
                let end = (from + random.below(200)).min(other.len());
                out.splice(at..at, other[from..end].iter().copied());
            }
            _ => {
                let number = random.pick(&NUMBERS).to_le_bytes();
                let end = (at + if random.chance(0.5) { 4 } else { 8 }).min(out.len());
                out[at..end].copy_from_slice(&number[..end - at]);
            }
        }
    }
    out
}

/// Returns a value that few readers expect.
pub fn extreme(random: &mut Random) -> Json {
    match random.below(16) {
        0..4 => json!(random.pick(&NUMBERS)),
        4 => json!(-(random.below(1 << 31) as i64)),
        5 => json!(*random.pick(&[0.5, -0.0, 1e308, 5e-324, 2.0, 1e19])),
        6 => json!(""),
        7 => json!("x".repeat(random.below(3000))),
        8 => json!(random.pick(&["\u{0}", "\u{1b}[2J", "../x", "/dev/zero", "é🙂", "^", "a*", "\\", "{{"])),
        9 => Json::Null,
        10 => json!(random.chance(0.5)),
        11 => json!([]),
        12 => json!({}),
        13 => {
            // deeper than most readers nest
            let depth = 1 + random.below(100);
            (0..depth).fold(json!(1), |inner, _| json!([inner]))
        }
        14 => json!({"a": {"a": 1}, "b": [1, "x", null]}),
        _ => json!(vec![1; random.below(200)]),
    }
}

/// Changes a JSON document in one to four places.
pub fn json(random: &mut Random, seed: &Json) -> Json {
    let mut out = seed.clone();
    for _ in 0..1 + random.below(4) {
        let part = part(random, seed).clone();
        let place = place(random, &mut out);
        change(random, place, part);
    }
    out
}

/// Returns a random value within a document.
fn part<'a>(random: &mut Random, mut json: &'a Json) -> &'a Json {
    while random.chance(0.85) {
        let inner: Vec<&Json> = match json {
            Json::Array(items) => items.iter().collect(),
            Json::Object(fields) => fields.values().collect(),
            _ => break,
        };
        if inner.is_empty() {
            break;
        }
        json = inner[random.below(inner.len())];
    }
    json
}

fn place<'a>(random: &mut Random, json: &'a mut Json) -> &'a mut Json {
    let count = match &*json {
        Json::Array(items) => items.len(),
        Json::Object(fields) => fields.len(),
        _ => 0,
    };
    if count == 0 || random.chance(0.2) {
        return json;
    }
    let index = random.below(count);
    match json {
        Json::Array(items) => place(random, &mut items[index]),
        Json::Object(fields) => place(random, fields.values_mut().nth(index).expect("the index is below the number")),
        _ => unreachable!("it has parts"),
    }
}

fn change(random: &mut Random, place: &mut Json, part: Json) {
    match (random.below(7), place) {
        (0, Json::Object(fields)) if !fields.is_empty() => {
            let key = fields.keys().nth(random.below(fields.len())).cloned().unwrap_or_default();
            fields.shift_remove(&key);
        }
        (1, Json::Object(fields)) if !fields.is_empty() => {
            let key = fields.keys().nth(random.below(fields.len())).cloned().unwrap_or_default();
            let value = fields.shift_remove(&key).unwrap_or_default();
            fields.insert(key + "x", value);
        }
        (2, Json::Object(fields)) => {
            fields.insert("extra".into(), extreme(random));
        }
        (0, Json::Array(items)) if !items.is_empty() => drop(items.remove(random.below(items.len()))),
        (1 | 2, Json::Array(items)) if !items.is_empty() => {
            let item = items[random.below(items.len())].clone();
            items.insert(random.below(items.len()), item);
        }
        (3, place) => *place = part,
        (4, place) => {
            if let Some(number) = place.as_i64() {
                *place = json!(number.wrapping_add([-1, 1, number][random.below(3)]));
            } else if let Some(text) = place.as_str() {
                let mutated = bytes(random, text.as_bytes(), b"<|im_end|>\"\\");
                *place = json!(String::from_utf8_lossy(&mutated));
            } else {
                *place = extreme(random);
            }
        }
        (5, place) if place.is_object() => *place = Json::Object(Map::new()),
        (_, place) => *place = extreme(random),
    }
}
