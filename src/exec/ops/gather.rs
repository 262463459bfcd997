//! Gather and scatter ops.

use std::sync::Arc;

use super::{Resolved, Row, make_like, moving};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::tensor::{Dims, Tensor, TensorData, axis_index, strides};
use crate::value::Value;

/// Rows of the table.
pub(super) const ROWS: &[Row] = moving! {
    "gather" => |op| Gather::resolve(op, Gathering::Axis),
    "gather_along_axis" => |op| Gather::resolve(op, Gathering::AlongAxis),
    "gather_nd" => |op| Gather::resolve(op, Gathering::Blocks),
};

/// Indices into an axis. Negative ones count from the end until iOS17, whose ops have `validate_indices` and treat them
/// as out of bounds.
struct Indices {
    wrap: bool,
}

impl Indices {
    fn resolve(op: &Resolver<'_>) -> Self {
        Indices { wrap: !op.has("validate_indices") }
    }

    fn place(&self, index: i64, size: usize) -> Result<usize, String> {
        let from_front = if index < 0 && self.wrap { index + size as i64 } else { index };
        let place = usize::try_from(from_front).ok().filter(|place| *place < size);
        place.ok_or_else(|| format!("index {index} is outside an axis of size {size}"))
    }

    fn places(&self, indices: &[i64], size: usize) -> Result<Dims, String> {
        indices.iter().map(|index| self.place(*index, size)).collect()
    }
}

/// Meaning of the indices.
enum Gathering {
    /// `out[batch, outer, i, inner] = x[batch, outer, indices[batch, i], inner]`.
    Axis,
    /// One element per index along an axis.
    AlongAxis,
    /// Blocks at positions along several axes.
    Blocks,
}

/// Elements of `x` at the indices.
struct Gather {
    x: Input,
    indices: Input,
    bounds: Indices,
    axis: i64,
    batch: usize,
    gathering: Gathering,
}

impl Gather {
    fn resolve(op: &mut Resolver<'_>, gathering: Gathering) -> Resolved {
        // forms without one of them count as 0
        let integer = |name: &str| if op.has(name) { op.integer(name) } else { Ok(0) };
        let (axis, batch) = (integer("axis")?, integer("batch_dims")?);
        let batch = usize::try_from(batch).unwrap_or(usize::MAX / 2);
        let bounds = Indices::resolve(op);
        Ok(Arc::new(Gather { x: op.input("x")?, indices: op.input("indices")?, bounds, axis, batch, gathering }))
    }
}

impl Kernel for Gather {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        match self.gathering {
            Gathering::Axis => gather(self, call, pool),
            Gathering::AlongAxis => gather_along_axis(self, call, pool),
            Gathering::Blocks => gather_nd(self, call, pool),
        }
    }
}

fn gather(op: &Gather, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
    let indices = call.numbers(op.indices)?;
    let index_shape = &call.tensor(op.indices)?.shape;
    let shape = match call.value(op.x)? {
        Value::Weight(weight) => weight.shape(),
        _ => call.tensor(op.x)?.shape.as_slice(),
    };
    let (axis, batch) = (op.axis, op.batch);
    let axis = axis_index(axis, shape.len())?;
    if batch > axis || batch > index_shape.len() || shape[..batch] != index_shape[..batch] {
        return Err(format!(
            "`x` {shape:?} and `indices` {index_shape:?} have no {batch} axes in common before {axis}"
        ));
    }
    let places = op.bounds.places(&indices, shape[axis])?;
    let out_shape: Dims =
        [&shape[..axis], &index_shape[batch..], &shape[axis + 1..]].into_iter().flatten().copied().collect();
    if let Value::Weight(weight) = call.value(op.x)?
        && axis == 0
    {
        // embedding: only the selected rows are expanded
        let columns = weight.columns();
        let result = pool.make(&out_shape, |out| {
            out.resize(places.len() * columns, 0.0);
            out.chunks_exact_mut(columns.max(1)).zip(places).for_each(|(out, place)| weight.expand_row(place, out));
        });
        return call.push(result);
    }
    let x = call.tensor(op.x)?;
    let batches: usize = shape[..batch].iter().product();
    let outer: usize = shape[batch..axis].iter().product();
    let inner: usize = shape[axis + 1..].iter().product();
    let each = places.len() / batches.max(1);
    let (size, places) = (shape[axis], &places);
    fn pick<T: Copy>(
        v: &[T],
        places: &[usize],
        (batches, outer, each): (usize, usize, usize),
        size: usize,
        inner: usize,
        out: &mut Vec<T>,
    ) {
        for b in 0..batches {
            for o in 0..outer {
                for place in &places[b * each..][..each] {
                    out.extend_from_slice(&v[((b * outer + o) * size + place) * inner..][..inner]);
                }
            }
        }
    }
    let result =
        make_like!(pool, &out_shape, &x.data, (v, out) => pick(v, places, (batches, outer, each), size, inner, out));
    call.push(result)
}

