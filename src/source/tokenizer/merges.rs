//! Merges of a `tokenizer.json`.

use serde::ser::{Serialize, Serializer};

use crate::gguf::Strings;

/// Merges in order of priority.
pub(super) enum Merges<'a> {
    /// As stored in GGUF: two pieces separated by a space.
    Stored(&'a Strings),
    /// Derived from scores.
    Derived(Vec<(&'a str, &'a str)>),
}

/// Splits a stored merge into its two pieces.
pub(super) fn pair_of(merge: &str) -> Option<(&str, &str)> {
    str::split_once(merge, ' ')
}

impl Serialize for Merges<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Merges::Stored(merges) => serializer.collect_seq(merges.iter().filter_map(pair_of)),
            Merges::Derived(pairs) => pairs.serialize(serializer),
        }
    }
}
