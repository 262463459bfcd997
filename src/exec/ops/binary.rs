//! Elementwise ops of two tensors, with NumPy's broadcasting.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Resolved, Row, computing};
use crate::kernel::{Call, Elements, Elementwise, Input, Kernel};
use crate::pool::{Element, Pool};
use crate::resolve::Resolver;
use crate::tensor::{Dims, Tensor, TensorData, broadcast_shape, broadcast_strides, for_each_index};
use anec_kernels::dispatch::{Vectorize, vectorized};
use anec_kernels::pool::{self, LARGE, PART};

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "add" => |op| arithmetic(op, BinaryOp::Add),
    "equal" => |op| compare(op, |x, y| x == y, |x, y| x == y),
    "floor_div" => |op| arithmetic(op, BinaryOp::FloorDiv),
    "greater" => |op| compare(op, |x, y| x > y, |x, y| x > y),
    "greater_equal" => |op| compare(op, |x, y| x >= y, |x, y| x >= y),
    "less" => |op| compare(op, |x, y| x < y, |x, y| x < y),
    "less_equal" => |op| compare(op, |x, y| x <= y, |x, y| x <= y),
    "logical_and" => |op| logical(op, |x, y| x && y),
    "logical_or" => |op| logical(op, |x, y| x || y),
    "logical_xor" => |op| logical(op, |x, y| x != y),
    "maximum" => |op| arithmetic(op, BinaryOp::Maximum),
    "minimum" => |op| arithmetic(op, BinaryOp::Minimum),
    "mod" => |op| arithmetic(op, BinaryOp::Mod),
    "mul" => |op| arithmetic(op, BinaryOp::Mul),
    "not_equal" => |op| compare(op, |x, y| x != y, |x, y| x != y),
    "pow" => |op| arithmetic(op, BinaryOp::Pow),
    "real_div" => |op| arithmetic(op, BinaryOp::RealDiv),
    "select" => |op| Ok(Arc::new(Select { condition: op.input("cond")?, a: op.input("a")?, b: op.input("b")? })),
    "sub" => |op| arithmetic(op, BinaryOp::Sub),
};

/// Arithmetic of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BinaryOp {
    Add,
    FloorDiv,
    Maximum,
    Minimum,
    Mod,
    Mul,
    Pow,
    RealDiv,
    Sub,
}

/// Arithmetic of two tensors.
pub(crate) struct Arithmetic {
    pub op: BinaryOp,
    pub x: Input,
    pub y: Input,
}

fn arithmetic(op: &mut Resolver<'_>, operation: BinaryOp) -> Resolved {
    Ok(Arc::new(Arithmetic { op: operation, x: op.input("x")?, y: op.input("y")? }))
}

/// Evaluates an expression with the float and integer functions of an op.
macro_rules! with_functions {
    ($op:expr, |$float:ident, $integer:ident| $body:expr) => {{
        macro_rules! with {
            ($of_floats:expr, $of_integers:expr) => {{
                let ($float, $integer) = ($of_floats, $of_integers);
                $body
            }};
        }
        match $op {
            BinaryOp::Add => with!(|x: f32, y: f32| x + y, i32::wrapping_add),
            BinaryOp::FloorDiv => with!(|x: f32, y: f32| (x / y).floor(), floor_div),
            BinaryOp::Maximum => with!(f32::max, i32::max),
            BinaryOp::Minimum => with!(f32::min, i32::min),
            BinaryOp::Mod => with!(|x: f32, y: f32| x - (x / y).floor() * y, modulo),
            BinaryOp::Mul => with!(|x: f32, y: f32| x * y, i32::wrapping_mul),
            BinaryOp::Pow => {
                with!(f32::powf, |x: i32, y: i32| u32::try_from(y).map_or(0, |y| x.wrapping_pow(y)))
            }
            BinaryOp::RealDiv => with!(|x: f32, y: f32| x / y, |x: i32, y: i32| x.checked_div(y).unwrap_or(0)),
            BinaryOp::Sub => with!(|x: f32, y: f32| x - y, i32::wrapping_sub),
        }
    }};
}

