//! Bound on how much the steps of a tokenizer lengthen a text. Untrusted steps that multiply the length could turn a
//! word into gigabytes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::Value as Json;

use super::charsmap;

/// Maximum growth factor of a text. Tokenizers of published models stay below 20.
const MAX_GROWTH: u64 = 64;

/// Length of the longest form in the character tables of published models in bytes: U+FDFA, with a margin.
const LONGEST_FORM: u64 = 40;

/// Checks that steps can't make a text much longer. Growth by Unicode normalization forms is bounded and isn't counted.
pub(super) fn check(
    normalizer: Option<&impl Serialize>,
    pre_tokenizer: Option<&impl Serialize>,
    decoder: Option<&impl Serialize>,
) -> Result<(), String> {
    let mut encoding = Growth::default();
    let normalizer = json(normalizer)?;
    charsmap::check(&normalizer)?;
    encoding.add(&normalizer);
    encoding.add(&json(pre_tokenizer)?);
    let mut decoding = Growth::default();
    decoding.add(&json(decoder)?);
    for growth in [encoding, decoding] {
        if growth.factor > MAX_GROWTH {
            return Err(format!("its steps can make a text more than {MAX_GROWTH} times as long"));
        }
    }
    Ok(())
}

fn json(step: Option<&impl Serialize>) -> Result<Json, String> {
    serde_json::to_value(step).map_err(|error| error.to_string())
}

struct Growth {
    factor: u64,
    /// Whether a character table was among the steps.
    table: bool,
}

impl Default for Growth {
    fn default() -> Self {
        Growth { factor: 1, table: false }
    }
}

impl Growth {
    fn add(&mut self, step: &Json) {
        let bytes = |key: &str| step[key].as_str().unwrap_or_default().len() as u64;
        let factor = match step["type"].as_str().unwrap_or_default() {
            "Sequence" => {
                let steps = ["normalizers", "pretokenizers", "decoders"].map(|key| step[key].as_array());
                steps.into_iter().flatten().flatten().for_each(|step| self.add(step));
                1
            }
            "Replace" => replaced(&step["pattern"], bytes("content")),
            // once per part of a text between special tokens
            "Prepend" => 1 + bytes("prepend"),
            "Metaspace" => 1 + bytes("replacement"),
            // a character of up to two bytes for each byte
            "ByteLevel" => 2,
            // spaces around a character of three bytes
            "BertNormalizer" => 2,
            "Precompiled" => match (longest_form(&step["precompiled_charsmap"]), self.table) {
                // Unicode's own forms
                (..=LONGEST_FORM, false) => {
                    self.table = true;
                    1
                }
                (longest, _) => longest,
            },
            _ => 1,
        };
        self.factor = self.factor.saturating_mul(factor.max(1));
    }
}

/// Returns the growth factor of replacing each match of a pattern by `content` bytes.
fn replaced(pattern: &Json, content: u64) -> u64 {
    let shortest = match (pattern["String"].as_str(), pattern["Regex"].as_str()) {
        (Some(text), _) => text.len() as u64,
        (None, Some(regex)) => {
            let parsed = regex_syntax::parse(regex).ok();
            parsed.and_then(|parsed| parsed.properties().minimum_len()).unwrap_or(0) as u64
        }
        (None, None) => 0,
    };
    match shortest {
        // between any two characters
        0 => 1 + content,
        shortest => content.div_ceil(shortest),
    }
}

/// Returns the length of the longest text in a SentencePiece table: a length, an array of that length, and texts that
/// end in zero.
fn longest_form(table: &Json) -> u64 {
    let table = table.as_str().and_then(|table| STANDARD.decode(table).ok()).unwrap_or_default();
    let forms = table.split_first_chunk().and_then(|(count, rest)| rest.get(u32::from_le_bytes(*count) as usize..));
    let forms = forms.unwrap_or(&table).split(|byte| *byte == 0);
    forms.map(|form| form.len() as u64).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn factor(step: Json) -> u64 {
        let mut growth = Growth::default();
        growth.add(&step);
        growth.factor
    }

    #[test]
    fn steps_multiply() {
        let replace = |pattern: Json, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        assert_eq!(factor(Json::Null), 1);
        assert_eq!(factor(json!({"type": "NFKC"})), 1);
        assert_eq!(factor(replace(json!({"String": "ab"}), "abc")), 2);
        assert_eq!(factor(replace(json!({"String": "``"}), "\"")), 1);
        assert_eq!(factor(replace(json!({"String": ""}), "ab")), 3);
        assert_eq!(factor(replace(json!({"Regex": " {2,}"}), "▁")), 2);
        assert_eq!(factor(replace(json!({"Regex": "a*"}), "ab")), 3);
        assert_eq!(factor(replace(json!({"Regex": "(?<=a)"}), "ab")), 3, "not of the kind that is understood here");
        // Llama 2
        let steps = [json!({"type": "Prepend", "prepend": "▁"}), replace(json!({"String": " "}), "▁")];
        assert_eq!(factor(json!({"type": "Sequence", "normalizers": steps})), 12);
        let many = vec![json!({"type": "ByteLevel"}); 100];
        assert_eq!(factor(json!({"type": "Sequence", "pretokenizers": many})), u64::MAX);
    }

    #[test]
    fn tables_of_characters_are_unicodes_once() {
        let table = |forms: &str| {
            let bytes = [&4u32.to_le_bytes()[..], &[1; 4], forms.as_bytes()].concat();
            json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(bytes)})
        };
        let usual = table("a\0صلى الله عليه وسلم\0b\0");
        assert_eq!(factor(usual.clone()), 1);
        assert_eq!(factor(json!({"type": "Sequence", "normalizers": [usual.clone(), usual]})), 33);
        assert_eq!(factor(table(&format!("a\0{}", "b".repeat(1000)))), 1000);
    }
}
