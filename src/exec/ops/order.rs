//! Ops that sort, count, and generate tensors.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{Resolved, Row, computing, make_like};
use crate::kernel::{Call, Input, Integers, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::tensor::{Dims, Tensor, TensorData, axis_index, strides};

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "argsort" => |op| Sort::resolve(op, false),
    "band_part" => BandPart::resolve,
    "cumsum" => CumulativeSum::resolve,
    "fill" => |op| {
        let shape = Shape::Given(op.integers("shape")?);
        Ok(Arc::new(Fill { shape, value: op.optional_input("value")? }))
    },
    "fill_like" => |op| {
        let shape = Shape::Like(op.input("ref_tensor")?);
        Ok(Arc::new(Fill { shape, value: op.optional_input("value")? }))
    },
    "non_zero" => |op| Ok(Arc::new(NonZero { x: op.input("x")? })),
    "one_hot" => OneHot::resolve,
    "range_1d" => RangeOp::resolve,
    "topk" => |op| Sort::resolve(op, true),
};

/// Maximum elements of a generated tensor.
const MAX_ELEMENTS: usize = 1 << 31;

/// Sizes before, along and after an axis.
fn split_at_axis(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}

/// Indices of the first `count` sorted elements of each line along an axis; stable. NaN counts as the smallest.
fn sorted(x: &Tensor, axis: usize, ascending: bool, count: usize) -> Result<Vec<Vec<usize>>, String> {
    let (outer, size, inner) = split_at_axis(&x.shape, axis);
    let compare: Box<dyn Fn(usize, usize) -> Ordering> = match &x.data {
        TensorData::F32(v) => {
            Box::new(|a, b| v[a].partial_cmp(&v[b]).unwrap_or_else(|| v[b].is_nan().cmp(&v[a].is_nan())))
        }
        TensorData::I32(v) => Box::new(|a, b| v[a].cmp(&v[b])),
        TensorData::Bool(_) => return Err("`x` holds booleans, not numbers".into()),
    };
    let mut lines = Vec::with_capacity(outer * inner);
    for line in 0..outer * inner {
        let start = line / inner * size * inner + line % inner;
        let mut places: Vec<usize> = (0..size).map(|i| start + i * inner).collect();
        let order = |a: &usize, b: &usize| (if ascending { compare(*a, *b) } else { compare(*b, *a) }).then(a.cmp(b));
        if count < size {
            places.select_nth_unstable_by(count, order);
            places.truncate(count);
        }
        places.sort_unstable_by(order);
        lines.push(places);
    }
    Ok(lines)
}

/// Indices of sorted elements as tensor elements: indices into the data, and positions along the axis.
fn lines_to_places(lines: &[Vec<usize>], shape: &[usize], axis: usize, count: usize) -> (Vec<usize>, Vec<i32>) {
    let (outer, size, inner) = split_at_axis(shape, axis);
    let mut places = vec![0; outer * count * inner];
    for (line, order) in lines.iter().enumerate() {
        for (i, place) in order[..count].iter().enumerate() {
            places[(line / inner * count + i) * inner + line % inner] = *place;
        }
    }
    let along = places.iter().map(|place| (place / inner % size) as i32).collect();
    (places, along)
}

/// Sorted positions along an axis, or the `k` largest (or smallest) elements with their positions.
struct Sort {
    x: Input,
    axis: i64,
    ascending: bool,
    top: Option<Top>,
}

struct Top {
    k: i64,
    return_indices: bool,
}

impl Sort {
    fn resolve(op: &mut Resolver<'_>, top: bool) -> Resolved {
        let (axis, ascending) = (op.integer("axis")?, op.flag("ascending")?);
        let top = match top {
            true => Some(Top {
                k: op.integer("k")?,
                return_indices: !op.has("return_indices") || op.flag("return_indices")?,
            }),
            false => None,
        };
        Ok(Arc::new(Sort { x: op.input("x")?, axis, ascending, top }))
    }
}

