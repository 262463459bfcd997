//! Ops that give the same elements another shape or order.

use std::sync::Arc;

use super::{Call, Results, Row, map_data, moving, one};
use crate::strided::View;
use crate::tensor::{Tensor, TensorData, axis_index};

/// The rows of this group.
pub(super) const ROWS: &[Row] = moving! {
    "expand_dims" => expand_dims,
    "flatten2d" => flatten2d,
    "identity" => |c| Ok(vec![c.take(if c.has("input") { "input" } else { "x" })?]),
    "reshape" => reshape,
    "reshape_like" => reshape_like,
    "reverse" => reverse,
    "shape" => shape_of,
    "squeeze" => squeeze,
    "tile" => tile,
    "transpose" => transpose,
};

/// The tensor with another shape of as many elements.
fn with_shape(mut x: Arc<Tensor>, shape: Vec<usize>) -> Results {
    if shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) != Some(x.data.len()) {
        return Err(format!("a tensor of shape {:?} can't have the shape {shape:?}", x.shape));
    }
    match Arc::get_mut(&mut x) {
        Some(tensor) => tensor.shape = shape,
        None => x = Arc::new(Tensor { shape, data: x.data.clone() }),
    }
    Ok(vec![x])
}

/// A 0 keeps the dimension at the same distance from the last axis, a -1 takes what is left.
fn reshape(call: &mut Call<'_>) -> Results {
    let wanted = call.integers("shape")?;
    let x = call.take("x")?;
    let misfit = || format!("a tensor of shape {:?} can't have the shape {wanted:?}", x.shape);
    let mut shape = Vec::with_capacity(wanted.len());
    let mut free = None;
    for (i, size) in wanted.iter().enumerate() {
        shape.push(match size {
            -1 if free.is_none() => {
                free = Some(i);
                1
            }
            0 => {
                let from_right = wanted.len() - i;
                x.shape.len().checked_sub(from_right).map(|axis| x.shape[axis]).ok_or_else(misfit)?
            }
            size => usize::try_from(*size).map_err(|_| misfit())?,
        });
    }
    if let Some(i) = free {
        let others = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).ok_or_else(misfit)?;
        if others == 0 || x.data.len() % others != 0 {
            return Err(misfit());
        }
        shape[i] = x.data.len() / others;
    }
    with_shape(x, shape)
}

/// The shape of other tensors: ranges `begins[i]..ends[i]` of the axes of `x` become ranges of the axes of the `i`-th
/// reference.
fn reshape_like(call: &mut Call<'_>) -> Results {
    let (begins, ends) = (call.integers("begins")?, call.integers("ends")?);
    let masks = (call.flags("begin_masks", begins.len())?, call.flags("end_masks", ends.len())?);
    let references: Vec<Vec<usize>> = call.tensors("ref_tensors")?.iter().map(|t| t.shape.clone()).collect();
    if begins.len() != references.len() || ends.len() != references.len() {
        let (b, e, r) = (begins.len(), ends.len(), references.len());
        return Err(format!("{b} begins and {e} ends for {r} reference tensors"));
    }
    let mut shape = Vec::new();
    for (i, reference) in references.iter().enumerate() {
        let rank = reference.len() as i64;
        let place = |v: i64| (if v < 0 { v + rank } else { v }).clamp(0, rank) as usize;
        let begin = if masks.0[i] { 0 } else { place(begins[i]) };
        let end = if masks.1[i] { reference.len() } else { place(ends[i]) };
        shape.extend_from_slice(reference.get(begin..end).unwrap_or_default());
    }
    with_shape(call.take("x")?, shape)
}

fn flatten2d(call: &mut Call<'_>) -> Results {
    let axis = call.integer_or("axis", 1)?;
    let x = call.take("x")?;
    let axis = if axis == x.rank() as i64 { x.rank() } else { axis_index(axis, x.rank())? };
    let shape = vec![x.shape[..axis].iter().product(), x.shape[axis..].iter().product()];
    with_shape(x, shape)
}

fn expand_dims(call: &mut Call<'_>) -> Results {
    let axes = call.integers("axes")?;
    let x = call.take("x")?;
    let rank = x.rank() + axes.len();
    let mut added = vec![false; rank];
    for axis in &axes {
        added[axis_index(*axis, rank)?] = true;
    }
    if added.iter().filter(|a| **a).count() != axes.len() {
        return Err(format!("the axes {axes:?} name one axis twice"));
    }
    let mut sizes = x.shape.iter().copied();
    let shape = added.iter().map(|added| if *added { 1 } else { sizes.next().unwrap_or(1) }).collect();
    with_shape(x, shape)
}

fn squeeze(call: &mut Call<'_>) -> Results {
    let axes = call.optional_integers("axes")?;
    let x = call.take("x")?;
    let dropped: Vec<usize> = match axes {
        Some(axes) => axes.iter().map(|axis| axis_index(*axis, x.rank())).collect::<Result<_, _>>()?,
        None => (0..x.rank()).filter(|i| x.shape[*i] == 1).collect(),
    };
    let kept = x.shape.iter().enumerate().filter(|(i, _)| !dropped.contains(i)).map(|(_, d)| *d).collect();
    with_shape(x, kept)
}

