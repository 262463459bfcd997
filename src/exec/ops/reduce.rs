//! Ops that reduce axes.

use std::borrow::Cow;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Resolved, Row, computing};
use crate::kernel::{Call, Input, Kernel, Reduction};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::strided::View;
use crate::tensor::{Dims, TensorData, axis_index};
use anec_kernels::pool::{self, LARGE};
use anec_kernels::reduce::{
    COLUMNS, max, max_of_columns, sum, sum_of, sum_of_columns, sum_of_squares, sum_of_squares_of_columns,
};

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "reduce_argmax" => |c| position(c, |a, b| a > b),
    "reduce_argmin" => |c| position(c, |a, b| a < b),
    "reduce_l1_norm" => |c| reduce(c, |v| sum_of(v, f32::abs), |v| v.iter().map(|v| v.wrapping_abs()).fold(0, i32::wrapping_add)),
    "reduce_l2_norm" => |c| reduce(c, |v| sum_of_squares(v).sqrt(), |v| sum_of(&float(v), |v| v * v).sqrt() as i32),
    "reduce_log_sum" => |c| reduce(c, |v| sum(v).ln(), |v| sum(&float(v)).ln() as i32),
    "reduce_log_sum_exp" => |c| reduce(c, log_sum_exp, |v| log_sum_exp(&float(v)) as i32),
    "reduce_max" => |c| reduce_beside(c, (max, max_of_columns), |v| v.iter().copied().max().unwrap_or(i32::MIN)),
    "reduce_mean" => |c| reduce_beside(c, (|v| sum(v) / v.len() as f32, mean_of_columns), mean),
    "reduce_min" => |c| reduce(c, |v| v.iter().copied().fold(f32::INFINITY, f32::min), |v| v.iter().copied().min().unwrap_or(i32::MAX)),
    "reduce_prod" => |c| reduce(c, |v| v.iter().product(), |v| v.iter().copied().fold(1, i32::wrapping_mul)),
    "reduce_sum" => |c| reduce_beside(c, (sum, sum_of_columns), |v| v.iter().copied().fold(0, i32::wrapping_add)),
    "reduce_sum_square" => |c| reduce_beside(c, (sum_of_squares, sum_of_squares_of_columns), |v| v.iter().map(|v| v.wrapping_mul(*v)).fold(0, i32::wrapping_add)),
};

fn float(values: &[i32]) -> Vec<f32> {
    values.iter().map(|v| *v as f32).collect()
}

fn mean(values: &[i32]) -> i32 {
    let sum: i64 = values.iter().map(|v| i64::from(*v)).sum();
    sum.checked_div(values.len() as i64).unwrap_or(0) as i32
}

fn mean_of_columns(values: &[f32], stride: usize, depth: usize) -> [f32; COLUMNS] {
    sum_of_columns(values, stride, depth).map(|sum| sum / depth as f32)
}

fn log_sum_exp(values: &[f32]) -> f32 {
    let top = max(values);
    if top.is_finite() { sum_of(values, |v| (v - top).exp()).ln() + top } else { top }
}

/// Whether each axis is reduced.
pub(super) type Reduced = SmallVec<[bool; 8]>;

/// Axes in an order that puts reduced ones last.
fn order(reduced: &[bool]) -> Dims {
    let axes = |last: bool| (0..reduced.len()).filter(move |axis| reduced[*axis] == last);
    axes(false).chain(axes(true)).collect()
}

/// Returns whether elements that are reduced together are contiguous already.
pub(super) fn is_gathered(shape: &[usize], reduced: &[bool]) -> bool {
    order(reduced).iter().filter(|axis| shape[**axis] != 1).is_sorted()
}

/// Elements in an order in which those that are reduced together are contiguous.
pub(super) fn gathered<'a, T: Copy + Send + Sync>(shape: &[usize], values: &'a [T], reduced: &[bool]) -> Cow<'a, [T]> {
    if is_gathered(shape, reduced) {
        Cow::Borrowed(values)
    } else {
        Cow::Owned(View::whole(shape).permute(&order(reduced)).read(values))
    }
}

