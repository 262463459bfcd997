//! Ops that take parts of tensors, put parts into them, and join them.

use std::sync::Arc;

use super::{Call, Results, Row, map_data, moving, one};
use crate::strided::View;
use crate::tensor::{Tensor, TensorData, axis_index};

/// The rows of this group.
pub(super) const ROWS: &[Row] = moving! {
    "concat" => concat,
    "pad" => pad,
    "slice_by_index" => slice_by_index,
    "slice_by_size" => slice_by_size,
    "slice_update" => slice_update,
    "split" => split,
    "stack" => stack,
};

/// What `begin`, `end`, `stride` and the masks say, with Python's rules: negative positions count from the end,
/// positions outside are clamped. Also which axes stay.
fn indexed_view(call: &Call<'_>, shape: &[usize]) -> Result<(View, Vec<bool>), String> {
    let rank = shape.len();
    let begin = call.integers("begin")?;
    let end = call.integers("end")?;
    let stride = call.optional_integers("stride")?.unwrap_or_else(|| vec![1; rank]);
    let begin_mask = call.flags("begin_mask", rank)?;
    let end_mask = call.flags("end_mask", rank)?;
    let squeeze_mask = call.flags("squeeze_mask", rank)?;
    for (name, given) in [("begin", &begin), ("end", &end), ("stride", &stride)] {
        if given.len() != rank {
            return Err(format!("`{name}` has {} elements for a tensor of rank {rank}", given.len()));
        }
    }
    let mut view = View::whole(shape);
    for axis in 0..rank {
        let size = shape[axis] as i64;
        let from_end = |position: i64| if position < 0 { position.saturating_add(size) } else { position };
        let step = stride[axis];
        if squeeze_mask[axis] {
            let at = from_end(if begin_mask[axis] { 0 } else { begin[axis] });
            let at = usize::try_from(at).ok().filter(|at| *at < shape[axis]);
            let at = at.ok_or_else(|| format!("position {} is outside axis {axis} of size {size}", begin[axis]))?;
            view.slice(axis, at, 1, 1);
            continue;
        }
        let (first, past) = match step {
            0 => return Err(format!("the stride of axis {axis} is 0")),
            1.. => (
                if begin_mask[axis] { 0 } else { from_end(begin[axis]).clamp(0, size) },
                if end_mask[axis] { size } else { from_end(end[axis]).clamp(0, size) },
            ),
            _ => (
                if begin_mask[axis] { size - 1 } else { from_end(begin[axis]).clamp(-1, size - 1) },
                if end_mask[axis] { -1 } else { from_end(end[axis]).clamp(-1, size - 1) },
            ),
        };
        let span = if step > 0 { past - first } else { first - past };
        let count = if span > 0 { (span as u64).div_ceil(step.unsigned_abs()) as usize } else { 0 };
        view.slice(axis, first.max(0) as usize, count, step as isize);
    }
    Ok((view, squeeze_mask.into_iter().map(|s| !s).collect()))
}

fn kept(shape: &[usize], keep: &[bool]) -> Vec<usize> {
    shape.iter().zip(keep).filter(|(_, keep)| **keep).map(|(d, _)| *d).collect()
}

fn slice_by_index(call: &mut Call<'_>) -> Results {
    let (view, keep) = indexed_view(call, &call.tensor("x")?.shape)?;
    let shape = kept(&view.shape, &keep);
    let x = call.tensor("x")?;
    if view.shape == x.shape && view.offset == 0 && view.strides == View::whole(&x.shape).strides {
        let mut x = call.take("x")?;
        if x.shape != shape {
            Arc::make_mut(&mut x).shape = shape;
        }
        return Ok(vec![x]);
    }
    one(Tensor { data: map_data!(&x.data, v => view.read(v)), shape })
}

/// `size` elements of each axis from `begin`; a size of -1 goes to the end.
fn slice_by_size(call: &mut Call<'_>) -> Results {
    let (begin, size) = (call.integers("begin")?, call.integers("size")?);
    let x = call.tensor("x")?;
    if begin.len() != x.rank() || size.len() != x.rank() {
        let (b, s) = (begin.len(), size.len());
        return Err(format!("{b} begins and {s} sizes for a tensor of rank {}", x.rank()));
    }
    let mut view = View::whole(&x.shape);
    for axis in 0..x.rank() {
        let whole = x.shape[axis] as i64;
        let from = if begin[axis] < 0 { begin[axis].saturating_add(whole) } else { begin[axis] };
        let count = if size[axis] == -1 { whole - from } else { size[axis] };
        if from < 0 || count < 0 || from.saturating_add(count) > whole {
            return Err(format!("{count} elements from {from} are beyond axis {axis} of size {whole}"));
        }
        view.slice(axis, from as usize, count as usize, 1);
    }
    one(Tensor { data: map_data!(&x.data, v => view.read(v)), shape: view.shape })
}

