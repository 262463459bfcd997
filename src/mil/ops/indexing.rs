//! Gathers and scatters.

use super::rules::{Inferred, axis, one};
use crate::catalogue::{Arguments, Row};
use crate::types::Dim;
use crate::types::Opset::{CoreMl5, CoreMl6, CoreMl7};

pub const ROWS: &[Row] = &[
    ("gather", CoreMl5, "x indices axis!=0", gather),
    ("gather", CoreMl6, "x indices axis!=0 batch_dims!=0", gather),
    ("gather", CoreMl7, "x indices axis!=0 batch_dims!=0 validate_indices!=false", gather),
    ("gather_along_axis", CoreMl5, "x indices axis!=0", gather_along_axis),
    ("gather_along_axis", CoreMl7, "x indices axis!=0 validate_indices!=false", gather_along_axis),
    ("gather_nd", CoreMl5, "x indices", gather_nd),
    ("gather_nd", CoreMl6, "x indices batch_dims!=0", gather_nd),
    ("gather_nd", CoreMl7, "x indices batch_dims!=0 validate_indices!=false", gather_nd),
    ("scatter", CoreMl5, "data indices updates axis!=0 mode!=\"add\"", data),
    ("scatter", CoreMl7, "data indices updates axis!=0 mode!=\"add\" validate_indices!=false", data),
    ("scatter_along_axis", CoreMl5, "data indices updates axis!=0 mode!=\"add\"", data),
    ("scatter_along_axis", CoreMl7, "data indices updates axis!=0 mode!=\"add\" validate_indices!=false", data),
    ("scatter_nd", CoreMl5, "data indices updates mode!=\"add\"", data),
    ("scatter_nd", CoreMl7, "data indices updates mode!=\"add\" validate_indices!=false", data),
    ("non_zero", CoreMl5, "x", non_zero),
];

fn batch_dims(a: &Arguments<'_>) -> usize {
    a.optional_integers("batch_dims").and_then(|v| v.first().copied()).map_or(0, |v| v.max(0) as usize)
}

fn gather(a: &Arguments<'_>) -> Inferred {
    let (x, indices) = (a.tensor("x")?, a.tensor("indices")?);
    let along = axis(a.integer("axis")?, x.rank())?;
    let batch = batch_dims(a);
    if batch > indices.rank() || batch > along {
        return Err(format!("`batch_dims` {batch} is more than the indices' rank or the axis"));
    }
    let mut dims = x.shape[..along].to_vec();
    dims.extend_from_slice(&indices.shape[batch..]);
    dims.extend_from_slice(&x.shape[along + 1..]);
    one(x.dtype, dims)
}

fn gather_along_axis(a: &Arguments<'_>) -> Inferred {
    let (x, indices) = (a.tensor("x")?, a.tensor("indices")?);
    axis(a.integer("axis")?, x.rank())?;
    if x.rank() != indices.rank() {
        return Err(format!("x has rank {} and indices {}; both must be equal", x.rank(), indices.rank()));
    }
    one(x.dtype, indices.shape.clone())
}

fn gather_nd(a: &Arguments<'_>) -> Inferred {
    let (x, indices) = (a.tensor("x")?, a.tensor("indices")?);
    let batch = batch_dims(a);
    let depth = indices.shape.last().and_then(Dim::fixed).ok_or("the last dimension of `indices` must be fixed")?;
    let taken = batch + depth as usize;
    if taken > x.rank() {
        return Err(format!("`indices` names {taken} dimensions of rank {}", x.rank()));
    }
    let mut dims = indices.shape[..indices.rank() - 1].to_vec();
    dims.extend_from_slice(&x.shape[taken..]);
    one(x.dtype, dims)
}

fn data(a: &Arguments<'_>) -> Inferred {
    Ok(vec![a.tensor("data")?.clone().into()])
}

fn non_zero(a: &Arguments<'_>) -> Inferred {
    let rank = a.tensor("x")?.rank() as u64;
    one(crate::types::DataType::Int32, vec![Dim::Unknown, Dim::Fixed(rank)])
}
