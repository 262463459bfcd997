//! The tables of `validators/`, which are part of the binary.

use serde::de::DeserializeOwned;

/// A table out of its YAML. It goes over a tree of JSON, so that the parser of YAML isn't compiled anew for every type of every
/// table: three megabytes of machine code.
///
/// # Errors
/// What doesn't fit.
pub(crate) fn parse<T: DeserializeOwned>(yaml: &str) -> Result<T, String> {
    let tree: serde_json::Value = serde_yaml::from_str(yaml).map_err(|error| error.to_string())?;
    serde_json::from_value(tree).map_err(|error| error.to_string())
}

/// A table that is part of the binary; tests read each.
pub(crate) fn built_in<T: DeserializeOwned>(name: &str, yaml: &str) -> T {
    parse(yaml).unwrap_or_else(|problem| panic!("validators/{name}, which is part of the binary: {problem}"))
}
