//! Ops that sort, count and make tensors from numbers.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{Call, Results, Row, Value, computing, map_data, one};
use crate::tensor::{Tensor, TensorData, axis_index, strides};

/// The rows of this group.
pub(super) const ROWS: &[Row] = computing! {
    "argsort" => argsort,
    "band_part" => band_part,
    "cumsum" => cumsum,
    "fill" => fill,
    "fill_like" => fill_like,
    "non_zero" => non_zero,
    "one_hot" => one_hot,
    "range_1d" => range_1d,
    "topk" => topk,
};

/// Most elements that an op may make from numbers alone.
const MOST_ELEMENTS: usize = 1 << 31;

/// The sizes before, along and after an axis.
fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}

/// For each line along an axis, the places of its elements in order; of equal ones the first comes first.
fn sorted(x: &Tensor, axis: usize, ascending: bool) -> Result<Vec<Vec<usize>>, String> {
    let (outer, size, inner) = around(&x.shape, axis);
    let compare: Box<dyn Fn(usize, usize) -> Ordering> = match &x.data {
        TensorData::F32(v) => Box::new(|a, b| v[a].partial_cmp(&v[b]).unwrap_or(Ordering::Equal)),
        TensorData::I32(v) => Box::new(|a, b| v[a].cmp(&v[b])),
        TensorData::Bool(_) => return Err("`x` holds booleans, not numbers".into()),
    };
    let mut lines = Vec::with_capacity(outer * inner);
    for line in 0..outer * inner {
        let start = line / inner * size * inner + line % inner;
        let mut places: Vec<usize> = (0..size).map(|i| start + i * inner).collect();
        places.sort_by(|a, b| if ascending { compare(*a, *b) } else { compare(*b, *a) });
        lines.push(places);
    }
    Ok(lines)
}

/// Lines of places as a tensor's elements: the places themselves, and where along the axis they are.
fn lines_to_places(lines: &[Vec<usize>], shape: &[usize], axis: usize, count: usize) -> (Vec<usize>, Vec<i32>) {
    let (outer, size, inner) = around(shape, axis);
    let mut places = vec![0; outer * count * inner];
    for (line, order) in lines.iter().enumerate() {
        for (i, place) in order[..count].iter().enumerate() {
            places[(line / inner * count + i) * inner + line % inner] = *place;
        }
    }
    let along = places.iter().map(|place| (place / inner % size) as i32).collect();
    (places, along)
}

fn argsort(call: &mut Call<'_>) -> Results {
    let ascending = call.flag_or("ascending", false)?;
    let x = call.tensor("x")?;
    let axis = axis_index(call.integer_or("axis", -1)?, x.rank())?;
    let lines = sorted(x, axis, ascending)?;
    let (_, along) = lines_to_places(&lines, &x.shape, axis, x.shape[axis]);
    one(Tensor::new(x.shape.clone(), along))
}

/// The `k` largest (or smallest) along an axis, and where they are.
fn topk(call: &mut Call<'_>) -> Results {
    let ascending = call.flag_or("ascending", false)?;
    let k = call.integer_or("k", 1)?;
    let x = call.tensor("x")?;
    let axis = axis_index(call.integer_or("axis", -1)?, x.rank())?;
    let count = if k == -1 { x.shape[axis] } else { usize::try_from(k).unwrap_or(usize::MAX) };
    if count > x.shape[axis] {
        return Err(format!("`k` is {k}, but axis {axis} has {} elements", x.shape[axis]));
    }
    let lines = sorted(x, axis, ascending)?;
    let (places, along) = lines_to_places(&lines, &x.shape, axis, count);
    let mut shape = x.shape.clone();
    shape[axis] = count;
    let values = Tensor { shape: shape.clone(), data: map_data!(&x.data, v => places.iter().map(|p| v[*p]).collect()) };
    let mut results = vec![Arc::new(values)];
    if call.flag_or("return_indices", true)? {
        results.push(Arc::new(Tensor::new(shape, along)));
    }
    Ok(results)
}

fn cumsum(call: &mut Call<'_>) -> Results {
    let (exclusive, reverse) = (call.flag_or("exclusive", false)?, call.flag_or("reverse", false)?);
    let axis = call.integer_or("axis", 0)?;
    let mut x = call.take("x")?;
    let axis = axis_index(axis, x.rank())?;
    let (outer, size, inner) = around(&x.shape, axis);
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
    match &mut Arc::make_mut(&mut x).data {
        TensorData::F32(v) => run(v, (outer, size, inner), (exclusive, reverse), |a, b| a + b),
        TensorData::I32(v) => run(v, (outer, size, inner), (exclusive, reverse), i32::wrapping_add),
        TensorData::Bool(_) => return Err("`x` holds booleans, not numbers".into()),
    }
    Ok(vec![x])
}

/// Keeps what is at most `lower` below and `upper` above the diagonal of the last two axes; -1 keeps all on that side.
fn band_part(call: &mut Call<'_>) -> Results {
    let (lower, upper) = (call.integer_or("lower", -1)?, call.integer_or("upper", -1)?);
    let mut x = call.take("x")?;
    let [.., rows, columns] = x.shape[..] else { return Err(format!("`x` of shape {:?} has no matrix", x.shape)) };
    fn keep<T: Default>(values: &mut [T], rows: usize, columns: usize, lower: i64, upper: i64) {
        for (i, value) in values.iter_mut().enumerate() {
            let below = (i / columns % rows) as i64 - (i % columns) as i64;
            if (lower >= 0 && below > lower) || (upper >= 0 && -below > upper) {
                *value = T::default();
            }
        }
    }
    match &mut Arc::make_mut(&mut x).data {
        TensorData::F32(v) => keep(v, rows, columns, lower, upper),
        TensorData::I32(v) => keep(v, rows, columns, lower, upper),
        TensorData::Bool(v) => keep(v, rows, columns, lower, upper),
    }
    Ok(vec![x])
}

