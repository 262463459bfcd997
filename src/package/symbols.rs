//! Symbols of packages that don't name theirs.
//!
//! A description gives ranges only. Dimensions of equal ranges may be one number, such as the tokens of several inputs,
//! or independent of each other, such as height and width.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use anec_mil::verify::not_inferred;
use anec_mil::{Dim, Function, Symbol, SymbolRange, ValueType};

/// Maximum number of dimensions that are told apart.
const MAX_PLACES: usize = 16;
/// Maximum number of dimensions of which some are told apart: up to 203 groupings, each an inference.
const MAX_PARTITIONED: usize = 6;

/// Flexible dimension of an input.
struct Place {
    input: usize,
    axis: usize,
    symbol: Symbol,
}

/// Gives dimensions that share a range symbols of their own, as far as the types of all ops can be inferred as before.
pub(super) fn separate(function: &mut Function) {
    let places = places(function);
    if places.len() < 2 || places.len() > MAX_PLACES {
        return;
    }
    let known = not_inferred(function);
    let fits = |candidate: &Function| not_inferred(candidate).is_subset(&known);
    let finest = with_groups(function, &places, &(0..places.len()).collect::<Vec<_>>());
    if fits(&finest) {
        *function = finest;
        return;
    }
    if places.len() > MAX_PARTITIONED {
        return;
    }
    let mut groupings = vec![Vec::new()];
    for place in &places {
        groupings = groupings.iter().flat_map(|before| continued(before, place, &places)).collect();
    }
    // from many symbols to few
    groupings.sort_by_key(|groups| Reverse(groups.iter().max().copied()));
    let mut candidates = groupings.iter().map(|groups| with_groups(function, &places, groups));
    if let Some(separated) = candidates.find(fits) {
        *function = separated;
    }
}

/// Groups of the first dimensions, continued by a group for the next: a new one, or one of the same range.
fn continued(before: &[usize], next: &Place, places: &[Place]) -> Vec<Vec<usize>> {
    let count = before.iter().max().map_or(0, |most| most + 1);
    let joins = |group: &usize| {
        let mut members = before.iter().zip(places).filter(|(of, _)| *of == group);
        *group == count || members.any(|(_, place)| place.symbol == next.symbol)
    };
    (0..=count).filter(joins).map(|group| before.iter().copied().chain([group]).collect()).collect()
}

/// Dimensions of inputs whose symbol has a range and is used by others, too.
fn places(function: &Function) -> Vec<Place> {
    let mut places = Vec::new();
    for (input, value) in function.inputs.iter().map(|id| function.value(*id)).enumerate() {
        let ValueType::Tensor(ty) = &value.ty else { continue };
        for (axis, dim) in ty.shape.iter().enumerate() {
            let Dim::Symbolic { factor: 1, symbol, offset: 0 } = dim else { continue };
            if matches!(function.lengths.get(symbol), Some(SymbolRange::Range { .. })) {
                places.push(Place { input, axis, symbol: symbol.clone() });
            }
        }
    }
    let count = |symbol: &Symbol| places.iter().filter(|place| place.symbol == *symbol).count();
    let shared: Vec<Symbol> = places.iter().map(|place| place.symbol.clone()).filter(|s| count(s) > 1).collect();
    places.retain(|place| shared.contains(&place.symbol));
    places
}

/// The function with one symbol for each group. The first group of a symbol keeps it.
fn with_groups(function: &Function, places: &[Place], groups: &[usize]) -> Function {
    let mut function = function.clone();
    let mut of_group: BTreeMap<usize, Symbol> = BTreeMap::new();
    for (Place { input, axis, symbol }, group) in places.iter().zip(groups) {
        let own = match of_group.get(group) {
            Some(own) => own.clone(),
            None if !of_group.values().any(|used| used == symbol) => symbol.clone(),
            None => fresh(&function),
        };
        if let Some(range) = function.lengths.get(symbol).cloned() {
            function.lengths.insert(own.clone(), range);
        }
        let id = function.inputs[*input];
        if let ValueType::Tensor(ty) = &mut function.values[id.0 as usize].ty {
            ty.shape[*axis] = Dim::symbol(&own);
        }
        of_group.insert(*group, own);
    }
    function
}

/// A symbol that the function doesn't have: `T1`, `T2`, …
fn fresh(function: &Function) -> Symbol {
    let mut symbols = (1..).map(|number| Symbol::new(&format!("T{number}")));
    symbols.find(|symbol| !function.lengths.contains_key(symbol)).unwrap_or_else(|| Symbol::new("T"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use anec_mil::text;

    /// Types of the inputs after separation.
    fn separated(inputs: &str, body: &str, output: &str) -> Vec<String> {
        let text = format!(
            "program(1.0) {{ func main<ios15>({inputs})[T = range(lower = 1, upper = 9, default = 2)] {{
                {body}
            }} -> ({output}); }}"
        );
        let mut function = text::parse(&text).unwrap().functions.remove(0);
        separate(&mut function);
        let used: BTreeSet<&Symbol> = function.symbols().collect();
        let ranges: BTreeSet<String> = function.lengths.values().map(|range| format!("{range:?}")).collect();
        assert_eq!(ranges.len(), 1, "{used:?}");
        function.tensor_inputs().map(|value| value.ty.to_string()).collect()
    }

    #[test]
    fn dimensions_that_the_graph_keeps_apart_are_told_apart() {
        let image = separated("tensor<fp32, [T, T]> x", "tensor<fp32, [?, ?]> y = relu(x = x);", "y");
        assert_eq!(image, ["tensor<fp32, [T, T1]>"]);
        let two = "tensor<fp32, [T]> x, tensor<fp32, [T]> y";
        let sum = separated(two, "tensor<fp32, [?]> z = add(x = x, y = y);", "z");
        assert_eq!(sum, ["tensor<fp32, [T]>"; 2]);
    }

    #[test]
    fn only_dimensions_that_must_be_equal_share_a_symbol() {
        // queries and keys have lengths of their own; the mask has both
        let inputs = "tensor<fp32, [T, 4]> q, tensor<fp32, [T, 4]> k, tensor<fp32, [T, T]> mask";
        let body = "bool no = const()[val = bool(false)]; bool yes = const()[val = bool(true)];
                    tensor<fp32, [?, ?]> scores = matmul(x = q, y = k, transpose_x = no, transpose_y = yes);
                    tensor<fp32, [?, ?]> seen = add(x = scores, y = mask);";
        let found = separated(inputs, body, "seen");
        assert_eq!(found, ["tensor<fp32, [T, 4]>", "tensor<fp32, [T1, 4]>", "tensor<fp32, [T, T1]>"]);
        // an op that can't be inferred at all is no reason
        let odd = separated("tensor<fp32, [T, T]> x", "tensor<fp32, [?, ?]> y = oracle(x = x);", "y");
        assert_eq!(odd, ["tensor<fp32, [T, T1]>"]);
    }
}
