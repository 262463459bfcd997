//! Plan of a bundle: which functions run, in which order, with how many tokens per call.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::path::Path;

use super::error::RuntimeError;
use anec_bundle::{Bundle, FunctionEntry, Stage, TokenCount};

/// Routes of all context lengths, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallPlan {
    /// One route per context length.
    pub routes: Vec<Route>,
}

/// Functions of one context length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Number of slots of the KV cache.
    pub context: u64,
    /// Layers, first to last.
    pub layers: Vec<Step>,
    /// Parts of the LM head, first row to last; none if the function of the layers has it.
    pub head: Vec<Step>,
}

/// Part of the model with its functions for several numbers of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Layers, or rows of the vocabulary.
    pub part: Range<u64>,
    /// Feed-forward network of the part's last layer, if in a function of its own.
    pub feed_forward: Option<Box<Step>>,
    /// Groups of experts of the part's last layer, if in functions of their own.
    pub experts: Vec<Step>,
    /// Numbers of tokens and their functions.
    variants: Vec<(TokenCount, usize)>,
}

/// Tokens of one call: `real` of them, padded to the `size` of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Number of tokens that count.
    pub real: u64,
    /// Number of tokens that the functions are called with.
    pub size: u64,
}

impl Route {
    /// Returns all steps in execution order, including feed-forward networks and experts after their layers.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.layers.iter().flat_map(Step::with_followers).chain(&self.head)
    }
}

impl CallPlan {
    /// Creates the plan of a bundle; `path` is for errors.
    ///
    /// # Errors
    /// If the bundle contradicts itself.
    pub fn new(bundle: &Bundle, path: &Path) -> Result<Self, RuntimeError> {
        if let Some(problem) = bundle.check().into_iter().next() {
            return Err(RuntimeError::bundle(path.join(anec_bundle::FILE_NAME), problem));
        }
        let head = steps(bundle, |entry| match entry.stage {
            Stage::Head { first, end } => Some(first..end),
            _ => None,
        });
        let route = |context: u64| {
            let mut layers = steps(bundle, |entry| match entry.stage {
                Stage::Layers { .. } | Stage::Model { .. } if entry.context == context => {
                    let layers = entry.stage.layers();
                    Some(layers.start as u64..layers.end as u64)
                }
                _ => None,
            });
            for step in &mut layers {
                let last = step.part.end - 1;
                let networks = steps(bundle, |entry| match entry.stage {
                    Stage::FeedForward { layer } if layer as u64 == last => Some(last..last + 1),
                    _ => None,
                });
                step.feed_forward = networks.into_iter().next().map(Box::new);
                step.experts = steps(bundle, |entry| match entry.stage {
                    Stage::Experts { layer, first, end } if layer as u64 == last => Some(first..end),
                    _ => None,
                });
            }
            Route { context, layers, head: head.clone() }
        };
        let routes = bundle.model.contexts.iter().copied().map(route).collect();
        Ok(CallPlan { routes })
    }

    /// Returns the route of the smallest context that holds `tokens`.
    ///
    /// # Errors
    /// If no context is large enough.
    pub fn route(&self, tokens: u64) -> Result<usize, RuntimeError> {
        self.routes.iter().position(|route| route.context >= tokens).ok_or_else(|| RuntimeError::ContextFull {
            tokens,
            context: self.routes.last().map_or(0, |route| route.context),
        })
    }
}

/// Returns the steps of the functions that have a `part`, in the parts' order.
fn steps(bundle: &Bundle, part: impl Fn(&FunctionEntry) -> Option<Range<u64>>) -> Vec<Step> {
    let mut parts: BTreeMap<(u64, u64), Step> = BTreeMap::new();
    for (index, entry) in bundle.functions.iter().enumerate() {
        if let Some(part) = part(entry) {
            let step = parts.entry((part.start, part.end)).or_insert(Step::of(part));
            step.variants.push((entry.tokens, index));
        }
    }
    parts
        .into_values()
        .map(|mut step| {
            // a function of one size is preferred over a flexible one
            step.variants.sort_by_key(|(tokens, _)| matches!(tokens, TokenCount::Range(..)));
            step
        })
        .collect()
}

