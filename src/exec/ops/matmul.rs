//! Matrix products: `matmul`, `linear`, and scaled dot-product attention.

use std::sync::Arc;

use smallvec::SmallVec;

use super::norm::softmax_rows;
use super::{Resolved, Row, computing};
use crate::arithmetic::ProductArithmetic;
use crate::engine::EngineEffects;
use crate::engine::sums::{multiply, product};
use crate::kernel::{Call, Input, Kernel, Matrix};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::tensor::{Dims, Tensor, TensorData, broadcast_shape, broadcast_strides, for_each_index};
use crate::value::Value;
use crate::weight::LoadedWeight;
use crate::weight::WeightProduct;
use anec_kernels::layout::MatrixLayout;
use anec_kernels::pool;
use anec_kernels::product::Activations;

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "linear" => Linear::resolve,
    "matmul" => Matmul::resolve,
    "scaled_dot_product_attention" => ScaledDotProductAttention::resolve,
};

/// Minimum multiplications for which threads are used.
const MIN_PARALLEL_WORK: usize = 1 << 17;

/// Optional bias with one number for each of `rows`.
pub(super) fn bias<'c>(call: &'c Call<'_>, bias: Option<Input>, rows: usize) -> Result<Option<&'c [f32]>, String> {
    let Some(bias) = bias else { return Ok(None) };
    let bias = call.floats(bias)?;
    if bias.len() != rows {
        return Err(format!("`bias` has {} elements for {rows} rows of the weight", bias.len()));
    }
    Ok(Some(bias))
}

/// `x weightᵀ + bias` over the last axis.
#[derive(Clone)]
pub(crate) struct Linear {
    pub x: Input,
    pub weight: Matrix,
    pub bias: Option<Input>,
    /// Arithmetic of products.
    pub arithmetic: ProductArithmetic,
}

impl Linear {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let (x, weight) = (op.input("x")?, op.matrix("weight")?);
        let bias = if op.has("bias") { Some(op.factor("bias")?) } else { None };
        Ok(Arc::new(Linear { x, weight, bias, arithmetic: ProductArithmetic::default() }))
    }
}

/// `x weightᵀ` for all rows of `x`, whose width is the weight's.
fn product_of_rows<'c>(
    activations: Activations,
    x: &'c Tensor,
    weight: &'c LoadedWeight,
    bias: Option<&'c [f32]>,
) -> Result<WeightProduct<'c>, String> {
    let (rows, columns) = (weight.rows(), weight.columns());
    let values = x.floats().ok_or_else(|| format!("`x` holds {}, not floats", x.data.kind()))?;
    let mut shape = Dims::from_slice(&x.shape);
    if let Some(last) = shape.last_mut() {
        *last = rows;
    }
    let tokens = shape[..shape.len().saturating_sub(1)].iter().product();
    let (x, layout) = ((values, MatrixLayout { row: 1, column: columns }), MatrixLayout { row: 1, column: rows });
    Ok(WeightProduct { weight, activations, bias, x, tokens, shape, layout })
}

/// Returns whether `x weightᵀ` is a product of rows.
fn multiplies_rows(x: &Tensor, weight: &LoadedWeight) -> bool {
    weight.shape().len() == 2 && x.shape.last() == Some(&weight.columns())
}

impl Kernel for Linear {
    fn weight_product<'c>(&'c self, call: &'c Call<'_>) -> Result<Option<WeightProduct<'c>>, String> {
        let Matrix::Constant(weight) = &self.weight else { return Ok(None) };
        let x = call.tensor(self.x)?;
        if self.arithmetic.effects != EngineEffects::NONE || !multiplies_rows(x, weight) {
            return Ok(None);
        }
        product_of_rows(self.arithmetic.activations, x, weight, bias(call, self.bias, weight.rows())?).map(Some)
    }

    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let weight = call.matrix(&self.weight)?;
        let bias = bias(call, self.bias, weight.rows())?;
        let x = call.tensor(self.x)?;
        if !multiplies_rows(x, &weight) {
            let (x, weight) = (&x.shape, weight.shape());
            return Err(format!("`x` of shape {x:?} doesn't fit a weight of shape {weight:?}"));
        }
        let result = rows_times_weight(self.arithmetic, pool, x, &weight, bias)?;
        call.push(result)
    }
}

fn rows_times_weight(
    arithmetic: ProductArithmetic,
    pool: &mut Pool,
    x: &Tensor,
    weight: &LoadedWeight,
    bias: Option<&[f32]>,
) -> Result<Arc<Tensor>, String> {
    let product = product_of_rows(arithmetic.activations, x, weight, bias)?;
    Ok(pool.written(&product.shape, |out| {
        multiply(arithmetic, weight, product.x, product.tokens, bias, (out, product.layout));
    }))
}