/// A tensor of one value.
fn filled(value: Option<&Value>, shape: Vec<usize>) -> Results {
    let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).filter(|n| *n <= MOST_ELEMENTS);
    let count = count.ok_or_else(|| format!("a tensor of shape {shape:?} is too large"))?;
    let data = match value {
        Some(Value::Tensor(tensor)) if tensor.data.len() == 1 => map_data!(&tensor.data, v => vec![v[0]; count]),
        None => TensorData::F32(vec![0.0; count]),
        Some(_) => return Err("`value` is not one number".into()),
    };
    one(Tensor { shape, data })
}

fn fill(call: &mut Call<'_>) -> Results {
    let shape: Result<Vec<usize>, _> = call.integers("shape")?.into_iter().map(usize::try_from).collect();
    let shape = shape.map_err(|_| "`shape` has a negative size".to_owned())?;
    filled(call.value("value").ok(), shape)
}

fn fill_like(call: &mut Call<'_>) -> Results {
    filled(call.value("value").ok(), call.tensor("ref_tensor")?.shape.clone())
}

/// The indices of what is not zero, one row each.
fn non_zero(call: &mut Call<'_>) -> Results {
    let x = call.tensor("x")?;
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
    one(Tensor::new([places.len(), x.rank()], indices))
}

/// A new axis that holds `on_value` where the index says and `off_value` elsewhere; an index outside sets nothing.
fn one_hot(call: &mut Call<'_>) -> Results {
    let size = call.integer_or("one_hot_vector_size", -1)?;
    let indices = call.integers("indices")?;
    let shape = call.tensor("indices")?.shape.clone();
    let axis = axis_index(call.integer_or("axis", -1)?, shape.len() + 1)?;
    let size = usize::try_from(size).map_err(|_| format!("`one_hot_vector_size` is {size}"))?;
    let inner: usize = shape[axis..].iter().product();
    let mut out_shape = shape;
    out_shape.insert(axis, size);
    let count = indices.len().checked_mul(size).filter(|n| *n <= MOST_ELEMENTS);
    let count = count.ok_or_else(|| format!("a tensor of shape {out_shape:?} is too large"))?;
    let places = indices.iter().enumerate().filter_map(|(i, index)| {
        let index = usize::try_from(*index).ok().filter(|index| *index < size)?;
        Some((i / inner.max(1) * size + index) * inner + i % inner.max(1))
    });
    let scalar = |name: &str, default: i32| -> Result<Tensor, String> {
        if call.has(name) { call.tensor(name).cloned() } else { Ok(Tensor::scalar(default)) }
    };
    let data: TensorData = match (&scalar("on_value", 1)?.data, &scalar("off_value", 0)?.data) {
        (TensorData::I32(on), TensorData::I32(off)) if on.len() == 1 && off.len() == 1 => {
            let mut out = vec![off[0]; count];
            places.for_each(|place| out[place] = on[0]);
            out.into()
        }
        (TensorData::F32(on), TensorData::F32(off)) if on.len() == 1 && off.len() == 1 => {
            let mut out = vec![off[0]; count];
            places.for_each(|place| out[place] = on[0]);
            out.into()
        }
        (on, off) => {
            return Err(format!("`on_value` holds {}, `off_value` {}; one of a kind is needed", on.kind(), off.kind()));
        }
    };
    one(Tensor { shape: out_shape, data })
}

/// `start`, `start + step`, … before `end`.
fn range_1d(call: &mut Call<'_>) -> Results {
    let too_many = |count: f64| format!("{count} elements are too many, or the step is 0");
    if let (Ok(start), Ok(end), Ok(step)) = (call.integer("start"), call.integer("end"), call.integer("step")) {
        let count = ((end - start) as f64 / step as f64).ceil().max(0.0);
        if step == 0 || !(count <= MOST_ELEMENTS as f64) {
            return Err(too_many(count));
        }
        let values: Vec<i32> = (0..count as i64).map(|i| (start + i * step) as i32).collect();
        return one(Tensor::new([values.len()], values));
    }
    let (start, end, step) = (call.float_or("start", 0.0)?, call.float_or("end", 0.0)?, call.float_or("step", 1.0)?);
    let count = (f64::from(end - start) / f64::from(step)).ceil().max(0.0);
    if step == 0.0 || !(count <= MOST_ELEMENTS as f64) {
        return Err(too_many(count));
    }
    let values: Vec<f32> = (0..count as usize).map(|i| start + i as f32 * step).collect();
    one(Tensor::new([values.len()], values))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, b, f, i, results, run, try_run};
    use anec_mil::DataType;

    #[test]
    fn the_largest_come_first_with_their_places() {
        let x = || f(&[2, 3], &[3.0, 9.0, 1.0, 5.0, 5.0, 7.0]);
        let top = |k: i32, axis: i32, ascending: bool| {
            let arguments = vec![
                ("x", vec![x()]),
                ("k", vec![i(&[], &[k])]),
                ("axis", vec![i(&[], &[axis])]),
                ("ascending", vec![b(&[], &[ascending])]),
            ];
            results("topk", arguments, DataType::Fp32)
        };
        let two = top(2, -1, false).unwrap();
        assert_close(&two[0], &[2, 2], &[9.0, 3.0, 7.0, 5.0]);
        assert_eq!(two[1].integers().unwrap(), [1, 0, 2, 0]);
        let columns = top(1, 0, true).unwrap();
        assert_close(&columns[0], &[1, 3], &[3.0, 5.0, 1.0]);
        assert_eq!(columns[1].integers().unwrap(), [0, 1, 0]);
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