/// Axes of the parameter `axes`; all if it is missing.
pub(super) struct Axes(Option<Vec<i64>>);

impl Axes {
    pub fn resolve(op: &Resolver<'_>) -> Result<Self, String> {
        Ok(Axes(op.known_integers("axes")?.map(|axes| axes.to_vec())))
    }

    /// Axes of a tensor of this rank.
    pub fn of(&self, rank: usize) -> Result<Reduced, String> {
        let Some(axes) = &self.0 else { return Ok(SmallVec::from_elem(true, rank)) };
        let mut reduced = SmallVec::from_elem(false, rank);
        for axis in axes {
            reduced[axis_index(*axis, rank)?] = true;
        }
        Ok(reduced)
    }
}

fn result_shape(shape: &[usize], reduced: &[bool], keep: bool) -> Dims {
    let sizes = shape.iter().zip(reduced);
    if keep {
        sizes.map(|(size, reduced)| if *reduced { 1 } else { *size }).collect()
    } else {
        sizes.filter(|(_, reduced)| !**reduced).map(|(size, _)| *size).collect()
    }
}

/// Sizes of the axes before, among and behind the reduced ones, if these are adjacent.
fn planes(shape: &[usize], reduced: &[bool]) -> Option<[usize; 3]> {
    let mut sizes = [1; 3];
    let mut part = 0;
    for (size, reduced) in shape.iter().zip(reduced).filter(|(size, _)| **size != 1) {
        part = match (part, reduced) {
            (0, false) => 0,
            (0 | 1, true) => 1,
            (1 | 2, false) => 2,
            _ => return None,
        };
        sizes[part] *= size;
    }
    Some(sizes)
}

/// Reduces columns of the planes `[outer, depth, inner]`, [`COLUMNS`] at a time; the remaining ones are gathered.
fn reduce_planes(
    (floats, columns): (impl Fn(&[f32]) -> f32 + Sync, OfColumns),
    [_, depth, inner]: [usize; 3],
    values: &[f32],
    out: &mut [f32],
) {
    for (plane, out) in values.chunks_exact(depth * inner).zip(out.chunks_exact_mut(inner)) {
        let part = |i: usize, out: &mut [f32]| {
            let values = &plane[i * COLUMNS..];
            match <&mut [f32; COLUMNS]>::try_from(&mut *out) {
                Ok(out) => *out = columns(values, inner, depth),
                Err(_) => {
                    let column = |c: usize| -> Vec<f32> { (0..depth).map(|k| values[k * inner + c]).collect() };
                    out.iter_mut().enumerate().for_each(|(c, out)| *out = floats(&column(c)));
                }
            }
        };
        if plane.len() > LARGE {
            pool::for_each_chunk(out, COLUMNS, part);
        } else {
            out.chunks_mut(COLUMNS).enumerate().for_each(|(i, out)| part(i, out));
        }
    }
}

/// Reduction of [`COLUMNS`] adjacent columns: elements, stride of rows, number of rows.
type OfColumns = fn(&[f32], usize, usize) -> [f32; COLUMNS];

/// Reduction of some axes to one number each.
struct Reduce<F, I> {
    x: Input,
    axes: Axes,
    keep: bool,
    floats: F,
    /// Faster form of `floats` for adjacent columns.
    columns: Option<OfColumns>,
    integers: I,
}

fn reduce(
    op: &mut Resolver<'_>,
    floats: impl Fn(&[f32]) -> f32 + Send + Sync + 'static,
    integers: impl Fn(&[i32]) -> i32 + Send + Sync + 'static,
) -> Resolved {
    let (x, axes, keep) = (op.input("x")?, Axes::resolve(op)?, op.flag("keep_dims")?);
    Ok(Arc::new(Reduce { x, axes, keep, floats, columns: None, integers }))
}

