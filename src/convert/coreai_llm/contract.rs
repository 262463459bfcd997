//! Numbers of the contract: calls, contexts, and memory that the engine shares between functions.

use anec_coreai::aicode::{Allocation, Constraints};
use anec_manifest::Contract;

/// Numbers of tokens per call.
pub(super) const QUERIES: [u64; 3] = Contract::CoreaiLlm.queries();

/// The embedding as the engine passes it on.
pub(super) const TABLE: &str = "embedding_table";
/// Keys of all layers, and values.
pub(super) const CACHES: [&str; 2] = ["key_cache", "value_cache"];

/// Elements of the first axis of the table, and of a cache's channels, that lie side by side.
const INTERLEAVE: u64 = 8;

/// Dimensions of a model, as far as signatures contain them.
pub(super) struct Dimensions {
    pub(super) layers: u64,
    /// Heads of keys and values.
    pub(super) heads: u64,
    pub(super) head_dim: u64,
    pub(super) hidden_size: u64,
    pub(super) vocab_size: u64,
    /// Largest context.
    pub(super) context: u64,
}

impl Dimensions {
    /// Channels of a layer's keys, or values.
    pub(super) fn channels(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// Shape of the cache of all layers for a context.
    pub(super) fn cache(&self, context: u64) -> [u64; 5] {
        [self.layers, 1, self.channels(), 1, context]
    }

    /// Shape of the table.
    pub(super) fn table(&self) -> [u64; 3] {
        [self.vocab_size, 1, self.hidden_size]
    }

    /// Constraints on shared memory by name. All contexts share the caches' memory, so that their rows have the length
    /// of the largest one.
    pub(super) fn memory(&self) -> [(&'static str, Constraints); 3] {
        let interleave = INTERLEAVE as i64;
        let table = Constraints {
            alignments: vec![1; 4],
            interleave: vec![interleave, 1, 1],
            allocation: Allocation::IO_SURFACE,
        };
        let cache = Constraints {
            alignments: vec![1, 1, 1, 1, interleave * self.context as i64, 1],
            interleave: vec![1, 1, interleave, 1, 1],
            allocation: Allocation::IO_SURFACE,
        };
        let [keys, values] = CACHES;
        [(TABLE, table), (keys, cache.clone()), (values, cache)]
    }

    /// Dimensions that the engine would misunderstand, and a remedy. Without constraints on memory, any multiple fits.
    pub(super) fn problem(&self, plain_memory: bool) -> Option<(String, String)> {
        let channels = self.channels();
        if channels >= self.context {
            // with equal numbers, the engine takes the first of several contexts for the largest
            let problem = format!(
                "{channels} channels of keys for a context of {}: Apple's engine takes the largest dimension of the \
                 cache for the context",
                self.context
            );
            let least = Contract::CoreaiLlm.contexts(channels + 1).last().copied().unwrap_or(channels);
            return Some((problem, format!("convert it again with `context: {least}` or more")));
        }
        let odd = [("channels of keys", channels), ("tokens in the vocabulary", self.vocab_size)];
        let (name, count) = odd.into_iter().find(|(_, count)| !plain_memory && count % INTERLEAVE != 0)?;
        let problem = format!("{count} {name}, expected a multiple of {INTERLEAVE}, which memory is interleaved by");
        Some((problem, "use `format: coreai` without a contract".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_that_the_engine_misunderstands_are_named() {
        let of = |heads: u64, vocab_size: u64, context: u64| Dimensions {
            layers: 2,
            heads,
            head_dim: 64,
            hidden_size: 32,
            vocab_size,
            context,
        };
        assert_eq!(of(2, 256, 512).problem(false), None);
        let (problem, help) = of(8, 256, 512).problem(false).unwrap();
        assert!(problem.contains("512 channels") && help.contains("`context: 1024`"), "{problem} {help}");
        assert!(of(2, 257, 512).problem(false).unwrap().0.contains("257 tokens"));
        assert_eq!(of(2, 257, 512).problem(true), None);
    }
}
