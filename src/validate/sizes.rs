//! Sizes of flexible dimensions at which functions are tested.

use anec_mil::{Function, SymbolRange};

/// Default size of a function's first flexible dimension; `None` for fixed shapes.
pub(crate) fn default_size(function: &Function) -> Option<u64> {
    function.lengths.values().next().map(SymbolRange::default_size)
}

/// Tested sizes of a function's first flexible dimension: smallest, default, largest. Empty for fixed shapes.
pub(crate) fn size_values(function: &Function) -> Vec<u64> {
    let Some(first) = function.lengths.values().next() else { return Vec::new() };
    let mut sizes = match first {
        SymbolRange::Range { lower, upper, default } => {
            // an unbounded dimension is tried near its default
            vec![(*lower).max(1), *default, upper.unwrap_or(*default + 1).min(default.saturating_mul(8).max(8))]
        }
        SymbolRange::Enumerated(sizes) => sizes.clone(),
    };
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Function with all flexible dimensions fixed: at `size` if they have it, otherwise at their defaults.
pub(crate) fn fixed_at(function: &Function, size: Option<u64>) -> Function {
    function.lengths.iter().fold(function.clone(), |fixed, (symbol, lengths)| {
        let size = size.filter(|size| lengths.contains(*size)).unwrap_or_else(|| lengths.default_size());
        fixed.with_length(symbol, size)
    })
}

/// Function at each tested size.
pub(crate) fn sizes(function: &Function) -> Vec<Function> {
    match size_values(function) {
        sizes if sizes.is_empty() => vec![function.clone()],
        sizes => sizes.into_iter().map(|size| fixed_at(function, Some(size))).collect(),
    }
}
