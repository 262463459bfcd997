//! Names in a package: what is allowed, and the nearest allowed name.

/// Words of the text form, which can't be names.
const RESERVED: [&str; 24] = [
    "any", "bf16", "bool", "dict", "false", "fp16", "fp32", "fp64", "func", "int16", "int32", "int64", "int8", "list",
    "program", "state", "string", "tensor", "true", "tuple", "uint16", "uint32", "uint64", "uint8",
];

/// What is wrong with a name, if anything: names are `[A-Za-z_][A-Za-z0-9_@]*` and not a word of the text form.
pub fn problem(name: &str) -> Option<String> {
    let mut chars = name.chars();
    let Some(first) = chars.next() else { return Some("a name is empty".into()) };
    if !(first.is_ascii_alphabetic() || first == '_') {
        return Some(format!("the name `{name}` starts with `{first}`; expected a letter or `_`"));
    }
    if let Some(bad) = chars.find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '@'))) {
        return Some(format!("the name `{name}` has the character `{bad}`; expected letters, digits, `_` or `@`"));
    }
    RESERVED.contains(&name).then(|| format!("the name `{name}` is a word of the language"))
}

/// The nearest allowed name: `layers.0.k_state` becomes `layers_0_k_state`. Different names may become the same.
pub fn sanitise(name: &str) -> String {
    let mut out: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '_' | '@') { c } else { '_' }).collect();
    if !out.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        out.insert(0, '_');
    }
    if RESERVED.contains(&out.as_str()) {
        out.push('_');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sanitised_names_are_allowed() {
        for (name, expected) in [
            ("layers.0.k_state", "layers_0_k_state"),
            ("0", "_0"),
            ("", "_"),
            ("state", "state_"),
            ("@x", "_@x"),
            ("caf\u{e9}", "caf_"),
            ("good_1", "good_1"),
        ] {
            assert_eq!(sanitise(name), expected);
            assert_eq!(problem(expected), None);
        }
        for name in ["", "1x", "a.b", "func"] {
            assert!(problem(name).is_some(), "{name}");
        }
    }
}
