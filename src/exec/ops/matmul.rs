//! Products of matrices: `matmul`, `linear`, and scaled dot-product attention.

use std::sync::Arc;

use super::norm::softmax_rows;
use super::{Call, Results, Row, Value, computing, one};
use crate::tensor::{Tensor, TensorData, broadcast_shape, broadcast_strides, for_each_index};
use crate::weight::Weight;
use anec_kernels::matrix::product;
use anec_kernels::layout::Layout;
use anec_kernels::product::multiply;
use anec_kernels::team;
use anec_kernels::weight::Elements;

/// The rows of this group.
pub(super) const ROWS: &[Row] = computing! {
    "linear" => linear,
    "matmul" => matmul,
    "scaled_dot_product_attention" => attention,
};

/// Multiplications below which threads are not worth waking.
const SMALL_WORK: usize = 1 << 17;

/// The value of a parameter as a weight; a small or computed tensor becomes one.
pub(super) fn weight(call: &Call<'_>, parameter: &str) -> Result<Arc<Weight>, String> {
    match call.value(parameter)? {
        Value::Weight(weight) => Ok(weight.clone()),
        _ => {
            let elements = Elements::F32(call.floats(parameter)?.to_vec().into());
            Ok(Arc::new(Weight::plain(call.tensor(parameter)?.shape.clone(), Arc::new(elements))))
        }
    }
}

/// A bias of one number for each of `rows`, if there is one.
pub(super) fn bias<'c>(call: &'c Call<'_>, rows: usize) -> Result<Option<&'c [f32]>, String> {
    if !call.has("bias") {
        return Ok(None);
    }
    let bias = call.floats("bias")?;
    if bias.len() != rows {
        return Err(format!("`bias` has {} elements for {rows} rows of the weight", bias.len()));
    }
    Ok(Some(bias))
}

/// `x weightᵀ + bias` over the last axis.
fn linear(call: &mut Call<'_>) -> Results {
    let weight = weight(call, "weight")?;
    let (rows, columns) = (weight.rows(), weight.columns());
    let bias = bias(call, rows)?;
    let x = call.tensor("x")?;
    if weight.shape().len() != 2 || x.shape.last() != Some(&columns) {
        return Err(format!("`x` of shape {:?} doesn't fit a weight of shape {:?}", x.shape, weight.shape()));
    }
    one(rows_times_weight(x, &weight, bias)?)
}

fn rows_times_weight(x: &Tensor, weight: &Weight, bias: Option<&[f32]>) -> Result<Tensor, String> {
    let (rows, columns) = (weight.rows(), weight.columns());
    let values = x.floats().ok_or_else(|| format!("`x` holds {}, not floats", x.data.kind()))?;
    let mut shape = x.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last = rows;
    }
    let tokens: usize = shape[..shape.len().saturating_sub(1)].iter().product();
    let mut out = vec![0.0; tokens * rows];
    let layouts = (Layout { row: 1, column: columns }, Layout { row: 1, column: rows });
    multiply(weight, (values, layouts.0), tokens, bias, (&mut out, layouts.1));
    Ok(Tensor::new(shape, out))
}

/// The last two axes are matrices, the others broadcast; a vector is a matrix of one row (`x`) or column (`y`), and
/// the axis added for it is dropped from the result.
fn matmul(call: &mut Call<'_>) -> Results {
    let transpose_x = call.flag_or("transpose_x", false)?;
    let transpose_y = call.flag_or("transpose_y", false)?;
    if let (Value::Tensor(x), Value::Weight(y)) = (call.value("x")?, call.value("y")?)
        && y.shape().len() == 2
        && transpose_y
        && !(transpose_x && x.rank() > 1)
        && x.shape.last() == Some(&y.columns())
    {
        return one(rows_times_weight(x, y, None)?);
    }
    if let (Value::Weight(x), Value::Tensor(y)) = (call.value("x")?, call.value("y")?)
        && x.shape().len() == 2
        && !transpose_x
        && y.rank() >= 2
    {
        return one(weight_times_columns(x, y, transpose_y)?);
    }
    let (x, y) = (call.tensor("x")?, call.tensor("y")?);
    if let (TensorData::I32(a), TensorData::I32(b)) = (&x.data, &y.data) {
        let float = |shape: &[usize], v: &[i32]| Tensor::new(shape, v.iter().map(|v| *v as f32).collect::<Vec<_>>());
        let out = batched(&float(&x.shape, a), &float(&y.shape, b), transpose_x, transpose_y)?;
        let values: Vec<i32> = out.floats().unwrap_or_default().iter().map(|v| *v as i32).collect();
        return one(Tensor::new(out.shape, values));
    }
    one(batched(x, y, transpose_x, transpose_y)?)
}

