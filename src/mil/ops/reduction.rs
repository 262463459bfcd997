//! Reductions along axes.

use super::rules::{Inferred, axes, axis, dtype_of_name, one};
use crate::catalogue::{Arguments, Row};
use crate::types::Opset::{CoreMl5, CoreMl6, CoreMl7};
use crate::types::{DataType, Dim};

pub const ROWS: &[Row] = &[
    ("reduce_l1_norm", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_l2_norm", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_log_sum", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_log_sum_exp", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_max", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_mean", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_min", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_prod", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_sum", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_sum_square", CoreMl5, "x axes!? keep_dims!=false", reduce),
    ("reduce_argmax", CoreMl5, "x axis!=-1 keep_dims!=false", arg),
    ("reduce_argmin", CoreMl5, "x axis!=-1 keep_dims!=false", arg),
    ("reduce_argmax", CoreMl7, "x axis!=-1 keep_dims!=false output_dtype!=\"int32\"", arg),
    ("reduce_argmin", CoreMl7, "x axis!=-1 keep_dims!=false output_dtype!=\"int32\"", arg),
    ("argsort", CoreMl5, "x axis!=-1 ascending!=false", argsort),
    ("topk", CoreMl5, "x k!=1 axis!=-1 ascending!=false", topk),
    ("topk", CoreMl6, "x k!=1 axis!=-1 ascending!=false sort!=true return_indices!=true", topk),
    (
        "topk",
        CoreMl7,
        "x k!=1 axis!=-1 ascending!=false sort!=true return_indices!=true output_indices_dtype!=\"int32\"",
        topk,
    ),
];

fn reduced(shape: &[Dim], gone: &[usize], keep: bool) -> Vec<Dim> {
    let dims = shape.iter().enumerate();
    if keep {
        dims.map(|(i, d)| if gone.contains(&i) { Dim::Fixed(1) } else { d.clone() }).collect()
    } else {
        dims.filter(|(i, _)| !gone.contains(i)).map(|(_, d)| d.clone()).collect()
    }
}

fn reduce(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let gone = axes(a, "axes", x.rank())?;
    one(x.dtype, reduced(&x.shape, &gone, a.flag("keep_dims")))
}

fn index_type(a: &Arguments<'_>, parameter: &str) -> Result<DataType, String> {
    match a.text(parameter) {
        None => Ok(DataType::Int32),
        Some(name) => dtype_of_name(name).ok_or_else(|| format!("`{parameter}` is \"{name}\", which is no type")),
    }
}

fn arg(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let gone = axis(a.integer("axis")?, x.rank())?;
    one(index_type(a, "output_dtype")?, reduced(&x.shape, &[gone], a.flag("keep_dims")))
}

fn argsort(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    axis(a.integer("axis")?, x.rank())?;
    one(DataType::Int32, x.shape.clone())
}

fn topk(a: &Arguments<'_>) -> Inferred {
    let x = a.tensor("x")?;
    let along = axis(a.integer("axis")?, x.rank())?;
    let mut values = x.clone();
    values.shape[along] = match a.optional_integers("k").and_then(|k| k.first().copied()) {
        Some(-1) => x.shape[along].clone(),
        Some(k) => Dim::Fixed(u64::try_from(k).map_err(|_| format!("`k` is {k}"))?),
        None => Dim::Unknown,
    };
    let mut indices = values.clone();
    indices.dtype = index_type(a, "output_indices_dtype")?;
    let with_indices = a.constant("return_indices").is_none() || a.flag("return_indices");
    Ok(if with_indices { vec![values.into(), indices.into()] } else { vec![values.into()] })
}
