//! Inputs and outputs of one forward pass.

use std::ops::Range;

/// Positions whose logits are returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// No position.
    None,
    /// Last token.
    Last,
    /// Every token.
    All,
}

impl Positions {
    /// Returns the positions within a call of `tokens` tokens; `last` marks the last call.
    pub(super) fn of_call(self, tokens: usize, last: bool) -> Range<usize> {
        match self {
            Positions::All => 0..tokens,
            Positions::Last if last => tokens - 1..tokens,
            Positions::Last | Positions::None => tokens..tokens,
        }
    }
}

/// Division of tokens into calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Chunking {
    /// Largest calls that the functions take.
    #[default]
    Largest,
    /// Repeating pattern of call sizes; the last call takes the rest.
    Pattern(Vec<u64>),
}

/// Hidden states to record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// No hidden states.
    No,
    /// Input of the first function and output of each; every backend supports this.
    BetweenFunctions,
    /// States between all layers; not every backend shows values inside a function.
    BetweenLayers,
}

impl Chunking {
    /// Returns the requested number of tokens of the call with this index, if any.
    pub(super) fn wish(&self, turn: usize) -> Option<u64> {
        match self {
            Chunking::Largest => None,
            Chunking::Pattern(sizes) => sizes.get(turn % sizes.len().max(1)).copied(),
        }
    }
}

/// Options of a forward pass.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ForwardOptions {
    /// Positions with logits.
    pub logits: Positions,
    /// Hidden states to record.
    pub hidden: Hidden,
    /// Division into calls.
    pub chunking: Chunking,
    /// Whether the largest logits suffice: a head that gives them returns no others.
    pub largest: bool,
}

impl Default for ForwardOptions {
    fn default() -> Self {
        ForwardOptions { logits: Positions::All, hidden: Hidden::No, chunking: Chunking::Largest, largest: false }
    }
}

impl ForwardOptions {
    /// Returns options without logits, for passes that only update states.
    pub fn none() -> Self {
        ForwardOptions { logits: Positions::None, ..ForwardOptions::default() }
    }

    /// Returns options for the logits of the last token, in the largest calls.
    pub fn last() -> Self {
        ForwardOptions { logits: Positions::Last, ..ForwardOptions::default() }
    }

    /// Returns options for the logits of all tokens, in calls by `chunking`.
    pub fn all(chunking: Chunking) -> Self {
        ForwardOptions::default().in_calls(chunking)
    }

    /// Sets the division into calls.
    #[must_use]
    pub fn in_calls(self, chunking: Chunking) -> Self {
        ForwardOptions { chunking, ..self }
    }

    /// Sets the hidden states to record.
    #[must_use]
    pub fn recording(self, hidden: Hidden) -> Self {
        ForwardOptions { hidden, ..self }
    }

    /// Sets whether the largest logits suffice.
    #[must_use]
    pub fn largest(self, largest: bool) -> Self {
        ForwardOptions { largest, ..self }
    }
}

/// Result of a forward pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ForwardOutput {
    /// Logits, row-major `[positions, vocab_size]`, or the largest ones `[positions, k]` in descending order.
    pub logits: Vec<f32>,
    /// Tokens of the largest logits, `[positions, k]`; empty if `logits` has all.
    pub tokens: Vec<u32>,
    /// If requested, `num_layers + 1` matrices `[tokens, hidden_size]`: the input of layer 0, then the output of each
    /// layer. Matrices that aren't recorded are empty.
    pub hidden: Vec<Vec<f32>>,
}