fn weight_times_columns(weight: &Weight, y: &Tensor, transposed: bool) -> Result<Tensor, String> {
    let values = y.floats().ok_or_else(|| format!("`y` holds {}, not floats", y.data.kind()))?;
    let (lead, last) = y.shape.split_at(y.rank() - 2);
    let (inner, tokens) = if transposed { (last[1], last[0]) } else { (last[0], last[1]) };
    if inner != weight.columns() {
        return Err(format!("a matrix of shape {:?} can't be multiplied with {:?}", weight.shape(), y.shape));
    }
    let rows = weight.rows();
    let layout = if transposed { Layout { row: 1, column: inner } } else { Layout { row: tokens, column: 1 } };
    let count: usize = lead.iter().product();
    let mut out = vec![0.0; count * rows * tokens];
    if inner * tokens * rows > 0 {
        for (values, out) in values.chunks_exact(inner * tokens).zip(out.chunks_exact_mut(rows * tokens)) {
            multiply(weight, (values, layout), tokens, None, (out, Layout { row: tokens, column: 1 }));
        }
    }
    Ok(Tensor::new([lead, &[rows, tokens]].concat(), out))
}

/// The product of two tensors of floats.
pub(super) fn batched(x: &Tensor, y: &Tensor, transpose_x: bool, transpose_y: bool) -> Result<Tensor, String> {
    let (Some(a), Some(b)) = (x.floats(), y.floats()) else {
        return Err(format!("{} can't be multiplied with {}", x.data.kind(), y.data.kind()));
    };
    let misfit =
        || format!("shapes {:?} and {:?} (transposed: {transpose_x}, {transpose_y}) don't multiply", x.shape, y.shape);
    let x_shape = if x.rank() == 1 { vec![1, x.shape[0]] } else { x.shape.clone() };
    let y_shape = if y.rank() == 1 { vec![y.shape[0], 1] } else { y.shape.clone() };
    if x_shape.len() < 2 || y_shape.len() < 2 {
        return Err(misfit());
    }
    let (transpose_x, transpose_y) = (transpose_x && x.rank() > 1, transpose_y && y.rank() > 1);
    let matrix = |shape: &[usize], transposed: bool| {
        let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        let plain = Layout { row: columns, column: 1 };
        if transposed { (columns, rows, Layout { row: 1, column: columns }) } else { (rows, columns, plain) }
    };
    let (m, k, a_layout) = matrix(&x_shape, transpose_x);
    let (inner, n, b_layout) = matrix(&y_shape, transpose_y);
    if k != inner {
        return Err(misfit());
    }
    let (x_lead, y_lead) = (&x_shape[..x_shape.len() - 2], &y_shape[..y_shape.len() - 2]);
    let lead = broadcast_shape(x_lead, y_lead).map_err(|_| misfit())?;
    let mut places = Vec::with_capacity(lead.iter().product());
    for_each_index(&lead, [&broadcast_strides(x_lead, &lead), &broadcast_strides(y_lead, &lead)], |at| places.push(at));
    let mut out = vec![0.0; places.len() * m * n];
    let work = places.len() * m * n * k;
    let compute = |([i, j], out): ([usize; 2], &mut [f32])| {
        product((m, k, n), (&a[i * m * k..][..m * k], a_layout), (&b[j * k * n..][..k * n], b_layout), out);
    };
    if m * n > 0 {
        if places.len() > 1 && work > SMALL_WORK {
            team::for_each_chunk(&mut out, m * n, |i, out| compute((places[i], out)));
        } else {
            out.chunks_exact_mut(m * n).zip(places).for_each(|(out, at)| compute((at, out)));
        }
    }
    let mut shape = lead;
    if x.rank() > 1 {
        shape.push(m);
    }
    if y.rank() > 1 {
        shape.push(n);
    }
    Ok(Tensor::new(shape, out))
}