impl Kernel for Arithmetic {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        // constant exponents of 2 and 0.5 are squares and square roots
        if self.op == BinaryOp::Pow
            && let Ok(y) = call.floats(self.y)
        {
            if y.iter().all(|y| *y == 2.0) {
                return self.combine(call, pool, |x, _| x * x, |x, _| x.wrapping_mul(x));
            }
            if y.iter().all(|y| *y == 0.5) {
                return self.combine(call, pool, |x, _| x.sqrt(), |x, _| x);
            }
        }
        with_functions!(self.op, |float, integer| self.combine(call, pool, float, integer))
    }

    fn elementwise(&self) -> Option<&dyn Elementwise> {
        // the method for a power depends on all exponents
        (self.op != BinaryOp::Pow).then_some(self)
    }
}

impl Elementwise for Arithmetic {
    fn inputs(&self) -> (Input, Option<Input>) {
        (self.x, Some(self.y))
    }

    fn apply(&self, values: &mut [f32], other: Elements<'_>) {
        with_functions!(self.op, |function, _integer| vectorized(Combine { values, other, function }));
    }
}

impl Arithmetic {
    fn combine(
        &self,
        call: &mut Call<'_>,
        pool: &mut Pool,
        float: impl Fn(f32, f32) -> f32 + Sync,
        integer: impl Fn(i32, i32) -> i32 + Sync,
    ) -> Result<(), String> {
        let mut x = call.take(self.x)?;
        let mut y = call.take(self.y)?;
        let shape = broadcast_shape(&x.shape, &y.shape)?;
        // reuse the buffer of an operand that nothing else needs
        if x.shape[..] == shape[..]
            && let Some(Tensor { data, .. }) = Arc::get_mut(&mut x)
        {
            let done = match (data, &y.data) {
                (TensorData::F32(a), TensorData::F32(b)) => {
                    zip_in_place(&shape, a, (&y.shape, b), &float);
                    true
                }
                (TensorData::I32(a), TensorData::I32(b)) => {
                    zip_in_place(&shape, a, (&y.shape, b), &integer);
                    true
                }
                _ => false,
            };
            if done {
                pool.recycle(y);
                return call.push(x);
            }
        } else if y.shape[..] == shape[..]
            && let Some(Tensor { data: TensorData::F32(b), .. }) = Arc::get_mut(&mut y)
            && let TensorData::F32(a) = &x.data
        {
            zip_in_place(&shape, b, (&x.shape, a), |y, x| float(x, y));
            pool.recycle(x);
            return call.push(y);
        }
        let result = match (&x.data, &y.data) {
            (TensorData::F32(a), TensorData::F32(b)) => zip_numbers(pool, &shape, (&x.shape, a), (&y.shape, b), float),
            (TensorData::I32(a), TensorData::I32(b)) => {
                zip_numbers(pool, &shape, (&x.shape, a), (&y.shape, b), integer)
            }
            _ => {
                let (a, b) = (to_floats(&x)?, to_floats(&y)?);
                zip(pool, &shape, (&x.shape, &a), (&y.shape, &b), float)
            }
        };
        pool.recycle(x);
        pool.recycle(y);
        call.push(result)
    }
}

/// Combines numbers with others, in place.
struct Combine<'a, T, F> {
    values: &'a mut [T],
    other: Elements<'a, T>,
    function: F,
}

impl<T: Copy, F: Fn(T, T) -> T> Vectorize for Combine<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Combine { values, other, function } = self;
        match other {
            Elements::Each(other) => values.iter_mut().zip(other).for_each(|(x, y)| *x = function(*x, *y)),
            Elements::One(y) => values.iter_mut().for_each(|x| *x = function(*x, y)),
        }
    }
}

/// Quotient rounded towards minus infinity; 0 for a division by 0, as in NumPy.
fn floor_div(x: i32, y: i32) -> i32 {
    let quotient = x.checked_div(y).unwrap_or(0);
    if y != 0 && x.wrapping_rem(y) != 0 && (x < 0) != (y < 0) { quotient - 1 } else { quotient }
}