impl Kernel for Sort {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let axis = axis_index(self.axis, x.rank())?;
        let count = match &self.top {
            None | Some(Top { k: -1, .. }) => x.shape[axis],
            Some(Top { k, .. }) => usize::try_from(*k).unwrap_or(usize::MAX),
        };
        if count > x.shape[axis] {
            return Err(format!("`k` is {count}, but axis {axis} has {} elements", x.shape[axis]));
        }
        let lines = sorted(x, axis, self.ascending, count)?;
        let (places, along) = lines_to_places(&lines, &x.shape, axis, count);
        let mut shape = Dims::from_slice(&x.shape);
        shape[axis] = count;
        let indices = pool.copied(&shape, &along);
        let Some(top) = &self.top else { return call.push(indices) };
        let values = make_like!(pool, &shape, &x.data, (v, out) => out.extend(places.iter().map(|place| v[*place])));
        call.push(values)?;
        if top.return_indices { call.push(indices) } else { Ok(()) }
    }
}

struct CumulativeSum {
    x: Input,
    axis: i64,
    exclusive: bool,
    reverse: bool,
}

impl CumulativeSum {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let (exclusive, reverse) = (op.flag("exclusive")?, op.flag("reverse")?);
        Ok(Arc::new(CumulativeSum { x: op.input("x")?, axis: op.integer("axis")?, exclusive, reverse }))
    }
}

impl Kernel for CumulativeSum {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (exclusive, reverse) = (self.exclusive, self.reverse);
        let mut x = call.take(self.x)?;
        let axis = axis_index(self.axis, x.rank())?;
        let (outer, size, inner) = split_at_axis(&x.shape, axis);
        fn run<T: Copy + Default>(
            values: &mut [T],
            (outer, size, inner): (usize, usize, usize),
            (exclusive, reverse): (bool, bool),
            add: impl Fn(T, T) -> T,
        ) {
            for line in 0..outer * inner {
                let start = line / inner * size * inner + line % inner;
                let mut total = T::default();
                for i in 0..size {
                    let at = start + if reverse { size - 1 - i } else { i } * inner;
                    let with = add(total, values[at]);
                    values[at] = if exclusive { total } else { with };
                    total = with;
                }
            }
        }
        match &mut pool.make_mut(&mut x).data {
            TensorData::F32(v) => run(v, (outer, size, inner), (exclusive, reverse), |a, b| a + b),
            TensorData::I32(v) => run(v, (outer, size, inner), (exclusive, reverse), i32::wrapping_add),
            TensorData::Bool(_) => return Err("`x` holds booleans, not numbers".into()),
        }
        call.push(x)
    }
}

/// Keeps up to `lower` diagonals below and `upper` above the main diagonal of the last two axes; -1 keeps all.
struct BandPart {
    x: Input,
    lower: i64,
    upper: i64,
}

impl BandPart {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let (lower, upper) = (op.integer("lower")?, op.integer("upper")?);
        Ok(Arc::new(BandPart { x: op.input("x")?, lower, upper }))
    }
}

impl Kernel for BandPart {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (lower, upper) = (self.lower, self.upper);
        let mut x = call.take(self.x)?;
        let [.., rows, columns] = x.shape[..] else { return Err(format!("`x` of shape {:?} has no matrix", x.shape)) };
        fn keep<T: Default>(values: &mut [T], rows: usize, columns: usize, lower: i64, upper: i64) {
            for (i, value) in values.iter_mut().enumerate() {
                let below = (i / columns % rows) as i64 - (i % columns) as i64;
                if (lower >= 0 && below > lower) || (upper >= 0 && -below > upper) {
                    *value = T::default();
                }
            }
        }
        match &mut pool.make_mut(&mut x).data {
            TensorData::F32(v) => keep(v, rows, columns, lower, upper),
            TensorData::I32(v) => keep(v, rows, columns, lower, upper),
            TensorData::Bool(v) => keep(v, rows, columns, lower, upper),
        }
        call.push(x)
    }
}