/// `softmax(query keyᵀ / sqrt(d) + mask) value`; a boolean mask is true where attention is paid.
fn attention(call: &mut Call<'_>) -> Results {
    let (query, key, value) = (call.tensor("query")?, call.tensor("key")?, call.tensor("value")?);
    let size = query.shape.last().copied().unwrap_or(1);
    let mut scores = batched(query, key, false, true)?;
    let scale = 1.0 / (size as f32).sqrt();
    let shape = scores.shape.clone();
    let TensorData::F32(values) = &mut scores.data else { return Err("the scores are not floats".into()) };
    values.iter_mut().for_each(|v| *v *= scale);
    if call.has("attn_mask") {
        let mask = call.tensor("attn_mask")?;
        if broadcast_shape(&shape, &mask.shape)? != shape {
            return Err(format!("a mask of shape {:?} for scores of shape {shape:?}", mask.shape));
        }
        let strides = broadcast_strides(&mask.shape, &shape);
        let mut scores = values.iter_mut();
        match &mask.data {
            TensorData::F32(mask) => for_each_index(&shape, [&strides], |[i]| {
                if let Some(score) = scores.next() {
                    *score += mask[i];
                }
            }),
            TensorData::Bool(mask) => for_each_index(&shape, [&strides], |[i]| {
                if let Some(score) = scores.next()
                    && !mask[i]
                {
                    *score = f32::NEG_INFINITY;
                }
            }),
            data => return Err(format!("`attn_mask` holds {}", data.kind())),
        }
    }
    softmax_rows(values, shape.last().copied().unwrap_or(1));
    one(batched(&scores, value, false, false)?)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, b, f, run, try_run};
    use super::*;

    #[test]
    fn matrices_multiply_with_batches_and_transposes() {
        let x = || f(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let y = || f(&[2, 2], &[5.0, 6.0, 7.0, 8.0]);
        assert_close(&run("matmul", vec![("x", x()), ("y", y())]), &[2, 2], &[19.0, 22.0, 43.0, 50.0]);
        let yes = || b(&[], &[true]);
        let turned = run("matmul", vec![("x", x()), ("y", y()), ("transpose_y", yes())]);
        assert_close(&turned, &[2, 2], &[17.0, 23.0, 39.0, 53.0]);
        let both = run("matmul", vec![("x", x()), ("y", y()), ("transpose_x", yes()), ("transpose_y", yes())]);
        assert_close(&both, &[2, 2], &[23.0, 31.0, 34.0, 46.0]);
        let batch = run(
            "matmul",
            vec![("x", f(&[2, 1, 1, 2], &[1.0, 2.0, 3.0, 4.0])), ("y", f(&[2, 2, 1], &[1.0, 1.0, 0.0, 1.0]))],
        );
        assert_close(&batch, &[2, 2, 1, 1], &[3.0, 2.0, 7.0, 4.0]);
        let vector = run("matmul", vec![("x", f(&[2], &[1.0, 1.0])), ("y", y())]);
        assert_close(&vector, &[2], &[12.0, 14.0]);
        assert!(try_run("matmul", vec![("x", x()), ("y", f(&[3, 2], &[0.0; 6]))]).unwrap_err().contains("[3, 2]"));
    }

    #[test]
    fn a_stored_weight_stands_on_either_side() {
        let weight =
            Arc::new(Weight::plain(vec![2, 3], Arc::new(Elements::F32(vec![1.0, 0.0, 2.0, 0.0, 1.0, -1.0].into()))));
        let weight = || Value::Weight(weight.clone());
        let yes = b(&[], &[true]);
        let right = run("matmul", vec![("x", f(&[1, 1, 3], &[1.0, 2.0, 3.0])), ("y", weight()), ("transpose_y", yes)]);
        assert_close(&right, &[1, 1, 2], &[7.0, -1.0]);
        let left = run("matmul", vec![("x", weight()), ("y", f(&[1, 3, 2], &[1.0, 10.0, 2.0, 20.0, 3.0, 30.0]))]);
        assert_close(&left, &[1, 2, 2], &[7.0, 70.0, -1.0, -10.0]);
        let straight = run("matmul", vec![("x", f(&[1, 2], &[1.0, 2.0])), ("y", weight())]);
        assert_close(&straight, &[1, 3], &[1.0, 2.0, 0.0]);
        let linear = run(
            "linear",
            vec![
                ("x", f(&[2, 3], &[1.0, 2.0, 3.0, 0.0, 1.0, 0.0])),
                ("weight", weight()),
                ("bias", f(&[2], &[0.5, 0.0])),
            ],
        );
        assert_close(&linear, &[2, 2], &[7.5, -1.0, 0.5, 1.0]);
        assert!(try_run("linear", vec![("x", f(&[2], &[1.0, 2.0])), ("weight", weight())]).is_err());
    }

    #[test]
    fn attention_is_paid_where_the_mask_allows() {
        let query = || f(&[1, 1, 1], &[2f32.ln()]);
        let key = || f(&[1, 3, 1], &[1.0, 0.0, 5.0]);
        let value = || f(&[1, 3, 2], &[3.0, 0.0, 0.0, 3.0, 9.0, 9.0]);
        let mask = b(&[1, 3], &[true, true, false]);
        let masked = run(
            "scaled_dot_product_attention",
            vec![("query", query()), ("key", key()), ("value", value()), ("attn_mask", mask)],
        );
        assert_close(&masked, &[1, 1, 2], &[2.0, 1.0]);
        let added = f(&[1, 3], &[0.0, 2f32.ln(), f32::NEG_INFINITY]);
        let added = run(
            "scaled_dot_product_attention",
            vec![("query", query()), ("key", key()), ("value", value()), ("attn_mask", added)],
        );
        assert_close(&added, &[1, 1, 2], &[1.5, 1.5]);
    }
}
