//! Inputs and outputs of one forward pass.

use std::ops::Range;

/// The positions whose logits are returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// None.
    None,
    /// The last token.
    Last,
    /// Every token.
    All,
}

impl Positions {
    /// Those of a call of so many tokens, which is the `last` one or not.
    pub(super) fn of_call(self, tokens: usize, last: bool) -> Range<usize> {
        match self {
            Positions::All => 0..tokens,
            Positions::Last if last => tokens - 1..tokens,
            Positions::Last | Positions::None => tokens..tokens,
        }
    }
}

/// How tokens are divided into calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Chunking {
    /// As many tokens per call as the functions take.
    #[default]
    Largest,
    /// These numbers of tokens, again and again; the last call takes what is left.
    Pattern(Vec<u64>),
}

/// Which hidden states are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// None.
    No,
    /// Those between functions: what enters the first and leaves each. Every backend can show them.
    BetweenFunctions,
    /// Those between all layers. Not every backend shows what is inside a function.
    BetweenLayers,
}

impl Chunking {
    /// The number of tokens that the call of this turn should have, if any.
    pub(super) fn wish(&self, turn: usize) -> Option<u64> {
        match self {
            Chunking::Largest => None,
            Chunking::Pattern(sizes) => sizes.get(turn % sizes.len().max(1)).copied(),
        }
    }
}

/// Options of a forward pass.
#[derive(Clone, Debug)]
pub struct ForwardOptions {
    /// Positions with logits.
    pub logits: Positions,
    /// Hidden states beside them.
    pub hidden: Hidden,
    /// Division into calls.
    pub chunking: Chunking,
}

impl ForwardOptions {
    /// No logits: only the states are of interest.
    pub fn none() -> Self {
        ForwardOptions { logits: Positions::None, hidden: Hidden::No, chunking: Chunking::Largest }
    }

    /// Logits of the last token, in the largest calls.
    pub fn last() -> Self {
        ForwardOptions { logits: Positions::Last, hidden: Hidden::No, chunking: Chunking::Largest }
    }

    /// Logits of all tokens, in calls by `chunking`.
    pub fn all(chunking: Chunking) -> Self {
        ForwardOptions { logits: Positions::All, hidden: Hidden::No, chunking }
    }
}

/// What a run over tokens gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ForwardOutput {
    /// Logits, row-major `[positions, vocab_size]`.
    pub logits: Vec<f32>,
    /// Where wanted, `num_layers + 1` matrices `[tokens, hidden_size]`: what enters layer 0, then what leaves each layer.
    /// Those that are not wanted are empty.
    pub hidden: Vec<Vec<f32>>,
}
