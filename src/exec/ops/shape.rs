//! Ops that change the shape or the order of elements.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Row, make_like, moving};
use crate::kernel::{Call, Input, Inputs, Integers, Kernel, Numbers};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::strided::View;
use crate::tensor::{Dims, Tensor, TensorData, axis_index};

/// Rows of the table.
pub(super) const ROWS: &[Row] = moving! {
    "expand_dims" => |op| {
        let axes = op.known_integers("axes")?.ok_or("parameter `axes` is missing")?;
        Ok(Arc::new(ExpandDims { x: op.input("x")?, axes }))
    },
    "flatten2d" => |op| Ok(Arc::new(Flatten { x: op.input("x")?, axis: op.integer("axis")? })),
    "identity" => |op| Ok(Arc::new(Identity { x: op.input(if op.has("input") { "input" } else { "x" })? })),
    "reshape" => |op| Ok(Arc::new(Reshape { x: op.input("x")?, shape: op.integers("shape")? })),
    "reshape_like" => |op| {
        let numbers = |op: &Resolver<'_>, name: &str| op.list_of_integers(name);
        let (begins, ends, masks) = (numbers(op, "begins")?, numbers(op, "ends")?, numbers(op, "end_masks")?);
        let references = op.inputs("ref_tensors")?;
        let count = references.iter().len();
        if [&begins, &ends, &masks].iter().any(|numbers| numbers.len() != count) {
            return Err(format!("`begins`, `ends` and `end_masks` aren't lists of {count}, as `ref_tensors` is"));
        }
        let ends = ends.into_iter().zip(masks).map(|(end, mask)| (mask == 0).then_some(end));
        Ok(Arc::new(ReshapeLike { x: op.input("x")?, references, parts: begins.into_iter().zip(ends).collect() }))
    },
    "reverse" => |op| Ok(Arc::new(Reverse { x: op.input("x")?, axes: op.known_integers("axes")? })),
    "shape" => |op| Ok(Arc::new(ShapeOf { x: op.input("x")? })),
    "squeeze" => |op| Ok(Arc::new(Squeeze { x: op.input("x")?, axes: op.known_integers("axes")? })),
    "tile" => |op| Ok(Arc::new(Tile { x: op.input("x")?, repetitions: op.integers("reps")? })),
    "transpose" => |op| {
        let order = op.known_integers("perm")?.ok_or("parameter `perm` is missing")?;
        Ok(Arc::new(Transpose { x: op.input("x")?, order }))
    },
};

/// Tensor with another shape of as many elements.
fn with_shape(pool: &mut Pool, mut x: Arc<Tensor>, shape: &[usize]) -> Result<Arc<Tensor>, String> {
    if shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) != Some(x.data.len()) {
        return Err(format!("a tensor of shape {:?} can't have the shape {shape:?}", x.shape));
    }
    match Arc::get_mut(&mut x) {
        Some(tensor) => {
            tensor.shape.clear();
            tensor.shape.extend_from_slice(shape);
            Ok(x)
        }
        None => Ok(pool.reshaped(shape, &x.data)),
    }
}

/// Axis indices; negative ones count from the back.
fn axes_of(axes: &[i64], rank: usize) -> Result<Dims, String> {
    axes.iter().map(|axis| axis_index(*axis, rank)).collect()
}

struct Identity {
    x: Input,
}

impl Kernel for Identity {
    fn run(&self, call: &mut Call<'_>, _: &mut Pool) -> Result<(), String> {
        let x = call.take(self.x)?;
        call.push(x)
    }
}

/// New shape: 0 keeps the dimension at the same distance from the last axis, or is 1 if there is none; -1 takes the
/// rest.
struct Reshape {
    x: Input,
    shape: Integers,
}

