//! Activations: Core ML's ops, or forms whose result doesn't depend on a device's lookup tables.
//!
//! The Neural Engine computes `silu`, `gelu` and `softplus` with tables whose published errors are: `silu(0)` is
//! -0.00126, and softplus is 0 beyond the end of its table instead of x. The stable forms use only tanh and exp, whose
//! results are bounded, so that their errors stay small:
//!
//! ```text
//! silu(x)     = x/2 (1 + tanh(x/2))
//! gelu(x)     = x/2 (1 + tanh(t P(t^2)))            t = x held within ±6
//! softplus(x) = relu(x) + log(1 + e),               e = exp(-|x|)
//! log(1 + e)  = 2 atanh(s) = 2 (s + s^3/3 + s^5/5 + …),   s = e / (2 + e) <= 1/3
//! ```
//!
//! For GELU with tanh, `P(t^2) = sqrt(2/pi) (1 + 0.044715 t^2)` by definition. For the exact GELU, P is fitted with
//! coefficients that fp16 holds, and the result is within 6e-5 everywhere. The series of the logarithm keeps the digits
//! of a small e, which `1 + e` would lose in fp16.

use super::Graph;
use crate::row::Activation;
use anec_manifest::ActivationForm;
use anec_mil::{Constant, ValueId};

/// Bound at which tanh is 1 in fp16 for either polynomial, and the square is still small.
const GELU_BOUND: f32 = 6.0;
/// Coefficients of P, constant first: `sqrt(2/pi) (1 + 0.044715 t^2)`.
const GELU_TANH: &[f32] = &[0.797_884_6, 0.035_677_41];
/// Coefficients of P for the exact GELU: minimax over 0..6 with coefficients that fp16 holds.
const GELU_ERF: &[f32] = &[0.797_851_6, 0.036_804_2, -0.000_328_302_4];
/// `atanh(s) / s` in powers of `s^2`, constant first, for s up to 1/3; the last coefficient approximates the rest of
/// the series.
const ATANH: &[f32] = &[1.0, 0.333_333_3, 0.2, 0.161];

/// Applies an activation to hidden states.
pub fn activate(g: &mut Graph<'_>, x: ValueId, activation: Activation) -> ValueId {
    match (g.form.activations, activation) {
        (_, Activation::Silu) => silu(g, x),
        (ActivationForm::Native, Activation::GeluTanh) => g.ops.gelu_tanh(x),
        (ActivationForm::Native, Activation::Gelu) => g.ops.gelu(x),
        (ActivationForm::Stable, Activation::GeluTanh) => g.scope("gelu", |g| gelu(g, x, GELU_TANH)),
        (ActivationForm::Stable, Activation::Gelu) => g.scope("gelu", |g| gelu(g, x, GELU_ERF)),
    }
}

/// `x / (1 + exp(-x))`
pub fn silu(g: &mut Graph<'_>, x: ValueId) -> ValueId {
    match g.form.activations {
        ActivationForm::Native => g.ops.silu(x),
        ActivationForm::Stable => g.scope("silu", |g| {
            let half = g.ops.mul(x, Constant::fp16(0.5));
            let tanh = g.ops.tanh(half);
            by_half(g, half, tanh)
        }),
    }
}

/// `log(1 + exp(x))`
pub fn softplus(g: &mut Graph<'_>, x: ValueId) -> ValueId {
    match g.form.activations {
        ActivationForm::Native => g.ops.softplus(x),
        ActivationForm::Stable => g.scope("softplus", |g| {
            let positive = g.ops.maximum(x, Constant::fp16(0.0));
            let magnitude = g.ops.abs(x);
            let negative = g.ops.mul(magnitude, Constant::fp16(-1.0));
            let e = g.ops.exp(negative);
            let below = g.ops.add(e, Constant::fp16(2.0));
            let s = g.ops.real_div(e, below);
            let square = g.ops.mul(s, s);
            let series = polynomial(g, square, ATANH);
            let atanh = g.ops.mul(series, s);
            let log = g.ops.mul(atanh, Constant::fp16(2.0));
            g.ops.add(positive, log)
        }),
    }
}

/// `x/2 (1 + tanh(t P(t^2)))`
fn gelu(g: &mut Graph<'_>, x: ValueId, coefficients: &[f32]) -> ValueId {
    let held = g.ops.minimum(x, Constant::fp16(GELU_BOUND));
    let held = g.ops.maximum(held, Constant::fp16(-GELU_BOUND));
    let square = g.ops.mul(held, held);
    let factor = polynomial(g, square, coefficients);
    let inner = g.ops.mul(held, factor);
    let tanh = g.ops.tanh(inner);
    let half = g.ops.mul(x, Constant::fp16(0.5));
    by_half(g, half, tanh)
}

/// `half (1 + tanh)`: the sum first, which is exact near cancellation.
fn by_half(g: &mut Graph<'_>, half: ValueId, tanh: ValueId) -> ValueId {
    let open = g.ops.add(tanh, Constant::fp16(1.0));
    g.ops.mul(half, open)
}

/// `c[0] + c[1] x + c[2] x^2 + …` for at least two coefficients, by Horner's rule.
fn polynomial(g: &mut Graph<'_>, x: ValueId, coefficients: &[f32]) -> ValueId {
    let (last, rest) = coefficients.split_last().unwrap_or((&0.0, &[]));
    let (next, rest) = rest.split_last().unwrap_or((&0.0, &[]));
    let product = g.ops.mul(x, Constant::fp16(*last));
    let sum = g.ops.add(product, Constant::fp16(*next));
    rest.iter().rev().fold(sum, |sum, coefficient| {
        let product = g.ops.mul(sum, x);
        g.ops.add(product, Constant::fp16(*coefficient))
    })
}
