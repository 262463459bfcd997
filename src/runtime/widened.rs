//! Larger calls than a bundle allows, on the CPU executor: for texts, and for gates that look at the values inside a program.
//!
//! A function of a range of tokens is one graph, in which nothing depends on their number but sizes. The executor computes as
//! many as one likes, and reads its weights once for all of them.

use anec_bundle::{Bundle, FunctionEntry, PortRole, Stage, StatePort, TokenCount};

/// The bundle, in which functions of a range of tokens take up to `most`, if all functions of layers are such and what their
/// tokens leave has a place of its own for every position. Others stay as they are, rings and recurrences among them: in a
/// ring of a sliding window, tokens of a larger call would take places that others of it still look at.
pub fn widened(bundle: &Bundle, most: u64) -> Bundle {
    let apart = |entry: &FunctionEntry| entry.states.iter().all(|state| by_position(state, entry.context));
    with_larger_calls(bundle, most, apart).unwrap_or_else(|| bundle.clone())
}

/// The largest calls of a text with sliding windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingLimit {
    /// Positions that have places of their own in every ring: calls that end within them may be of any size.
    slots: u64,
    /// Most tokens of others.
    most: u64,
}

impl RingLimit {
    /// Most tokens of a call at a position.
    pub fn at(self, position: u64) -> u64 {
        self.slots.saturating_sub(position).max(self.most)
    }
}

/// As [`widened`], but functions with rings are widened, too: their calls keep to the limit. There is none where the bundle stays
/// as it is.
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

/// The bundle, in which functions of a range of tokens take up to `most`; none unless all functions of layers are such, `keep`
/// nothing that forbids it, and are given nothing but what each token or position has for itself.
fn with_larger_calls(bundle: &Bundle, most: u64, keep: impl Fn(&FunctionEntry) -> bool) -> Option<Bundle> {
    let fits = |entry: &FunctionEntry| {
        matches!(entry.tokens, TokenCount::Range(..)) && keep(entry) && is_given_by_position(entry)
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

/// Whether a function is given nothing but what each token or position has for itself.
fn is_given_by_position(entry: &FunctionEntry) -> bool {
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

/// Whether each position of a text has a place of its own in a state: not in a ring, and not in a recurrence.
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