/// Remainder with the sign of the divisor.
fn modulo(x: i32, y: i32) -> i32 {
    if y == 0 { 0 } else { x.wrapping_sub(floor_div(x, y).wrapping_mul(y)) }
}

/// Joint iteration over two tensors: the result's shape with adjacent axes merged where both operands allow it, so that
/// the innermost axis is as long as possible.
struct BroadcastLoop {
    shape: Dims,
    x: Dims,
    y: Dims,
    /// Length of the innermost run, and the steps (0 or 1) along it.
    inner: (usize, usize, usize),
}

fn walk(shape: &[usize], x: &[usize], y: &[usize]) -> BroadcastLoop {
    let (x, y) = (broadcast_strides(x, shape), broadcast_strides(y, shape));
    let mut merged = SmallVec::<[(usize, usize, usize); 8]>::new();
    for ((size, x), y) in shape.iter().zip(x).zip(y) {
        if *size == 1 {
            continue;
        }
        match merged.last_mut() {
            Some((outer, outer_x, outer_y)) if *outer_x == x * size && *outer_y == y * size => {
                (*outer, *outer_x, *outer_y) = (*outer * size, x, y);
            }
            _ => merged.push((*size, x, y)),
        }
    }
    let inner = merged.pop().unwrap_or((1, 1, 1));
    BroadcastLoop {
        shape: merged.iter().map(|m| m.0).collect(),
        x: merged.iter().map(|m| m.1).collect(),
        y: merged.iter().map(|m| m.2).collect(),
        inner,
    }
}

impl BroadcastLoop {
    /// Offsets of both operands at the start of a run.
    fn starts(&self, run: usize) -> (usize, usize) {
        let mut rest = run;
        let axes = self.shape.iter().zip(&self.x).zip(&self.y).rev();
        axes.fold((0, 0), |(i, j), ((size, x), y)| {
            let index = rest % size;
            rest /= size;
            (i + index * x, j + index * y)
        })
    }

    /// Number of runs in a part that is worth a thread; `None` if there is too little work to divide.
    fn part(&self) -> Option<usize> {
        let (runs, length) = (self.shape.iter().product::<usize>(), self.inner.0);
        (runs > 1 && runs * length > LARGE).then(|| (PART / length).max(1))
    }
}

/// Applies `function` to each pair of numbers.
fn zip_numbers<T: Element + Send + Sync>(
    pool: &mut Pool,
    shape: &[usize],
    (x_shape, x): (&[usize], &[T]),
    (y_shape, y): (&[usize], &[T]),
    function: impl Fn(T, T) -> T + Sync,
) -> Arc<Tensor> {
    if x_shape == shape && x.len() > LARGE {
        // threads write to existing elements
        return pool.written(shape, |out| zip_into(shape, (out, Some(x)), (y_shape, y), function));
    }
    zip(pool, shape, (x_shape, x), (y_shape, y), function)
}

/// Applies `function` to each pair.
fn zip<X: Copy, Y: Copy, R: Element>(
    pool: &mut Pool,
    shape: &[usize],
    (x_shape, x): (&[usize], &[X]),
    (y_shape, y): (&[usize], &[Y]),
    function: impl Fn(X, Y) -> R,
) -> Arc<Tensor> {
    pool.make(shape, |out| {
        if shape.contains(&0) {
            return;
        }
        let walk = walk(shape, x_shape, y_shape);
        let (length, x_step, y_step) = walk.inner;
        for_each_index(&walk.shape, [&walk.x, &walk.y], |[i, j]| match (x_step, y_step) {
            (1, 1) => out.extend(x[i..][..length].iter().zip(&y[j..][..length]).map(|(x, y)| function(*x, *y))),
            (1, 0) => {
                let y = y[j];
                out.extend(x[i..][..length].iter().map(|x| function(*x, y)));
            }
            (0, 1) => {
                let x = x[i];
                out.extend(y[j..][..length].iter().map(|y| function(x, *y)));
            }
            _ => out.extend((0..length).map(|k| function(x[i + k * x_step], y[j + k * y_step]))),
        });
    })
}

