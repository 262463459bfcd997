//! Softmax and normalizations.

use std::sync::Arc;

use super::reduce::{gathered, reduced_axes};
use super::{Call, Results, Row, computing, one};
use crate::strided::View;
use crate::tensor::{Tensor, TensorData, axis_index, broadcast_strides, for_each_index};
use anec_kernels::activation::exp_in_place;
use anec_kernels::reduce::{max, sum, sum_of, sum_of_squares};

/// The rows of this group.
pub(super) const ROWS: &[Row] = computing! {
    "batch_norm" => batch_norm,
    "instance_norm" => instance_norm,
    "l2_norm" => l2_norm,
    "layer_norm" => layer_norm,
    "local_response_norm" => local_response_norm,
    "softmax" => softmax,
};

/// Softmax over the last axis of rows of `length`.
pub(crate) fn softmax_rows(values: &mut [f32], length: usize) {
    for row in values.chunks_exact_mut(length.max(1)) {
        let top = max(row);
        row.iter_mut().for_each(|v| *v -= top);
        exp_in_place(row);
        let scale = 1.0 / sum(row);
        row.iter_mut().for_each(|v| *v *= scale);
    }
}

/// Softmax over the middle one of three axes.
fn softmax_planes(values: &mut [f32], length: usize, inner: usize) {
    let mut row = vec![0.0; inner];
    for plane in values.chunks_exact_mut((length * inner).max(1)) {
        row.copy_from_slice(&plane[..inner]);
        for line in plane.chunks_exact(inner) {
            row.iter_mut().zip(line).for_each(|(top, v)| *top = top.max(*v));
        }
        for line in plane.chunks_exact_mut(inner) {
            line.iter_mut().zip(&row).for_each(|(v, top)| *v -= top);
        }
        exp_in_place(plane);
        row.fill(0.0);
        for line in plane.chunks_exact(inner) {
            row.iter_mut().zip(line).for_each(|(sum, v)| *sum += v);
        }
        row.iter_mut().for_each(|sum| *sum = 1.0 / *sum);
        for line in plane.chunks_exact_mut(inner) {
            line.iter_mut().zip(&row).for_each(|(v, scale)| *v *= scale);
        }
    }
}

fn softmax(call: &mut Call<'_>) -> Results {
    let axis = call.integer_or("axis", -1)?;
    let mut x = call.take("x")?;
    let axis = axis_index(axis, x.rank())?;
    let length = x.shape[axis];
    let inner: usize = x.shape[axis + 1..].iter().product();
    match &mut Arc::make_mut(&mut x).data {
        TensorData::F32(values) if inner == 1 => softmax_rows(values, length),
        TensorData::F32(values) if inner > 0 && length > 0 => softmax_planes(values, length, inner),
        TensorData::F32(_) => {}
        data => return Err(format!("`x` holds {}, not floats", data.kind())),
    }
    Ok(vec![x])
}

/// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, with mean and variance over `axes`.
fn layer_norm(call: &mut Call<'_>) -> Results {
    let epsilon = call.float_or("epsilon", 1e-5)?;
    let x = call.tensor("x")?;
    let reduced = reduced_axes(call, x.rank())?;
    let normal: Vec<usize> = x.shape.iter().zip(&reduced).filter(|(_, r)| **r).map(|(n, _)| *n).collect();
    let count: usize = normal.iter().product();
    let factor = |name: &str| -> Result<Option<&[f32]>, String> {
        if !call.has(name) {
            return Ok(None);
        }
        let tensor = call.tensor(name)?;
        if tensor.shape != normal {
            return Err(format!("`{name}` has the shape {:?}, the axes have {normal:?}", tensor.shape));
        }
        call.floats(name).map(Some)
    };
    let (gamma, beta) = (factor("gamma")?, factor("beta")?);
    let mut values = gathered(&x.shape, call.floats("x")?, &reduced).into_owned();
    for row in values.chunks_exact_mut(count.max(1)) {
        normalize(row, epsilon);
        if let Some(gamma) = gamma {
            row.iter_mut().zip(gamma).for_each(|(v, g)| *v *= g);
        }
        if let Some(beta) = beta {
            row.iter_mut().zip(beta).for_each(|(v, b)| *v += b);
        }
    }
    one(Tensor::new(x.shape.clone(), scattered(&x.shape, values, &reduced)))
}