/// Source of a result's shape.
enum Shape {
    Given(Integers),
    /// Shape of a tensor.
    Like(Input),
}

/// Tensor of one value, 0 by default.
struct Fill {
    shape: Shape,
    value: Option<Input>,
}

impl Kernel for Fill {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let shape: Dims = match &self.shape {
            Shape::Like(reference) => call.tensor(*reference)?.shape.as_slice().into(),
            Shape::Given(shape) => {
                let shape: Result<Dims, _> = call.integers(shape)?.into_iter().map(usize::try_from).collect();
                shape.map_err(|_| "`shape` has a negative size".to_owned())?
            }
        };
        let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).filter(|n| *n <= MAX_ELEMENTS);
        count.ok_or_else(|| format!("a tensor of shape {shape:?} is too large"))?;
        let result = match self.value.map(|value| call.tensor(value)).transpose()? {
            None => pool.filled(&shape, 0f32),
            Some(Tensor { data: TensorData::F32(v), .. }) if v.len() == 1 => pool.filled(&shape, v[0]),
            Some(Tensor { data: TensorData::I32(v), .. }) if v.len() == 1 => pool.filled(&shape, v[0]),
            Some(Tensor { data: TensorData::Bool(v), .. }) if v.len() == 1 => pool.filled(&shape, v[0]),
            Some(_) => return Err("`value` is not one number".into()),
        };
        call.push(result)
    }
}

/// Indices of non-zero elements, one row each.
struct NonZero {
    x: Input,
}

impl Kernel for NonZero {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let steps = strides(&x.shape);
        let places: Vec<usize> = match &x.data {
            TensorData::F32(v) => v.iter().enumerate().filter(|(_, v)| **v != 0.0).map(|(i, _)| i).collect(),
            TensorData::I32(v) => v.iter().enumerate().filter(|(_, v)| **v != 0).map(|(i, _)| i).collect(),
            TensorData::Bool(v) => v.iter().enumerate().filter(|(_, v)| **v).map(|(i, _)| i).collect(),
        };
        let index = |place: &usize| -> Vec<i32> {
            steps.iter().zip(&x.shape).map(|(step, size)| (place / step % size) as i32).collect()
        };
        let indices: Vec<i32> = places.iter().flat_map(index).collect();
        let result = pool.copied(&[places.len(), x.rank()], &indices);
        call.push(result)
    }
}

/// New axis with `on_value` at the index and `off_value` elsewhere; an index out of range sets nothing.
struct OneHot {
    indices: Input,
    size: Integers,
    axis: i64,
    on: Option<Input>,
    off: Option<Input>,
}

impl OneHot {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let (indices, size) = (op.input("indices")?, op.integers("one_hot_vector_size")?);
        let (on, off) = (op.optional_input("on_value")?, op.optional_input("off_value")?);
        Ok(Arc::new(OneHot { indices, size, axis: op.integer("axis")?, on, off }))
    }
}

