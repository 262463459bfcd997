//! Normalizations.

use anec_mil::Op;

use super::arithmetic::{add_number, norm, per_channel};
use super::composite::Reduction;
use super::context::{Lowering, Tensor};
use super::convolution::window_sum;
use super::{Lowered, Row};

pub(super) const ROWS: &[Row] = &[
    ("batch_norm", batch_norm),
    ("instance_norm", instance_norm),
    ("l2_norm", l2_norm),
    ("layer_norm", layer_norm),
    ("local_response_norm", local_response_norm),
];

/// Deviations from the mean over some axes, divided by their root mean square.
fn normalized(l: &mut Lowering<'_>, x: &Tensor, axes: &[usize], epsilon: f32) -> Result<Tensor, String> {
    let mean = l.reduce(Reduction::Mean, x, axes)?;
    let centered = l.binary("primitive.sub_v1", x, &mean)?;
    let squares = l.binary("primitive.mul_v1", &centered, &centered)?;
    let variance = l.reduce(Reduction::Mean, &squares, axes)?;
    let variance = add_number(l, &variance, epsilon)?;
    let scale = l.unary("primitive.rsqrt_v1", &variance);
    l.binary("primitive.mul_v1", &centered, &scale)
}

/// Scales and shifts by parameters that `arrange` makes broadcast.
fn scaled(
    l: &mut Lowering<'_>,
    op: &Op,
    x: Tensor,
    arrange: impl Fn(&mut Lowering<'_>, &Tensor, &Tensor) -> Tensor,
) -> Lowered {
    let mut x = x;
    for (parameter, name) in [("gamma", "primitive.mul_v1"), ("beta", "primitive.add_v1")] {
        if let Some(factor) = l.optional(op, parameter)? {
            let factor = arrange(l, &x, &factor);
            x = l.binary(name, &x, &factor)?;
        }
    }
    Ok(vec![x])
}

fn layer_norm(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let epsilon = l.number(op, "epsilon", 1e-5)?;
    let axes = l.integers_or(op, "axes", (0..x.rank() as i64).collect())?;
    let mut axes = axes.into_iter().map(|axis| x.axis(axis)).collect::<Result<Vec<_>, _>>()?;
    axes.sort_unstable();
    let result = normalized(l, &x, &axes, epsilon)?;
    scaled(l, op, result, |l, x, factor| {
        let mut shape = vec![1; x.rank()];
        axes.iter().for_each(|axis| shape[*axis] = x.shape[*axis]);
        l.reshape(factor, &shape)
    })
}

fn instance_norm(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let epsilon = l.number(op, "epsilon", 1e-5)?;
    let axes: Vec<usize> = (2..x.rank()).collect();
    let result = normalized(l, &x, &axes, epsilon)?;
    scaled(l, op, result, per_channel)
}

fn batch_norm(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let epsilon = l.number(op, "epsilon", 1e-5)?;
    let (mean, variance) = (l.tensor(op, "mean")?, l.tensor(op, "variance")?);
    let (mean, variance) = (per_channel(l, &x, &mean), per_channel(l, &x, &variance));
    let centered = l.binary("primitive.sub_v1", &x, &mean)?;
    let variance = add_number(l, &variance, epsilon)?;
    let scale = l.unary("primitive.rsqrt_v1", &variance);
    let result = l.binary("primitive.mul_v1", &centered, &scale)?;
    scaled(l, op, result, per_channel)
}

/// Over all axes but those of batches.
fn l2_norm(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let epsilon = l.number(op, "epsilon", 1e-6)?;
    let axes: Vec<usize> = (x.rank().saturating_sub(3)..x.rank()).collect();
    let norm = norm(l, &x, &axes, epsilon)?;
    Ok(vec![l.binary("primitive.divide_v1", &x, &norm)?])
}

fn local_response_norm(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let size = l.integer_or(op, "size", 1)?.max(1) as u64;
    let (alpha, beta, k) = (l.number(op, "alpha", 1e-4)?, l.number(op, "beta", 0.75)?, l.number(op, "k", 1.0)?);
    let squares = l.binary("primitive.mul_v1", &x, &x)?;
    let sums = window_sum(l, &squares, 1, size)?;
    let scaled = l.with_number("primitive.mul_v1", &sums, f64::from(alpha) / size as f64)?;
    let base = l.with_number("primitive.add_v1", &scaled, k.into())?;
    let power = l.with_number("primitive.pow_v1", &base, beta.into())?;
    Ok(vec![l.binary("primitive.divide_v1", &x, &power)?])
}
