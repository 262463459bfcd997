//! Check of SentencePiece's character table in untrusted tokenizers: a double array (Aoe 1989, in darts-clone's format)
//! and the texts that it points to. The library that reads the table doesn't check it: a pointer out of the table would
//! abort the program, and its announced size is allocated at once.

use anec_base::json::read;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value as Json;

/// Checks the character tables of a `tokenizer.json`, before a library reads them.
///
/// # Errors
/// If it isn't JSON of this form, or a table points out of itself.
pub(super) fn check_file(bytes: &[u8]) -> Result<(), String> {
    #[derive(Deserialize)]
    struct Steps {
        #[serde(default)]
        normalizer: Json,
    }
    let steps: Steps = read(bytes).map_err(|error| format!("it isn't a tokenizer: {error}"))?;
    check(&steps.normalizer)
}

/// Checks the character tables of a normalizer.
///
/// # Errors
/// If a table points out of itself.
pub(super) fn check(normalizer: &Json) -> Result<(), String> {
    match normalizer {
        Json::Array(steps) => steps.iter().try_for_each(check),
        Json::Object(step) => match step.get("precompiled_charsmap").and_then(Json::as_str) {
            None => step.values().try_for_each(check),
            Some(text) => {
                let bytes = STANDARD.decode(text).map_err(|error| format!("precompiled_charsmap: {error}"))?;
                check_table(&bytes).map_err(|problem| format!("precompiled_charsmap: {problem}"))
            }
        },
        _ => Ok(()),
    }
}

/// Follows every text that the array contains.
fn check_table(bytes: &[u8]) -> Result<(), String> {
    let short = || "it is shorter than it says".to_owned();
    let (size, rest) = bytes.split_first_chunk::<4>().ok_or_else(short)?;
    let (array, forms) = rest.split_at_checked(u32::from_le_bytes(*size) as usize).ok_or_else(short)?;
    let units: Vec<u32> = array.as_chunks::<4>().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    let forms = std::str::from_utf8(forms).map_err(|_| "its texts are no UTF-8".to_owned())?;
    let offset = |unit: u32| (unit >> 10 << ((unit & 1 << 9) >> 6)) as usize;
    let mut seen = vec![false; units.len()];
    let mut open = vec![offset(*units.first().ok_or_else(short)?)];
    while let Some(base) = open.pop() {
        // every byte value is looked up from here
        if base | 0xFF >= units.len() {
            return Err(format!("unit {base} leads out of {} units", units.len()));
        }
        if std::mem::replace(&mut seen[base], true) {
            continue;
        }
        for byte in 1..=0xFF {
            let (at, unit) = (base ^ byte, units[base ^ byte]);
            if unit & (1 << 31 | 0xFF) != byte as u32 {
                continue;
            }
            let next = at ^ offset(unit);
            if unit >> 8 & 1 == 1 {
                let form = units.get(next).map(|unit| (unit & !(1 << 31)) as usize);
                if form.is_none_or(|form| !forms.is_char_boundary(form)) {
                    return Err(format!("unit {at} leads to no text"));
                }
            }
            open.push(next);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns a table that maps "a" to "ä", with one unit replaced.
    fn table(at: usize, unit: u32) -> Json {
        let mut units = vec![0u32; 512];
        // from the root to block 256 by nothing, from there by `a`, whose form is at 256 ^ 0x61 ^ 1
        units[0] = 256 << 10;
        units[256 ^ 0x61] = 1 << 10 | 1 << 8 | 0x61;
        units[256 ^ 0x61 ^ 1] = 1 << 31;
        units[at] = unit;
        let array: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        let bytes = [&(array.len() as u32).to_le_bytes()[..], &array, "ä\0".as_bytes()].concat();
        json!({"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(bytes)}]})
    }

    #[test]
    fn tables_that_lead_out_of_themselves_are_refused() {
        assert_eq!(check(&table(511, 0)), Ok(()));
        let refused = |at: usize, unit: u32| check(&table(at, unit)).unwrap_err();
        assert!(refused(0, 512 << 10).contains("out of 512 units"));
        // an offset with eight more bits
        assert!(refused(256 ^ 0x61, 1 << 30 | 1 << 9 | 0x61).contains("out of 512 units"));
        assert!(refused(256 ^ 0x61 ^ 1, 1 << 31 | 9).contains("leads to no text"));
        assert!(refused(256 ^ 0x61 ^ 1, 1 << 31 | 1).contains("leads to no text"), "in the middle of a character");
        let short = json!({"precompiled_charsmap": STANDARD.encode([9, 0, 0, 0, 1])});
        assert!(check(&short).unwrap_err().contains("shorter than it says"));
        // a size of 4 GiB, which the library would allocate
        let large =
            json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode([0xFC, 0xFF, 0xFF, 0xFF, 0, 0])});
        let twice = format!("{{\"normalizer\": null, \"normalizer\": {large}}}");
        for file in [json!({"normalizer": {"normalizers": [large]}}).to_string(), twice] {
            assert!(check_file(file.as_bytes()).is_err(), "{file}");
        }
        assert_eq!(check_file(b"{\"model\": {}}"), Ok(()));
        // accepted tables are looked up without harm; refused ones would panic
        let normalizer = |json: Json| serde_json::from_value::<tokenizers::NormalizerWrapper>(json).unwrap();
        let normalized = |json: Json| {
            let mut text = tokenizers::NormalizedString::from("ab");
            tokenizers::Normalizer::normalize(&normalizer(json), &mut text).unwrap();
            text.get().to_owned()
        };
        assert_eq!(normalized(table(511, 0)), "äb");
        let out = table(0, 512 << 10);
        assert!(std::panic::catch_unwind(|| normalized(out)).is_err());
    }
}
