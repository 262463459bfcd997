//! Larger calls than a bundle allows, on the CPU executor: for texts, and for gates that look at the values inside a program.
//!
//! A function of a range of tokens is one graph, in which nothing depends on their number but sizes. The executor computes as
//! many as one likes, and reads its weights once for all of them.

use anec_bundle::{Bundle, FunctionEntry, Port, PortRole, Stage, StatePort, TokenCount};

/// The bundle, in which functions of a range of tokens take up to `most`, if all functions of layers are such and what their
/// tokens leave has a place of its own for every position. Others stay as they are, rings and recurrences among them: in a
/// ring of a sliding window, tokens of a larger call would take places that others of it still look at.
pub fn widened(bundle: &Bundle, most: u64) -> Bundle {
    let mut bundle = bundle.clone();
    let is_range = |entry: &FunctionEntry| matches!(entry.tokens, TokenCount::Range(..));
    let head = |entry: &FunctionEntry| matches!(entry.stage, Stage::Head { .. });
    if bundle.functions.iter().all(|entry| head(entry) || is_range(entry) && keeps_positions_apart(entry)) {
        for entry in &mut bundle.functions {
            if let TokenCount::Range(lower, upper) = entry.tokens {
                entry.tokens = TokenCount::Range(lower, upper.max(most));
            }
        }
    }
    bundle
}

/// Whether a function is given nothing but what each token or position has for itself, and keeps nothing else.
fn keeps_positions_apart(entry: &FunctionEntry) -> bool {
    let given = |port: &Port| match &port.role {
        PortRole::Hidden
        | PortRole::RopeCos { .. }
        | PortRole::RopeSin { .. }
        | PortRole::AttentionMask { .. }
        | PortRole::PastMask { .. }
        | PortRole::CallMask { .. }
        | PortRole::KvWriteMask => true,
        PortRole::Cache { .. } => port.shape_at(1).get(2).is_some_and(|slots| *slots >= entry.context),
        _ => false,
    };
    entry.states.iter().all(|state| by_position(state, entry.context)) && entry.inputs.iter().all(given)
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
