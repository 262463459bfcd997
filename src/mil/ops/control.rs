//! Control flow: ops whose nested blocks run once, not at all, or repeatedly.

use super::rules::Inferred;
use crate::catalogue::{Arguments, Row};
use crate::ir::Block;
use crate::types::Opset::CoreMl5;
use crate::types::{DataType, TensorType, ValueType};

pub const ROWS: &[Row] = &[("cond", CoreMl5, "pred", cond), ("while_loop", CoreMl5, "loop_vars*", while_loop)];

/// Types of the first branch; the second has compatible ones.
fn cond(a: &Arguments<'_>) -> Inferred {
    scalar_bool(a.tensor("pred")?, "`pred`")?;
    let [yes, no] = a.blocks else { return Err(format!("it has {} blocks; expected two branches", a.blocks.len())) };
    if !yes.inputs.is_empty() || !no.inputs.is_empty() {
        return Err("a branch has inputs; expected none".into());
    }
    let (yes, no) = (outputs(a, yes), outputs(a, no));
    if yes.len() != no.len() {
        return Err(format!("its branches give {} and {} values; expected as many", yes.len(), no.len()));
    }
    match yes.iter().zip(&no).find(|(yes, no)| !compatible(yes, no)) {
        Some((yes, no)) => Err(format!("its branches give {yes} and {no}; expected one type")),
        None => Ok(yes),
    }
}

/// Types of the body's outputs, which are the variables of the next iteration.
fn while_loop(a: &Arguments<'_>) -> Inferred {
    let [condition, body] = a.blocks else {
        return Err(format!("it has {} blocks; expected a condition and a body", a.blocks.len()));
    };
    match outputs(a, condition).as_slice() {
        [ValueType::Tensor(ty)] => scalar_bool(ty, "the condition")?,
        several => return Err(format!("its condition gives {} values; expected a boolean", several.len())),
    }
    let variables = a.types("loop_vars");
    for (block, name) in [(condition, "condition"), (body, "body")] {
        let inputs: Vec<ValueType> = block.inputs.iter().map(|id| a.function.value(*id).ty.clone()).collect();
        if !all_compatible(&inputs, &variables) {
            let (takes, given) = (list(&inputs), list(&variables));
            return Err(format!("its {name} takes [{takes}]; expected the types of `loop_vars`, [{given}]"));
        }
    }
    let results = outputs(a, body);
    if !all_compatible(&results, &variables) {
        let (gives, given) = (list(&results), list(&variables));
        return Err(format!("its body gives [{gives}]; expected the types of `loop_vars`, [{given}]"));
    }
    Ok(results)
}

fn outputs(a: &Arguments<'_>, block: &Block) -> Vec<ValueType> {
    block.outputs.iter().map(|id| a.function.value(*id).ty.clone()).collect()
}

/// Checks that a condition is one boolean; coremltools' tests also have a vector of one.
fn scalar_bool(ty: &TensorType, name: &str) -> Result<(), String> {
    match ty.dtype == DataType::Bool && ty.elements() == Some(1) {
        true => Ok(()),
        false => Err(format!("{name} is {ty}; expected a boolean scalar")),
    }
}

fn all_compatible(a: &[ValueType], b: &[ValueType]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| compatible(a, b))
}

/// Returns whether two types can be of one value. A size that iterations change is unknown in the body.
fn compatible(a: &ValueType, b: &ValueType) -> bool {
    match (a, b) {
        (ValueType::Tensor(a), ValueType::Tensor(b)) => a.is_compatible(b),
        _ => a == b,
    }
}

fn list(types: &[ValueType]) -> String {
    types.iter().map(ValueType::to_string).collect::<Vec<_>>().join(", ")
}
