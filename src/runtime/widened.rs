//! Larger calls than a bundle allows, on the CPU executor: for generation, and for gates that observe the values inside
//! a program.
//!
//! A function for a range of tokens is one graph, in which only sizes depend on the number of tokens. The executor can
//! run any number and reads its weights once for all of them.

use anec_bundle::{Bundle, FunctionEntry, PortRole, Stage, StatePort, TokenCount};

/// Returns the bundle with ranges of tokens extended to `most`, provided that all layer functions have ranges and every
/// position has its own place in the states. Other bundles are returned unchanged, among them those with recurrences or
/// ring buffers: in a ring, tokens of a larger call would overwrite slots that others of the call still read.
pub fn widened(bundle: &Bundle, most: u64) -> Bundle {
    let apart = |entry: &FunctionEntry| entry.states.iter().all(|state| by_position(state, entry.context));
    with_larger_calls(bundle, most, apart).unwrap_or_else(|| bundle.clone())
}

/// Limit of calls with sliding windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingLimit {
    /// Number of positions with slots of their own in every ring; calls that end within them may have any size.
    slots: u64,
    /// Maximum size of other calls.
    most: u64,
}

impl RingLimit {
    /// Returns the maximum size of a call at a position.
    pub fn at(self, position: u64) -> u64 {
        self.slots.saturating_sub(position).max(self.most)
    }
}

/// Widens a bundle as [`widened`] does, including functions with rings, whose calls must respect the returned limit.
/// There is no limit where the bundle is unchanged.
pub(super) fn widened_within(bundle: &Bundle, most: u64) -> (Bundle, Option<RingLimit>) {
    let caches = |entry: &FunctionEntry| entry.states.iter().all(|state| state.role.is_cache());
    let slots = |entry: &FunctionEntry| {
        let rings = entry.states.iter().filter(|state| !by_position(state, entry.context));
        rings.filter_map(|state| state.shape.get(2).copied()).min()
    };
    let ring = |entry: &FunctionEntry| slots(entry).map(|slots| RingLimit { slots, most: entry.tokens.most() });
    let smaller = |a: RingLimit, b: RingLimit| RingLimit { slots: a.slots.min(b.slots), most: a.most.min(b.most) };
    match with_larger_calls(bundle, most, caches) {
        Some(widened) => (widened, bundle.functions.iter().filter_map(ring).reduce(smaller)),
        None => (bundle.clone(), None),
    }
}

/// Returns the bundle with ranges of tokens extended to `most`; `None` unless all layer functions have ranges, satisfy
/// `keep`, and take only inputs per token or position.
fn with_larger_calls(bundle: &Bundle, most: u64, keep: impl Fn(&FunctionEntry) -> bool) -> Option<Bundle> {
    let fits = |entry: &FunctionEntry| {
        matches!(entry.tokens, TokenCount::Range(..)) && keep(entry) && has_positional_inputs(entry)
    };
    let head = |entry: &FunctionEntry| matches!(entry.stage, Stage::Head { .. });
    bundle.functions.iter().all(|entry| head(entry) || fits(entry)).then(|| {
        let mut bundle = bundle.clone();
        for entry in &mut bundle.functions {
            if let TokenCount::Range(lower, upper) = entry.tokens {
                entry.tokens = TokenCount::Range(lower, upper.max(most));
            }
        }
        bundle
    })
}

/// Returns whether a function takes only inputs per token or position.
fn has_positional_inputs(entry: &FunctionEntry) -> bool {
    entry.inputs.iter().all(|port| match &port.role {
        PortRole::Hidden
        | PortRole::RopeCos { .. }
        | PortRole::RopeSin { .. }
        | PortRole::AttentionMask { .. }
        | PortRole::PastMask { .. }
        | PortRole::CallMask { .. }
        | PortRole::KvWriteMask => true,
        PortRole::Cache { .. } => port.shape_at(1).get(2).is_some_and(|slots| *slots >= entry.context),
        _ => false,
    })
}

/// Returns whether each position of a text has its own place in a state, unlike in a ring or a recurrence.
pub(super) fn by_position(state: &StatePort, context: u64) -> bool {
    state.role.is_cache() && state.shape.get(2).is_some_and(|slots| *slots >= context)
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeOptions};
    use super::*;

    #[test]
    fn only_ranges_of_tokens_that_keep_apart_take_more() {
        let most = |form: &FakeOptions| -> Vec<u64> {
            widened(&fake::bundle(form), 32).functions.iter().map(|entry| entry.tokens.most()).collect()
        };
        assert!(most(&FakeOptions::default()).iter().all(|most| *most == 32));
        let fixed = vec![TokenCount::Fixed(1), TokenCount::Fixed(4)];
        for form in [
            FakeOptions { recurrent: true, ..FakeOptions::default() },
            FakeOptions { slice: true, ..FakeOptions::default() },
            FakeOptions { layer_tokens: fixed, ..FakeOptions::default() },
        ] {
            assert!(most(&form).iter().all(|most| *most <= 4), "as they were");
        }
    }
}
