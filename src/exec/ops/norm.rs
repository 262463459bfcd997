//! Softmax and normalizations.

use std::sync::Arc;

use super::reduce::{Axes, gathered, is_gathered};
use super::{Resolved, Row, computing};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::strided::View;
use crate::tensor::{Dims, Tensor, TensorData, axis_index, broadcast_strides, for_each_index};
use anec_kernels::activation::exp_in_place;
use anec_kernels::aligned_buf::AlignedBuf;
use anec_kernels::dispatch::{Vectorize, vectorized};
use anec_kernels::reduce::{max, sum, sum_of, sum_of_squares};

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "batch_norm" => |op| ChannelNorm::resolve(op, true),
    "instance_norm" => |op| ChannelNorm::resolve(op, false),
    "l2_norm" => |op| Ok(Arc::new(L2Norm { x: op.input("x")?, epsilon: op.float("epsilon")? })),
    "layer_norm" => LayerNorm::resolve,
    "local_response_norm" => LocalResponseNorm::resolve,
    "softmax" => |op| Ok(Arc::new(Softmax { x: op.input("x")?, axis: op.integer("axis")? })),
};

/// Softmax of each row of `length`; returns the smallest of the rows' maxima.
pub(crate) fn softmax_rows(values: &mut [f32], length: usize) -> f32 {
    vectorized(SoftmaxRows { values, length })
}

/// Kernel of [`softmax_rows`].
struct SoftmaxRows<'a> {
    values: &'a mut [f32],
    length: usize,
}

impl Vectorize for SoftmaxRows<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let mut least = f32::INFINITY;
        for row in self.values.chunks_exact_mut(self.length.max(1)) {
            let top = max(row);
            least = least.min(top);
            row.iter_mut().for_each(|v| *v -= top);
            exp_in_place(row);
            let scale = 1.0 / sum(row);
            row.iter_mut().for_each(|v| *v *= scale);
        }
        least
    }
}

/// Softmax over the middle one of three axes.
fn softmax_planes(values: &mut [f32], length: usize, inner: usize) {
    let mut lines = AlignedBuf::new(inner);
    let row = lines.floats();
    for plane in values.chunks_exact_mut((length * inner).max(1)) {
        row.copy_from_slice(&plane[..inner]);
        for line in plane.chunks_exact(inner) {
            row.iter_mut().zip(line).for_each(|(top, v)| *top = top.max(*v));
        }
        for line in plane.chunks_exact_mut(inner) {
            line.iter_mut().zip(&*row).for_each(|(v, top)| *v -= top);
        }
        exp_in_place(plane);
        row.fill(0.0);
        for line in plane.chunks_exact(inner) {
            row.iter_mut().zip(line).for_each(|(sum, v)| *sum += v);
        }
        row.iter_mut().for_each(|sum| *sum = 1.0 / *sum);
        for line in plane.chunks_exact_mut(inner) {
            line.iter_mut().zip(&*row).for_each(|(v, scale)| *v *= scale);
        }
    }
}

/// Softmax over an axis.
pub(crate) struct Softmax {
    pub x: Input,
    pub axis: i64,
}

impl Kernel for Softmax {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let mut x = call.take(self.x)?;
        let axis = axis_index(self.axis, x.rank())?;
        let length = x.shape[axis];
        let inner: usize = x.shape[axis + 1..].iter().product();
        match &mut pool.make_mut(&mut x).data {
            TensorData::F32(values) if inner == 1 => {
                softmax_rows(values, length);
            }
            TensorData::F32(values) if inner > 0 && length > 0 => softmax_planes(values, length, inner),
            TensorData::F32(_) => {}
            data => return Err(format!("`x` holds {}, not floats", data.kind())),
        }
        call.push(x)
    }
}

/// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, with mean and variance over `axes`.
struct LayerNorm {
    x: Input,
    axes: Axes,
    gamma: Option<Input>,
    beta: Option<Input>,
    epsilon: f32,
}

impl LayerNorm {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        Ok(Arc::new(LayerNorm {
            x: op.input("x")?,
            axes: Axes::resolve(op)?,
            gamma: op.optional_input("gamma")?,
            beta: op.optional_input("beta")?,
            epsilon: op.float("epsilon")?,
        }))
    }
}

