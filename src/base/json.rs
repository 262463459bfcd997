//! JSON of untrusted files and clients: errors name the place of the value, in JSON's words.
//!
//! ```
//! use anec_base::json;
//!
//! #[derive(Debug, serde::Deserialize)]
//! struct Range {
//!     ends: [u32; 2],
//! }
//!
//! let error = json::read::<Range>(br#"{"ends": [1, "x"]}"#).unwrap_err();
//! assert_eq!(error.to_string(), "`ends[1]`: found \"x\", expected a whole number that isn't negative");
//! assert_eq!(error.field(), Some("ends"));
//! ```

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::listing::{quote, sentence};

/// Reason why JSON isn't what was expected.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", text(path, problem))]
pub struct JsonError {
    /// Keys and indices on the way to the value, as `a.b[3]`; empty for the whole.
    path: String,
    problem: String,
}

impl JsonError {
    /// Returns the outermost key on the way to the value.
    pub fn field(&self) -> Option<&str> {
        self.path.split(['.', '[']).next().filter(|key| !key.is_empty())
    }

    /// Returns the problem without its place.
    pub fn problem(&self) -> &str {
        &self.problem
    }

    fn new(path: &serde_path_to_error::Path, error: &serde_json::Error) -> Self {
        let path = if path.iter().next().is_none() { String::new() } else { path.to_string() };
        // parts of flattened values have no path of their own
        let path = if path == "?" || path == "." { String::new() } else { path };
        JsonError { path: quote(&path).into_owned(), problem: problem(error) }
    }
}

fn text(path: &str, problem: &str) -> String {
    if path.is_empty() { problem.to_owned() } else { format!("`{path}`: {problem}") }
}

/// Reads a JSON text.
///
/// # Errors
/// If it isn't JSON, or not of the expected form.
pub fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T, JsonError> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|e| JsonError::new(e.path(), e.inner()))?;
    reader.end().map_err(|error| JsonError { path: String::new(), problem: problem(&error) })?;
    Ok(value)
}

/// Reads a JSON value.
///
/// # Errors
/// If it isn't of the expected form.
pub fn read_value<T: DeserializeOwned>(value: &Value) -> Result<T, JsonError> {
    serde_path_to_error::deserialize(value).map_err(|error| JsonError::new(error.path(), error.inner()))
}

/// Returns the problem of an error in JSON's words.
pub fn problem(error: &serde_json::Error) -> String {
    let whole = error.to_string();
    let (line, column) = (error.line(), error.column());
    let place = format!(" at line {line} column {column}");
    let message = whole.strip_suffix(place.as_str()).unwrap_or(&whole);
    match error.is_data() || line == 0 {
        true => in_words(message),
        false => format!("line {line}, column {column}: {}", message.replace("EOF", "the text ends")),
    }
}

/// Translates a message of a deserializer, which names types of Rust.
fn in_words(message: &str) -> String {
    for kind in ["invalid type: ", "invalid value: ", "invalid length "] {
        if let Some((found, wanted)) = message.strip_prefix(kind).and_then(|rest| rest.rsplit_once(", expected ")) {
            return format!("found {}, expected {}", found_words(found), wanted_words(wanted));
        }
    }
    for (kind, words) in [("missing field ", " is missing"), ("duplicate field ", " is there twice")] {
        if let Some(name) = message.strip_prefix(kind) {
            return format!("{}{words}", quote(name));
        }
    }
    for (kind, words) in [("unknown variant ", "unknown value "), ("unknown field ", "unknown key ")] {
        if let Some((name, wanted)) = message.strip_prefix(kind).and_then(|rest| rest.rsplit_once(", expected ")) {
            return format!("{words}{}, expected {}", quote(name), sentence(wanted));
        }
    }
    if message.starts_with("data did not match any variant") {
        return "it has none of the known forms".to_owned();
    }
    sentence(message)
}

fn found_words(found: &str) -> String {
    match found {
        "map" => "an object".to_owned(),
        "sequence" => "a list".to_owned(),
        "unit value" | "Option value" | "unit" => "null".to_owned(),
        _ => {
            let kinds = ["string ", "integer ", "floating point ", "boolean ", "number ", "character "];
            let bare = kinds.iter().find_map(|kind| found.strip_prefix(kind)).unwrap_or(found);
            let (text, quoted) = (bare.trim_matches('`'), bare.starts_with('"'));
            let end = if quoted && quote(text).ends_with('…') { "\"" } else { "" };
            format!("{}{end}", quote(text))
        }
    }
}

