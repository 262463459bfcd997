//! Rounding to half precision.

use crate::dispatch::{Vectorize, vectorized};

/// Smallest magnitude that rounds to infinity in fp16.
const LIMIT: f32 = 65520.0;

/// Rounds each value to fp16: nearest even, infinite beyond the range.
pub fn round_to_f16(values: &mut [f32]) {
    struct Rounding<'a>(&'a mut [f32]);
    impl Vectorize for Rounding<'_> {
        type Output = ();

        #[inline(always)]
        fn run(self) {
            self.0.iter_mut().for_each(|value| *value = rounded_to_f16(*value));
        }
    }
    vectorized(Rounding(values));
}

/// Exponent bits of an f32.
pub const EXPONENT: u32 = 0x7f80_0000;

/// Number whose addition and subtraction rounds another one to `significant_bits`, nearest even; `power` holds the bits
/// of the power of two below that number. It is 1.5 times 2^23 units of the last place that remains.
#[inline(always)]
pub fn rounding_shift(power: u32, significant_bits: u32) -> f32 {
    f32::from_bits(power.wrapping_add((24 - significant_bits) << 23 | 1 << 22))
}

/// Nearest fp16 value, ties to even.
#[inline(always)]
pub fn rounded_to_f16(value: f32) -> f32 {
    const SMALLEST_EXPONENT: u32 = (127 - 14) << 23;
    let shift = rounding_shift((value.to_bits() & EXPONENT).max(SMALLEST_EXPONENT), 11);
    let magnitude = if value.abs() >= LIMIT { f32::INFINITY } else { value + shift - shift };
    magnitude.copysign(value)
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn values_round_to_nearest_even_and_overflow() {
        let mut values = vec![1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65519.0, 65520.0, -1e9, 2.9e-8, 3.1e-8];
        round_to_f16(&mut values);
        let smallest = 2f32.powi(-24);
        assert_eq!(values, [1.0, 1.0 + 2.0 / 1024.0, 65504.0, f32::INFINITY, f32::NEG_INFINITY, 0.0, smallest]);
        let mut nan = [f32::NAN];
        round_to_f16(&mut nan);
        assert!(nan[0].is_nan());
    }

    #[test]
    fn every_exponent_and_every_tie_is_rounded_as_the_half_crate_does() {
        // all exponents and signs; mantissas at, below and above each tie of half precision and of its subnormals
        let near_ties = (0..1 << 14).flat_map(|mantissa: u32| [0, 1, 0x1ff].map(|low| mantissa << 9 | low));
        let mantissas: Vec<u32> = near_ties.chain((0..1 << 23).step_by(4093)).collect();
        for exponent in 0..512u32 {
            let values: Vec<f32> = mantissas.iter().map(|mantissa| f32::from_bits(exponent << 23 | mantissa)).collect();
            let mut rounded = values.clone();
            round_to_f16(&mut rounded);
            for (value, rounded) in values.iter().zip(&rounded).filter(|(value, _)| !value.is_nan()) {
                let expected = f16::from_f32(*value).to_f32();
                assert_eq!(rounded.to_bits(), expected.to_bits(), "{value:e}");
            }
        }
    }
}