impl Step {
    fn of(part: Range<u64>) -> Step {
        Step { part, feed_forward: None, experts: Vec::new(), variants: Vec::new() }
    }

    /// Returns itself and the steps that its last layer leaves to other functions.
    pub fn with_followers(&self) -> impl Iterator<Item = &Step> {
        std::iter::once(self).chain(self.feed_forward.as_deref()).chain(&self.experts)
    }

    /// Returns the function for calls of `size` tokens.
    pub fn function(&self, size: u64) -> Option<usize> {
        self.variants.iter().find(|(tokens, _)| tokens.allows(size)).map(|(_, function)| *function)
    }

    /// Returns all its functions.
    pub fn functions(&self) -> impl Iterator<Item = usize> + '_ {
        self.variants.iter().map(|(_, function)| *function)
    }

    /// Returns the largest call size up to `size`.
    pub fn largest_at_most(&self, size: u64) -> Option<u64> {
        let candidates = self.variants.iter().filter_map(|(tokens, _)| match *tokens {
            TokenCount::Range(lower, upper) => (lower <= size).then_some(upper.min(size)),
            TokenCount::Fixed(n) => (n <= size).then_some(n),
        });
        candidates.max()
    }

    /// Returns the smallest call size of at least `size`.
    pub fn smallest_at_least(&self, size: u64) -> Option<u64> {
        let candidates = self.variants.iter().filter_map(|(tokens, _)| match *tokens {
            TokenCount::Range(lower, upper) => (upper >= size).then_some(lower.max(size)),
            TokenCount::Fixed(n) => (n >= size).then_some(n),
        });
        candidates.min()
    }
}

/// Returns the largest size up to `size` that every step takes.
fn largest_at_most(steps: &[Step], mut size: u64) -> Option<u64> {
    loop {
        let next = steps.iter().try_fold(size, |size, step| step.largest_at_most(size))?;
        if next == size {
            return Some(size);
        }
        size = next;
    }
}

/// Returns the smallest size of at least `size` that every step takes.
fn smallest_at_least(steps: &[Step], mut size: u64) -> Option<u64> {
    loop {
        let next = steps.iter().try_fold(size, |size, step| step.smallest_at_least(size))?;
        if next == size {
            return Some(size);
        }
        size = next;
    }
}

/// Number of tokens up to which a call takes about as long as for one token, because both are bound by reading weights:
/// 8 to 16 on the Neural Engine (published: five tokens take 1.05 times as long as one, on an M5 Pro).
const READING_BOUND: u64 = 16;
/// Larger calls are padded if at least one token in this many counts.
const FILLED: u64 = 4;

/// Returns the next call when `left` tokens remain: as many as possible, at most `wish`. The call is padded where every
/// function takes more tokens than remain, and also, up to `fill` tokens, where that replaces several calls.
///
/// # Errors
/// If no function takes so many.
pub fn chunk(steps: &[Step], left: u64, wish: Option<u64>, fill: u64) -> Result<Chunk, RuntimeError> {
    let impossible = |size: u64| RuntimeError::Chunk { size, allowed: describe(steps) };
    if let Some(wish) = wish
        && largest_at_most(steps, wish) != Some(wish)
    {
        return Err(impossible(wish));
    }
    let most = wish.map_or(left, |wish| wish.min(left));
    let filled = smallest_at_least(steps, most);
    if let Some(size) = largest_at_most(steps, most) {
        let saves = |filled: &u64| *filled <= fill && *filled <= READING_BOUND.max(FILLED * most);
        return Ok(match filled.filter(|filled| size < most && wish.is_none() && saves(filled)) {
            Some(filled) => Chunk { real: most, size: filled },
            None => Chunk { real: size, size },
        });
    }
    Ok(Chunk { real: most, size: filled.ok_or_else(|| impossible(most))? })
}

/// Returns the call sizes that every step takes: all up to eight, and the largest up to `most`.
pub fn sizes(steps: &[Step], most: u64) -> Vec<u64> {
    let mut sizes: Vec<u64> = (1..=8.min(most)).filter(|size| largest_at_most(steps, *size) == Some(*size)).collect();
    sizes.extend(largest_at_most(steps, most).filter(|size| *size > 8));
    sizes
}

