//! Root-mean-square norm (arXiv:1910.07467): `x / sqrt(mean(x^2) + eps) * w`.
//!
//! In fp16, the equation as written overflows for |x| > 256, and epsilon may vanish. The accurate form first divides by
//! the largest magnitude `m` of the row, which doesn't change the result: with `s = x / m`,
//! `x / sqrt(mean(x^2) + eps) = s / sqrt(mean(s^2) + (sqrt(eps) / m)^2)`. The squares are within 0..1 and epsilon keeps
//! its full weight. `m` is at least 2^-14 (the smallest normal fp16), so a row of zeros results in zeros.

use super::Graph;
use crate::error::FamilyError;
use anec_manifest::{NormForm, Role};
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;
use half::f16;

/// Smallest normal fp16.
const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
/// Smallest positive fp16: epsilon of `rsqrt`, which requires one; it is added to sums of at least 1/channels.
const SMALLEST: f32 = 5.960_464_5e-8;
/// Number whose square fp16 holds.
const LARGEST_ROOT: f64 = 128.0;
/// Scale of the `prescale` form: a power of two, so that scaling is exact.
const PRESCALE: f32 = 1.0 / 16.0;

/// Gain and epsilon of a norm. A layer norm (arXiv:1607.06450) first subtracts the mean,
/// `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b`.
#[derive(Clone, Debug)]
pub struct Norm {
    /// Name within the layer.
    pub name: &'static str,
    /// Weight `[width]`, or one row for each of several heads; `None` without a gain.
    pub weight: Option<SourceWeight>,
    /// Difference of gain and weight: 1 for a zero-centred weight, else 0; times the scale of the residual stream if
    /// the norm writes to it.
    pub offset: f32,
    /// Epsilon, added to the mean square.
    pub eps: f64,
    /// Whether the mean is subtracted first.
    pub centred: bool,
    /// Bias `[width]`.
    pub bias: Option<SourceWeight>,
}

impl Norm {
    /// Creates a root-mean-square norm.
    pub fn root_mean_square(name: &'static str, weight: SourceWeight, offset: f32, eps: f64) -> Self {
        Norm { name, weight: Some(weight), offset, eps, centred: false, bias: None }
    }

    /// Creates a root-mean-square norm without a gain.
    pub fn without_gain(name: &'static str, eps: f64) -> Self {
        Norm { name, weight: None, offset: 0.0, eps, centred: false, bias: None }
    }

    /// Creates a layer norm.
    pub fn layer(name: &'static str, weight: SourceWeight, bias: Option<SourceWeight>, eps: f64) -> Self {
        Norm { name, weight: Some(weight), offset: 0.0, eps, centred: true, bias }
    }

    /// Gain, if the norm has one.
    pub fn gain(&self) -> Option<SourceWeight> {
        Some(self.weight.as_ref()?.add(self.offset))
    }

    /// Multiplies the norm's output.
    pub fn scale_result(&mut self, factor: f32) {
        self.weight = self.weight.as_ref().map(|weight| weight.scale(factor));
        self.bias = self.bias.as_ref().map(|bias| bias.scale(factor));
        self.offset *= factor;
    }
}

/// Applies a norm to rank-4 `x` over `axis`, whose size is that of the gain.
///
/// The gain of a zero-centred weight is `1 + w`, which isn't computed: fp16 would round it to 2^-11, whereas the small
/// `w` is rounded to 2^-11 of itself (and a published bf16 weight is exact). `x w + x` loses nothing else.
pub fn rms_norm(g: &mut Graph<'_>, x: ValueId, norm: &Norm, axis: usize) -> ValueId {
    // the number of a norm's channels is fixed
    let width = g.ops.ty(x).shape[axis].fixed().unwrap_or(1);
    let mut shape = [1u64; 4];
    shape[axis] = width;
    let gains = norm.weight.as_ref().map_or(width, SourceWeight::elements);
    if gains > width {
        // heads, each with a gain of its own
        shape[1] = gains / width;
    }
    g.scope(norm.name, |g| {
        let normal = if norm.centred { centred(g, x, axis, norm.eps) } else { normalize(g, x, axis, width, norm.eps) };
        let Some(weight) = &norm.weight else { return normal };
        let weight = g.weight("weight", Role::Norm, weight, &shape);
        let product = g.ops.mul(normal, weight);
        let gained = match norm.offset {
            0.0 => product,
            1.0 => g.ops.add(product, normal),
            offset => {
                let centre = g.ops.mul(normal, Constant::fp16(offset));
                g.ops.add(product, centre)
            }
        };
        let Some(bias) = &norm.bias else { return gained };
        let bias = g.weight("bias", Role::Norm, bias, &shape);
        g.ops.add(gained, bias)
    })
}

/// `x / sqrt(sum(x^2) + eps)` over `axis`, in the accurate form.
pub fn l2_normalize(g: &mut Graph<'_>, x: ValueId, axis: usize, eps: f64) -> ValueId {
    scaled_first(g, x, axis, eps, |g, square, axes| g.ops.reduce_sum(square, axes, true))
}

