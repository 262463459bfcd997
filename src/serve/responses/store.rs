//! Responses, and the conversations that later requests continue by the id of a response.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value as Json;

use anec_runtime::chat::Message;

/// Maximum number of conversations.
const MOST_CONVERSATIONS: usize = 256;
/// Maximum size of all conversations in bytes of JSON.
const MOST_BYTES: usize = 32 << 20;

/// Bounded store of conversations in memory; the oldest are dropped first.
#[derive(Default)]
pub(crate) struct ConversationStore {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    conversations: VecDeque<Conversation>,
    bytes: usize,
}

struct Conversation {
    /// Id of the last response.
    id: String,
    messages: Vec<Message>,
    /// The response itself.
    response: Json,
    bytes: usize,
}

impl ConversationStore {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the conversation that ends with the response `id`, unless it alone exceeds the limit.
    pub(super) fn insert(&self, id: &str, messages: Vec<Message>, response: Json) {
        let of_messages = serde_json::to_vec(&messages).map_or(usize::MAX / 2, |json| json.len());
        let bytes = id.len() + of_messages + response.to_string().len();
        if bytes > MOST_BYTES {
            return;
        }
        let mut kept = self.lock();
        kept.bytes += bytes;
        kept.conversations.push_back(Conversation { id: id.to_owned(), messages, response, bytes });
        while kept.conversations.len() > MOST_CONVERSATIONS || kept.bytes > MOST_BYTES {
            let Some(oldest) = kept.conversations.pop_front() else { break };
            kept.bytes -= oldest.bytes;
        }
    }

    /// Returns the conversation that ends with the response `id`.
    pub(super) fn get(&self, id: &str) -> Option<Vec<Message>> {
        let kept = self.lock();
        let found = kept.conversations.iter().rev().find(|conversation| conversation.id == id);
        found.map(|conversation| conversation.messages.clone())
    }

    /// Returns the response `id`.
    pub(super) fn response(&self, id: &str) -> Option<Json> {
        let kept = self.lock();
        let found = kept.conversations.iter().find(|conversation| conversation.id == id);
        found.map(|conversation| conversation.response.clone())
    }

    /// Removes the conversation that ends with the response `id`; returns whether there was one.
    pub(super) fn remove(&self, id: &str) -> bool {
        let mut kept = self.lock();
        let found = kept.conversations.iter().position(|conversation| conversation.id == id);
        let removed = found.and_then(|at| kept.conversations.remove(at));
        kept.bytes -= removed.as_ref().map_or(0, |conversation| conversation.bytes);
        removed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_conversations_are_dropped_first() {
        let store = ConversationStore::default();
        for number in 0..=MOST_CONVERSATIONS {
            store.insert(&number.to_string(), vec![Message::new("user", &number.to_string())], Json::Null);
        }
        assert_eq!(store.get("0"), None);
        assert_eq!(store.get("1").unwrap()[0].content.as_deref(), Some("1"));
        let large = |id: &str| store.insert(id, vec![Message::new("user", &"a".repeat(MOST_BYTES / 2))], Json::Null);
        large("large");
        assert!(store.get("2").is_some() && store.get("large").is_some());
        large("larger");
        assert!(store.get("large").is_none() && store.get("2").is_none() && store.get("larger").is_some());
        store.insert("largest", vec![Message::new("user", &"a".repeat(MOST_BYTES))], Json::Null);
        assert!(store.get("largest").is_none() && store.get("larger").is_some());
    }

    #[test]
    fn responses_are_found_and_removed() {
        let store = ConversationStore::default();
        store.insert("a", vec![Message::new("user", "Hi")], Json::from("first"));
        store.insert("b", Vec::new(), Json::from("second"));
        assert_eq!(store.response("a"), Some(Json::from("first")));
        assert!(store.remove("a") && !store.remove("a"));
        assert_eq!((store.response("a"), store.get("a")), (None, None));
        assert_eq!(store.response("b"), Some(Json::from("second")));
        let left = store.lock().bytes;
        assert_eq!(left, "b".len() + "[]".len() + "\"second\"".len());
    }
}
