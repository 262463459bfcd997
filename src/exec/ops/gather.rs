//! Ops that read and write where indices say.

use std::sync::Arc;

use super::{Call, Results, Row, Value, map_data, moving, one};
use crate::tensor::{Tensor, TensorData, axis_index, strides};

/// The rows of this group.
pub(super) const ROWS: &[Row] = moving! {
    "gather" => gather,
    "gather_along_axis" => gather_along_axis,
    "gather_nd" => gather_nd,
};

/// Indices into an axis. They count from the end if negative, until iOS17 (whose ops have `validate_indices`) put
/// those out of bounds.
struct Indices {
    wrap: bool,
}

impl Indices {
    fn new(call: &Call<'_>) -> Self {
        Indices { wrap: !call.has("validate_indices") }
    }

    fn place(&self, index: i64, size: usize) -> Result<usize, String> {
        let from_front = if index < 0 && self.wrap { index + size as i64 } else { index };
        let place = usize::try_from(from_front).ok().filter(|place| *place < size);
        place.ok_or_else(|| format!("index {index} is outside an axis of size {size}"))
    }

    fn places(&self, indices: &[i64], size: usize) -> Result<Vec<usize>, String> {
        indices.iter().map(|index| self.place(*index, size)).collect()
    }
}

/// `out[batch, outer, i, inner] = x[batch, outer, indices[batch, i], inner]`.
fn gather(call: &mut Call<'_>) -> Results {
    let (axis, batch) = (call.integer_or("axis", 0)?, call.integer_or("batch_dims", 0)?);
    let indices = call.integers("indices")?;
    let index_shape = call.tensor("indices")?.shape.clone();
    let bounds = Indices::new(call);
    let shape = match call.value("x")? {
        Value::Weight(weight) => weight.shape().to_vec(),
        _ => call.tensor("x")?.shape.clone(),
    };
    let axis = axis_index(axis, shape.len())?;
    let batch = usize::try_from(batch).unwrap_or(usize::MAX);
    if batch > axis || batch > index_shape.len() || shape[..batch] != index_shape[..batch] {
        return Err(format!(
            "`x` {shape:?} and `indices` {index_shape:?} have no {batch} axes in common before {axis}"
        ));
    }
    let places = bounds.places(&indices, shape[axis])?;
    let out_shape = [&shape[..axis], &index_shape[batch..], &shape[axis + 1..]].concat();
    if let Value::Weight(weight) = call.value("x")?
        && axis == 0
    {
        // an embedding: only the rows that are asked for are expanded
        let columns = weight.columns();
        let mut out = vec![0.0; places.len() * columns];
        out.chunks_exact_mut(columns.max(1)).zip(places).for_each(|(out, place)| weight.expand_row(place, out));
        return one(Tensor::new(out_shape, out));
    }
    let x = call.tensor("x")?;
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
    ) -> Vec<T> {
        let mut out = Vec::with_capacity(places.len() * outer * inner);
        for b in 0..batches {
            for o in 0..outer {
                for place in &places[b * each..][..each] {
                    out.extend_from_slice(&v[((b * outer + o) * size + place) * inner..][..inner]);
                }
            }
        }
        out
    }
    let data = map_data!(&x.data, v => pick(v, places, (batches, outer, each), size, inner));
    one(Tensor { shape: out_shape, data })
}

