//! Products: `matmul`, `linear`, `einsum`, attention.

use std::collections::HashMap;

use super::rules::{Inferred, broadcast, one, shape_text};
use crate::catalogue::{Arguments, Row};
use crate::types::Dim;
use crate::types::Opset::{CoreMl5, CoreMl7, CoreMl8};

pub const ROWS: &[Row] = &[
    ("matmul", CoreMl5, "x y transpose_x!=false transpose_y!=false", matmul),
    ("linear", CoreMl5, "x weight! bias!?", linear),
    ("einsum", CoreMl5, "values* equation!", einsum),
    ("scaled_dot_product_attention", CoreMl8, "query key value attn_mask?", attention),
];

fn matmul(a: &Arguments<'_>) -> Inferred {
    let (x, y) = (a.tensor("x")?, a.tensor("y")?);
    // from iOS17 on, a constant may have another type
    let dtype = match (a.constant("x").is_some(), a.constant("y").is_some()) {
        (true, false) if a.function.opset >= CoreMl7 => y.dtype,
        (false, true) if a.function.opset >= CoreMl7 => x.dtype,
        _ if x.dtype == y.dtype => x.dtype,
        _ => return Err(format!("x is {} and y is {}; both must be the same type", x.dtype, y.dtype)),
    };
    if x.rank() == 0 || y.rank() == 0 {
        return Err("a scalar can't be multiplied as a matrix".into());
    }
    // a vector is a row on the left and a column on the right
    let row = |shape: &[Dim], first: bool| match shape {
        [only] if first => vec![Dim::Fixed(1), only.clone()],
        [only] => vec![only.clone(), Dim::Fixed(1)],
        _ => shape.to_vec(),
    };
    let (mut left, mut right) = (row(&x.shape, true), row(&y.shape, false));
    let (l, r) = (left.len(), right.len());
    if a.flag("transpose_x") {
        left.swap(l - 2, l - 1);
    }
    if a.flag("transpose_y") {
        right.swap(r - 2, r - 1);
    }
    if !left[l - 1].is_compatible(&right[r - 2]) {
        return Err(format!("x has {} columns and y {} rows", left[l - 1], right[r - 2]));
    }
    let mut shape = broadcast(&left[..l - 2], &right[..r - 2])?;
    if x.rank() > 1 {
        shape.push(left[l - 2].clone());
    }
    if y.rank() > 1 {
        shape.push(right[r - 1].clone());
    }
    one(dtype, shape)
}

fn linear(a: &Arguments<'_>) -> Inferred {
    let (x, weight) = (a.tensor("x")?, a.tensor("weight")?);
    let ([.., columns], [rows, inner]) = (x.shape.as_slice(), weight.shape.as_slice()) else {
        return Err(format!(
            "x has rank {} and weight rank {}; at least 1 and exactly 2 are needed",
            x.rank(),
            weight.rank()
        ));
    };
    if !columns.is_compatible(inner) {
        return Err(format!("x has {columns} columns and weight {inner}"));
    }
    if let Some(bias) = a.optional_tensor("bias")?
        && !(bias.rank() == 1 && bias.shape[0].is_compatible(rows))
    {
        return Err(format!("bias has shape {}; [{rows}] is needed", shape_text(&bias.shape)));
    }
    let mut shape = x.shape.clone();
    shape[x.rank() - 1] = rows.clone();
    one(x.dtype, shape)
}

fn einsum(a: &Arguments<'_>) -> Inferred {
    let values = a.tensors("values")?;
    let equation = a.text("equation").ok_or("`equation` must be a constant string")?.replace(' ', "");
    let (inputs, output) = equation.split_once("->").ok_or_else(|| format!("`{equation}` has no `->`"))?;
    let inputs: Vec<&str> = inputs.split(',').collect();
    if inputs.len() != values.len() {
        return Err(format!("`{equation}` names {} tensors, {} are given", inputs.len(), values.len()));
    }
    let mut sizes: HashMap<char, Dim> = HashMap::new();
    for (letters, value) in inputs.iter().zip(&values) {
        if letters.chars().count() != value.rank() {
            return Err(format!("`{letters}` of `{equation}` is given a tensor of rank {}", value.rank()));
        }
        for (letter, dim) in letters.chars().zip(&value.shape) {
            match sizes.get(&letter) {
                Some(Dim::Fixed(1)) | None => drop(sizes.insert(letter, dim.clone())),
                Some(known) if known.is_compatible(dim) || *dim == Dim::Fixed(1) => {}
                Some(known) => return Err(format!("`{letter}` of `{equation}` is both {known} and {dim}")),
            }
        }
    }
    let shape =
        output.chars().map(|l| sizes.get(&l).cloned().ok_or_else(|| format!("`{l}` of `{equation}` is unknown")));
    one(values[0].dtype, shape.collect::<Result<_, _>>()?)
}

fn attention(a: &Arguments<'_>) -> Inferred {
    let (query, key, value) = (a.tensor("query")?, a.tensor("key")?, a.tensor("value")?);
    let rank = query.rank();
    if rank < 3 || key.rank() != rank || value.rank() != rank {
        let ranks = [rank, key.rank(), value.rank()];
        return Err(format!("query, key and value have ranks {ranks:?}; they must be equal and at least 3"));
    }
    if !query.shape[rank - 1].is_compatible(&key.shape[rank - 1])
        || !key.shape[rank - 2].is_compatible(&value.shape[rank - 2])
    {
        let shapes = [&query.shape, &key.shape, &value.shape].map(|s| shape_text(s));
        return Err(format!("query, key and value have shapes {}", shapes.join(", ")));
    }
    let mut shape = query.shape.clone();
    shape[rank - 1] = value.shape[rank - 1].clone();
    one(query.dtype, shape)
}
