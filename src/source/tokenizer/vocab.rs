//! Vocabulary of a `tokenizer.json`.

use std::hash::BuildHasher;

// randomly seeded like the standard library's, and several times as fast
use hashbrown::{DefaultHashBuilder, HashTable};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::gguf::Strings;

/// Tokens by id, and ids by token.
pub(super) struct Vocab<'a> {
    pub(super) tokens: &'a Strings,
    /// Last id of each token. Entries refer to the tokens by index, because hundreds of thousands of references would
    /// take several times the memory.
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

    /// Returns the id of a token.
    pub(super) fn id(&self, token: &str) -> Option<usize> {
        self.ids.find(self.hasher.hash_one(token), |id| self.tokens.get(*id) == Some(token)).copied()
    }

    /// Number of distinct tokens.
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
