//! Legal names of functions and values.

use std::fmt::{self, Display, Formatter};

/// Reserved words of the text form.
const RESERVED: [&str; 24] = [
    "any", "bf16", "bool", "dict", "false", "fp16", "fp32", "fp64", "func", "int16", "int32", "int64", "int8", "list",
    "program", "state", "string", "tensor", "true", "tuple", "uint16", "uint32", "uint64", "uint8",
];

/// Describes why a name is illegal. Names are `[A-Za-z_][A-Za-z0-9_@]*` and no reserved words of the text form.
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

/// A name as the text form writes it: in quotes if it is illegal or ambiguous.
pub struct Name<'a>(pub &'a str);

impl Display for Name<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if problem(self.0).is_none() && self.0 != "opaque" { f.write_str(self.0) } else { write!(f, "{:?}", self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_letters_digits_underscores_and_at_signs() {
        for name in ["_0", "_@x", "good_1", "T", "state_"] {
            assert_eq!(problem(name), None);
        }
        for (name, expected) in [
            ("", "a name is empty"),
            ("1x", "the name `1x` starts with `1`; expected a letter or `_`"),
            ("a.b", "the name `a.b` has the character `.`; expected letters, digits, `_` or `@`"),
            ("caf\u{e9}", "the name `caf\u{e9}` has the character `\u{e9}`; expected letters, digits, `_` or `@`"),
            ("func", "the name `func` is a word of the language"),
        ] {
            assert_eq!(problem(name).as_deref(), Some(expected));
        }
    }
}