fn wanted_words(wanted: &str) -> String {
    let number = |text: &str| text.split_whitespace().find_map(|word| word.parse::<u64>().ok());
    match wanted {
        "a string" | "string" | "a borrowed string" | "a character" => "a text".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a map" => "an object".to_owned(),
        "a sequence" => "a list".to_owned(),
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number that isn't negative".to_owned(),
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "string or map" | "variant identifier" | "field identifier" | "string only" => "a text".to_owned(),
        _ if wanted.starts_with("enum ") || wanted.contains("tagged enum") => "one of the known values".to_owned(),
        _ if wanted.starts_with("struct ") || wanted.starts_with("struct variant ") => match number(wanted) {
            Some(count) => format!("an object of {count} values"),
            None => "an object".to_owned(),
        },
        _ if wanted.starts_with("a tuple") || wanted.starts_with("an array") || wanted.starts_with("tuple") => {
            number(wanted).map_or_else(|| "a list".to_owned(), |count| format!("a list of {count} values"))
        }
        _ => sentence(wanted),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "read only to fail")]
    struct Sample {
        text: String,
        #[serde(default)]
        count: Option<u32>,
        #[serde(default)]
        scale: f32,
        #[serde(default)]
        flag: bool,
        #[serde(default)]
        pair: [u8; 2],
        #[serde(default)]
        inner: BTreeMap<String, Vec<i64>>,
        #[serde(default)]
        word: Option<Word>,
        #[serde(default)]
        form: Option<Form>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Word {
        Yes,
        No,
    }

    #[derive(Debug, Deserialize)]
    #[serde(untagged)]
    #[allow(dead_code, reason = "read only to fail")]
    enum Form {
        One(String),
        Many(Vec<String>),
    }

    #[test]
    fn errors_have_jsons_words_and_places() {
        let said = |mut value: Value| {
            if let Some(fields) = value.as_object_mut() {
                fields.entry("text").or_insert("x".into());
            }
            read_value::<Sample>(&value).unwrap_err().to_string()
        };
        for (value, expected) in [
            (json!([1]), "found 1, expected a text"),
            (json!("x"), "found \"x\", expected an object"),
            (json!(null), "found null, expected an object"),
            (json!({"text": {}}), "`text`: found an object, expected a text"),
            (json!({"count": -1}), "`count`: found -1, expected a whole number that isn't negative"),
            (
                json!({"count": 4_294_967_296u64}),
                "`count`: found 4294967296, expected a whole number that isn't negative",
            ),
            (json!({"scale": "1"}), "`scale`: found \"1\", expected a number"),
            (json!({"flag": 1.5}), "`flag`: found 1.5, expected true or false"),
            (json!({"pair": [1]}), "found 1, expected a list of 2 values"),
            (json!({"inner": {"a": [1, true]}}), "`inner.a[1]`: found true, expected a whole number"),
            (json!({"word": "maybe"}), "`word`: unknown value `maybe`, expected `yes` or `no`"),
            (json!({"form": 5}), "`form`: it has none of the known forms"),
            (json!({"other": 5}), "unknown key `other`, expected one of `text`, `count`"),
        ] {
            let found = said(value.clone());
            assert!(found.contains(expected), "{value}: {found}");
        }
        assert_eq!(read_value::<Sample>(&json!({})).unwrap_err().to_string(), "`text` is missing");
        let long = said(json!({"count": "y".repeat(100_000)}));
        assert!(long.len() < 300 && long.ends_with("expected a whole number that isn't negative"), "{long}");
        let keys = said(json!({"z".repeat(100_000): 1}));
        assert!(keys.len() < 1500, "{}", keys.len());
    }

    #[test]
    fn texts_that_are_no_json_have_a_line() {
        let said = |text: &[u8]| read::<Value>(text).unwrap_err().to_string();
        assert_eq!(said(b""), "line 1, column 0: the text ends while parsing a value");
        assert_eq!(said(b"{\n x"), "line 2, column 2: key must be a string");
        assert_eq!(said(b"{} {}"), "line 1, column 4: trailing characters");
        assert!(said(&b"[".repeat(1000)).contains("recursion limit exceeded"));
    }
}
