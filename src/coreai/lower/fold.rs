//! Integers that follow from shapes: programs compute the sizes of a reshape from `shape`, which is known here.

use anec_mil::{Binding, Constant, DataType, Function, Op, TensorType};

/// More integers than this aren't folded.
const MOST: usize = 1 << 12;

/// Shape and elements of a value.
struct Integers {
    shape: Vec<u64>,
    values: Vec<i64>,
}

/// Finds the integers that an operator gives and makes them a constant of the function.
pub(super) fn fold(function: &mut Function, op: &Op) -> bool {
    let [output] = op.outputs[..] else { return false };
    let Some(ty) = function.tensor_type(output) else { return false };
    if ty.dtype != DataType::Int32 {
        return false;
    }
    let Some(result) = evaluate(function, op).filter(|result| result.values.len() <= MOST) else { return false };
    let values: Option<Vec<i32>> = result.values.iter().map(|value| i32::try_from(*value).ok()).collect();
    let Some(values) = values else { return false };
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let ty = TensorType::new(DataType::Int32, result.shape);
    let value = &mut function.values[output.0 as usize];
    value.ty = ty.clone().into();
    value.constant = Some(Constant::literal(ty, bytes));
    true
}

fn argument(function: &Function, op: &Op, parameter: &str) -> Option<Integers> {
    integers(function, op.input(parameter)?)
}

fn integers(function: &Function, binding: &Binding) -> Option<Integers> {
    let constant = function.constant(binding)?;
    let is_integer = constant.ty.dtype.is_integer() || constant.ty.dtype == DataType::Bool;
    let values = constant.as_integers().filter(|values| is_integer && values.len() <= MOST)?;
    Some(Integers { shape: constant.ty.fixed_shape()?, values })
}

fn list(function: &Function, op: &Op, parameter: &str) -> Option<Vec<i64>> {
    argument(function, op, parameter).map(|integers| integers.values)
}

fn evaluate(function: &Function, op: &Op) -> Option<Integers> {
    let x = || argument(function, op, "x");
    let declared = || function.tensor_type(*op.outputs.first()?)?.fixed_shape();
    match &op.operator[..] {
        "shape" => {
            let sizes = function.binding_type(op.input("x")?)?.fixed_shape()?;
            Some(Integers { shape: vec![sizes.len() as u64], values: sizes.iter().map(|size| *size as i64).collect() })
        }
        "cast" | "identity" => x(),
        "reshape" | "squeeze" | "expand_dims" => Some(Integers { shape: declared()?, values: x()?.values }),
        "add" => binary(function, op, i64::checked_add),
        "sub" => binary(function, op, i64::checked_sub),
        "mul" => binary(function, op, i64::checked_mul),
        "floor_div" => binary(function, op, |a, b| (b != 0).then(|| a.div_euclid(b)).filter(|_| b > 0)),
        "maximum" => binary(function, op, |a, b| Some(a.max(b))),
        "minimum" => binary(function, op, |a, b| Some(a.min(b))),
        "concat" => {
            let parts: Option<Vec<Integers>> =
                op.inputs.get("values")?.iter().map(|binding| integers(function, binding)).collect();
            let parts = parts?;
            let flat = parts.iter().all(|part| part.shape.len() == 1);
            let values: Vec<i64> = parts.into_iter().flat_map(|part| part.values).collect();
            flat.then(|| Integers { shape: vec![values.len() as u64], values })
        }
        "stack" => {
            let parts: Option<Vec<Integers>> =
                op.inputs.get("values")?.iter().map(|binding| integers(function, binding)).collect();
            let parts = parts?;
            let scalars = parts.iter().all(|part| part.shape.is_empty());
            let values: Vec<i64> = parts.into_iter().flat_map(|part| part.values).collect();
            scalars.then(|| Integers { shape: vec![values.len() as u64], values })
        }
        "gather" => {
            let (x, indices) = (x()?, argument(function, op, "indices")?);
            if x.shape.len() != 1 {
                return None;
            }
            let size = x.values.len() as i64;
            let at = |index: &i64| {
                let place = if *index < 0 { index + size } else { *index };
                x.values.get(usize::try_from(place).ok()?).copied()
            };
            let values = indices.values.iter().map(at).collect::<Option<_>>()?;
            Some(Integers { shape: indices.shape, values })
        }
        "slice_by_index" => {
            let x = x()?;
            if x.shape.len() != 1 {
                return None;
            }
            let size = x.values.len() as i64;
            let of = |parameter: &str, default: i64| {
                list(function, op, parameter).and_then(|list| list.first().copied()).unwrap_or(default)
            };
            let masked = |parameter: &str| of(parameter, 0) != 0;
            let wrap = |value: i64| (if value < 0 { value + size } else { value }).clamp(0, size);
            if of("stride", 1) != 1 {
                return None;
            }
            let begin = if masked("begin_mask") { 0 } else { wrap(list(function, op, "begin")?.first().copied()?) };
            let squeezed = masked("squeeze_mask");
            let end = match (squeezed, masked("end_mask")) {
                (true, _) => begin + 1,
                (false, true) => size,
                (false, false) => wrap(list(function, op, "end")?.first().copied()?),
            };
            let values: Vec<i64> = x.values.get(begin as usize..end.max(begin) as usize)?.to_vec();
            let shape = if squeezed { Vec::new() } else { vec![values.len() as u64] };
            Some(Integers { shape, values })
        }
        "reduce_prod" => {
            let x = x()?;
            let product = x.values.iter().try_fold(1i64, |product, value| product.checked_mul(*value))?;
            Some(Integers { shape: declared()?, values: vec![product] }).filter(|_| x.shape.len() <= 1)
        }
        _ => None,
    }
}

fn binary(function: &Function, op: &Op, combine: impl Fn(i64, i64) -> Option<i64>) -> Option<Integers> {
    let (x, y) = (argument(function, op, "x")?, argument(function, op, "y")?);
    let (shape, count) = match (x.values.len(), y.values.len()) {
        (a, b) if a == b && x.shape == y.shape => (x.shape.clone(), a),
        (a, 1) if y.shape.len() <= x.shape.len() => (x.shape.clone(), a),
        (1, b) if x.shape.len() <= y.shape.len() => (y.shape.clone(), b),
        _ => return None,
    };
    let at = |values: &[i64], i: usize| if values.len() == 1 { values[0] } else { values[i] };
    let values = (0..count).map(|i| combine(at(&x.values, i), at(&y.values, i))).collect::<Option<_>>()?;
    Some(Integers { shape, values })
}