/// As [`reduce`], with a form of the function for adjacent columns.
fn reduce_beside(
    op: &mut Resolver<'_>,
    (floats, columns): (impl Fn(&[f32]) -> f32 + Send + Sync + 'static, OfColumns),
    integers: impl Fn(&[i32]) -> i32 + Send + Sync + 'static,
) -> Resolved {
    let (x, axes, keep) = (op.input("x")?, Axes::resolve(op)?, op.flag("keep_dims")?);
    Ok(Arc::new(Reduce { x, axes, keep, floats, columns: Some(columns), integers }))
}

impl<F, I> Kernel for Reduce<F, I>
where
    F: Fn(&[f32]) -> f32 + Send + Sync + 'static,
    I: Fn(&[i32]) -> i32 + Send + Sync + 'static,
{
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let reduced = self.axes.of(x.rank())?;
        let count: usize = x.shape.iter().zip(&reduced).filter(|(_, r)| **r).map(|(n, _)| *n).product();
        if count == 0 {
            return Err(format!("a tensor of shape {:?} has nothing to reduce", x.shape));
        }
        let shape = result_shape(&x.shape, &reduced, self.keep);
        let planes = planes(&x.shape, &reduced).filter(|[_, _, inner]| *inner > 1);
        let result = match &x.data {
            TensorData::F32(v) if let (Some(columns), Some(sizes)) = (self.columns, planes) => {
                pool.make(&shape, |out| {
                    out.resize(sizes[0] * sizes[2], 0.0);
                    reduce_planes((&self.floats, columns), sizes, v, out);
                })
            }
            TensorData::F32(v) => {
                let gathered = gathered(&x.shape, v, &reduced);
                pool.make(&shape, |out| out.extend(gathered.chunks_exact(count).map(&self.floats)))
            }
            TensorData::I32(v) => {
                let gathered = gathered(&x.shape, v, &reduced);
                pool.make(&shape, |out| out.extend(gathered.chunks_exact(count).map(&self.integers)))
            }
            TensorData::Bool(_) => return Err("`x` holds booleans, not numbers".into()),
        };
        call.push(result)
    }

    fn reduction(&self) -> Option<&dyn Reduction> {
        self.keep.then_some(self)
    }
}

impl<F, I> Reduction for Reduce<F, I>
where
    F: Fn(&[f32]) -> f32 + Send + Sync,
    I: Sync,
{
    fn input(&self) -> Input {
        self.x
    }

    fn axis(&self, rank: usize) -> Option<usize> {
        let reduced = self.axes.of(rank).ok()?;
        let mut axes = (0..rank).filter(|axis| reduced[*axis]);
        axes.next().filter(|_| axes.next().is_none())
    }

    fn reduce(&self, row: &[f32]) -> f32 {
        (self.floats)(row)
    }
}

/// Position of the first best element along an axis.
struct Position {
    x: Input,
    axis: i64,
    keep: bool,
    beats: fn(f32, f32) -> bool,
}

fn position(op: &mut Resolver<'_>, beats: fn(f32, f32) -> bool) -> Resolved {
    let (axis, keep) = (op.integer("axis")?, op.flag("keep_dims")?);
    Ok(Arc::new(Position { x: op.input("x")?, axis, keep, beats }))
}