impl Kernel for LayerNorm {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let reduced = self.axes.of(x.rank())?;
        let normal: Dims = x.shape.iter().zip(&reduced).filter(|(_, r)| **r).map(|(n, _)| *n).collect();
        let count: usize = normal.iter().product();
        let factor = |input: Option<Input>| -> Result<Option<&[f32]>, String> {
            let Some(input) = input else { return Ok(None) };
            let tensor = call.tensor(input)?;
            if tensor.shape[..] != normal[..] {
                let name = input.name;
                return Err(format!("`{name}` has the shape {:?}, the axes have {normal:?}", tensor.shape));
            }
            call.floats(input).map(Some)
        };
        let (gamma, beta) = (factor(self.gamma)?, factor(self.beta)?);
        let values = call.floats(self.x)?;
        let mut result = pool.make(&x.shape, |out| match is_gathered(&x.shape, &reduced) {
            true => out.extend_from_slice(values),
            false => out.extend_from_slice(&gathered(&x.shape, values, &reduced)),
        });
        let shape = &x.shape;
        let Tensor { data, .. } = pool.make_mut(&mut result);
        if let TensorData::F32(values) = data {
            for row in values.chunks_exact_mut(count.max(1)) {
                normalize(row, self.epsilon);
                if let Some(gamma) = gamma {
                    row.iter_mut().zip(gamma).for_each(|(v, g)| *v *= g);
                }
                if let Some(beta) = beta {
                    row.iter_mut().zip(beta).for_each(|(v, b)| *v += b);
                }
            }
            if !is_gathered(shape, &reduced) {
                *values = scattered(shape, std::mem::take(values), &reduced);
            }
        }
        call.push(result)
    }
}

/// Inverse of [`gathered`].
fn scattered(shape: &[usize], values: Vec<f32>, reduced: &[bool]) -> Vec<f32> {
    let (inner, outer): (Vec<usize>, Vec<usize>) = (0..shape.len()).partition(|axis| reduced[*axis]);
    let order = [outer, inner].concat();
    if order.is_sorted() {
        return values;
    }
    let mut out = vec![0.0; values.len()];
    View::whole(shape).permute(&order).write(&mut out, &values);
    out
}

fn normalize(row: &mut [f32], epsilon: f32) {
    let mean = sum(row) / row.len() as f32;
    let variance = sum_of(row, |v| (v - mean) * (v - mean)) / row.len() as f32;
    let scale = 1.0 / (variance + epsilon).sqrt();
    row.iter_mut().for_each(|v| *v = (*v - mean) * scale);
}

/// `x / sqrt(sum of squares over the last three axes + epsilon)`.
struct L2Norm {
    x: Input,
    epsilon: f32,
}

impl Kernel for L2Norm {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let mut x = call.take(self.x)?;
        let Tensor { shape, data } = pool.make_mut(&mut x);
        let count: usize = shape[shape.len().saturating_sub(3)..].iter().product();
        let TensorData::F32(values) = data else { return Err(format!("`x` holds {}, not floats", data.kind())) };
        for block in values.chunks_exact_mut(count.max(1)) {
            let scale = 1.0 / (sum_of_squares(block) + self.epsilon).sqrt();
            block.iter_mut().for_each(|v| *v *= scale);
        }
        call.push(x)
    }
}

/// One number for each channel, or a default.
struct OfChannels<'a> {
    values: Option<&'a [f32]>,
    default: f32,
}

impl<'a> OfChannels<'a> {
    fn new(call: &'a Call<'_>, input: Option<Input>, channels: usize, default: f32) -> Result<Self, String> {
        let Some(input) = input else { return Ok(OfChannels { values: None, default }) };
        let values = call.floats(input)?;
        if values.len() != channels {
            return Err(format!("`{}` has {} elements for {channels} channels", input.name, values.len()));
        }
        Ok(OfChannels { values: Some(values), default })
    }

    fn of(&self, channel: usize) -> f32 {
        self.values.map_or(self.default, |values| values[channel])
    }
}

fn channels_and_plane(shape: &[usize]) -> Result<(usize, usize), String> {
    match shape {
        [_, channels, rest @ ..] => Ok((*channels, rest.iter().product())),
        _ => Err(format!("a tensor of shape {shape:?} has no channel axis")),
    }
}

/// `(x - mean) / sqrt(variance + epsilon) * gamma + beta` by channel: `batch_norm` with constant means and variances,
/// `instance_norm` with those of each channel's plane.
struct ChannelNorm {
    x: Input,
    mean: Option<Input>,
    variance: Option<Input>,
    gamma: Option<Input>,
    beta: Option<Input>,
    epsilon: f32,
    given: bool,
}

impl ChannelNorm {
    fn resolve(op: &mut Resolver<'_>, given: bool) -> Resolved {
        Ok(Arc::new(ChannelNorm {
            x: op.input("x")?,
            mean: if given { op.optional_input("mean")? } else { None },
            variance: if given { op.optional_input("variance")? } else { None },
            gamma: op.optional_input("gamma")?,
            beta: op.optional_input("beta")?,
            epsilon: op.float("epsilon")?,
            given,
        }))
    }
}

impl Kernel for ChannelNorm {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (channels, plane) = channels_and_plane(&call.tensor(self.x)?.shape)?;
        let mut x = call.take(self.x)?;
        let of = |input, default| OfChannels::new(call, input, channels, default);
        let (mean, variance) = (of(self.mean, 0.0)?, of(self.variance, 1.0)?);
        let (gamma, beta) = (of(self.gamma, 1.0)?, of(self.beta, 0.0)?);
        let TensorData::F32(values) = &mut pool.make_mut(&mut x).data else { return Err("`x` holds no floats".into()) };
        for (i, plane) in values.chunks_exact_mut(plane.max(1)).enumerate() {
            let c = i % channels;
            if self.given {
                let scale = gamma.of(c) / (variance.of(c) + self.epsilon).sqrt();
                let (mean, beta) = (mean.of(c), beta.of(c));
                plane.iter_mut().for_each(|v| *v = (*v - mean) * scale + beta);
            } else {
                normalize(plane, self.epsilon);
                let (gamma, beta) = (gamma.of(c), beta.of(c));
                plane.iter_mut().for_each(|v| *v = *v * gamma + beta);
            }
        }
        call.push(x)
    }
}

