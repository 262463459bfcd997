//! JSON Schemas in the form that llguidance compiles: references as plain pointers, whole numbers as integers.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json};

/// Largest divisor of `multipleOf`, as an integer without its power of ten: an automaton has a state for each
/// remainder.
const MAX_DIVISOR: u64 = 2_000;
/// Number of references that are rewritten.
const MAX_REFERENCES: usize = 1_000;

/// Returns a schema that means the same and can be compiled.
///
/// # Errors
/// If it takes too much to compile, or refers to another document.
pub(super) fn prepare(mut schema: Json) -> Result<Json, String> {
    if schema == Json::Bool(true) {
        schema = Json::Object(Map::new());
    }
    integers(&mut schema);
    divisors(&schema)?;
    References::of(&schema).rewrite(&mut schema)?;
    Ok(schema)
}

/// Writes whole numbers as integers: `2.0` is one.
fn integers(value: &mut Json) {
    match value {
        Json::Number(number) if number.is_f64() => {
            let float = number.as_f64().unwrap_or(f64::NAN);
            if float.fract() == 0.0 && float.abs() < 9e15 {
                *value = Json::from(float as i64);
            }
        }
        Json::Array(items) => items.iter_mut().for_each(integers),
        Json::Object(fields) => fields.values_mut().for_each(integers),
        _ => {}
    }
}

/// Returns the product of all divisors within a schema, or fails if one automaton would have too many states.
fn divisors(schema: &Json) -> Result<u64, String> {
    let mut all: u64 = 1;
    match schema {
        Json::Array(items) => {
            for item in items {
                all = all.saturating_mul(divisors(item)?).min(MAX_DIVISOR + 1);
            }
        }
        Json::Object(fields) => {
            let own = match fields.get("multipleOf") {
                Some(Json::Number(number)) => divisor(number.as_f64().unwrap_or(0.0)),
                _ => 1,
            };
            // schemas that hold for the same number multiply the states, those of other values don't
            let mut same = own;
            for (key, value) in fields {
                let inner = divisors(value)?;
                if matches!(key.as_str(), "allOf" | "anyOf" | "oneOf" | "not" | "if" | "then" | "else") {
                    same = same.saturating_mul(inner);
                }
            }
            all = same;
        }
        _ => {}
    }
    match all > MAX_DIVISOR {
        true => Err(format!("`multipleOf` is too large to be compiled: at most {MAX_DIVISOR} in one value")),
        false => Ok(all),
    }
}

/// Returns the digits of a divisor as an integer.
fn divisor(value: f64) -> u64 {
    let text = format!("{value:e}");
    let digits: String = text.split('e').next().unwrap_or_default().chars().filter(char::is_ascii_digit).collect();
    let exponent: i32 = text.split('e').nth(1).and_then(|exponent| exponent.parse().ok()).unwrap_or(0);
    let zeros = (exponent - (digits.len() as i32 - 1)).clamp(0, 20) as usize;
    (digits + &"0".repeat(zeros)).parse().unwrap_or(u64::MAX)
}

/// Keywords whose values are no schemas.
const VALUES: [&str; 4] = ["enum", "const", "default", "examples"];
/// Keywords whose values are schemas by names, which may be those of keywords.
const SCHEMAS_BY_NAME: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Parts of a schema that references can name, and the references that have been rewritten.
struct References {
    root: Json,
    /// Schemas by `$id`, and by `$id#$anchor`.
    named: BTreeMap<String, Json>,
    /// Names of the definitions that references were rewritten to.
    rewritten: BTreeMap<String, String>,
    definitions: Map<String, Json>,
}

impl References {
    fn of(root: &Json) -> Self {
        let mut named = BTreeMap::new();
        collect(root, "", &mut named);
        References { root: root.clone(), named, rewritten: BTreeMap::new(), definitions: Map::new() }
    }

    fn rewrite(mut self, schema: &mut Json) -> Result<(), String> {
        self.visit(schema, "")?;
        if let (false, Json::Object(fields)) = (self.definitions.is_empty(), schema) {
            let own = fields.entry("$defs").or_insert_with(|| Json::Object(Map::new()));
            if let Json::Object(own) = own {
                own.extend(self.definitions);
            }
        }
        Ok(())
    }