/// For each element of `indices`, whose shape is that of `x` but for `axis`, where in `x` it points.
fn along_axis(
    bounds: &Indices,
    indices: &[i64],
    index_shape: &[usize],
    shape: &[usize],
    axis: usize,
) -> Result<Vec<usize>, String> {
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

fn gather_along_axis(call: &mut Call<'_>) -> Results {
    let indices = call.integers("indices")?;
    let index_shape = call.tensor("indices")?.shape.clone();
    let x = call.tensor("x")?;
    let axis = axis_index(call.integer_or("axis", 0)?, x.rank())?;
    let places = along_axis(&Indices::new(call), &indices, &index_shape, &x.shape, axis)?;
    let data = map_data!(&x.data, v => places.iter().map(|place| v[*place]).collect());
    one(Tensor { shape: index_shape, data })
}

/// The last axis of `indices` holds positions along as many axes of `shape` after the first `batch`. Gives the start of
/// each block pointed to, and the block's length.
fn blocks(
    bounds: &Indices,
    indices: &[i64],
    index_shape: &[usize],
    shape: &[usize],
    batch: usize,
) -> Result<(Vec<usize>, usize), String> {
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

fn gather_nd(call: &mut Call<'_>) -> Results {
    let indices = call.integers("indices")?;
    let index_shape = call.tensor("indices")?.shape.clone();
    let batch = usize::try_from(call.integer_or("batch_dims", 0)?).unwrap_or(usize::MAX / 2);
    let x = call.tensor("x")?;
    let (starts, block) = blocks(&Indices::new(call), &indices, &index_shape, &x.shape, batch)?;
    let (depth, lead) = index_shape.split_last().ok_or("`indices` is a scalar")?;
    let shape = [lead, &x.shape[batch + depth..]].concat();
    let data = map_data!(&x.data, v => starts.iter().flat_map(|start| v[*start..][..block].iter().copied()).collect());
    one(Tensor { shape, data })
}

/// The rows of the group that combines what is there with what comes.
pub(super) const SCATTER: &[Row] = super::computing! {
    "scatter" => scatter,
    "scatter_along_axis" => scatter_along_axis,
    "scatter_nd" => scatter_nd,
};

/// Combines blocks of `updates`, one after the other, into those of `data` that `starts` names.
fn combine(mut data: Arc<Tensor>, updates: &Tensor, starts: &[usize], block: usize, mode: &str) -> Results {
    if updates.data.len() != starts.len() * block {
        let (found, expected) = (updates.data.len(), starts.len() * block);
        return Err(format!("`updates` has {found} elements, the indices ask for {expected}"));
    }
    fn apply<T: Copy>(data: &mut [T], updates: &[T], starts: &[usize], block: usize, function: fn(T, T) -> T) {
        for (start, updates) in starts.iter().zip(updates.chunks_exact(block.max(1))) {
            data[*start..][..block].iter_mut().zip(updates).for_each(|(old, new)| *old = function(*old, *new));
        }
    }
    match (&mut Arc::make_mut(&mut data).data, &updates.data) {
        (TensorData::F32(data), TensorData::F32(updates)) => {
            let function: fn(f32, f32) -> f32 = match mode {
                "update" => |_, new| new,
                "add" => |old, new| old + new,
                "sub" => |old, new| old - new,
                "mul" => |old, new| old * new,
                "div" => |old, new| old / new,
                "max" => f32::max,
                "min" => f32::min,
                _ => return Err(format!("mode `{mode}` is unknown")),
            };
            apply(data, updates, starts, block, function);
        }
        (TensorData::I32(data), TensorData::I32(updates)) => {
            let function: fn(i32, i32) -> i32 = match mode {
                "update" => |_, new| new,
                "add" => i32::wrapping_add,
                "sub" => i32::wrapping_sub,
                "mul" => i32::wrapping_mul,
                "div" => |old, new| old.checked_div(new).unwrap_or(0),
                "max" => i32::max,
                "min" => i32::min,
                _ => return Err(format!("mode `{mode}` is unknown")),
            };
            apply(data, updates, starts, block, function);
        }
        (TensorData::Bool(data), TensorData::Bool(updates)) if mode == "update" => {
            apply(data, updates, starts, block, |_, new| new);
        }
        (data, updates) => return Err(format!("updates of {} for {} by `{mode}`", updates.kind(), data.kind())),
    }
    Ok(vec![data])
}

fn scatter(call: &mut Call<'_>) -> Results {
    let mode = call.text_or("mode", "add")?.to_owned();
    let bounds = Indices::new(call);
    let indices = call.integers("indices")?;
    let axis = call.integer_or("axis", 0)?;
    let updates = call.take("updates")?;
    let data = call.take("data")?;
    let axis = axis_index(axis, data.rank())?;
    let outer: usize = data.shape[..axis].iter().product();
    let inner: usize = data.shape[axis + 1..].iter().product();
    let size = data.shape[axis];
    let places = bounds.places(&indices, size)?;
    let starts: Vec<usize> = (0..outer).flat_map(|o| places.iter().map(move |p| (o * size + p) * inner)).collect();
    combine(data, &updates, &starts, inner, &mode)
}

fn scatter_along_axis(call: &mut Call<'_>) -> Results {
    let mode = call.text_or("mode", "add")?.to_owned();
    let bounds = Indices::new(call);
    let indices = call.integers("indices")?;
    let index_shape = call.tensor("indices")?.shape.clone();
    let axis = call.integer_or("axis", 0)?;
    let updates = call.take("updates")?;
    let data = call.take("data")?;
    let axis = axis_index(axis, data.rank())?;
    let starts = along_axis(&bounds, &indices, &index_shape, &data.shape, axis)?;
    combine(data, &updates, &starts, 1, &mode)
}

fn scatter_nd(call: &mut Call<'_>) -> Results {
    let mode = call.text_or("mode", "add")?.to_owned();
    let bounds = Indices::new(call);
    let indices = call.integers("indices")?;
    let index_shape = call.tensor("indices")?.shape.clone();
    let updates = call.take("updates")?;
    let data = call.take("data")?;
    let (starts, block) = blocks(&bounds, &indices, &index_shape, &data.shape, 0)?;
    combine(data, &updates, &starts, block, &mode)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, b, f, i, run, s, try_run};
    use super::*;
    use crate::weight::Weight;
    use anec_kernels::weight::{Elements, Scales};

    fn counted(shape: &[usize]) -> Value {
        let count: usize = shape.iter().product();
        f(shape, &(0..count).map(|v| v as f32).collect::<Vec<_>>())
    }

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
        let weight = Weight::scaled(
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