impl Kernel for Reshape {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let wanted = call.integers(&self.shape)?;
        let x = call.take(self.x)?;
        let misfit = || format!("a tensor of shape {:?} can't have the shape {wanted:?}", x.shape);
        let mut shape = Dims::new();
        let mut free = None;
        for (i, size) in wanted.iter().enumerate() {
            shape.push(match size {
                -1 if free.is_none() => {
                    free = Some(i);
                    1
                }
                0 => {
                    let from_right = wanted.len() - i;
                    x.shape.len().checked_sub(from_right).map_or(1, |axis| x.shape[axis])
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
        let result = with_shape(pool, x, &shape)?;
        call.push(result)
    }
}

/// Shape of parts of other tensors' shapes.
struct ReshapeLike {
    x: Input,
    references: Inputs,
    /// First axis of each reference, and the one behind the last; `None` for all.
    parts: Vec<(i64, Option<i64>)>,
}

impl Kernel for ReshapeLike {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let mut shape = Dims::new();
        for (reference, (begin, end)) in self.references.iter().zip(&self.parts) {
            let own = &call.tensor(reference)?.shape;
            // as Python's slices: from the back if negative, and cut at the ends
            let place =
                |at: i64| if at < 0 { (at + own.len() as i64).max(0) } else { at.min(own.len() as i64) } as usize;
            let (begin, end) = (place(*begin), end.map_or(own.len(), place));
            shape.extend_from_slice(own.get(begin..end).unwrap_or_default());
        }
        let x = call.take(self.x)?;
        let result = with_shape(pool, x, &shape)?;
        call.push(result)
    }
}

struct Flatten {
    x: Input,
    axis: i64,
}

impl Kernel for Flatten {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.take(self.x)?;
        let axis = if self.axis == x.rank() as i64 { x.rank() } else { axis_index(self.axis, x.rank())? };
        let shape = [x.shape[..axis].iter().product(), x.shape[axis..].iter().product()];
        let result = with_shape(pool, x, &shape)?;
        call.push(result)
    }
}

struct ExpandDims {
    x: Input,
    axes: Numbers,
}

impl Kernel for ExpandDims {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.take(self.x)?;
        let rank = x.rank() + self.axes.len();
        let added = axes_of(&self.axes, rank)?;
        if (1..added.len()).any(|i| added[..i].contains(&added[i])) {
            return Err(format!("the axes {:?} name one axis twice", self.axes));
        }
        let mut sizes = x.shape.iter().copied();
        let shape: Dims =
            (0..rank).map(|axis| if added.contains(&axis) { 1 } else { sizes.next().unwrap_or(1) }).collect();
        let result = with_shape(pool, x, &shape)?;
        call.push(result)
    }
}

struct Squeeze {
    x: Input,
    axes: Option<Numbers>,
}

impl Kernel for Squeeze {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.take(self.x)?;
        let dropped = match &self.axes {
            Some(axes) => axes_of(axes, x.rank())?,
            None => (0..x.rank()).filter(|i| x.shape[*i] == 1).collect(),
        };
        let kept: Dims = x.shape.iter().enumerate().filter(|(i, _)| !dropped.contains(i)).map(|(_, d)| *d).collect();
        let result = with_shape(pool, x, &kept)?;
        call.push(result)
    }
}

struct Transpose {
    x: Input,
    order: Numbers,
}

impl Kernel for Transpose {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.take(self.x)?;
        let order = axes_of(&self.order, x.rank())?;
        let mut seen = SmallVec::<[bool; 8]>::from_elem(false, x.rank());
        order.iter().for_each(|axis| seen[*axis] = true);
        if order.len() != x.rank() || seen.contains(&false) {
            return Err(format!("{order:?} is not an order of {} axes", x.rank()));
        }
        let view = View::whole(&x.shape).permute(&order);
        // axes of size 1 may move freely
        if order.iter().filter(|axis| x.shape[**axis] != 1).is_sorted() {
            let result = with_shape(pool, x, &view.shape)?;
            return call.push(result);
        }
        let result = make_like!(pool, &view.shape, &x.data, (v, out) => view.read_into(v, out));
        pool.recycle(x);
        call.push(result)
    }
}

struct Reverse {
    x: Input,
    axes: Option<Numbers>,
}

impl Kernel for Reverse {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let axes = self.axes.clone().unwrap_or_else(|| (0..x.rank() as i64).collect());
        let mut view = View::whole(&x.shape);
        for axis in axes {
            let axis = axis_index(axis, x.rank())?;
            view.slice(axis, x.shape[axis].saturating_sub(1), x.shape[axis], -1);
        }
        let result = make_like!(pool, &x.shape, &x.data, (v, out) => view.read_into(v, out));
        call.push(result)
    }
}

struct Tile {
    x: Input,
    repetitions: Integers,
}

impl Kernel for Tile {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let repetitions = call.integers(&self.repetitions)?;
        let x = call.tensor(self.x)?;
        if repetitions.len() != x.rank() {
            return Err(format!("{} repetitions for a tensor of rank {}", repetitions.len(), x.rank()));
        }
        let whole = View::whole(&x.shape);
        let mut view = View::scalar();
        let mut shape = Dims::new();
        for ((count, size), stride) in repetitions.iter().zip(&x.shape).zip(&whole.strides) {
            let count = usize::try_from(*count).map_err(|_| format!("a repetition of {count}"))?;
            view.shape.extend([count, *size]);
            view.strides.extend([0, *stride]);
            shape.push(count * size);
        }
        let result = make_like!(pool, &shape, &x.data, (v, out) => view.read_into(v, out));
        call.push(result)
    }
}

struct ShapeOf {
    x: Input,
}

impl Kernel for ShapeOf {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let shape = &call.tensor(self.x)?.shape;
        let result = pool.make(&[shape.len()], |out: &mut Vec<i32>| out.extend(shape.iter().map(|d| *d as i32)));
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, counted, i, run, try_run};

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
