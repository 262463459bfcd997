//! Gathers and scatters.

use anec_mil::Op;

use super::context::{Lowering, Tensor};
use super::{Lowered, Row};
use crate::aicode::{AiAttribute, ElementType};

pub(super) const ROWS: &[Row] = &[
    ("gather", gather),
    ("gather_along_axis", gather_along_axis),
    ("gather_nd", gather_nd),
    ("reverse_sequence", reverse_sequence),
    ("scatter", scatter),
    ("scatter_along_axis", scatter_along_axis),
    ("scatter_nd", scatter_nd),
];

/// Indices as si32; negative ones count from the end.
fn places(l: &mut Lowering<'_>, indices: &Tensor, size: u64) -> Result<Tensor, String> {
    let indices = l.cast(indices, ElementType::Si32);
    let shifted = l.with_number("primitive.add_v1", &indices, size as f64)?;
    let zero = l.splat(0.0, &indices.shape, ElementType::Si32)?;
    let negative = l.greater(&zero, &indices)?;
    Ok(l.choose(&negative, &shifted, &indices))
}

/// Rows of a matrix by their numbers.
fn rows(l: &mut Lowering<'_>, matrix: &Tensor, numbers: &Tensor) -> Tensor {
    let count = numbers.shape.iter().product();
    let numbers = l.reshape(numbers, &[count, 1]);
    l.op("primitive.gather_nd_v1", &[matrix, &numbers], &[count, matrix.shape[1]], matrix.element)
}

fn gather(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, indices) = (l.tensor(op, "x")?, l.tensor(op, "indices")?);
    let axis = x.axis(l.integer_or(op, "axis", 0)?)?;
    let batch = l.integer_or(op, "batch_dims", 0)?.max(0) as usize;
    if batch > axis || batch > indices.rank() {
        return Err(format!("`batch_dims` {batch}"));
    }
    let product = |sizes: &[u64]| sizes.iter().product::<u64>();
    let (batches, before) = (product(&x.shape[..batch]), product(&x.shape[batch..axis]));
    let (size, behind) = (x.shape[axis], product(&x.shape[axis + 1..]));
    let count = product(&indices.shape[batch..]);
    let open = l.reshape(&x, &[batches, before, size, behind]);
    let open = l.transpose(&open, &[0, 2, 1, 3]);
    let matrix = l.reshape(&open, &[batches * size, before * behind]);
    let mut numbers = places(l, &indices, size)?;
    if batches > 1 {
        numbers = l.reshape(&numbers, &[batches, count]);
        let first: Vec<f64> = (0..batches).map(|batch| (batch * size) as f64).collect();
        let first = l.floats(&first, &[batches, 1], ElementType::Si32)?;
        numbers = l.binary("primitive.add_v1", &numbers, &first)?;
    }
    let taken = rows(l, &matrix, &numbers);
    let taken = l.reshape(&taken, &[batches, count, before, behind]);
    let taken = l.transpose(&taken, &[0, 2, 1, 3]);
    let shape = [&x.shape[..axis], &indices.shape[batch..], &x.shape[axis + 1..]].concat();
    Ok(vec![l.reshape(&taken, &shape)])
}

fn gather_along_axis(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, indices) = (l.tensor(op, "x")?, l.tensor(op, "indices")?);
    let axis = x.axis(l.integer_or(op, "axis", 0)?)?;
    let numbers = places(l, &indices, x.shape[axis])?;
    let along = l.signed_scalar(axis as i64);
    Ok(vec![l.op("primitive.gather_along_axis_v1", &[&x, &numbers, &along], &indices.shape, x.element)])
}

/// Reverses the first elements of an axis, as many as `lengths` has for each batch.
fn reverse_sequence(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, lengths) = (l.tensor(op, "x")?, l.tensor(op, "lengths")?);
    let along = x.axis(l.integer_or(op, "seq_axis", 0)?)?;
    let batch = x.axis(l.integer_or(op, "batch_axis", 0)?)?;
    let line = |axis: usize| {
        let mut shape = vec![1; x.rank()];
        shape[axis] = x.shape[axis];
        shape
    };
    let lengths = l.cast(&lengths, ElementType::Si32);
    let lengths = l.reshape(&lengths, &line(batch));
    let lengths = l.broadcast(&lengths, &x.shape)?;
    let numbers: Vec<f64> = (0..x.shape[along]).map(|place| place as f64).collect();
    let numbers = l.floats(&numbers, &line(along), ElementType::Si32)?;
    let numbers = l.broadcast(&numbers, &x.shape)?;
    let last = l.with_number("primitive.sub_v1", &lengths, 1.0)?;
    let mirrored = l.binary("primitive.sub_v1", &last, &numbers)?;
    let within = l.greater(&lengths, &numbers)?;
    let places = l.choose(&within, &mirrored, &numbers);
    let axis = l.signed_scalar(along as i64);
    Ok(vec![l.op("primitive.gather_along_axis_v1", &[&x, &places, &axis], &x.shape, x.element)])
}

/// Number of each place along an axis, in every place of a shape with a last axis of size 1.
fn coordinates(l: &mut Lowering<'_>, shape: &[u64], axis: usize) -> Result<Tensor, String> {
    let mut line = vec![1; shape.len()];
    line[axis] = shape[axis];
    let numbers: Vec<f64> = (0..shape[axis]).map(|place| place as f64).collect();
    let numbers = l.floats(&numbers, &line, ElementType::Si32)?;
    let wide = l.broadcast(&numbers, shape)?;
    Ok(l.reshape(&wide, &[shape, &[1]].concat()))
}