/// Element of `x` for each element of `indices`, which has the shape of `x` except along `axis`.
fn along_axis(
    bounds: &Indices,
    indices: &[i64],
    index_shape: &[usize],
    shape: &[usize],
    axis: usize,
) -> Result<Dims, String> {
    let fits = index_shape.len() == shape.len() && (0..shape.len()).all(|i| i == axis || index_shape[i] == shape[i]);
    if !fits {
        return Err(format!("`indices` of shape {index_shape:?} don't run along axis {axis} of {shape:?}"));
    }
    let inner: usize = shape[axis + 1..].iter().product();
    let count = index_shape[axis];
    let place = |(i, index): (usize, &i64)| {
        let (outer, inside) = (i / (count * inner), i % inner);
        Ok((outer * shape[axis] + bounds.place(*index, shape[axis])?) * inner + inside)
    };
    indices.iter().enumerate().map(place).collect()
}

fn gather_along_axis(op: &Gather, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
    let indices = call.numbers(op.indices)?;
    let index_shape = &call.tensor(op.indices)?.shape;
    let x = call.tensor(op.x)?;
    let axis = axis_index(op.axis, x.rank())?;
    let places = along_axis(&op.bounds, &indices, index_shape, &x.shape, axis)?;
    let result = make_like!(pool, index_shape, &x.data, (v, out) => out.extend(places.iter().map(|place| v[*place])));
    call.push(result)
}

/// Start of each block, and the length of a block. The last axis of `indices` holds positions along as many axes of
/// `shape` after the first `batch`.
fn blocks(
    bounds: &Indices,
    indices: &[i64],
    index_shape: &[usize],
    shape: &[usize],
    batch: usize,
) -> Result<(Dims, usize), String> {
    let depth = index_shape.last().copied().unwrap_or(0);
    if batch + depth > shape.len() || index_shape.len() <= batch || index_shape[..batch] != shape[..batch] {
        return Err(format!("`indices` of shape {index_shape:?} don't point into {shape:?} with {batch} batch axes"));
    }
    let steps = strides(shape);
    let block: usize = shape[batch + depth..].iter().product();
    let batches: usize = shape[..batch].iter().product();
    let count: usize = index_shape[..index_shape.len() - 1].iter().product();
    let batch_step: usize = shape[batch..].iter().product();
    let starts = (0..count).map(|i| {
        let mut start = i / (count / batches.max(1)).max(1) * batch_step;
        for d in 0..depth {
            start += bounds.place(indices[i * depth + d], shape[batch + d])? * steps[batch + d];
        }
        Ok(start)
    });
    Ok((starts.collect::<Result<_, String>>()?, block))
}

fn gather_nd(op: &Gather, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
    let indices = call.numbers(op.indices)?;
    let index_shape = &call.tensor(op.indices)?.shape;
    let x = call.tensor(op.x)?;
    let (starts, block) = blocks(&op.bounds, &indices, index_shape, &x.shape, op.batch)?;
    let (depth, lead) = index_shape.split_last().ok_or("`indices` is a scalar")?;
    let shape: Dims = [lead, &x.shape[op.batch + depth..]].into_iter().flatten().copied().collect();
    let result = make_like!(pool, &shape, &x.data, (v, out) => {
        starts.iter().for_each(|start| out.extend_from_slice(&v[*start..][..block]));
    });
    call.push(result)
}

/// Rows of the table for ops that combine updates with the data.
pub(super) const SCATTER: &[Row] = super::computing! {
    "scatter" => |op| Scatter::resolve(op, Gathering::Axis),
    "scatter_along_axis" => |op| Scatter::resolve(op, Gathering::AlongAxis),
    "scatter_nd" => |op| Scatter::resolve(op, Gathering::Blocks),
};