/// Puts `update` where a slice of `x` is; in place if nothing else needs `x`.
fn slice_update(call: &mut Call<'_>) -> Results {
    let (view, keep) = indexed_view(call, &call.tensor("x")?.shape)?;
    let update = call.take("update")?;
    let mut x = call.take("x")?;
    let expected = kept(&view.shape, &keep);
    if update.shape != expected {
        return Err(format!("an update of shape {:?} for a slice of shape {expected:?}", update.shape));
    }
    match (&mut Arc::make_mut(&mut x).data, &update.data) {
        (TensorData::F32(x), TensorData::F32(update)) => view.write(x, update),
        (TensorData::I32(x), TensorData::I32(update)) => view.write(x, update),
        (TensorData::Bool(x), TensorData::Bool(update)) => view.write(x, update),
        (x, update) => return Err(format!("an update of {} for {}", update.kind(), x.kind())),
    }
    Ok(vec![x])
}

/// The parts of `shape` along an axis, from sizes or an equal division.
fn split(call: &mut Call<'_>) -> Results {
    let axis = call.integer("axis")?;
    let sizes = call.optional_integers("split_sizes")?;
    let count = call.optional_integers("num_splits")?;
    let x = call.tensor("x")?;
    let axis = axis_index(axis, x.rank())?;
    let whole = x.shape[axis];
    let sizes: Vec<usize> = match (sizes, count.as_deref()) {
        (Some(sizes), _) => {
            let sizes: Result<Vec<usize>, _> = sizes.iter().map(|s| usize::try_from(*s)).collect();
            sizes.map_err(|_| "a size is negative".to_owned())?
        }
        (None, Some([n])) if *n > 0 && whole % *n as usize == 0 => vec![whole / *n as usize; *n as usize],
        _ => return Err(format!("neither sizes nor a number of parts divides axis {axis} of size {whole}")),
    };
    if sizes.iter().try_fold(0usize, |n, s| n.checked_add(*s)) != Some(whole) {
        return Err(format!("the sizes {sizes:?} don't sum to {whole}, the size of axis {axis}"));
    }
    let mut begin = 0;
    let mut parts = Vec::with_capacity(sizes.len());
    for size in sizes {
        let mut view = View::whole(&x.shape);
        view.slice(axis, begin, size, 1);
        begin += size;
        parts.push(Arc::new(Tensor { data: map_data!(&x.data, v => view.read(v)), shape: view.shape }));
    }
    Ok(parts)
}

/// Joins rows of `widths[i]` elements of each part, `rows` times.
fn interleave<T: Copy>(parts: &[(&[T], usize)], rows: usize) -> Vec<T> {
    let mut out = Vec::with_capacity(parts.iter().map(|(part, _)| part.len()).sum());
    for row in 0..rows {
        for (part, width) in parts {
            out.extend_from_slice(&part[row * width..][..*width]);
        }
    }
    out
}

/// Joins tensors whose elements are laid out as `rows` rows of equal width each.
fn join(tensors: &[&Tensor], rows: usize) -> Result<TensorData, String> {
    macro_rules! joined {
        ($variant:path) => {{
            let parts = tensors.iter().map(|t| match &t.data {
                $variant(v) => Some((v.as_slice(), v.len() / rows.max(1))),
                _ => None,
            });
            parts.collect::<Option<Vec<_>>>().map(|parts| $variant(interleave(&parts, rows)))
        }};
    }
    let joined = match tensors.first().map(|t| &t.data) {
        Some(TensorData::F32(_)) => joined!(TensorData::F32),
        Some(TensorData::I32(_)) => joined!(TensorData::I32),
        Some(TensorData::Bool(_)) => joined!(TensorData::Bool),
        None => return Err("there is nothing to join".into()),
    };
    joined.ok_or_else(|| "the tensors hold different kinds of elements".into())
}

/// Scalars are joined to a vector.
fn concat(call: &mut Call<'_>) -> Results {
    let axis = call.integer("axis")?;
    let interleaved = call.flag_or("interleave", false)?;
    let tensors = call.tensors("values")?;
    let first = tensors.first().ok_or("there is nothing to join")?;
    if tensors.iter().all(|t| t.rank() == 0) {
        return one(Tensor { data: join(&tensors, 1)?, shape: vec![tensors.len()] });
    }
    let axis = axis_index(axis, first.rank())?;
    let mut shape = first.shape.clone();
    shape[axis] = 0;
    for tensor in &tensors {
        let fits = tensor.rank() == first.rank() && (0..shape.len()).all(|i| i == axis || tensor.shape[i] == shape[i]);
        if !fits {
            return Err(format!("the shapes {:?} and {:?} don't join along axis {axis}", first.shape, tensor.shape));
        }
        shape[axis] += tensor.shape[axis];
    }
    let mut rows: usize = shape[..axis].iter().product();
    if interleaved {
        if tensors.iter().any(|t| t.shape[axis] != first.shape[axis]) {
            return Err("only tensors of equal shape can be interleaved".into());
        }
        rows *= first.shape[axis];
    }
    one(Tensor { data: join(&tensors, rows)?, shape })
}

