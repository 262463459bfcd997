//! Scan of a weight for numbers that half precision can't hold.

use half::{bf16, f16};

/// Largest fp16.
const LARGEST: f32 = f16::MAX.to_f32_const();
/// Smallest normal fp16; hardware may flush smaller numbers to zero.
const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;

/// Counts of numbers by their fate in fp16.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FloatScan {
    /// All numbers.
    pub count: u64,
    /// Zeros.
    pub zero: u64,
    /// Infinities and NaN.
    pub not_finite: u64,
    /// Numbers beyond fp16, or at its largest value, where saturated numbers are.
    pub saturated: u64,
    /// Non-zero numbers that are zero in fp16.
    pub vanishing: u64,
    /// Numbers below the normal range of fp16.
    pub subnormal: u64,
    /// Largest magnitude.
    pub largest: f32,
}

impl FloatScan {
    /// Adds a number.
    #[inline(always)]
    fn add(&mut self, value: f32) {
        let magnitude = value.abs();
        self.count += 1;
        if !value.is_finite() {
            self.not_finite += 1;
        } else if magnitude >= LARGEST {
            self.saturated += 1;
        } else if value == 0.0 {
            self.zero += 1;
        } else if magnitude < SMALLEST_NORMAL {
            if f16::from_f32(value) == f16::ZERO {
                self.vanishing += 1;
            } else {
                self.subnormal += 1;
            }
        }
        if magnitude > self.largest {
            self.largest = magnitude;
        }
    }

    /// Adds fp16 numbers, little-endian.
    pub fn add_f16(&mut self, bytes: &[u8]) {
        bytes.as_chunks().0.iter().for_each(|b| self.add(f16::from_le_bytes(*b).to_f32()));
    }

    /// Adds bf16 numbers, little-endian.
    pub fn add_bf16(&mut self, bytes: &[u8]) {
        bytes.as_chunks().0.iter().for_each(|b| self.add(bf16::from_le_bytes(*b).to_f32()));
    }

    /// Adds f32 numbers, little-endian.
    pub fn add_f32(&mut self, bytes: &[u8]) {
        bytes.as_chunks().0.iter().for_each(|b| self.add(f32::from_le_bytes(*b)));
    }

    /// Adds f64 numbers, little-endian.
    pub fn add_f64(&mut self, bytes: &[u8]) {
        bytes.as_chunks().0.iter().for_each(|b| self.add(f64::from_le_bytes(*b) as f32));
    }
}

/// Returns whether all fp16 numbers in these bytes are finite.
pub fn finite_f16(bytes: &[u8]) -> bool {
    const EXPONENT: u16 = 0x7c00;
    bytes.as_chunks().0.iter().all(|b| u16::from_le_bytes(*b) & EXPONENT != EXPONENT)
}

/// Decodes little-endian f32 numbers.
pub fn floats_of_f32(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Decodes little-endian fp16 numbers.
pub fn floats_of_f16(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
}

/// Decodes little-endian bf16 numbers.
pub fn floats_of_bf16(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_counted_by_what_half_precision_makes_of_them() {
        let values = [0.0f32, -0.0, 1.0, 1e-8, -1e-6, 65504.0, 1e9, f32::NAN, f32::INFINITY];
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut scan = FloatScan::default();
        scan.add_f32(&bytes);
        assert_eq!((scan.count, scan.zero, scan.not_finite, scan.saturated), (9, 2, 2, 2));
        assert_eq!((scan.vanishing, scan.subnormal), (1, 1));
        let halves =
            |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect() };
        assert!(finite_f16(&halves(&[65504.0, -1.0])) && !finite_f16(&halves(&[1.0, f32::NAN])));
        assert!(!finite_f16(&halves(&[f32::NEG_INFINITY])));
        assert_eq!((floats_of_f32(&bytes[8..16]), floats_of_f16(&halves(&[1.5]))), (vec![1.0, 1e-8], vec![1.5]));
    }
}