/// Combination of an update with the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Update,
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
}

/// Combines updates with the elements at the indices.
struct Scatter {
    data: Input,
    indices: Input,
    updates: Input,
    bounds: Indices,
    axis: i64,
    mode: Mode,
    gathering: Gathering,
}

impl Scatter {
    fn resolve(op: &mut Resolver<'_>, gathering: Gathering) -> Resolved {
        let mode = match op.text("mode")? {
            "update" => Mode::Update,
            "add" => Mode::Add,
            "sub" => Mode::Sub,
            "mul" => Mode::Mul,
            "div" => Mode::Div,
            "max" => Mode::Max,
            "min" => Mode::Min,
            mode => return Err(format!("mode `{mode}` is unknown")),
        };
        let (data, indices, updates) = (op.input("data")?, op.input("indices")?, op.input("updates")?);
        // `scatter_nd` has no axis
        let axis = if op.has("axis") { op.integer("axis")? } else { 0 };
        let bounds = Indices::resolve(op);
        Ok(Arc::new(Scatter { data, indices, updates, bounds, axis, mode, gathering }))
    }
}

impl Kernel for Scatter {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let indices = call.numbers(self.indices)?;
        let updates = call.take(self.updates)?;
        let mut data = call.take(self.data)?;
        let index_shape = &call.tensor(self.indices)?.shape;
        let (starts, block) = match self.gathering {
            Gathering::Axis => {
                let axis = axis_index(self.axis, data.rank())?;
                let outer: usize = data.shape[..axis].iter().product();
                let inner: usize = data.shape[axis + 1..].iter().product();
                let size = data.shape[axis];
                let places = self.bounds.places(&indices, size)?;
                let starts = (0..outer).flat_map(|o| places.iter().map(move |p| (o * size + p) * inner)).collect();
                (starts, inner)
            }
            Gathering::AlongAxis => {
                let axis = axis_index(self.axis, data.rank())?;
                (along_axis(&self.bounds, &indices, index_shape, &data.shape, axis)?, 1)
            }
            Gathering::Blocks => blocks(&self.bounds, &indices, index_shape, &data.shape, 0)?,
        };
        combine(pool.make_mut(&mut data), &updates, &starts, block, self.mode)?;
        pool.recycle(updates);
        call.push(data)
    }
}

