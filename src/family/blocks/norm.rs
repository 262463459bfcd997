//! Root-mean-square norm (arXiv:1910.07467): `x / sqrt(mean(x^2) + eps) * w`.
//!
//! In fp16 the equation as written overflows at |x| > 256 and its epsilon may vanish. The accurate form first divides
//! by the largest magnitude `m` of the row, which changes nothing: with `s = x / m`,
//! `x / sqrt(mean(x^2) + eps) = s / sqrt(mean(s^2) + (sqrt(eps) / m)^2)`. The squares lie in 0..1 and epsilon keeps
//! its full weight. `m` is held above 2^-14 (the smallest normal fp16), so a row of zeros gives zeros.

use super::Graph;
use anec_manifest::{NormForm, Role};
use anec_mil::{Constant, ValueId};
use anec_source::Weight;

/// Smallest normal fp16.
const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
/// Smallest positive fp16: what `rsqrt` is given as its epsilon, for it must have one; the sums it is added to are
/// at least 1/channels.
const SMALLEST: f32 = 5.960_464_5e-8;
/// The constant scale of the `prescale` form: a power of two, so that scaling is exact.
const PRESCALE: f32 = 1.0 / 16.0;

/// A norm's gain and epsilon.
#[derive(Clone, Debug)]
pub struct Norm {
    /// Name within the layer.
    pub name: &'static str,
    /// `[width]`
    pub weight: Weight,
    /// Added to the mean square.
    pub eps: f64,
}

/// Normalises rank-4 `x` over `axis`, whose size is that of the gain.
pub fn rms_norm(g: &mut Graph<'_>, x: ValueId, norm: &Norm, axis: usize) -> ValueId {
    let width = norm.weight.rows() * norm.weight.columns();
    let mut shape = [1u64; 4];
    shape[axis] = width;
    g.scope(norm.name, |g| {
        let normal = normalize(g, x, axis, width, norm.eps);
        let gain = g.weight("weight", Role::Norm, &norm.weight, &shape);
        g.ops.mul(normal, gain)
    })
}

/// `x / sqrt(sum(x^2) + eps)` over `axis`, in the accurate form.
pub fn l2_normalize(g: &mut Graph<'_>, x: ValueId, axis: usize, eps: f64) -> ValueId {
    scaled_first(g, x, axis, eps, |g, square, axes| g.ops.reduce_sum(square, axes, true))
}

/// `x / sqrt(total(x^2) + eps)` over `axis`, for a `total` that is linear. Both are divided by the largest magnitude
/// first, so that no square leaves fp16's range.
fn scaled_first(
    g: &mut Graph<'_>,
    x: ValueId,
    axis: usize,
    eps: f64,
    total: impl FnOnce(&mut Graph<'_>, ValueId, &[i32]) -> ValueId,
) -> ValueId {
    let axes = [axis as i32];
    let magnitude = g.ops.abs(x);
    let largest = g.ops.reduce_max(magnitude, &axes, true);
    let largest = g.ops.maximum(largest, Constant::fp16(SMALLEST_NORMAL));
    let scaled = g.ops.real_div(x, largest);
    let square = g.ops.mul(scaled, scaled);
    let total = total(g, square, &axes);
    let root_eps = g.ops.real_div(Constant::fp16(eps.sqrt() as f32), largest);
    let eps = g.ops.mul(root_eps, root_eps);
    let total = g.ops.add(total, eps);
    let inverse = g.ops.rsqrt(total, SMALLEST);
    g.ops.mul(scaled, inverse)
}

/// `x / sqrt(mean(x^2) + eps)` over `axis` of size `width`, without gain.
fn normalize(g: &mut Graph<'_>, x: ValueId, axis: usize, width: u64, eps: f64) -> ValueId {
    let axes = [axis as i32];
    match g.form.norm {
        NormForm::Accurate => scaled_first(g, x, axis, eps, |g, square, axes| g.ops.reduce_mean(square, axes, true)),
        NormForm::Naive => {
            let square = g.ops.mul(x, x);
            let mean = g.ops.reduce_mean(square, &axes, true);
            let inverse = g.ops.rsqrt(mean, (eps as f32).max(SMALLEST));
            g.ops.mul(x, inverse)
        }
        NormForm::Prescale => {
            let scaled = g.ops.mul(x, Constant::fp16(PRESCALE));
            let square = g.ops.mul(scaled, scaled);
            let mean = g.ops.reduce_mean(square, &axes, true);
            let eps = eps as f32 * PRESCALE * PRESCALE;
            let inverse = g.ops.rsqrt(mean, eps.max(SMALLEST));
            g.ops.mul(scaled, inverse)
        }
        NormForm::LayerNormConcat => {
            let negative = g.ops.mul(x, Constant::fp16(-1.0));
            let both = g.ops.concat(&[x, negative], axis as i32);
            let normal = g.ops.layer_norm(both, &axes, (eps as f32).max(SMALLEST));
            g.ops.slice(normal, axis, 0..width)
        }
    }
}