/// `x / (k + alpha / size * sum of squares of the `size` channels around it)^beta`.
struct LocalResponseNorm {
    x: Input,
    size: usize,
    alpha: f32,
    beta: f32,
    k: f32,
}

impl LocalResponseNorm {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let size = usize::try_from(op.integer("size")?).map_err(|_| "`size` is negative".to_owned())?;
        let (alpha, beta, k) = (op.float("alpha")?, op.float("beta")?, op.float("k")?);
        Ok(Arc::new(LocalResponseNorm { x: op.input("x")?, size, alpha, beta, k }))
    }
}

impl Kernel for LocalResponseNorm {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let LocalResponseNorm { size, alpha, beta, k, .. } = *self;
        let x = call.tensor(self.x)?;
        let values = call.floats(self.x)?;
        let (channels, plane) = channels_and_plane(&x.shape)?;
        let mut out = vec![0f32; values.len()];
        let shape = [x.shape[0], channels, plane];
        let mut i = 0;
        for_each_index(&shape, [&broadcast_strides(&[channels, 1], &shape)], |[c]| {
            let (low, high) = (c.saturating_sub(size / 2), (c + size.div_ceil(2)).min(channels));
            let squares: f32 = (low..high).map(|other| values[i + other * plane - c * plane].powi(2)).sum();
            out[i] = values[i] / (k + alpha / size.max(1) as f32 * squares).powf(beta);
            i += 1;
        });
        let result = pool.copied(&x.shape, &out);
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, f, i, run};

    #[test]
    fn softmax_sums_to_one_along_any_axis() {
        let x = || f(&[2, 2], &[0.0, 2f32.ln(), f32::NEG_INFINITY, 1000.0]);
        let last = run("softmax", vec![("x", x()), ("axis", i(&[], &[-1]))]);
        assert_close(&last, &[2, 2], &[1.0 / 3.0, 2.0 / 3.0, 0.0, 1.0]);
        let first = run("softmax", vec![("x", x()), ("axis", i(&[], &[0]))]);
        assert_close(&first, &[2, 2], &[1.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn layers_are_normalized_over_their_axes() {
        // mean 2, variance 1
        let x = f(&[1, 2, 2], &[1.0, 10.0, 3.0, 30.0]);
        let axis = i(&[1], &[1]);
        let zero = f(&[], &[0.0]);
        let plain = run("layer_norm", vec![("x", x.clone()), ("axes", axis.clone()), ("epsilon", zero.clone())]);
        assert_close(&plain, &[1, 2, 2], &[-1.0, -1.0, 1.0, 1.0]);
        let scaled = run(
            "layer_norm",
            vec![
                ("x", x),
                ("axes", axis),
                ("epsilon", zero),
                ("gamma", f(&[2], &[2.0, 3.0])),
                ("beta", f(&[2], &[0.5, 0.0])),
            ],
        );
        assert_close(&scaled, &[1, 2, 2], &[-1.5, -1.5, 3.0, 3.0]);
    }

    #[test]
    fn channels_are_normalized() {
        let x = || f(&[1, 2, 1, 2], &[1.0, 3.0, 5.0, 5.0]);
        let zero = || f(&[], &[0.0]);
        let batch = run(
            "batch_norm",
            vec![
                ("x", x()),
                ("mean", f(&[2], &[1.0, 4.0])),
                ("variance", f(&[2], &[4.0, 1.0])),
                ("gamma", f(&[2], &[1.0, 2.0])),
                ("beta", f(&[2], &[0.0, 1.0])),
                ("epsilon", zero()),
            ],
        );
        assert_close(&batch, &[1, 2, 1, 2], &[0.0, 1.0, 3.0, 3.0]);
        let instance = run("instance_norm", vec![("x", x()), ("epsilon", f(&[], &[1e-12]))]);
        assert_close(&instance, &[1, 2, 1, 2], &[-1.0, 1.0, 0.0, 0.0]);
        let l2 = run("l2_norm", vec![("x", f(&[1, 2, 1, 1], &[3.0, 4.0])), ("epsilon", zero())]);
        assert_close(&l2, &[1, 2, 1, 1], &[0.6, 0.8]);
        let response = run(
            "local_response_norm",
            vec![
                ("x", f(&[1, 3, 1, 1], &[1.0, 2.0, 3.0])),
                ("size", i(&[], &[3])),
                ("alpha", f(&[], &[3.0])),
                ("beta", f(&[], &[1.0])),
            ],
        );
        assert_close(&response, &[1, 3, 1, 1], &[1.0 / 6.0, 2.0 / 15.0, 3.0 / 14.0]);
    }
}
