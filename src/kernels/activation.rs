//! Exponentials and activations, without branches so that the compiler vectorizes them.

use crate::vectorized_fn;

/// `e^x` within 2 units in the last place; infinite above 88.73, 0 below -103.98.
///
/// Cephes' scheme: `x = n ln 2 + r`, a polynomial of degree 6 in `r`, and `2^n` applied in two halves so that neither
/// end of the range is lost.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // adding 1.5 * 2^23 leaves the rounded integer in the low bits
    const SHIFT: f32 = 12_582_912.0;
    let x = x.clamp(-104.0, 89.0);
    let shifted = x * std::f32::consts::LOG2_E + SHIFT;
    let n = (shifted.to_bits() as i32).wrapping_sub(SHIFT.to_bits() as i32);
    let whole = shifted - SHIFT;
    let r = (x - whole * 0.693_359_4) + whole * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4f32;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let value = p * r * r + r + 1.0;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    value * power(half) * power(n.wrapping_sub(half))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x sigmoid(x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Hyperbolic tangent; near 0 by Cephes' polynomial, which keeps the relative error small.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let z = x * x;
    let mut p = -5.704_988_7e-3f32;
    p = p * z + 2.063_908_9e-2;
    p = p * z - 5.373_971_5e-2;
    p = p * z + 1.333_144_2e-1;
    p = p * z - 3.333_328e-1;
    let near = p * z * x + x;
    let far = 1.0 - 2.0 / (exp(2.0 * x) + 1.0);
    if x.abs() < 0.625 { near } else { far }
}

/// GELU in its tanh approximation.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    // sqrt(2 / pi)
    0.5 * x * (1.0 + tanh(0.797_884_6 * (x + 0.044_715 * x * x * x)))
}

/// GELU in its sigmoid approximation.
#[inline(always)]
pub fn gelu_sigmoid(x: f32) -> f32 {
    x / (1.0 + exp(-1.702 * x))
}

/// GELU: `x Phi(x)`.
pub fn gelu(x: f32) -> f32 {
    (0.5 * f64::from(x) * erfc(-f64::from(x) * std::f64::consts::FRAC_1_SQRT_2)) as f32
}

/// Error function.
pub fn erf(x: f32) -> f32 {
    let x = f64::from(x);
    if x.abs() < 0.1 {
        // series, since 1 - erfc(x) cancels here
        let z = x * x;
        return (std::f64::consts::FRAC_2_SQRT_PI
            * x
            * (1.0 - z / 3.0 + z * z / 10.0 - z * z * z / 42.0 + z * z * z * z / 216.0)) as f32;
    }
    (1.0 - erfc(x)) as f32
}

/// Complementary error function within a relative error of 1.2e-7 (a Chebyshev fit, Press et al., Numerical Recipes,
/// section 6.2).
fn erfc(x: f64) -> f64 {
    const FIT: [f64; 10] = [
        -1.26551223,
        1.00002368,
        0.37409196,
        0.09678418,
        -0.18628806,
        0.27886807,
        -1.13520398,
        1.48851587,
        -0.82215223,
        0.17087277,
    ];
    let t = 1.0 / (1.0 + 0.5 * x.abs());
    let exponent = FIT.iter().rev().fold(0.0, |sum, c| sum * t + c);
    let value = t * (-x * x + exponent).exp();
    if x >= 0.0 { value } else { 2.0 - value }
}

/// Functions that replace each value of a slice. A value has the same bits for every instruction set.
macro_rules! map_in_place {
    ($($(#[$doc:meta])* $name:ident => $function:ident;)*) => {$(
        vectorized_fn! {
            $(#[$doc])*
            pub fn $name<'a>(values: &'a mut [f32]) -> () = |values: &mut [f32]| {
                for value in values {
                    *value = $function(*value);
                }
            }
        }
    )*};
}

map_in_place! {
    /// `e^x` of each value.
    exp_in_place => exp;
    /// `sigmoid(x)` of each value.
    sigmoid_in_place => sigmoid;
    /// `silu(x)` of each value.
    silu_in_place => silu;
    /// `tanh(x)` of each value.
    tanh_in_place => tanh;
    /// GELU of each value by the tanh approximation.
    gelu_tanh_in_place => gelu_tanh;
    /// GELU of each value by the sigmoid approximation.
    gelu_sigmoid_in_place => gelu_sigmoid;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relative(found: f32, exact: f64) -> f64 {
        ((f64::from(found) - exact) / exact.abs().max(1e-30)).abs()
    }

    #[test]
    fn exp_is_exact_to_a_few_units_in_the_last_place() {
        let mut values: Vec<f32> = (-870..887).map(|i| i as f32 / 10.0).collect();
        let exact: Vec<f64> = values.iter().map(|x| f64::from(*x).exp()).collect();
        exp_in_place(&mut values);
        for (found, exact) in values.iter().zip(exact) {
            assert!(relative(*found, exact) < 2.5e-7, "{found} {exact}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(-100.0) > 0.0, "subnormal results are kept");
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_keeps_small_values_and_saturates() {
        for x in [-9.0f32, -3.0, -0.7, -0.6, -1e-3, 1e-6, 0.3, 0.625, 2.0, 20.0] {
            assert!(relative(tanh(x), f64::from(x).tanh()) < 4e-7, "{x}");
        }
    }

    #[test]
    fn gelu_and_erf_agree_with_tables() {
        // Abramowitz and Stegun, table 7.1
        for (x, exact) in [(0.05, 0.0563719778), (0.5, 0.5204998778), (1.0, 0.8427007929), (2.0, 0.9953222650)] {
            assert!(relative(erf(x), exact) < 3e-7, "{x}");
            assert!(relative(erf(-x), -exact) < 3e-7);
        }
        // x Phi(x): Phi(-3) = 0.0013498980, Phi(1) = 0.8413447461
        assert!(relative(gelu(-3.0), -3.0 * 0.001_349_898_0) < 3e-7);
        assert!(relative(gelu(1.0), 0.841_344_746_1) < 3e-7);
        assert!((gelu_tanh(1.0) - 0.841_192).abs() < 1e-6);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6);
    }
}