/// Undoes [`gathered`].
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
fn l2_norm(call: &mut Call<'_>) -> Results {
    let epsilon = call.float_or("epsilon", 1e-6)?;
    let mut x = call.take("x")?;
    let Tensor { shape, data } = Arc::make_mut(&mut x);
    let count: usize = shape[shape.len().saturating_sub(3)..].iter().product();
    let TensorData::F32(values) = data else { return Err(format!("`x` holds {}, not floats", data.kind())) };
    for block in values.chunks_exact_mut(count.max(1)) {
        let scale = 1.0 / (sum_of_squares(block) + epsilon).sqrt();
        block.iter_mut().for_each(|v| *v *= scale);
    }
    Ok(vec![x])
}

/// One number for each channel, or what it is when left out.
fn channel_values(call: &Call<'_>, name: &str, channels: usize, default: f32) -> Result<Vec<f32>, String> {
    if !call.has(name) {
        return Ok(vec![default; channels]);
    }
    let values = call.floats(name)?;
    if values.len() != channels {
        return Err(format!("`{name}` has {} elements for {channels} channels", values.len()));
    }
    Ok(values.to_vec())
}

fn channels_and_plane(shape: &[usize]) -> Result<(usize, usize), String> {
    match shape {
        [_, channels, rest @ ..] => Ok((*channels, rest.iter().product())),
        _ => Err(format!("a tensor of shape {shape:?} has no channel axis")),
    }
}

/// `(x - mean) / sqrt(variance + epsilon) * gamma + beta` by channel, with given means and variances.
fn batch_norm(call: &mut Call<'_>) -> Results {
    let epsilon = call.float_or("epsilon", 1e-5)?;
    let (channels, plane) = channels_and_plane(&call.tensor("x")?.shape)?;
    let mean = channel_values(call, "mean", channels, 0.0)?;
    let variance = channel_values(call, "variance", channels, 1.0)?;
    let gamma = channel_values(call, "gamma", channels, 1.0)?;
    let beta = channel_values(call, "beta", channels, 0.0)?;
    let mut x = call.take("x")?;
    let TensorData::F32(values) = &mut Arc::make_mut(&mut x).data else { return Err("`x` holds no floats".into()) };
    for (i, plane) in values.chunks_exact_mut(plane.max(1)).enumerate() {
        let c = i % channels;
        let scale = gamma[c] / (variance[c] + epsilon).sqrt();
        plane.iter_mut().for_each(|v| *v = (*v - mean[c]) * scale + beta[c]);
    }
    Ok(vec![x])
}

/// As batch_norm, with the mean and variance of each channel's own plane.
fn instance_norm(call: &mut Call<'_>) -> Results {
    let epsilon = call.float_or("epsilon", 1e-5)?;
    let (channels, plane) = channels_and_plane(&call.tensor("x")?.shape)?;
    let gamma = channel_values(call, "gamma", channels, 1.0)?;
    let beta = channel_values(call, "beta", channels, 0.0)?;
    let mut x = call.take("x")?;
    let TensorData::F32(values) = &mut Arc::make_mut(&mut x).data else { return Err("`x` holds no floats".into()) };
    for (i, plane) in values.chunks_exact_mut(plane.max(1)).enumerate() {
        let c = i % channels;
        normalize(plane, epsilon);
        plane.iter_mut().for_each(|v| *v = *v * gamma[c] + beta[c]);
    }
    Ok(vec![x])
}

/// `x / (k + alpha / size * sum of squares of the `size` channels around it)^beta`.
fn local_response_norm(call: &mut Call<'_>) -> Results {
    let size = usize::try_from(call.integer("size")?).map_err(|_| "`size` is negative".to_owned())?;
    let (alpha, beta, k) = (call.float_or("alpha", 1e-4)?, call.float_or("beta", 0.75)?, call.float_or("k", 1.0)?);
    let x = call.tensor("x")?;
    let values = call.floats("x")?;
    let (channels, plane) = channels_and_plane(&x.shape)?;
    let mut out = vec![0.0; values.len()];
    let shape = [x.shape[0], channels, plane];
    let mut i = 0;
    for_each_index(&shape, [&broadcast_strides(&[channels, 1], &shape)], |[c]| {
        let (low, high) = (c.saturating_sub(size / 2), (c + size.div_ceil(2)).min(channels));
        let squares: f32 = (low..high).map(|other| values[i + other * plane - c * plane].powi(2)).sum();
        out[i] = values[i] / (k + alpha / size.max(1) as f32 * squares).powf(beta);
        i += 1;
    });
    one(Tensor::new(x.shape.clone(), out))
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
