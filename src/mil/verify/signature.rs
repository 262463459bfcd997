//! Check of inputs, outputs and states.

use hashbrown::HashSet;

use super::Findings;
use crate::ir::{Function, SymbolRange, Value};
use crate::types::{DataType, Dim, Opset, TensorType, ValueType};

pub(super) fn check(function: &Function, findings: &mut Findings<'_>) {
    for (symbol, lengths) in &function.lengths {
        if let Some(problem) = lengths_problem(lengths) {
            findings.add("", format!("symbol {}: {problem}", symbol.name()));
        }
    }
    for id in &function.inputs {
        let Value { name, ty, .. } = function.value(*id);
        let problem = match ty {
            ValueType::Tensor(ty) => input_problem(function, ty),
            ValueType::State(ty) => state_problem(function, ty),
            ValueType::Opaque(_) => Some(format!("an input is {ty}; expected a tensor or a state")),
        };
        if let Some(problem) = problem {
            findings.add(name, problem);
        }
    }
    let mut given = HashSet::new();
    for id in &function.block.outputs {
        let Value { name, ty, .. } = function.value(*id);
        if !matches!(ty, ValueType::Tensor(_)) {
            findings.add(name, format!("an output is {ty}; expected a tensor"));
        }
        if function.inputs.contains(id) {
            findings.add(name, "an output is an input; expected the result of an op".into());
        }
        if !given.insert(*id) {
            findings.add(name, "it is an output twice".into());
        }
    }
}

fn lengths_problem(lengths: &SymbolRange) -> Option<String> {
    match lengths {
        SymbolRange::Range { lower, upper, default } => {
            let fits = *lower >= 1 && upper.is_none_or(|upper| upper >= *lower) && lengths.contains(*default);
            let upper = upper.map_or("any".to_owned(), |upper| upper.to_string());
            (!fits)
                .then(|| format!("{lower} to {upper} with default {default}; expected 1 <= lower <= default <= upper"))
        }
        SymbolRange::Enumerated(sizes) => {
            let distinct: HashSet<&u64> = sizes.iter().collect();
            let fits = !sizes.is_empty() && distinct.len() == sizes.len() && !sizes.contains(&0);
            (!fits).then(|| format!("sizes {sizes:?}; expected at least one, all different, none 0"))
        }
    }
}

fn input_problem(function: &Function, ty: &TensorType) -> Option<String> {
    ty.shape.iter().find_map(|dim| match dim {
        Dim::Symbolic { symbol, .. } if !function.lengths.contains_key(symbol) => {
            Some(format!("an input is {ty}; expected lengths for the symbol {}", symbol.name()))
        }
        Dim::Unknown => Some(format!("an input is {ty}; expected a size or symbol for each dimension")),
        _ => None,
    })
}

fn state_problem(function: &Function, ty: &TensorType) -> Option<String> {
    if function.opset < Opset::CoreMl8 {
        return Some(format!("a state needs CoreML8, the function is {}", function.opset.name()));
    }
    let fits = ty.dtype == DataType::Fp16 && ty.fixed_shape().is_some();
    (!fits).then(|| format!("a state is {ty}; expected fp16 and a fixed shape"))
}