/// Applies `function` to each pair, in place of the first operand; `x` has the shape of the result.
fn zip_in_place<T: Copy + Send + Sync>(
    x_shape: &[usize],
    x: &mut [T],
    y: (&[usize], &[T]),
    function: impl Fn(T, T) -> T + Sync,
) {
    zip_into(x_shape, (x, None), y, function);
}

/// Applies `function` to each pair, into `out`, which has the shape of `x`; without `x`, `out` is the first operand.
fn zip_into<T: Copy + Send + Sync>(
    shape: &[usize],
    (out, x): (&mut [T], Option<&[T]>),
    (y_shape, y): (&[usize], &[T]),
    function: impl Fn(T, T) -> T + Sync,
) {
    if out.is_empty() {
        return;
    }
    let walk = walk(shape, shape, y_shape);
    let (length, _, y_step) = walk.inner;
    // part of a run from `i` on; `y` continues at `j`
    let combine = |row: &mut [T], i: usize, j: usize| {
        if let Some(x) = x {
            row.copy_from_slice(&x[i..][..row.len()]);
        }
        let other = if y_step == 0 { Elements::One(y[j]) } else { Elements::Each(&y[j..]) };
        vectorized(Combine { values: row, other, function: &function });
    };
    if walk.shape.is_empty() {
        return pool::for_each_part(out, |first, part| combine(part, first, first * y_step));
    }
    if let Some(runs) = walk.part() {
        return pool::for_each_chunk(out, runs * length, |i, part| {
            let rows = part.chunks_exact_mut(length).enumerate();
            rows.for_each(|(r, row)| combine(row, (i * runs + r) * length, walk.starts(i * runs + r).1));
        });
    }
    let mut rows = out.chunks_exact_mut(length).enumerate();
    for_each_index(&walk.shape, [&walk.y], |[j]| {
        if let Some((run, row)) = rows.next() {
            combine(row, run * length, j);
        }
    });
}

/// Converts integers to floats when only one operand is floats.
fn to_floats(tensor: &Tensor) -> Result<Vec<f32>, String> {
    match &tensor.data {
        TensorData::F32(v) => Ok(v.clone()),
        TensorData::I32(v) => Ok(v.iter().map(|v| *v as f32).collect()),
        TensorData::Bool(_) => Err("booleans can't be computed with".into()),
    }
}

/// Comparison of two tensors.
struct Compare<F, I> {
    x: Input,
    y: Input,
    float: F,
    integer: I,
}

fn compare(
    op: &mut Resolver<'_>,
    float: impl Fn(f32, f32) -> bool + Send + Sync + 'static,
    integer: impl Fn(i32, i32) -> bool + Send + Sync + 'static,
) -> Resolved {
    Ok(Arc::new(Compare { x: op.input("x")?, y: op.input("y")?, float, integer }))
}

impl<F, I> Kernel for Compare<F, I>
where
    F: Fn(f32, f32) -> bool + Send + Sync + 'static,
    I: Fn(i32, i32) -> bool + Send + Sync + 'static,
{
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (x, y) = (call.tensor(self.x)?, call.tensor(self.y)?);
        let shape = broadcast_shape(&x.shape, &y.shape)?;
        let bits = |v: &[bool]| -> Vec<i32> { v.iter().map(|b| i32::from(*b)).collect() };
        let (float, integer) = (&self.float, &self.integer);
        let result = match (&x.data, &y.data) {
            (TensorData::F32(a), TensorData::F32(b)) => zip(pool, &shape, (&x.shape, a), (&y.shape, b), float),
            (TensorData::I32(a), TensorData::I32(b)) => zip(pool, &shape, (&x.shape, a), (&y.shape, b), integer),
            (TensorData::Bool(a), TensorData::Bool(b)) => {
                zip(pool, &shape, (&x.shape, &bits(a)), (&y.shape, &bits(b)), integer)
            }
            _ => zip(pool, &shape, (&x.shape, &to_floats(x)?), (&y.shape, &to_floats(y)?), float),
        };
        call.push(result)
    }
}