    /// Rewrites the references within a value whose `$id` is `base`.
    fn visit(&mut self, value: &mut Json, base: &str) -> Result<(), String> {
        match value {
            Json::Array(items) => items.iter_mut().try_for_each(|item| self.visit(item, base)),
            Json::Object(fields) => {
                let base =
                    fields.get("$id").and_then(Json::as_str).map_or_else(|| base.to_owned(), |id| resolved(base, id));
                if let Some(reference) = fields.remove("$dynamicRef") {
                    fields.entry("$ref").or_insert(reference);
                }
                for (key, value) in fields.iter_mut() {
                    match value {
                        _ if VALUES.contains(&key.as_str()) => {}
                        Json::Object(named) if SCHEMAS_BY_NAME.contains(&key.as_str()) => {
                            named.values_mut().try_for_each(|value| self.visit(value, &base))?;
                        }
                        value => self.visit(value, &base)?,
                    }
                }
                if let Some(Json::String(reference)) = fields.get_mut("$ref") {
                    *reference = self.plain(reference, &base)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Returns a reference as a pointer without escapes from the root.
    fn plain(&mut self, reference: &str, base: &str) -> Result<String, String> {
        let is_plain =
            |reference: &str| reference == "#" || (reference.starts_with("#/") && !reference.contains(['~', '%']));
        if is_plain(reference) && !self.named.contains_key(base) {
            return Ok(reference.to_owned());
        }
        let whole = resolved(base, reference);
        if let Some(name) = self.rewritten.get(&whole) {
            return Ok(format!("#/$defs/{name}"));
        }
        if self.rewritten.len() >= MAX_REFERENCES {
            return Err(format!("it has more than {MAX_REFERENCES} references"));
        }
        let (document, fragment) = whole.split_once('#').unwrap_or((&whole, ""));
        let from = if document.is_empty() { Some(&self.root) } else { self.named.get(document) };
        let target = match fragment.is_empty() || fragment.starts_with('/') {
            true => from.and_then(|from| from.pointer(&unescaped(fragment))),
            false => self.named.get(&whole),
        };
        let Some(mut target) = target.cloned() else {
            return Err(format!("`$ref` names {reference:?}, which isn't in the schema"));
        };
        let name = format!("anec_ref_{}", self.rewritten.len());
        let document = document.to_owned();
        self.rewritten.insert(whole.clone(), name.clone());
        self.visit(&mut target, &document)?;
        if let Json::Object(fields) = &mut target {
            fields.remove("$id");
        }
        self.definitions.insert(name.clone(), target);
        Ok(format!("#/$defs/{name}"))
    }
}

/// Collects the schemas that have an `$id` or an `$anchor`.
fn collect(value: &Json, base: &str, named: &mut BTreeMap<String, Json>) {
    match value {
        Json::Array(items) => items.iter().for_each(|item| collect(item, base, named)),
        Json::Object(fields) => {
            let id = fields.get("$id").and_then(Json::as_str).map(|id| resolved(base, id));
            if let Some(id) = &id {
                named.insert(id.clone(), value.clone());
            }
            let base = id.as_deref().unwrap_or(base);
            for anchor in ["$anchor", "$dynamicAnchor"].iter().filter_map(|key| fields.get(*key)?.as_str()) {
                named.insert(format!("{base}#{anchor}"), value.clone());
            }
            for (key, value) in fields {
                match value {
                    _ if VALUES.contains(&key.as_str()) => {}
                    Json::Object(schemas) if SCHEMAS_BY_NAME.contains(&key.as_str()) => {
                        schemas.values().for_each(|value| collect(value, base, named));
                    }
                    value => collect(value, base, named),
                }
            }
        }
        _ => {}
    }
}

/// Resolves a reference against the address of the schema that it stands in.
fn resolved(base: &str, reference: &str) -> String {
    let document = base.split('#').next().unwrap_or_default();
    if reference.starts_with('#') {
        return format!("{document}{reference}");
    }
    if reference.contains("://") || reference.starts_with("urn:") {
        return reference.trim_end_matches('#').to_owned();
    }
    let host =
        document.find("://").map_or(0, |at| document[at + 3..].find('/').map_or(document.len(), |end| at + 3 + end));
    let folder = match reference.starts_with('/') {
        true => &document[..host],
        false => document.rfind('/').filter(|at| *at >= host).map_or("", |at| &document[..=at]),
    };
    format!("{folder}{}", reference.trim_end_matches('#'))
}

/// Returns a pointer without the escapes of URIs; those of JSON pointers stay.
fn unescaped(fragment: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = fragment.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = match first {
            b'%' => after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok()),
            _ => None,
        };
        match code.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn references_of_all_forms_become_pointers() {
        let schema = json!({
            "$id": "https://example.org/root.json",
            "properties": {
                "a": {"$ref": "#/$defs/x~1y"}, "b": {"$ref": "#named"}, "c": {"$ref": "other.json"},
                "d": {"$ref": "https://example.org/other.json#/$defs/z"}, "e": {"$ref": "#/$defs/p%25q"}, "f": {"$ref": "#"},
            },
            "$defs": {
                "x/y": {"type": "integer"}, "n": {"$anchor": "named", "type": "null"}, "p%q": {"type": "boolean"},
                "o": {"$id": "other.json", "type": "array", "items": {"$ref": "#/$defs/z"}, "$defs": {"z": {"type": "string"}}},
            },
        });
        let prepared = prepare(schema).unwrap();
        let target = |pointer: &str| {
            let reference = prepared.pointer(pointer).unwrap()["$ref"].as_str().unwrap();
            prepared.pointer(reference.strip_prefix('#').unwrap()).unwrap_or_else(|| panic!("{reference}: {prepared}"))
        };
        let kinds = ["a", "b", "c", "d", "e"].map(|key| target(&format!("/properties/{key}"))["type"].clone());
        assert_eq!(kinds, ["integer", "null", "array", "string", "boolean"].map(Json::from));
        assert!(prepare(json!({"$ref": "https://example.org/else.json"})).unwrap_err().contains("isn't in the schema"));
        // values of `enum` are no schemas, and names of properties no keywords
        let values = json!({
            "$defs": {"v": {"enum": [{"$anchor": "a", "type": "null"}]}, "s": {"$anchor": "a", "type": "string"}},
            "properties": {"enum": {"$ref": "#a"}},
        });
        let prepared = prepare(values).unwrap();
        let name = prepared["properties"]["enum"]["$ref"].as_str().unwrap().rsplit('/').next().unwrap();
        assert_eq!(prepared["$defs"][name]["type"], "string");
        let recursive = json!({"$id": "r.json", "properties": {"next": {"$ref": "r.json"}}});
        assert!(prepare(recursive).is_ok());
    }

    #[test]
    fn divisors_are_limited_where_they_multiply() {
        let of = |divisor: f64| json!({"type": "number", "multipleOf": divisor});
        for good in [of(0.01), of(1000.0), of(1.5), json!({"properties": {"a": of(1500.0), "b": of(1700.0)}})] {
            assert!(prepare(good.clone()).is_ok(), "{good}");
        }
        for bad in [
            of(9_999_991.0),
            of(99_991.0),
            of(1e300),
            of(0.000_099_991),
            json!({"allOf": [of(97.0), of(89.0)]}),
            json!({"multipleOf": 97, "anyOf": [{"multipleOf": 89}]}),
            json!({"items": {"properties": {"x": of(12_345.0)}}}),
        ] {
            assert!(prepare(bad.clone()).unwrap_err().contains("multipleOf"), "{bad}");
        }
    }

    #[test]
    fn whole_numbers_are_integers() {
        assert_eq!(prepare(json!({"minimum": 2.0, "maximum": 2.5})).unwrap(), json!({"minimum": 2, "maximum": 2.5}));
    }
}
