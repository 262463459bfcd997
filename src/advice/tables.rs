//! Tables in YAML that are part of the binary.

use serde::de::DeserializeOwned;

/// Parses a YAML table via JSON, so that the YAML parser isn't instantiated for every type of every table (3 MB of
/// code).
///
/// # Errors
/// If the text doesn't fit the type.
pub fn parse<T: DeserializeOwned>(yaml: &str) -> Result<T, String> {
    let tree: serde_json::Value = serde_yaml::from_str(yaml).map_err(|error| error.to_string())?;
    serde_json::from_value(tree).map_err(|error| error.to_string())
}

/// Parses a table that is part of the binary and called `name` in its crate.
///
/// # Panics
/// If the text doesn't fit the type. Tests parse each built-in table.
pub fn built_in<T: DeserializeOwned>(name: &str, yaml: &str) -> T {
    parse(yaml).unwrap_or_else(|problem| panic!("{name}, which is part of the binary: {problem}"))
}