impl Kernel for OneHot {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let indices = call.numbers(self.indices)?;
        let shape = Dims::from_slice(&call.tensor(self.indices)?.shape);
        let axis = axis_index(self.axis, shape.len() + 1)?;
        let size = match call.integers(&self.size)?.as_slice() {
            [size] => usize::try_from(*size).map_err(|_| format!("`one_hot_vector_size` is {size}"))?,
            several => return Err(format!("`one_hot_vector_size` has {} elements", several.len())),
        };
        let inner: usize = shape[axis..].iter().product();
        let mut out_shape = shape;
        out_shape.insert(axis, size);
        let count = indices.len().checked_mul(size).filter(|n| *n <= MAX_ELEMENTS);
        let count = count.ok_or_else(|| format!("a tensor of shape {out_shape:?} is too large"))?;
        let places = indices.iter().enumerate().filter_map(|(i, index)| {
            let index = usize::try_from(*index).ok().filter(|index| *index < size)?;
            Some((i / inner.max(1) * size + index) * inner + i % inner.max(1))
        });
        let scalar = |input: Option<Input>, default: i32| -> Result<Tensor, String> {
            input.map_or(Ok(Tensor::scalar(default)), |input| call.tensor(input).cloned())
        };
        let result = match (&scalar(self.on, 1)?.data, &scalar(self.off, 0)?.data) {
            (TensorData::I32(on), TensorData::I32(off)) if on.len() == 1 && off.len() == 1 => {
                pool.make(&out_shape, |out| {
                    out.resize(count, off[0]);
                    places.for_each(|place| out[place] = on[0]);
                })
            }
            (TensorData::F32(on), TensorData::F32(off)) if on.len() == 1 && off.len() == 1 => {
                pool.make(&out_shape, |out| {
                    out.resize(count, off[0]);
                    places.for_each(|place| out[place] = on[0]);
                })
            }
            (on, off) => {
                return Err(format!(
                    "`on_value` holds {}, `off_value` {}; one of a kind is needed",
                    on.kind(),
                    off.kind()
                ));
            }
        };
        call.push(result)
    }
}

/// `start`, `start + step`, … before `end`.
struct RangeOp {
    start: Input,
    end: Input,
    step: Input,
}

impl RangeOp {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        Ok(Arc::new(RangeOp { start: op.input("start")?, end: op.input("end")?, step: op.input("step")? }))
    }
}