/// Returns the call sizes as text.
fn describe(steps: &[Step]) -> String {
    let mut text = String::new();
    let mut described: Vec<&[(TokenCount, usize)]> = Vec::new();
    for step in steps {
        let same = |other: &&[(TokenCount, usize)]| other.iter().map(|v| v.0).eq(step.variants.iter().map(|v| v.0));
        if described.iter().any(same) {
            continue;
        }
        if !described.is_empty() {
            text.push_str("; ");
        }
        described.push(&step.variants);
        for (i, (tokens, _)) in step.variants.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            let _ = write!(text, "{separator}{tokens}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(variants: &[TokenCount]) -> Step {
        let variants = variants.iter().map(|tokens| (*tokens, 0)).collect();
        Step { variants, ..Step::of(0..1) }
    }

    fn sizes(steps: &[Step], left: u64, wish: Option<u64>) -> Vec<(u64, u64)> {
        filled(steps, left, wish, 0)
    }

    fn filled(steps: &[Step], mut left: u64, wish: Option<u64>, fill: u64) -> Vec<(u64, u64)> {
        let mut sizes = Vec::new();
        while left > 0 {
            let chunk = chunk(steps, left, wish, fill).unwrap();
            sizes.push((chunk.real, chunk.size));
            left -= chunk.real;
        }
        sizes
    }

    #[test]
    fn a_range_takes_its_largest_and_then_the_rest() {
        let steps = [step(&[TokenCount::Range(1, 4)])];
        assert_eq!(sizes(&steps, 11, None), [(4, 4), (4, 4), (3, 3)]);
        assert_eq!(sizes(&steps, 5, Some(2)), [(2, 2), (2, 2), (1, 1)]);
    }

    #[test]
    fn fixed_sizes_need_no_filling_when_one_of_them_is_one() {
        let steps = [step(&[TokenCount::Fixed(1), TokenCount::Fixed(8)])];
        assert_eq!(sizes(&steps, 10, None), [(8, 8), (1, 1), (1, 1)]);
    }

    #[test]
    fn one_call_that_is_filled_up_replaces_several() {
        let steps = [step(&[TokenCount::Fixed(1), TokenCount::Fixed(8), TokenCount::Fixed(64)])];
        // a token, two or more of them, and a rest of a prompt
        assert_eq!(filled(&steps, 1, None, u64::MAX), [(1, 1)]);
        assert_eq!(filled(&steps, 3, None, u64::MAX), [(3, 8)]);
        assert_eq!(filled(&steps, 150, None, u64::MAX), [(64, 64), (64, 64), (22, 64)]);
        assert_eq!(filled(&steps, 12, None, u64::MAX), [(8, 8), (4, 8)], "four of five tokens wouldn't count");
        assert_eq!(filled(&steps, 3, None, 7), [(1, 1); 3], "there is no room");
        assert_eq!(filled(&steps, 3, Some(1), u64::MAX), [(1, 1); 3], "as it was asked for");
    }

    #[test]
    fn a_single_large_size_is_filled_up() {
        let steps = [step(&[TokenCount::Fixed(64)])];
        assert_eq!(sizes(&steps, 70, None), [(64, 64), (6, 64)]);
    }

    #[test]
    fn steps_agree_on_a_size() {
        let steps = [
            step(&[TokenCount::Range(1, 4)]),
            step(&[TokenCount::Fixed(1), TokenCount::Fixed(3), TokenCount::Fixed(8)]),
        ];
        assert_eq!(sizes(&steps, 8, None), [(3, 3), (3, 3), (1, 1), (1, 1)]);
        let steps = [step(&[TokenCount::Fixed(2)]), step(&[TokenCount::Fixed(3)])];
        let error = chunk(&steps, 6, None, 0).unwrap_err().to_string();
        assert_eq!(error, "no call of 6 tokens is possible: the bundle's functions take 2; 3");
    }

    #[test]
    fn a_size_that_nothing_takes_is_refused() {
        let steps = [step(&[TokenCount::Range(1, 4)])];
        let error = chunk(&steps, 20, Some(5), 0).unwrap_err().to_string();
        assert_eq!(error, "no call of 5 tokens is possible: the bundle's functions take 1 to 4");
    }
}