/// Combines blocks of `updates`, in order, into the blocks of `data` at `starts`.
fn combine(data: &mut Tensor, updates: &Tensor, starts: &[usize], block: usize, mode: Mode) -> Result<(), String> {
    if updates.data.len() != starts.len() * block {
        let (found, expected) = (updates.data.len(), starts.len() * block);
        return Err(format!("`updates` has {found} elements, the indices ask for {expected}"));
    }
    fn apply<T: Copy>(data: &mut [T], updates: &[T], starts: &[usize], block: usize, function: fn(T, T) -> T) {
        for (start, updates) in starts.iter().zip(updates.chunks_exact(block.max(1))) {
            data[*start..][..block].iter_mut().zip(updates).for_each(|(old, new)| *old = function(*old, *new));
        }
    }
    match (&mut data.data, &updates.data) {
        (TensorData::F32(data), TensorData::F32(updates)) => {
            let function: fn(f32, f32) -> f32 = match mode {
                Mode::Update => |_, new| new,
                Mode::Add => |old, new| old + new,
                Mode::Sub => |old, new| old - new,
                Mode::Mul => |old, new| old * new,
                Mode::Div => |old, new| old / new,
                Mode::Max => f32::max,
                Mode::Min => f32::min,
            };
            apply(data, updates, starts, block, function);
        }
        (TensorData::I32(data), TensorData::I32(updates)) => {
            let function: fn(i32, i32) -> i32 = match mode {
                Mode::Update => |_, new| new,
                Mode::Add => i32::wrapping_add,
                Mode::Sub => i32::wrapping_sub,
                Mode::Mul => i32::wrapping_mul,
                Mode::Div => |old, new| old.checked_div(new).unwrap_or(0),
                Mode::Max => i32::max,
                Mode::Min => i32::min,
            };
            apply(data, updates, starts, block, function);
        }
        (TensorData::Bool(data), TensorData::Bool(updates)) if mode == Mode::Update => {
            apply(data, updates, starts, block, |_, new| new);
        }
        (data, updates) => return Err(format!("updates of {} for {} by {mode:?}", updates.kind(), data.kind())),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, b, counted, f, i, run, s, try_run};
    use super::*;
    use crate::weight::LoadedWeight;
    use anec_kernels::weight::{Elements, Scales};

    #[test]
    fn rows_and_columns_are_gathered() {
        let rows = run("gather", vec![("x", counted(&[3, 2])), ("indices", i(&[2], &[2, -3]))]);
        assert_close(&rows, &[2, 2], &[4.0, 5.0, 0.0, 1.0]);
        let columns =
            run("gather", vec![("x", counted(&[2, 3])), ("indices", i(&[1, 2], &[2, 0])), ("axis", i(&[], &[1]))]);
        assert_close(&columns, &[2, 1, 2], &[2.0, 0.0, 5.0, 3.0]);
        let batched = run(
            "gather",
            vec![
                ("x", counted(&[2, 3])),
                ("indices", i(&[2, 1], &[2, 0])),
                ("axis", i(&[], &[1])),
                ("batch_dims", i(&[], &[1])),
            ],
        );
        assert_close(&batched, &[2, 1], &[2.0, 3.0]);
        let strict = vec![("x", counted(&[3])), ("indices", i(&[1], &[-1])), ("validate_indices", b(&[], &[false]))];
        assert!(try_run("gather", strict).unwrap_err().contains("-1"));
    }

    #[test]
    fn an_embedding_is_expanded_row_by_row() {
        let weight = LoadedWeight::scaled(
            vec![3, 2],
            Arc::new(Elements::Int8(vec![1, 2, 3, 4, 5, 6].into())),
            Scales { values: vec![1.0, 10.0, 100.0], blocks: 1 },
        );
        let rows = run("gather", vec![("x", Value::Weight(Arc::new(weight))), ("indices", i(&[1, 2], &[1, 2]))]);
        assert_close(&rows, &[1, 2, 2], &[30.0, 40.0, 500.0, 600.0]);
    }

    #[test]
    fn elements_are_gathered_by_their_own_index() {
        let x = || counted(&[2, 2]);
        let along =
            run("gather_along_axis", vec![("x", x()), ("indices", i(&[1, 2], &[1, 0])), ("axis", i(&[], &[0]))]);
        assert_close(&along, &[1, 2], &[2.0, 1.0]);
        let points = run("gather_nd", vec![("x", x()), ("indices", i(&[2, 2], &[0, 1, 1, 0]))]);
        assert_close(&points, &[2], &[1.0, 2.0]);
        let rows = run("gather_nd", vec![("x", x()), ("indices", i(&[1, 1], &[1]))]);
        assert_close(&rows, &[1, 2], &[2.0, 3.0]);
        let batched =
            run("gather_nd", vec![("x", x()), ("indices", i(&[2, 1], &[1, 0])), ("batch_dims", i(&[], &[1]))]);
        assert_close(&batched, &[2], &[1.0, 2.0]);
    }

    #[test]
    fn updates_are_scattered_by_mode() {
        let data = || f(&[3, 1], &[1.0, 2.0, 3.0]);
        let arguments = |operator, indices: Value, mode| {
            run(
                operator,
                vec![("data", data()), ("indices", indices), ("updates", f(&[2, 1], &[10.0, 20.0])), ("mode", s(mode))],
            )
        };
        assert_close(&arguments("scatter", i(&[2], &[2, 2]), "add"), &[3, 1], &[1.0, 2.0, 33.0]);
        assert_close(&arguments("scatter", i(&[2], &[0, 1]), "update"), &[3, 1], &[10.0, 20.0, 3.0]);
        assert_close(&arguments("scatter_nd", i(&[2, 1], &[0, 2]), "mul"), &[3, 1], &[10.0, 2.0, 60.0]);
        assert_close(&arguments("scatter_along_axis", i(&[2, 1], &[1, 0]), "min"), &[3, 1], &[1.0, 2.0, 3.0]);
        assert_close(&arguments("scatter_along_axis", i(&[2, 1], &[1, 0]), "sub"), &[3, 1], &[-19.0, -8.0, 3.0]);
    }
}
