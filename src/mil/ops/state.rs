//! States and constants.

use super::rules::Inferred;
use crate::catalogue::{Arguments, Row};
use crate::ir::{Argument, Binding};
use crate::types::Opset::{CoreMl5, CoreMl8};
use crate::types::{TensorType, ValueType};

pub const ROWS: &[Row] = &[
    ("const", CoreMl5, "", constant),
    ("read_state", CoreMl8, "input", read),
    ("write_state", CoreMl8, "input data", write),
];

fn constant(a: &Arguments<'_>) -> Inferred {
    let value = a.attributes.get("val").ok_or("attribute `val` is missing")?;
    Ok(vec![value.ty.clone().into()])
}

fn state<'a>(a: &Arguments<'a>) -> Result<&'a TensorType, String> {
    match a.inputs.get("input").map(Argument::as_slice) {
        Some([Binding::Value(id)]) => match &a.function.value(*id).ty {
            ValueType::State(ty) => Ok(ty),
            other => Err(format!("`input` is {other}; a state is needed")),
        },
        _ => Err("parameter `input` must be one state".into()),
    }
}

fn read(a: &Arguments<'_>) -> Inferred {
    Ok(vec![state(a)?.clone().into()])
}

fn write(a: &Arguments<'_>) -> Inferred {
    let (state, data) = (state(a)?, a.tensor("data")?);
    if state.is_compatible(data) {
        Ok(Vec::new())
    } else {
        Err(format!("the state is {state}, what is written {data}"))
    }
}
