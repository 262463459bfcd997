//! What is among the numbers of a weight: how many of them half precision can't hold, and which.

use half::{bf16, f16};

/// Largest fp16.
const LARGEST: f32 = f16::MAX.to_f32_const();
/// Smallest normal fp16; below it, hardware may take zero for what is written.
const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;

/// What is among some numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FloatScan {
    /// How many there are.
    pub count: u64,
    /// Zeros.
    pub zero: u64,
    /// Infinite, or no number.
    pub not_finite: u64,
    /// Beyond fp16, or at its very end, where saturated numbers are.
    pub saturated: u64,
    /// Other than zero, but zero in fp16.
    pub vanishing: u64,
    /// Below the normal range of fp16.
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

/// Whether all fp16 numbers among these bytes are finite.
pub fn finite_f16(bytes: &[u8]) -> bool {
    const EXPONENT: u16 = 0x7c00;
    bytes.as_chunks().0.iter().all(|b| u16::from_le_bytes(*b) & EXPONENT != EXPONENT)
}

/// f32 numbers of little-endian bytes.
pub fn floats_of_f32(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// f32 numbers of little-endian fp16.
pub fn floats_of_f16(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
}

/// f32 numbers of little-endian bf16.
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