impl Kernel for RangeOp {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let too_many = |count: f64| format!("{count} elements are too many, or the step is 0");
        let integer = |input: Input| match &call.tensor(input).ok()?.data {
            TensorData::I32(v) if v.len() == 1 => Some(i64::from(v[0])),
            TensorData::Bool(v) if v.len() == 1 => Some(i64::from(v[0])),
            _ => None,
        };
        if let (Some(start), Some(end), Some(step)) = (integer(self.start), integer(self.end), integer(self.step)) {
            let count = ((end - start) as f64 / step as f64).ceil().max(0.0);
            if step == 0 || !(count <= MAX_ELEMENTS as f64) {
                return Err(too_many(count));
            }
            let values = (0..count as i64).map(|i| (start + i * step) as i32);
            let result = pool.make(&[count as usize], |out: &mut Vec<i32>| out.extend(values));
            return call.push(result);
        }
        let float = |input: Input| match &call.tensor(input)?.data {
            TensorData::F32(v) if v.len() == 1 => Ok(v[0]),
            TensorData::I32(v) if v.len() == 1 => Ok(v[0] as f32),
            _ => Err(format!("parameter `{}` takes one number", input.name)),
        };
        let (start, end, step) = (float(self.start)?, float(self.end)?, float(self.step)?);
        let count = (f64::from(end - start) / f64::from(step)).ceil().max(0.0);
        if step == 0.0 || !(count <= MAX_ELEMENTS as f64) {
            return Err(too_many(count));
        }
        let values = (0..count as usize).map(|i| start + i as f32 * step);
        let result = pool.make(&[count as usize], |out: &mut Vec<f32>| out.extend(values));
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, b, f, i, results, run, try_run};
    use crate::value::Value;
    use anec_mil::DataType;

    #[test]
    fn the_largest_come_first_with_their_places() {
        let x = || f(&[2, 3], &[3.0, 9.0, 1.0, 5.0, 5.0, 7.0]);
        let top_of = |x: Value, k: i32, axis: i32, ascending: bool| {
            let arguments = vec![
                ("x", vec![x]),
                ("k", vec![i(&[], &[k])]),
                ("axis", vec![i(&[], &[axis])]),
                ("ascending", vec![b(&[], &[ascending])]),
            ];
            results("topk", arguments, DataType::Fp32)
        };
        let top = |k, axis, ascending| top_of(x(), k, axis, ascending);
        let two = top(2, -1, false).unwrap();
        assert_close(&two[0], &[2, 2], &[9.0, 3.0, 7.0, 5.0]);
        assert_eq!(two[1].integers().unwrap(), [1, 0, 2, 0]);
        let columns = top(1, 0, true).unwrap();
        assert_close(&columns[0], &[1, 3], &[3.0, 5.0, 1.0]);
        assert_eq!(columns[1].integers().unwrap(), [0, 1, 0]);
        // of equal values the first comes first, and NaN counts as the smallest
        let ties = top_of(f(&[5], &[2.0, f32::NAN, 2.0, 3.0, 2.0]), 3, 0, false).unwrap();
        assert_close(&ties[0], &[3], &[3.0, 2.0, 2.0]);
        assert_eq!(ties[1].integers().unwrap(), [3, 0, 2]);
        assert!(top(4, 1, false).unwrap_err().contains('4'));
        let order = run("argsort", vec![("x", x()), ("axis", i(&[], &[1])), ("ascending", b(&[], &[true]))]);
        assert_eq!(order.integers().unwrap(), [2, 0, 1, 0, 1, 2]);
    }

    #[test]
    fn sums_run_along_an_axis() {
        let x = || f(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let sum = |axis: i32, exclusive: bool, reverse: bool| {
            run(
                "cumsum",
                vec![
                    ("x", x()),
                    ("axis", i(&[], &[axis])),
                    ("exclusive", b(&[], &[exclusive])),
                    ("reverse", b(&[], &[reverse])),
                ],
            )
        };
        assert_close(&sum(1, false, false), &[2, 2], &[1.0, 3.0, 3.0, 7.0]);
        assert_close(&sum(0, false, true), &[2, 2], &[4.0, 6.0, 3.0, 4.0]);
        assert_close(&sum(1, true, false), &[2, 2], &[0.0, 1.0, 0.0, 3.0]);
    }

    #[test]
    fn tensors_come_from_numbers() {
        let band =
            run("band_part", vec![("x", f(&[3, 3], &[1.0; 9])), ("lower", i(&[], &[0])), ("upper", i(&[], &[1]))]);
        assert_close(&band, &[3, 3], &[1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
        assert_close(&run("fill", vec![("shape", i(&[2], &[1, 2])), ("value", f(&[], &[7.0]))]), &[1, 2], &[7.0, 7.0]);
        let hot = run("one_hot", vec![("indices", i(&[3], &[1, 0, 5])), ("one_hot_vector_size", i(&[], &[2]))]);
        assert_eq!((hot.shape.as_slice(), hot.integers().unwrap()), (&[3, 2][..], &[0, 1, 1, 0, 0, 0][..]));
        let hot = run(
            "one_hot",
            vec![("indices", i(&[2], &[1, 0])), ("one_hot_vector_size", i(&[], &[2])), ("axis", i(&[], &[0]))],
        );
        assert_eq!(hot.integers().unwrap(), [0, 1, 1, 0]);
        let range = |start, end, step| {
            try_run("range_1d", vec![("start", i(&[], &[start])), ("end", i(&[], &[end])), ("step", i(&[], &[step]))])
        };
        assert_eq!(range(1, 8, 3).unwrap().integers().unwrap(), [1, 4, 7]);
        assert_eq!(range(3, 0, -2).unwrap().integers().unwrap(), [3, 1]);
        assert_eq!(range(3, 0, 1).unwrap().shape, [0]);
        assert!(range(0, 1, 0).is_err());
        let places = run("non_zero", vec![("x", f(&[2, 2], &[0.0, 1.0, 1.0, 0.0]))]);
        assert_eq!((places.shape.as_slice(), places.integers().unwrap()), (&[2, 2][..], &[0, 1, 1, 0][..]));
    }
}
