//! Elementwise ops: arithmetic, functions, activations, comparisons, choice, casts.

use super::rules::{Inferred, broadcast, one, same};
use crate::catalogue::{Arguments, Row};
use crate::types::DataType;
use crate::types::Opset::{CoreMl5, CoreMl6, CoreMl7};

pub const ROWS: &[Row] = &[
    ("add", CoreMl5, "x y", arithmetic),
    ("sub", CoreMl5, "x y", arithmetic),
    ("mul", CoreMl5, "x y", arithmetic),
    ("real_div", CoreMl5, "x y", arithmetic),
    ("floor_div", CoreMl5, "x y", arithmetic),
    ("mod", CoreMl5, "x y", arithmetic),
    ("pow", CoreMl5, "x y", arithmetic),
    ("maximum", CoreMl5, "x y", arithmetic),
    ("minimum", CoreMl5, "x y", arithmetic),
    ("equal", CoreMl5, "x y", comparison),
    ("not_equal", CoreMl5, "x y", comparison),
    ("greater", CoreMl5, "x y", comparison),
    ("greater_equal", CoreMl5, "x y", comparison),
    ("less", CoreMl5, "x y", comparison),
    ("less_equal", CoreMl5, "x y", comparison),
    ("logical_and", CoreMl5, "x y", comparison),
    ("logical_or", CoreMl5, "x y", comparison),
    ("logical_xor", CoreMl5, "x y", comparison),
    ("logical_not", CoreMl5, "x", same),
    ("abs", CoreMl5, "x", same),
    ("acos", CoreMl5, "x", same),
    ("asin", CoreMl5, "x", same),
    ("atan", CoreMl5, "x", same),
    ("atanh", CoreMl5, "x", same),
    ("ceil", CoreMl5, "x", same),
    ("cos", CoreMl5, "x", same),
    ("cosh", CoreMl5, "x", same),
    ("erf", CoreMl5, "x", same),
    ("exp", CoreMl5, "x", same),
    ("exp2", CoreMl5, "x", same),
    ("floor", CoreMl5, "x", same),
    ("identity", CoreMl5, "x", same),
    ("inverse", CoreMl5, "x epsilon!=0.0001", same),
    ("log", CoreMl5, "x epsilon!=1e-45", same),
    ("round", CoreMl5, "x", same),
    ("rsqrt", CoreMl5, "x epsilon!=1e-12", same),
    ("sign", CoreMl5, "x", same),
    ("sin", CoreMl5, "x", same),
    ("sinh", CoreMl5, "x", same),
    ("sqrt", CoreMl5, "x", same),
    ("square", CoreMl5, "x", same),
    ("tan", CoreMl5, "x", same),
    ("tanh", CoreMl5, "x", same),
    ("threshold", CoreMl5, "x alpha!", same),
    ("clip", CoreMl5, "x alpha! beta!", same),
    ("clamped_relu", CoreMl5, "x alpha! beta!", same),
    ("elu", CoreMl5, "x alpha!", same),
    ("gelu", CoreMl5, "x mode!=\"EXACT\"", same),
    ("leaky_relu", CoreMl5, "x alpha!", same),
    ("linear_activation", CoreMl5, "x alpha! beta!", same),
    ("prelu", CoreMl5, "x alpha!", same),
    ("relu", CoreMl5, "x", same),
    ("relu6", CoreMl5, "x", same),
    ("scaled_tanh", CoreMl5, "x alpha! beta!", same),
    ("sigmoid", CoreMl5, "x", same),
    ("sigmoid_hard", CoreMl5, "x alpha! beta!", same),
    ("silu", CoreMl5, "x", same),
    ("softplus", CoreMl5, "x", same),
    ("softplus_parametric", CoreMl5, "x alpha! beta!", same),
    ("softsign", CoreMl5, "x", same),
    ("thresholded_relu", CoreMl5, "x alpha!", same),
    ("softmax", CoreMl5, "x axis!=-1", same),
    ("cast", CoreMl5, "x dtype!", cast),
    ("select", CoreMl5, "cond a b", select),
    ("cumsum", CoreMl5, "x axis!=0 exclusive!=false reverse!=false", same),
    ("fill_like", CoreMl6, "ref_tensor value!=0.0", fill_like),
];

/// Result types of a cast; the narrow integers from CoreML7.
const CAST: [DataType; 8] = [
    DataType::Bool,
    DataType::Fp16,
    DataType::Fp32,
    DataType::Int32,
    DataType::Int8,
    DataType::Int16,
    DataType::Uint8,
    DataType::Uint16,
];

fn arithmetic(a: &Arguments<'_>) -> Inferred {
    let (x, y) = (a.tensor("x")?, a.tensor("y")?);
    one(x.dtype, broadcast(&x.shape, &y.shape)?)
}

fn comparison(a: &Arguments<'_>) -> Inferred {
    one(DataType::Bool, broadcast(&a.tensor("x")?.shape, &a.tensor("y")?.shape)?)
}

fn cast(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let name = a.text("dtype").ok_or("`dtype` must be a constant string")?;
    let allowed = if a.function.opset >= CoreMl7 { &CAST[..] } else { &CAST[..4] };
    let dtype = allowed.iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
        let names: Vec<&str> = allowed.iter().map(|dtype| dtype.name()).collect();
        format!("`dtype` is \"{name}\"; expected one of {}", names.join(", "))
    })?;
    one(*dtype, x.shape.clone())
}

fn select(a: &Arguments<'_>) -> Inferred {
    let (cond, x, y) = (a.tensor("cond")?, a.tensor("a")?, a.tensor("b")?);
    one(x.dtype, broadcast(&cond.shape, &broadcast(&x.shape, &y.shape)?)?)
}

fn fill_like(a: &Arguments<'_>) -> Inferred {
    let value = a.optional_tensor("value")?.map_or(DataType::Fp32, |ty| ty.dtype);
    one(value, a.tensor("ref_tensor")?.shape.clone())
}