fn stack(call: &mut Call<'_>) -> Results {
    let axis = call.integer("axis")?;
    let tensors = call.tensors("values")?;
    let first = tensors.first().ok_or("there is nothing to join")?;
    let axis = axis_index(axis, first.rank() + 1)?;
    if let Some(other) = tensors.iter().find(|t| t.shape != first.shape) {
        return Err(format!("the shapes {:?} and {:?} don't stack", first.shape, other.shape));
    }
    let mut shape = first.shape.clone();
    shape.insert(axis, tensors.len());
    one(Tensor { data: join(&tensors, shape[..axis].iter().product())?, shape })
}

/// Elements put before and after the last axes that `pad` names (pairs of numbers): a constant, a reflection about the
/// edge element, or the edge element itself.
fn pad(call: &mut Call<'_>) -> Results {
    let amounts = call.integers("pad")?;
    let mode = call.text_or("mode", "constant")?.to_owned();
    let constant = call.float_or("constant_val", 0.0)?;
    let x = call.tensor("x")?;
    let padded = amounts.len() / 2;
    if amounts.len() % 2 != 0 || padded > x.rank() || amounts.iter().any(|n| *n < 0) {
        return Err(format!("`pad` {amounts:?} doesn't fit a tensor of rank {}", x.rank()));
    }
    let first = x.rank() - padded;
    let mut data = x.data.clone();
    let mut shape = x.shape.clone();
    // one axis after the other, so that corners come out right
    for (i, pair) in amounts.chunks_exact(2).enumerate() {
        let (before, after) = (pair[0] as usize, pair[1] as usize);
        let axis = first + i;
        let size = shape[axis];
        let source = |position: usize| -> Result<Option<usize>, String> {
            let at = position as i64 - before as i64;
            let inside = usize::try_from(at).ok().filter(|at| *at < size);
            match mode.as_str() {
                _ if inside.is_some() => Ok(inside),
                "constant" => Ok(None),
                "replicate" if size > 0 => Ok(Some(if at < 0 { 0 } else { size - 1 })),
                "reflect" => {
                    let mirrored = if at < 0 { -at } else { 2 * (size as i64 - 1) - at };
                    let mirrored = usize::try_from(mirrored).ok().filter(|at| *at < size);
                    mirrored.map(Some).ok_or_else(|| format!("{before} and {after} reflect beyond a size of {size}"))
                }
                _ => Err(format!("mode `{mode}` is none of constant, reflect, replicate")),
            }
        };
        let sources: Vec<Option<usize>> = (0..before + size + after).map(source).collect::<Result<_, _>>()?;
        let inner: usize = shape[axis + 1..].iter().product();
        let outer: usize = shape[..axis].iter().product();
        data = match &data {
            TensorData::F32(v) => TensorData::F32(pad_axis(v, outer, size, inner, &sources, constant)),
            TensorData::I32(v) => TensorData::I32(pad_axis(v, outer, size, inner, &sources, constant as i32)),
            TensorData::Bool(v) => TensorData::Bool(pad_axis(v, outer, size, inner, &sources, constant != 0.0)),
        };
        shape[axis] = sources.len();
    }
    one(Tensor { shape, data })
}