/// Product of matrices in the last two axes; other axes broadcast. A vector is a matrix of one row (`x`) or column
/// (`y`), without that axis in the result.
#[derive(Clone)]
pub(crate) struct Matmul {
    pub x: Input,
    pub y: Input,
    pub transpose_x: bool,
    pub transpose_y: bool,
    /// Arithmetic of products.
    pub arithmetic: ProductArithmetic,
}

impl Matmul {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let (x, y) = (op.factor("x")?, op.factor("y")?);
        let (transpose_x, transpose_y) = (op.flag("transpose_x")?, op.flag("transpose_y")?);
        Ok(Arc::new(Matmul { x, y, transpose_x, transpose_y, arithmetic: ProductArithmetic::default() }))
    }
}

impl Kernel for Matmul {
    fn weight_product<'c>(&'c self, call: &'c Call<'_>) -> Result<Option<WeightProduct<'c>>, String> {
        match (call.value(self.x)?, call.value(self.y)?) {
            (Value::Tensor(x), Value::Weight(y))
                if self.transpose_y
                    && !self.transpose_x
                    && self.arithmetic.effects == EngineEffects::NONE
                    && multiplies_rows(x, y) =>
            {
                product_of_rows(self.arithmetic.activations, x, y, None).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (transpose_x, transpose_y, arithmetic) = (self.transpose_x, self.transpose_y, self.arithmetic);
        let result = match (call.value(self.x)?, call.value(self.y)?) {
            (Value::Tensor(x), Value::Weight(y))
                if transpose_y && !(transpose_x && x.rank() > 1) && multiplies_rows(x, y) =>
            {
                rows_times_weight(arithmetic, pool, x, y, None)?
            }
            (Value::Weight(x), Value::Tensor(y)) if x.shape().len() == 2 && !transpose_x && y.rank() >= 2 => {
                weight_times_columns(arithmetic, pool, x, y, transpose_y)?
            }
            _ => {
                let (x, y) = (call.tensor(self.x)?, call.tensor(self.y)?);
                match (&x.data, &y.data) {
                    (TensorData::I32(a), TensorData::I32(b)) => {
                        let floats = |v: &[i32]| v.iter().map(|v| *v as f32).collect::<Vec<_>>();
                        let (x, y) = (Tensor::new(&x.shape[..], floats(a)), Tensor::new(&y.shape[..], floats(b)));
                        let product = batched(arithmetic.effects, pool, &x, &y, transpose_x, transpose_y)?;
                        let values = product.floats().unwrap_or_default().iter().map(|v| *v as i32);
                        pool.make(&product.shape, |out: &mut Vec<i32>| out.extend(values))
                    }
                    _ => batched(arithmetic.effects, pool, x, y, transpose_x, transpose_y)?,
                }
            }
        };
        call.push(result)
    }
}

fn weight_times_columns(
    arithmetic: ProductArithmetic,
    pool: &mut Pool,
    weight: &LoadedWeight,
    y: &Tensor,
    transposed: bool,
) -> Result<Arc<Tensor>, String> {
    let values = y.floats().ok_or_else(|| format!("`y` holds {}, not floats", y.data.kind()))?;
    let (lead, last) = y.shape.split_at(y.rank() - 2);
    let (inner, tokens) = if transposed { (last[1], last[0]) } else { (last[0], last[1]) };
    if inner != weight.columns() {
        return Err(format!("a matrix of shape {:?} can't be multiplied with {:?}", weight.shape(), y.shape));
    }
    let rows = weight.rows();
    let layout =
        if transposed { MatrixLayout { row: 1, column: inner } } else { MatrixLayout { row: tokens, column: 1 } };
    let count: usize = lead.iter().product();
    let shape: Dims = lead.iter().copied().chain([rows, tokens]).collect();
    Ok(pool.make(&shape, |out| {
        out.resize(count * rows * tokens, 0.0);
        if inner * tokens * rows > 0 {
            for (values, out) in values.chunks_exact(inner * tokens).zip(out.chunks_exact_mut(rows * tokens)) {
                multiply(
                    arithmetic,
                    weight,
                    (values, layout),
                    tokens,
                    None,
                    (out, MatrixLayout { row: tokens, column: 1 }),
                );
            }
        }
    }))
}