/// `x / sqrt(total(x^2) + eps)` over `axis` for a linear `total`. Both are divided by the largest magnitude first, so
/// that squares stay in fp16's range.
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
    // any divisor gives the same norm; the square of the epsilon's root by it must fit fp16
    let divisor = SMALLEST_NORMAL.max((eps.sqrt() / LARGEST_ROOT) as f32);
    let largest = g.ops.maximum(largest, Constant::fp16(divisor));
    let scaled = g.ops.real_div(x, largest);
    let square = g.ops.mul(scaled, scaled);
    let total = total(g, square, &axes);
    let root_eps = Constant::fp16(hold(g, eps.sqrt(), eps));
    let root_eps = g.ops.real_div(root_eps, largest);
    let eps = g.ops.mul(root_eps, root_eps);
    let total = g.ops.add(total, eps);
    let inverse = g.ops.rsqrt(total, SMALLEST);
    g.ops.mul(scaled, inverse)
}

/// `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)` over `axis`, without gain.
fn centred(g: &mut Graph<'_>, x: ValueId, axis: usize, eps: f64) -> ValueId {
    let axes = [axis as i32];
    if g.form.norm == NormForm::LayerNormConcat {
        // the op itself: the mean can't cancel
        let eps = hold(g, eps, eps).max(SMALLEST);
        return g.ops.layer_norm(x, &axes, eps);
    }
    let width = g.ops.ty(x).shape[axis].fixed().unwrap_or(1);
    let mean = g.ops.reduce_mean(x, &axes, true);
    let x = g.ops.sub(x, mean);
    normalize(g, x, axis, width, eps)
}

/// `x / sqrt(mean(x^2) + eps)` over `axis` of size `width`, without gain.
fn normalize(g: &mut Graph<'_>, x: ValueId, axis: usize, width: u64, eps: f64) -> ValueId {
    let axes = [axis as i32];
    match g.form.norm {
        NormForm::Accurate => scaled_first(g, x, axis, eps, |g, square, axes| g.ops.reduce_mean(square, axes, true)),
        NormForm::Naive if is_held(eps) => {
            let square = g.ops.mul(x, x);
            let mean = g.ops.reduce_mean(square, &axes, true);
            let inverse = g.ops.rsqrt(mean, (eps as f32).max(SMALLEST));
            g.ops.mul(x, inverse)
        }
        NormForm::Naive => divided_by_root(g, x, &axes, eps),
        NormForm::Prescale => {
            let scaled = g.ops.mul(x, Constant::fp16(PRESCALE));
            divided_by_root(g, scaled, &axes, eps * f64::from(PRESCALE * PRESCALE))
        }
        NormForm::LayerNormConcat => {
            let negative = g.ops.mul(x, Constant::fp16(-1.0));
            let both = g.ops.concat(&[x, negative], axis as i32);
            let eps = hold(g, eps, eps).max(SMALLEST);
            let normal = g.ops.layer_norm(both, &axes, eps);
            g.ops.slice(normal, axis, 0..width)
        }
    }
}

/// `x / sqrt(mean(x^2) + eps)` for an epsilon whose root, but not itself, fits fp16. With the root mean square `r`,
/// `e = sqrt(eps)`, and `l` the larger and `s` the smaller of both, `r^2 + e^2 = l^2 (1 + (s / l)^2)`.
fn divided_by_root(g: &mut Graph<'_>, x: ValueId, axes: &[i32], eps: f64) -> ValueId {
    let square = g.ops.mul(x, x);
    let mean = g.ops.reduce_mean(square, axes, true);
    let root = g.ops.sqrt(mean);
    // without an epsilon, avoids division by zero in a row of zeros
    let root_eps = Constant::fp16(hold(g, eps.sqrt(), eps).max(SMALLEST));
    let larger = g.ops.maximum(root, root_eps.clone());
    let smaller = g.ops.minimum(root, root_eps);
    let ratio = g.ops.real_div(smaller, larger);
    let ratio = g.ops.mul(ratio, ratio);
    let total = g.ops.add(ratio, Constant::fp16(1.0));
    let inverse = g.ops.rsqrt(total, SMALLEST);
    let scaled = g.ops.real_div(x, larger);
    g.ops.mul(scaled, inverse)
}

/// Epsilon as a constant if fp16 holds it; otherwise the function is refused.
fn hold(g: &mut Graph<'_>, value: f64, eps: f64) -> f32 {
    if !is_held(value) {
        g.refuse(FamilyError::Epsilon { form: g.form.norm.to_string(), eps });
    }
    value as f32
}

/// Returns whether fp16 holds a number to 1/32 with a few smaller ones. Zero counts as held: some models have no
/// epsilon.
fn is_held(value: f64) -> bool {
    let rounded = f16::from_f64(value).to_f64();
    value == 0.0 || rounded >= 4.0 * f64::from(SMALLEST) && (rounded - value).abs() <= value / 32.0
}
