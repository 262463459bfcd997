//! Tokens and their ids, as a `tokenizer.json` has them.

use std::hash::BuildHasher;

// its hash is seeded at random, as that of the standard library is, and several times as fast
use hashbrown::{DefaultHashBuilder, HashTable};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::gguf::Strings;

/// Tokens and their ids.
pub(super) struct Vocab<'a> {
    pub(super) tokens: &'a Strings,
    /// The last id of each, should one be there twice. Tokens are found where they are: hundreds of thousands of references to
    /// them would take several times as much memory.
    ids: HashTable<usize>,
    hasher: DefaultHashBuilder,
}

impl<'a> Vocab<'a> {
    pub(super) fn new(tokens: &'a Strings) -> Self {
        let hasher = DefaultHashBuilder::default();
        let text = |id: &usize| tokens.get(*id).unwrap_or_default();
        let mut ids = HashTable::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            let hash = hasher.hash_one(token);
            let mut entry =
                ids.entry(hash, |known| text(known) == token, |known| hasher.hash_one(text(known))).or_insert(id);
            *entry.get_mut() = id;
        }
        Vocab { tokens, ids, hasher }
    }

    /// The id of a token, if it is one.
    pub(super) fn id(&self, token: &str) -> Option<usize> {
        self.ids.find(self.hasher.hash_one(token), |id| self.tokens.get(*id) == Some(token)).copied()
    }

    /// How many tokens differ.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }
}

impl Serialize for Vocab<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len()))?;
        let all_differ = self.len() == self.tokens.len();
        for (id, token) in self.tokens.iter().enumerate() {
            if all_differ || self.id(token) == Some(id) {
                map.serialize_entry(token, &id)?;
            }
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_is_there_twice_has_its_last_id() {
        let tokens: Strings = ["a", "", "b", "a", "ab"].into_iter().collect();
        let vocab = Vocab::new(&tokens);
        assert_eq!(["a", "", "b", "ab", "c"].map(|token| vocab.id(token)), [Some(3), Some(1), Some(2), Some(4), None]);
        assert_eq!(vocab.len(), 4);
        assert_eq!(serde_json::to_string(&vocab).unwrap(), r#"{"":1,"b":2,"a":3,"ab":4}"#);
    }
}