/// Product of two tensors of floats.
pub(super) fn batched(
    effects: EngineEffects,
    pool: &mut Pool,
    x: &Tensor,
    y: &Tensor,
    transpose_x: bool,
    transpose_y: bool,
) -> Result<Arc<Tensor>, String> {
    let (Some(a), Some(b)) = (x.floats(), y.floats()) else {
        return Err(format!("{} can't be multiplied with {}", x.data.kind(), y.data.kind()));
    };
    let misfit =
        || format!("shapes {:?} and {:?} (transposed: {transpose_x}, {transpose_y}) don't multiply", x.shape, y.shape);
    let x_shape = if x.rank() == 1 { Dims::from_slice(&[1, x.shape[0]]) } else { Dims::from_slice(&x.shape) };
    let y_shape = if y.rank() == 1 { Dims::from_slice(&[y.shape[0], 1]) } else { Dims::from_slice(&y.shape) };
    if x_shape.len() < 2 || y_shape.len() < 2 {
        return Err(misfit());
    }
    let (transpose_x, transpose_y) = (transpose_x && x.rank() > 1, transpose_y && y.rank() > 1);
    let matrix = |shape: &[usize], transposed: bool| {
        let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        let plain = MatrixLayout { row: columns, column: 1 };
        if transposed { (columns, rows, MatrixLayout { row: 1, column: columns }) } else { (rows, columns, plain) }
    };
    let (m, k, a_layout) = matrix(&x_shape, transpose_x);
    let (inner, n, b_layout) = matrix(&y_shape, transpose_y);
    if k != inner {
        return Err(misfit());
    }
    let (x_lead, y_lead) = (&x_shape[..x_shape.len() - 2], &y_shape[..y_shape.len() - 2]);
    let lead = broadcast_shape(x_lead, y_lead).map_err(|_| misfit())?;
    let mut places = SmallVec::<[[usize; 2]; 64]>::new();
    for_each_index(&lead, [&broadcast_strides(x_lead, &lead), &broadcast_strides(y_lead, &lead)], |at| places.push(at));
    let work = places.len() * m * n * k;
    let compute = |([i, j], out): ([usize; 2], &mut [f32])| {
        product(effects, (m, k, n), (&a[i * m * k..][..m * k], a_layout), (&b[j * k * n..][..k * n], b_layout), out);
    };
    let count = places.len() * m * n;
    let mut shape = lead;
    if x.rank() > 1 {
        shape.push(m);
    }
    if y.rank() > 1 {
        shape.push(n);
    }
    Ok(pool.make(&shape, |out| {
        out.resize(count, 0.0);
        if m * n > 0 && places.len() > 1 && work > MIN_PARALLEL_WORK {
            pool::for_each_chunk(out, m * n, |i, out| compute((places[i], out)));
        } else if m * n > 0 {
            out.chunks_exact_mut(m * n).zip(places).for_each(|(out, at)| compute((at, out)));
        }
    }))
}

/// `softmax(query keyᵀ / sqrt(d) + mask) value`; a boolean mask is true for visible positions.
struct ScaledDotProductAttention {
    query: Input,
    key: Input,
    value: Input,
    mask: Option<Input>,
}

impl ScaledDotProductAttention {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let (query, key, value) = (op.input("query")?, op.input("key")?, op.input("value")?);
        Ok(Arc::new(ScaledDotProductAttention { query, key, value, mask: op.optional_input("attn_mask")? }))
    }
}

impl Kernel for ScaledDotProductAttention {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (query, key, value) = (call.tensor(self.query)?, call.tensor(self.key)?, call.tensor(self.value)?);
        let size = query.shape.last().copied().unwrap_or(1);
        let mut scores = batched(EngineEffects::NONE, pool, query, key, false, true)?;
        let scale = 1.0 / (size as f32).sqrt();
        let Tensor { shape, data } = pool.make_mut(&mut scores);
        let TensorData::F32(values) = data else { return Err("the scores are not floats".into()) };
        values.iter_mut().for_each(|v| *v *= scale);
        if let Some(mask) = self.mask {
            let mask = call.tensor(mask)?;
            if broadcast_shape(shape, &mask.shape)?[..] != shape[..] {
                return Err(format!("a mask of shape {:?} for scores of shape {shape:?}", mask.shape));
            }
            let strides = broadcast_strides(&mask.shape, shape);
            let mut scores = values.iter_mut();
            match &mask.data {
                TensorData::F32(mask) => for_each_index(shape, [&strides], |[i]| {
                    if let Some(score) = scores.next() {
                        *score += mask[i];
                    }
                }),
                TensorData::Bool(mask) => for_each_index(shape, [&strides], |[i]| {
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
        let result = batched(EngineEffects::NONE, pool, &scores, value, false, false)?;
        pool.recycle(scores);
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, b, f, run, try_run};
    use super::*;
    use anec_kernels::weight::Elements;

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
    fn a_weight_can_be_either_operand() {
        let weight = Arc::new(LoadedWeight::plain(
            vec![2, 3],
            Arc::new(Elements::F32(vec![1.0, 0.0, 2.0, 0.0, 1.0, -1.0].into())),
        ));
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