fn transpose(call: &mut Call<'_>) -> Results {
    let order = call.integers("perm")?;
    let x = call.take("x")?;
    let order: Vec<usize> = order.iter().map(|axis| axis_index(*axis, x.rank())).collect::<Result<_, _>>()?;
    let mut seen = vec![false; x.rank()];
    order.iter().for_each(|axis| seen[*axis] = true);
    if order.len() != x.rank() || seen.contains(&false) {
        return Err(format!("{order:?} is not an order of {} axes", x.rank()));
    }
    let view = View::whole(&x.shape).permute(&order);
    // axes of size 1 may move freely
    let moved: Vec<usize> = order.iter().copied().filter(|axis| x.shape[*axis] != 1).collect();
    if moved.is_sorted() {
        return with_shape(x, view.shape);
    }
    one(Tensor { data: map_data!(&x.data, v => view.read(v)), shape: view.shape })
}

fn reverse(call: &mut Call<'_>) -> Results {
    let x = call.tensor("x")?;
    let axes = call.optional_integers("axes")?.unwrap_or_else(|| (0..x.rank() as i64).collect());
    let mut view = View::whole(&x.shape);
    for axis in axes {
        let axis = axis_index(axis, x.rank())?;
        view.slice(axis, x.shape[axis].saturating_sub(1), x.shape[axis], -1);
    }
    one(Tensor { data: map_data!(&x.data, v => view.read(v)), shape: x.shape.clone() })
}

fn tile(call: &mut Call<'_>) -> Results {
    let repetitions = call.integers("reps")?;
    let x = call.tensor("x")?;
    if repetitions.len() != x.rank() {
        return Err(format!("{} repetitions for a tensor of rank {}", repetitions.len(), x.rank()));
    }
    let whole = View::whole(&x.shape);
    let mut view = View { offset: 0, shape: Vec::new(), strides: Vec::new() };
    let mut shape = Vec::new();
    for ((count, size), stride) in repetitions.iter().zip(&x.shape).zip(&whole.strides) {
        let count = usize::try_from(*count).map_err(|_| format!("a repetition of {count}"))?;
        view.shape.extend([count, *size]);
        view.strides.extend([0, *stride]);
        shape.push(count * size);
    }
    one(Tensor { data: map_data!(&x.data, v => view.read(v)), shape })
}

fn shape_of(call: &mut Call<'_>) -> Results {
    let shape: Vec<i32> = call.tensor("x")?.shape.iter().map(|d| *d as i32).collect();
    one(Tensor::new([shape.len()], shape))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, f, i, run, try_run};

    fn counted(shape: &[usize]) -> super::super::Value {
        let count: usize = shape.iter().product();
        f(shape, &(0..count).map(|v| v as f32).collect::<Vec<_>>())
    }

    #[test]
    fn reshape_keeps_and_infers_dimensions() {
        let reshape =
            |shape: &[i32]| try_run("reshape", vec![("x", counted(&[2, 3, 4])), ("shape", i(&[shape.len()], shape))]);
        assert_eq!(reshape(&[4, -1]).unwrap().shape, [4, 6]);
        assert_eq!(reshape(&[0, -1, 2]).unwrap().shape, [2, 6, 2]);
        assert_eq!(reshape(&[-1, 0]).unwrap().shape, [6, 4]);
        assert!(reshape(&[5, -1]).unwrap_err().contains("[2, 3, 4]"));
        assert!(reshape(&[-1, -1]).is_err());
        assert!(reshape(&[7]).is_err());
    }

    #[test]
    fn axes_come_and_go() {
        let x = || counted(&[1, 3, 1]);
        assert_eq!(run("squeeze", vec![("x", x())]).shape, [3]);
        assert_eq!(run("squeeze", vec![("x", x()), ("axes", i(&[1], &[-1]))]).shape, [1, 3]);
        assert_eq!(run("expand_dims", vec![("x", x()), ("axes", i(&[2], &[0, -1]))]).shape, [1, 1, 3, 1, 1]);
        assert!(try_run("squeeze", vec![("x", x()), ("axes", i(&[1], &[1]))]).is_err());
        assert_eq!(run("shape", vec![("x", x())]).integers().unwrap(), [1, 3, 1]);
    }

    #[test]
    fn orders_change() {
        let turned = run("transpose", vec![("x", counted(&[2, 1, 3])), ("perm", i(&[3], &[2, 1, 0]))]);
        assert_close(&turned, &[3, 1, 2], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        let moved = run("transpose", vec![("x", counted(&[2, 1, 3])), ("perm", i(&[3], &[1, 0, -1]))]);
        assert_close(&moved, &[1, 2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!(try_run("transpose", vec![("x", counted(&[2, 2])), ("perm", i(&[2], &[0, 0]))]).is_err());
        let back = run("reverse", vec![("x", counted(&[2, 2])), ("axes", i(&[1], &[1]))]);
        assert_close(&back, &[2, 2], &[1.0, 0.0, 3.0, 2.0]);
        let tiled = run("tile", vec![("x", counted(&[1, 2])), ("reps", i(&[2], &[2, 2]))]);
        assert_close(&tiled, &[2, 4], &[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    }
}
