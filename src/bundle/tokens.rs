//! Number of tokens of a call.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Numbers of tokens that one call of a function may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenCount {
    /// Exactly this many.
    Fixed(u64),
    /// Every number from the first to the second, both included.
    Range(u64, u64),
}

impl TokenCount {
    /// Whether a call of `tokens` tokens is possible.
    pub fn allows(self, tokens: u64) -> bool {
        (self.least()..=self.most()).contains(&tokens)
    }

    /// Smallest number of tokens.
    pub fn least(self) -> u64 {
        match self {
            TokenCount::Fixed(count) => count,
            TokenCount::Range(lower, _) => lower,
        }
    }

    /// Largest number of tokens.
    pub fn most(self) -> u64 {
        match self {
            TokenCount::Fixed(count) => count,
            TokenCount::Range(_, upper) => upper,
        }
    }
}

impl std::fmt::Display for TokenCount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TokenCount::Fixed(count) => write!(f, "{count}"),
            TokenCount::Range(lower, upper) => write!(f, "{lower} to {upper}"),
        }
    }
}
