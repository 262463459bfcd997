//! Cache of sessions: the next request of a conversation begins with the same tokens, whose states needn't be computed
//! again.

use std::sync::Arc;

use super::model::LoadedModel;
use super::session::TokenSession;
use anec_base::Result;

/// Unused sessions by time of last use.
pub struct PrefixCache {
    model: Arc<LoadedModel>,
    /// Sessions, most recently used last.
    sessions: Vec<TokenSession>,
    capacity: usize,
}

impl PrefixCache {
    /// Creates a cache of up to `capacity` sessions; each has the memory of a whole context.
    pub fn new(model: Arc<LoadedModel>, capacity: usize) -> Self {
        PrefixCache { model, sessions: Vec::new(), capacity }
    }

    /// Returns a session for a text of `length` tokens that begins with `prompt`. It may hold a beginning of the
    /// prompt, which generation reuses.
    ///
    /// # Errors
    /// If the text doesn't fit, or the backend can't allocate states.
    pub fn take(&mut self, prompt: &[u32], length: u64) -> Result<TokenSession> {
        let mut session = self.find(prompt, length)?;
        session.kept = true;
        Ok(session)
    }

    /// Returns the session that shares the longest prefix with a prompt, or a new one.
    fn find(&mut self, prompt: &[u32], length: u64) -> Result<TokenSession> {
        let candidates = self.sessions.iter().enumerate().filter(|(_, session)| session.is_compatible_with(length));
        let best = candidates.map(|(i, session)| (common(session.tokens(), prompt), i)).max();
        if let Some((shared, i)) = best.filter(|(shared, _)| *shared > 0) {
            let own = self.sessions[i].tokens().len();
            // a session that shares little belongs to another conversation, which may continue
            let session = if shared * 2 >= own { Some(self.sessions.remove(i)) } else { self.sessions[i].fork()? };
            if let Some(mut session) = session {
                session.set_length(length)?;
                return Ok(session);
            }
        }
        self.model.start(length)
    }

    /// Returns a session to the cache; the least recently used one is dropped if the cache is full.
    pub fn put(&mut self, session: TokenSession) {
        self.sessions.push(session);
        if self.sessions.len() > self.capacity {
            self.sessions.remove(0);
        }
    }

    /// Returns the model.
    pub fn model(&self) -> &Arc<LoadedModel> {
        &self.model
    }

    /// Returns the number of cached sessions.
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }
}

/// Returns the length of the common prefix.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::super::GenerationRequest;
    use super::super::fake::{self, FakeOptions};
    use super::super::forward::ForwardOptions;
    use super::*;

    fn cache(capacity: usize) -> PrefixCache {
        PrefixCache::new(fake::model(&FakeOptions::default()).0, capacity)
    }

    /// Computes a prompt in a session of the cache and returns the number of tokens that were cached.
    fn visit(cache: &mut PrefixCache, prompt: &[u32]) -> usize {
        let mut session = cache.take(prompt, 16).unwrap();
        let shared = common(session.tokens(), prompt);
        session.rewind(shared as u64).unwrap();
        if shared < prompt.len() {
            session.forward(&prompt[shared..], &ForwardOptions::none()).unwrap();
        }
        cache.put(session);
        shared
    }

    #[test]
    fn a_conversation_goes_on_from_where_it_was() {
        let mut cache = cache(2);
        assert_eq!(visit(&mut cache, &[1, 2, 3]), 0);
        assert_eq!(visit(&mut cache, &[1, 2, 3, 4, 5]), 3);
        assert_eq!(visit(&mut cache, &[1, 2, 3, 4, 6, 7]), 4);
        assert_eq!(cache.len(), 1);
    }

    #[test]
    fn a_common_beginning_is_copied_and_both_conversations_stay() {
        let mut cache = cache(2);
        visit(&mut cache, &[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(visit(&mut cache, &[1, 2, 5, 5, 5]), 2);
        assert_eq!(cache.len(), 2);
        assert_eq!(visit(&mut cache, &[1, 2, 3, 4, 5, 6, 7]), 7);
        assert_eq!(visit(&mut cache, &[1, 2, 5, 5, 5]), 5);
    }

    #[test]
    fn going_back_to_a_prompt_costs_nothing_where_others_may_begin_with_it() {
        let (model, calls) = fake::model(&FakeOptions { recurrent: true, ..FakeOptions::default() });
        let prompt = vec![3, 1, 4, 1];
        let calls_to_go_back = |session: TokenSession| {
            let request = GenerationRequest { prompt: prompt.clone(), max_tokens: 3, ..GenerationRequest::default() };
            let mut generation = session.generate(request).unwrap();
            generation.run().unwrap();
            calls.lock().unwrap().clear();
            generation.into_session().rewind(prompt.len() as u64).unwrap();
            calls.lock().unwrap().len()
        };
        let of_cache = PrefixCache::new(model.clone(), 1).take(&prompt, 16).unwrap();
        assert_eq!(calls_to_go_back(of_cache), 0, "the states were kept");
        assert_eq!(calls_to_go_back(model.start(16).unwrap()), 2, "a call of two shards");
    }

    #[test]
    fn the_oldest_makes_room_and_other_lengths_are_of_no_use() {
        let mut cache = cache(1);
        visit(&mut cache, &[1, 2, 3]);
        visit(&mut cache, &[4, 5, 6]);
        assert_eq!((cache.len(), visit(&mut cache, &[1, 2, 3])), (1, 0));
        // a short text uses another rotary table
        let session = cache.take(&[1, 2, 3], fake::SHORT).unwrap();
        assert_eq!(session.position(), 0);
        assert!(cache.take(&[1], 17).is_err());
    }
}