fn gather_nd(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, indices) = (l.tensor(op, "x")?, l.tensor(op, "indices")?);
    let batch = l.integer_or(op, "batch_dims", 0)?.max(0) as usize;
    let depth = *indices.shape.last().ok_or("indices of rank 0")? as usize;
    let lead = indices.shape[..indices.rank() - 1].to_vec();
    let mut numbers = l.cast(&indices, ElementType::Si32);
    if batch > 0 {
        let mut parts = Vec::new();
        for axis in 0..batch {
            parts.push(coordinates(l, &lead, axis)?);
        }
        parts.push(numbers);
        numbers = l.concat(&parts, lead.len());
    }
    let shape = [&lead[..], &x.shape[batch + depth..]].concat();
    Ok(vec![l.op("primitive.gather_nd_v1", &[&x, &numbers], &shape, x.element)])
}

/// Modes of a scatter along an axis, by their code.
const SCATTER_MODES: [&str; 7] = ["update", "add", "sub", "mul", "div", "max", "min"];

/// Scatters slices; `indices` name their places in the leading axes. The runtime takes a scatter along an axis with
/// several modes, and one of slices with none, so the named axes become one.
fn scattered(
    l: &mut Lowering<'_>,
    op: &Op,
    data: &Tensor,
    indices: &Tensor,
    updates: &Tensor,
) -> Result<Tensor, String> {
    let mode = l.text(op, "mode", "add");
    let mode = SCATTER_MODES.iter().position(|known| *known == mode).ok_or(format!("mode `{mode}`"))?;
    let product = |sizes: &[u64]| sizes.iter().product::<u64>();
    let depth = *indices.shape.last().ok_or("indices of rank 0")? as usize;
    let (count, rows) = (product(&indices.shape[..indices.rank() - 1]), product(&data.shape[..depth]));
    let columns = product(&data.shape[depth..]);
    let numbers = l.reshape(indices, &[count, depth as u64]);
    let strides: Vec<f64> = (0..depth).map(|axis| product(&data.shape[axis + 1..depth]) as f64).collect();
    let strides = l.floats(&strides, &[1, depth as u64], ElementType::Si32)?;
    let parts = l.binary("primitive.mul_v1", &numbers, &strides)?;
    let mut number = l.slice_axis(&parts, 1, 0, 1);
    for axis in 1..depth as u64 {
        let part = l.slice_axis(&parts, 1, axis, axis + 1);
        number = l.binary("primitive.add_v1", &number, &part)?;
    }
    let number = l.broadcast(&number, &[count, columns])?;
    let (matrix, updates) = (l.reshape(data, &[rows, columns]), l.reshape(updates, &[count, columns]));
    let axis = l.signed_scalar(0);
    let kind = AiAttribute::ScatterMode(mode as u64);
    let operands = [&matrix, &number, &updates, &axis];
    let result = l.op_of_kind("primitive.scatter_along_axis_v1", kind, &operands, &[rows, columns], data.element);
    Ok(l.reshape(&result, &data.shape))
}

fn scatter_nd(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (data, indices, updates) = (l.tensor(op, "data")?, l.tensor(op, "indices")?, l.tensor(op, "updates")?);
    let indices = l.cast(&indices, ElementType::Si32);
    Ok(vec![scattered(l, op, &data, &indices, &updates)?])
}

fn scatter(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (data, indices, updates) = (l.tensor(op, "data")?, l.tensor(op, "indices")?, l.tensor(op, "updates")?);
    let axis = data.axis(l.integer_or(op, "axis", 0)?)?;
    // the axis first, and those of the indices first in the updates
    let to_front: Vec<usize> = std::iter::once(axis).chain((0..data.rank()).filter(|i| *i != axis)).collect();
    let mut back = vec![0; data.rank()];
    to_front.iter().enumerate().for_each(|(place, axis)| back[*axis] = place);
    let span = axis..axis + indices.rank();
    let updates_front: Vec<usize> = span.clone().chain((0..updates.rank()).filter(|i| !span.contains(i))).collect();
    let (moved, updates) = (l.transpose(&data, &to_front), l.transpose(&updates, &updates_front));
    let numbers = places(l, &indices, data.shape[axis])?;
    let numbers = l.reshape(&numbers, &[&indices.shape[..], &[1]].concat());
    let result = scattered(l, op, &moved, &numbers, &updates)?;
    Ok(vec![l.transpose(&result, &back)])
}

fn scatter_along_axis(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (data, indices, updates) = (l.tensor(op, "data")?, l.tensor(op, "indices")?, l.tensor(op, "updates")?);
    let along = data.axis(l.integer_or(op, "axis", 0)?)?;
    let numbers = places(l, &indices, data.shape[along])?;
    let mut parts = Vec::new();
    for axis in 0..data.rank() {
        parts.push(match axis == along {
            true => l.reshape(&numbers, &[&indices.shape[..], &[1]].concat()),
            false => coordinates(l, &indices.shape, axis)?,
        });
    }
    let numbers = l.concat(&parts, indices.rank());
    Ok(vec![scattered(l, op, &data, &numbers, &updates)?])
}