/// Logical op of two tensors.
struct Logical {
    x: Input,
    y: Input,
    function: fn(bool, bool) -> bool,
}

fn logical(op: &mut Resolver<'_>, function: fn(bool, bool) -> bool) -> Resolved {
    Ok(Arc::new(Logical { x: op.input("x")?, y: op.input("y")?, function }))
}

impl Kernel for Logical {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (x, y) = (call.tensor(self.x)?, call.tensor(self.y)?);
        let shape = broadcast_shape(&x.shape, &y.shape)?;
        let (Some(a), Some(b)) = (x.booleans(), y.booleans()) else {
            return Err(format!("{} and {} are not booleans", x.data.kind(), y.data.kind()));
        };
        let result = zip(pool, &shape, (&x.shape, a), (&y.shape, b), self.function);
        call.push(result)
    }
}

/// `a` where `condition`, else `b`; all three broadcast.
struct Select {
    condition: Input,
    a: Input,
    b: Input,
}

impl Kernel for Select {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (condition, a, b) = (call.tensor(self.condition)?, call.tensor(self.a)?, call.tensor(self.b)?);
        let shape = broadcast_shape(&condition.shape, &broadcast_shape(&a.shape, &b.shape)?)?;
        let of_condition = broadcast_strides(&condition.shape, &shape);
        let (of_a, of_b) = (broadcast_strides(&a.shape, &shape), broadcast_strides(&b.shape, &shape));
        let flag = |i: usize| match &condition.data {
            TensorData::Bool(v) => v[i],
            TensorData::I32(v) => v[i] != 0,
            TensorData::F32(v) => v[i] != 0.0,
        };
        macro_rules! pick {
            ($x:expr, $y:expr) => {
                pool.make(&shape, |out| {
                    for_each_index(&shape, [&of_condition, &of_a, &of_b], |[f, i, j]| {
                        out.push(if flag(f) { $x[i] } else { $y[j] });
                    });
                })
            };
        }
        let result = match (&a.data, &b.data) {
            (TensorData::F32(x), TensorData::F32(y)) => pick!(x, y),
            (TensorData::I32(x), TensorData::I32(y)) => pick!(x, y),
            (TensorData::Bool(x), TensorData::Bool(y)) => pick!(x, y),
            (x, y) => return Err(format!("`a` holds {}, `b` holds {}", x.kind(), y.kind())),
        };
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, b, f, i, run, try_run};

    #[test]
    fn every_way_of_broadcasting_gives_what_the_shapes_say() {
        let column = || f(&[2, 1], &[10.0, 20.0]);
        let row = || f(&[3], &[1.0, 2.0, 3.0]);
        let full = || f(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let sub = |x, y| run("sub", vec![("x", x), ("y", y)]);
        assert_close(&sub(full(), full()), &[2, 3], &[0.0; 6]);
        assert_close(&sub(full(), row()), &[2, 3], &[0.0, 0.0, 0.0, 3.0, 3.0, 3.0]);
        assert_close(&sub(row(), full()), &[2, 3], &[0.0, 0.0, 0.0, -3.0, -3.0, -3.0]);
        assert_close(&sub(full(), column()), &[2, 3], &[-9.0, -8.0, -7.0, -16.0, -15.0, -14.0]);
        assert_close(&sub(column(), row()), &[2, 3], &[9.0, 8.0, 7.0, 19.0, 18.0, 17.0]);
        assert_close(&sub(full(), f(&[], &[1.0])), &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_close(&sub(f(&[1, 1], &[1.0]), row()), &[1, 3], &[0.0, -1.0, -2.0]);
        let problem = try_run("sub", vec![("x", full()), ("y", f(&[2], &[0.0; 2]))]).unwrap_err();
        assert!(problem.contains("[2, 3]") && problem.contains("[2]"), "{problem}");
    }

    #[test]
    fn parallel_results_equal_those_of_one_thread() {
        let (rows, columns) = (300, 140);
        let values =
            |count: usize, step: usize| -> Vec<f32> { (0..count).map(|i| ((i * step) % 997) as f32).collect() };
        let full = || f(&[1, rows, 1, columns], &values(rows * columns, 7));
        let expected = |y: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
            let x = values(rows * columns, 7);
            (0..rows * columns).map(|i| x[i] - y(i / columns, i % columns)).collect()
        };
        let (of_row, of_column) = (values(rows, 31), values(columns, 5));
        let row = run("sub", vec![("x", full()), ("y", f(&[1, rows, 1, 1], &of_row))]);
        assert_eq!(row.floats().unwrap(), expected(&|r, _| of_row[r]));
        let column = run("sub", vec![("x", full()), ("y", f(&[columns], &of_column))]);
        assert_eq!(column.floats().unwrap(), expected(&|_, c| of_column[c]));
        // a shared operand is copied first
        let shared = full();
        let column = run("sub", vec![("x", shared.clone()), ("y", f(&[columns], &of_column))]);
        assert_eq!(column.floats().unwrap(), expected(&|_, c| of_column[c]));
        let itself = run("sub", vec![("x", shared.clone()), ("y", shared)]);
        assert_eq!(itself.floats().unwrap(), vec![0.0; rows * columns]);
    }

    #[test]
    fn a_shared_operand_is_left_as_it_is() {
        let x = f(&[2], &[1.0, 2.0]);
        assert_close(&run("mul", vec![("x", x.clone()), ("y", x.clone())]), &[2], &[1.0, 4.0]);
        let crate::value::Value::Tensor(x) = x else { panic!("a tensor") };
        assert_eq!(x.floats().unwrap(), [1.0, 2.0]);
    }

    #[test]
    fn integers_divide_towards_minus_infinity() {
        let (x, y) = (i(&[4], &[7, -7, 7, -7]), i(&[4], &[2, 2, -2, -2]));
        assert_eq!(run("floor_div", vec![("x", x.clone()), ("y", y.clone())]).integers().unwrap(), [3, -4, -4, 3]);
        assert_eq!(run("mod", vec![("x", x), ("y", y)]).integers().unwrap(), [1, 1, -1, -1]);
        let zero = run("floor_div", vec![("x", i(&[1], &[5])), ("y", i(&[1], &[0]))]);
        assert_eq!(zero.integers().unwrap(), [0]);
        assert_close(&run("mod", vec![("x", f(&[1], &[-0.5])), ("y", f(&[1], &[2.0]))]), &[1], &[1.5]);
    }

    #[test]
    fn powers_and_extremes() {
        let x = || f(&[2], &[4.0, 9.0]);
        assert_close(&run("pow", vec![("x", x()), ("y", f(&[], &[2.0]))]), &[2], &[16.0, 81.0]);
        assert_close(&run("pow", vec![("x", x()), ("y", f(&[], &[0.5]))]), &[2], &[2.0, 3.0]);
        assert_close(&run("pow", vec![("x", x()), ("y", f(&[2], &[-1.0, 1.0]))]), &[2], &[0.25, 9.0]);
        assert_close(&run("maximum", vec![("x", x()), ("y", f(&[], &[5.0]))]), &[2], &[5.0, 9.0]);
        assert_close(&run("minimum", vec![("x", x()), ("y", f(&[], &[5.0]))]), &[2], &[4.0, 5.0]);
        assert_close(&run("real_div", vec![("x", x()), ("y", f(&[2], &[2.0, 3.0]))]), &[2], &[2.0, 3.0]);
    }

    #[test]
    fn comparisons_and_selection() {
        let less = run("less", vec![("x", i(&[3], &[1, 2, 3])), ("y", i(&[], &[2]))]);
        assert_eq!(less.booleans().unwrap(), [true, false, false]);
        let both = run("logical_and", vec![("x", b(&[2], &[true, true])), ("y", b(&[2], &[true, false]))]);
        assert_eq!(both.booleans().unwrap(), [true, false]);
        let chosen = run(
            "select",
            vec![("cond", b(&[2, 1], &[true, false])), ("a", f(&[2], &[1.0, 2.0])), ("b", f(&[], &[-1.0]))],
        );
        assert_close(&chosen, &[2, 2], &[1.0, 2.0, -1.0, -1.0]);
    }
}
