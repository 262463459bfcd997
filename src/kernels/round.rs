//! Rounding to half precision.

use half::{f16, slice::HalfFloatSliceExt};

/// Rounds every value to fp16, to nearest even; what is beyond its range becomes infinite.
pub fn round_to_f16(values: &mut [f32]) {
    let mut halves = [f16::ZERO; 512];
    for values in values.chunks_mut(halves.len()) {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        halves.convert_to_f32_slice(values);
    }
}

#[cfg(test)]
mod tests {
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
}
