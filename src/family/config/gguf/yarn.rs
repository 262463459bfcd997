//! YaRN's keys in GGUF files, below `{architecture}.rope.scaling.`.
//!
//! | key | with `type` yarn | without |
//! |---|---|---|
//! | `yarn_attn_factor` | `attention_factor`: cos and sin are multiplied by it | 1 |
//! | `yarn_beta_fast`, `yarn_beta_slow` | the turns between which frequencies are mixed | no effect |
//! | `yarn_ext_factor` | 1: they are mixed in full | 0: they aren't |
//! | `yarn_log_multiplier` | 0; `mscale` and `mscale_all_dim` in Ministral 3 | 0 |
//!
//! llama.cpp's converter writes the first key as `config.json` has it. Negative numbers stand for absent ones.

use serde_json::{Map, Value as Json};

use super::json_of;
use crate::error::FamilyError;
use anec_base::Result;
use anec_source::gguf::GgufMetadata;

/// Architecture whose files have a log multiplier.
const WITH_LOG_MULTIPLIER: &str = "mistral3";

/// YaRN's keys below `{architecture}.`.
const KEYS: [&str; 5] = [
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
];

/// Returns whether a key below `{architecture}.` is one of YaRN's.
pub(super) fn is_key(own: &str) -> bool {
    KEYS.contains(&own)
}

/// Reads YaRN's keys into the keys of `rope_scaling`, which contains the type of the scaling already.
pub(super) fn read(metadata: &GgufMetadata, architecture: &str, rope: &mut Map<String, Json>) -> Result<()> {
    let scaled = rope.get("rope_type").is_some_and(|kind| kind == "yarn");
    let refuse = |key: &str, found: f64, expected: &str| FamilyError::Value {
        place: metadata.path().display().to_string(),
        key: key.to_owned(),
        found: found.to_string(),
        expected: expected.to_owned(),
    };
    // it would be applied on top of YaRN's own factor
    let plain = format!("{architecture}.rope.scaling.attn_factor");
    if scaled && let Some(factor) = metadata.f64(&plain)? {
        if factor != 1.0 {
            return Err(refuse(&plain, factor, "1 with YaRN, whose factor is yarn_attn_factor").into());
        }
        rope.remove("attention_factor");
    }
    for own in KEYS {
        let key = format!("{architecture}.{own}");
        let Some(number) = metadata.f64(&key)? else { continue };
        let value = metadata.get(&key).map_or(Json::Null, json_of);
        let mixes = if scaled { 1.0 } else { 0.0 };
        match own.trim_start_matches("rope.scaling.yarn_") {
            "attn_factor" | "ext_factor" if number < 0.0 => {}
            "attn_factor" if scaled => {
                rope.insert("attention_factor".into(), value);
            }
            "attn_factor" if number != 1.0 => return Err(refuse(&key, number, "1 without YaRN").into()),
            "ext_factor" if number != mixes => {
                let expected = if scaled { "1 with YaRN: frequencies are mixed in full" } else { "0 without YaRN" };
                return Err(refuse(&key, number, expected).into());
            }
            "beta_fast" | "beta_slow" if scaled => {
                rope.insert(own.trim_start_matches("rope.scaling.yarn_").into(), value);
            }
            // one number for two that are equal
            "log_multiplier" if scaled && architecture == WITH_LOG_MULTIPLIER => {
                rope.insert("mscale".into(), value.clone());
                rope.insert("mscale_all_dim".into(), value);
            }
            "log_multiplier" if number != 0.0 => {
                let expected = format!("0, or a file of {WITH_LOG_MULTIPLIER} with YaRN");
                return Err(refuse(&key, number, &expected).into());
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use anec_source::gguf::GgufValue;

    /// Scaling that is read from these keys below `olmo2.rope.scaling.`.
    fn scaling(kind: &str, keys: &[(&str, f32)]) -> Result<Json, String> {
        let named = keys.iter().map(|(key, value)| (format!("olmo2.rope.scaling.{key}"), GgufValue::F32(*value)));
        let metadata = GgufMetadata::new(Path::new("m.gguf"), named.collect());
        let mut rope = Map::from_iter([("rope_type".to_owned(), json!(kind))]);
        read(&metadata, "olmo2", &mut rope).map_err(|error| error.to_string())?;
        Ok(rope.into())
    }

    #[test]
    fn what_the_converter_writes_is_understood() {
        let all = [
            ("yarn_attn_factor", 1.2079442),
            ("yarn_beta_fast", 32.0),
            ("yarn_beta_slow", 1.0),
            ("yarn_ext_factor", 1.0),
            ("yarn_log_multiplier", 0.0),
        ];
        let expected = json!({"rope_type": "yarn", "attention_factor": 1.2079442, "beta_fast": 32.0, "beta_slow": 1.0});
        assert_eq!(scaling("yarn", &all), Ok(expected));
        let idle = [("yarn_attn_factor", 1.0), ("yarn_beta_fast", 32.0), ("yarn_ext_factor", 0.0)];
        assert_eq!(scaling("linear", &idle), Ok(json!({"rope_type": "linear"})));
        let unset = [("yarn_attn_factor", -1.0), ("yarn_ext_factor", -1.0)];
        assert_eq!(scaling("yarn", &unset), Ok(json!({"rope_type": "yarn"})));
    }

    #[test]
    fn what_changes_the_maths_otherwise_is_refused() {
        for (kind, key, value, expected) in [
            ("yarn", "yarn_ext_factor", 0.5, "expected 1 with YaRN"),
            ("none", "yarn_ext_factor", 1.0, "expected 0 without YaRN"),
            ("none", "yarn_attn_factor", 1.5, "expected 1 without YaRN"),
            ("yarn", "yarn_log_multiplier", 0.1, "expected 0, or a file of mistral3"),
            ("yarn", "attn_factor", 1.5, "expected 1 with YaRN"),
        ] {
            let error = scaling(kind, &[(key, value)]).unwrap_err();
            assert!(error.contains(&format!("olmo2.rope.scaling.{key}")) && error.contains(expected), "{error}");
        }
    }
}