impl Kernel for Position {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let axis = axis_index(self.axis, x.rank())?;
        let reduced: Reduced = (0..x.rank()).map(|i| i == axis).collect();
        let count = x.shape[axis];
        if count == 0 {
            return Err(format!("a tensor of shape {:?} has nothing to reduce", x.shape));
        }
        let values: Cow<'_, [f32]> = match &x.data {
            TensorData::F32(v) => gathered(&x.shape, v, &reduced),
            TensorData::I32(v) => Cow::Owned(float(&gathered(&x.shape, v, &reduced))),
            TensorData::Bool(_) => return Err("`x` holds booleans, not numbers".into()),
        };
        let beats = self.beats;
        let first = |row: &[f32]| {
            let best = row.iter().enumerate().reduce(|best, next| if beats(*next.1, *best.1) { next } else { best });
            best.map_or(0, |(i, _)| i as i32)
        };
        let shape = result_shape(&x.shape, &reduced, self.keep);
        let result = pool.make(&shape, |out: &mut Vec<i32>| out.extend(values.chunks_exact(count).map(first)));
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, b, f, i, run, try_run};

    #[test]
    fn axes_are_reduced_wherever_they_are() {
        let x = || f(&[2, 3], &[1.0, 5.0, 3.0, -4.0, 2.0, 0.5]);
        let along = |operator, axis: i32, keep: bool| {
            run(operator, vec![("x", x()), ("axes", i(&[1], &[axis])), ("keep_dims", b(&[], &[keep]))])
        };
        assert_close(&along("reduce_sum", 1, false), &[2], &[9.0, -1.5]);
        assert_close(&along("reduce_sum", 0, true), &[1, 3], &[-3.0, 7.0, 3.5]);
        assert_close(&along("reduce_mean", -1, true), &[2, 1], &[3.0, -0.5]);
        assert_close(&along("reduce_max", 0, false), &[3], &[1.0, 5.0, 3.0]);
        assert_close(&along("reduce_min", 1, false), &[2], &[1.0, -4.0]);
        assert_close(&along("reduce_sum_square", 1, false), &[2], &[35.0, 20.25]);
        assert_close(&along("reduce_l2_norm", 1, false), &[2], &[35f32.sqrt(), 4.5]);
        assert_close(&along("reduce_log_sum_exp", 1, false), &[2], &[5.142_931_5, 2.203_437_9]);
        assert_close(&run("reduce_prod", vec![("x", x())]), &[], &[-60.0]);
        assert!(try_run("reduce_sum", vec![("x", x()), ("axes", i(&[1], &[2]))]).is_err());
    }

    #[test]
    fn columns_are_reduced_as_if_they_were_gathered() {
        let noise =
            |count: usize| -> Vec<f32> { (0..count).map(|i| ((i * 7919) % 1013) as f32 / 17.0 - 30.0).collect() };
        for shape in [[2, 3, 5, 1], [1, 40, 1, 37], [3, 17, 1, 16], [1, 900, 1, 130]] {
            let values = noise(shape.iter().product());
            // the same numbers with the reduced axis last
            let [outer, depth, ..] = shape;
            let inner = shape[2] * shape[3];
            let turned: Vec<f32> = (0..values.len())
                .map(|i| values[(i / (depth * inner) * depth + i % depth) * inner + i / depth % inner])
                .collect();
            for operator in ["reduce_sum", "reduce_mean", "reduce_max", "reduce_sum_square"] {
                let along = |x, axis: i32| {
                    run(operator, vec![("x", x), ("axes", i(&[1], &[axis])), ("keep_dims", b(&[], &[true]))])
                };
                let found = along(f(&shape, &values), 1);
                assert_eq!(found.shape[..], [shape[0], 1, shape[2], shape[3]]);
                let expected = along(f(&[outer, inner, depth], &turned), 2);
                assert_eq!(found.floats(), expected.floats(), "{operator} {shape:?}");
            }
        }
    }

    #[test]
    fn the_first_of_equal_extremes_is_found() {
        let x = || f(&[2, 3], &[1.0, 7.0, 7.0, 4.0, 2.0, 5.0]);
        let argmax = run("reduce_argmax", vec![("x", x()), ("axis", i(&[], &[1]))]);
        assert_eq!((argmax.shape.as_slice(), argmax.integers().unwrap()), (&[2][..], &[1, 2][..]));
        let argmin = run("reduce_argmin", vec![("x", x()), ("axis", i(&[], &[0])), ("keep_dims", b(&[], &[true]))]);
        assert_eq!((argmin.shape.as_slice(), argmin.integers().unwrap()), (&[1, 3][..], &[0, 1, 1][..]));
    }
}
