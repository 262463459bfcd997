//! Reductions and sorts.

use anec_mil::Op;

use super::arithmetic::norm;
use super::composite::Reduction;
use super::context::{Lowering, Tensor};
use super::{Lowered, Row};
use crate::aicode::ElementType;

pub(super) const ROWS: &[Row] = &[
    ("reduce_sum", |l, op| plain(l, op, Reduction::Sum)),
    ("reduce_mean", |l, op| plain(l, op, Reduction::Mean)),
    ("reduce_max", |l, op| plain(l, op, Reduction::Max)),
    ("reduce_min", |l, op| plain(l, op, Reduction::Min)),
    ("reduce_prod", |l, op| plain(l, op, Reduction::Product)),
    ("reduce_l1_norm", |l, op| {
        reduced(l, op, |l, x, axes| {
            let sizes = l.unary("primitive.abs_v1", x);
            l.reduce(Reduction::Sum, &sizes, axes)
        })
    }),
    ("reduce_l2_norm", |l, op| reduced(l, op, |l, x, axes| norm(l, x, axes, 0.0))),
    ("reduce_sum_square", |l, op| {
        reduced(l, op, |l, x, axes| {
            let squares = l.binary("primitive.mul_v1", x, x)?;
            l.reduce(Reduction::Sum, &squares, axes)
        })
    }),
    ("reduce_log_sum", |l, op| {
        reduced(l, op, |l, x, axes| {
            let sum = l.reduce(Reduction::Sum, x, axes)?;
            Ok(l.unary("primitive.log_v1", &sum))
        })
    }),
    ("reduce_log_sum_exp", |l, op| reduced(l, op, log_sum_exp)),
    ("reduce_argmax", |l, op| position(l, op, true)),
    ("reduce_argmin", |l, op| position(l, op, false)),
    ("argsort", argsort),
    ("topk", topk),
];

/// Reduces the axes that an operator names, and drops them if it doesn't keep them.
fn reduced(
    l: &mut Lowering<'_>,
    op: &Op,
    reduce: impl FnOnce(&mut Lowering<'_>, &Tensor, &[usize]) -> Result<Tensor, String>,
) -> Lowered {
    let x = l.tensor(op, "x")?;
    let axes = l.integers_or(op, "axes", (0..x.rank() as i64).collect())?;
    let axes = axes.into_iter().map(|axis| x.axis(axis)).collect::<Result<Vec<_>, _>>()?;
    let kept = reduce(l, &x, &axes)?;
    if l.flag(op, "keep_dims")? {
        return Ok(vec![kept]);
    }
    let shape: Vec<u64> = (0..x.rank()).filter(|axis| !axes.contains(axis)).map(|axis| x.shape[axis]).collect();
    Ok(vec![l.reshape(&kept, &shape)])
}

fn plain(l: &mut Lowering<'_>, op: &Op, kind: Reduction) -> Lowered {
    reduced(l, op, |l, x, axes| l.reduce(kind, x, axes))
}

/// The largest element is taken out first, so that no power overflows.
fn log_sum_exp(l: &mut Lowering<'_>, x: &Tensor, axes: &[usize]) -> Result<Tensor, String> {
    let most = l.reduce(Reduction::Max, x, axes)?;
    let shifted = l.binary("primitive.sub_v1", x, &most)?;
    let powers = l.unary("primitive.exp_v1", &shifted);
    let sum = l.reduce(Reduction::Sum, &powers, axes)?;
    let log = l.unary("primitive.log_v1", &sum);
    l.binary("primitive.add_v1", &log, &most)
}

/// The order of elements along an axis, with the first `count` places.
fn first_places(
    l: &mut Lowering<'_>,
    x: &Tensor,
    axis: usize,
    descending: bool,
    count: u64,
) -> Result<[Tensor; 2], String> {
    let (values, order) = l.sorted(x, axis, descending)?;
    Ok([l.slice_axis(&values, axis, 0, count), l.slice_axis(&order, axis, 0, count)])
}

fn position(l: &mut Lowering<'_>, op: &Op, largest: bool) -> Lowered {
    let x = l.tensor(op, "x")?;
    let axis = x.axis(l.integer_or(op, "axis", -1)?)?;
    let [_, place] = first_places(l, &x, axis, largest, 1)?;
    let (shape, element) = l.result_type(op, 0)?;
    let place = l.reshape(&place, &shape);
    Ok(vec![l.cast(&place, element)])
}

fn argsort(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let axis = x.axis(l.integer_or(op, "axis", -1)?)?;
    let descending = !l.flag(op, "ascending")?;
    Ok(vec![l.sorted(&x, axis, descending)?.1])
}

fn topk(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let axis = x.axis(l.integer_or(op, "axis", -1)?)?;
    let descending = !l.flag(op, "ascending")?;
    let count = match l.integer_or(op, "k", 1)? {
        -1 => x.shape[axis],
        count => u64::try_from(count).ok().filter(|count| *count <= x.shape[axis]).ok_or("`k` is out of range")?,
    };
    let [values, order] = first_places(l, &x, axis, descending, count)?;
    let indices = l.result_type(op, 1).map_or(ElementType::Si32, |(_, element)| element);
    Ok(vec![values, l.cast(&order, indices)])
}
