//! Pairs of tokens that become one, as a `tokenizer.json` has them.

use serde::ser::{Serialize, Serializer};

use crate::gguf::Strings;

/// Pairs of tokens that become one, in the order of their priority.
pub(super) enum Merges<'a> {
    /// As GGUF has them, each with a space between the two.
    Given(&'a Strings),
    /// Found by scores.
    Found(Vec<(&'a str, &'a str)>),
}

/// The two tokens of a pair that is given.
pub(super) fn pair_of(merge: &str) -> Option<(&str, &str)> {
    str::split_once(merge, ' ')
}

impl Serialize for Merges<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Merges::Given(merges) => serializer.collect_seq(merges.iter().filter_map(pair_of)),
            Merges::Found(pairs) => pairs.serialize(serializer),
        }
    }
}