fn pad_axis<T: Copy>(
    from: &[T],
    outer: usize,
    size: usize,
    inner: usize,
    sources: &[Option<usize>],
    constant: T,
) -> Vec<T> {
    let mut out = Vec::with_capacity(outer * sources.len() * inner);
    for block in 0..outer {
        for source in sources {
            match source {
                Some(at) => out.extend_from_slice(&from[(block * size + at) * inner..][..inner]),
                None => out.extend(std::iter::repeat_n(constant, inner)),
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::Value;
    use super::super::testing::{assert_close, b, f, i, results, run, s, try_run};
    use anec_mil::DataType;

    fn counted(shape: &[usize]) -> Value {
        let count: usize = shape.iter().product();
        f(shape, &(0..count).map(|v| v as f32).collect::<Vec<_>>())
    }

    #[test]
    fn slices_follow_pythons_rules() {
        let slice = |begin: [i32; 2], end: [i32; 2], stride: [i32; 2]| {
            run(
                "slice_by_index",
                vec![
                    ("x", counted(&[3, 4])),
                    ("begin", i(&[2], &begin)),
                    ("end", i(&[2], &end)),
                    ("stride", i(&[2], &stride)),
                ],
            )
        };
        assert_close(&slice([1, 1], [3, 3], [1, 1]), &[2, 2], &[5.0, 6.0, 9.0, 10.0]);
        assert_close(&slice([0, -2], [1, 100], [1, 1]), &[1, 2], &[2.0, 3.0]);
        assert_close(&slice([0, 0], [3, 4], [2, 3]), &[2, 2], &[0.0, 3.0, 8.0, 11.0]);
        assert_close(&slice([0, 3], [1, 0], [1, -2]), &[1, 2], &[3.0, 1.0]);
        assert_eq!(slice([2, 2], [1, 4], [1, 1]).shape, [0, 2]);
        let masked = run(
            "slice_by_index",
            vec![
                ("x", counted(&[3, 4])),
                ("begin", i(&[2], &[-1, 9])),
                ("end", i(&[2], &[0, 0])),
                ("begin_mask", b(&[2], &[false, true])),
                ("end_mask", b(&[2], &[false, true])),
                ("squeeze_mask", b(&[2], &[true, false])),
            ],
        );
        assert_close(&masked, &[4], &[8.0, 9.0, 10.0, 11.0]);
        let sized = run(
            "slice_by_size",
            vec![("x", counted(&[3, 4])), ("begin", i(&[2], &[1, 2])), ("size", i(&[2], &[1, -1]))],
        );
        assert_close(&sized, &[1, 2], &[6.0, 7.0]);
    }

    #[test]
    fn an_update_replaces_a_slice() {
        let arguments = |update: Value| {
            vec![
                ("x", counted(&[2, 3])),
                ("update", update),
                ("begin", i(&[2], &[0, 1])),
                ("end", i(&[2], &[2, 2])),
                ("stride", i(&[2], &[1, 1])),
            ]
        };
        let updated = run("slice_update", arguments(f(&[2, 1], &[-1.0, -2.0])));
        assert_close(&updated, &[2, 3], &[0.0, -1.0, 2.0, 3.0, -2.0, 5.0]);
        let problem = try_run("slice_update", arguments(f(&[1, 2], &[0.0; 2]))).unwrap_err();
        assert!(problem.contains("[1, 2]") && problem.contains("[2, 1]"), "{problem}");
    }

    #[test]
    fn parts_and_wholes() {
        let parts = |name: &'static str, value: Value| {
            let arguments = vec![("x", vec![counted(&[2, 3])]), ("axis", vec![i(&[], &[1])]), (name, vec![value])];
            results("split", arguments, DataType::Fp32)
        };
        let two = parts("split_sizes", i(&[2], &[1, 2])).unwrap();
        assert_close(&two[0], &[2, 1], &[0.0, 3.0]);
        assert_close(&two[1], &[2, 2], &[1.0, 2.0, 4.0, 5.0]);
        assert_eq!(parts("num_splits", i(&[], &[3])).unwrap().len(), 3);
        assert!(parts("num_splits", i(&[], &[2])).is_err());
        let join = |operator, axis: i32| {
            let values = vec![counted(&[1, 2]), counted(&[1, 2])];
            results(operator, vec![("values", values), ("axis", vec![i(&[], &[axis])])], DataType::Fp32)
                .unwrap()
                .remove(0)
        };
        assert_close(&join("concat", 0), &[2, 2], &[0.0, 1.0, 0.0, 1.0]);
        assert_close(&join("concat", -1), &[1, 4], &[0.0, 1.0, 0.0, 1.0]);
        assert_close(&join("stack", 2), &[1, 2, 2], &[0.0, 0.0, 1.0, 1.0]);
        let scalars = vec![("values", vec![f(&[], &[1.0]), f(&[], &[2.0])]), ("axis", vec![i(&[], &[0])])];
        assert_close(&results("concat", scalars, DataType::Fp32).unwrap()[0], &[2], &[1.0, 2.0]);
    }

    #[test]
    fn padding_by_mode() {
        let pad = |amounts: &[i32], mode| {
            run("pad", vec![("x", counted(&[1, 3])), ("pad", i(&[amounts.len()], amounts)), ("mode", s(mode))])
        };
        assert_close(&pad(&[1, 0, 0, 1], "constant"), &[2, 4], &[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0]);
        assert_close(&pad(&[2, 1], "reflect"), &[1, 6], &[2.0, 1.0, 0.0, 1.0, 2.0, 1.0]);
        assert_close(&pad(&[1, 2], "replicate"), &[1, 6], &[0.0, 0.0, 1.0, 2.0, 2.0, 2.0]);
    }
}
