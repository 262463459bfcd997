//! The 24-norm, a smooth approximation of the largest magnitude, and its gradient. All processors give the same bits.

use super::dispatch::{Vectorize, vectorized};

/// Values compared at a time.
const LANES: usize = 16;
/// Fraction of the largest magnitude below which values count as zero: their slopes are less than 1/3,600 of the
/// largest.
const SMALL: f32 = 0.7;

/// A value near the largest magnitude.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// Index of the value.
    pub index: u32,
    /// Slope of the norm's 24th power by the value, divided by 24, for values divided by the largest magnitude twice.
    pub slope: f32,
}

/// Appends the peaks of `values` and returns the sum of their `r^24`, where `r = v / m` and `m` is `largest`, the
/// non-zero largest magnitude among them and others. The slope of a peak is `r^23 / m`. With the sum `s` over all
/// values, `ln |v|_24 = ln m + ln(s) / 24`, and its gradient is the slopes divided by `s`.
///
/// # Panics
/// If there are more than 2^32 values.
pub fn peaks(values: &[f32], largest: f32, found: &mut Vec<Peak>) -> f64 {
    struct Work<'a> {
        values: &'a [f32],
        largest: f32,
        found: &'a mut Vec<Peak>,
    }
    impl Vectorize for Work<'_> {
        type Output = f64;

        #[inline(always)]
        fn run(self) -> f64 {
            peaks_generic(self.values, self.largest, self.found)
        }
    }
    assert!(u32::try_from(values.len()).is_ok(), "{} values", values.len());
    vectorized(Work { values, largest, found })
}

#[inline(always)]
fn peaks_generic(values: &[f32], largest: f32, found: &mut Vec<Peak>) -> f64 {
    let (limit, inverse) = (largest * SMALL, 1.0 / largest);
    let mut sum = 0f64;
    let mut add = |index: usize, value: f32| {
        let ratio = value * inverse;
        let square = ratio * ratio;
        let third = square * ratio;
        let fourth = square * square;
        let (seventh, eighth) = (fourth * third, fourth * fourth);
        let slope = eighth * eighth * seventh;
        sum += f64::from(slope * ratio);
        found.push(Peak { index: index as u32, slope: slope * inverse });
    };
    let (chunks, rest) = values.as_chunks::<LANES>();
    for (number, chunk) in chunks.iter().enumerate() {
        let mut mask = 0u32;
        for (lane, value) in chunk.iter().enumerate() {
            mask |= u32::from(value.abs() >= limit) << lane;
        }
        while mask != 0 {
            let lane = mask.trailing_zeros() as usize;
            add(number * LANES + lane, chunk[lane]);
            mask &= mask - 1;
        }
    }
    for (lane, value) in rest.iter().enumerate() {
        if value.abs() >= limit {
            add(chunks.len() * LANES + lane, *value);
        }
    }
    sum
}

/// Adds `factor * slopes^T rows` to `gradient`, `[slopes of a row, columns]`: for products `rows R` with as many
/// columns, the transpose of the gradient by `R`. `slopes` are the peaks of the products.
///
/// # Panics
/// If a peak lies outside of the rows, or `gradient` has fewer than `columns * columns` elements.
pub fn add_gradient(rows: &[f32], columns: usize, slopes: &[Peak], factor: f32, gradient: &mut [f32]) {
    struct Work<'a> {
        rows: &'a [f32],
        columns: usize,
        slopes: &'a [Peak],
        factor: f32,
        gradient: &'a mut [f32],
    }
    impl Vectorize for Work<'_> {
        type Output = ();

        #[inline(always)]
        fn run(self) {
            for peak in self.slopes {
                let (row, column) = (peak.index as usize / self.columns, peak.index as usize % self.columns);
                let values = &self.rows[row * self.columns..][..self.columns];
                let sums = &mut self.gradient[column * self.columns..][..self.columns];
                let slope = peak.slope * self.factor;
                // a loop, not a closure: a closure isn't compiled for each instruction set
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += slope * value;
                }
            }
        }
    }
    vectorized(Work { rows, columns, slopes, factor, gradient });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::InstructionSet;

    #[test]
    fn slopes_are_the_gradient_of_the_norm() {
        let values: Vec<f32> = (0..1500).map(|i| ((i * 37 % 101) as f32 - 50.0) / 30.0).collect();
        let largest = 50.0 / 30.0f32;
        let mut found = Vec::new();
        let sum = peaks(&values, largest, &mut found);
        let exact: f64 = values.iter().map(|value| f64::from(value / largest).powi(24)).sum();
        assert!((sum / exact - 1.0).abs() < 1e-3, "{sum} {exact}");
        let mut slopes = vec![0.0; values.len()];
        found.iter().for_each(|peak| slopes[peak.index as usize] = peak.slope);
        for (value, slope) in values.iter().zip(&slopes) {
            let exact = f64::from(value / largest).powi(23) / f64::from(largest);
            assert!((f64::from(*slope) - exact).abs() < 2e-4, "{value}: {slope} {exact}");
        }
        let mut plain = Vec::new();
        assert_eq!(sum, peaks_generic(&values, largest, &mut plain));
        assert_eq!(plain, found, "vector units change no bit");
    }

    #[test]
    fn gradients_are_sums_of_outer_products() {
        let rows: Vec<f32> = (0..3 * 4).map(|i| (i * 5 % 11) as f32 - 5.0).collect();
        let slopes = [(1, 2.0), (2, -1.0), (4, 0.25), (9, 0.5), (11, 4.0)];
        let found: Vec<Peak> = slopes.iter().map(|(index, slope)| Peak { index: *index, slope: *slope }).collect();
        let mut gradient = vec![1.0; 4 * 4];
        add_gradient(&rows, 4, &found, 0.5, &mut gradient);
        for column in 0..4 {
            for value in 0..4 {
                let of_column = slopes.iter().filter(|(index, _)| *index as usize % 4 == column);
                let sum: f32 =
                    of_column.map(|(index, slope)| 0.5 * slope * rows[*index as usize / 4 * 4 + value]).sum();
                assert_eq!(gradient[column * 4 + value], 1.0 + sum, "{column} {value}");
            }
        }
    }

    #[test]
    fn every_instruction_set_adds_the_same_bits() {
        let rows: Vec<f32> = (0..40 * 24).map(|i| ((i * 37 % 101) as f32 - 50.0) / 30.0).collect();
        let mut found = Vec::new();
        let sum = peaks(&rows, 50.0 / 30.0, &mut found);
        let mut gradient = vec![0.0; 24 * 24];
        add_gradient(&rows, 24, &found, 1.0 / sum as f32, &mut gradient);
        let mut expected = vec![0.0; 24 * 24];
        for peak in &found {
            let (row, column) = (peak.index as usize / 24, peak.index as usize % 24);
            let slope = peak.slope * (1.0 / sum as f32);
            for value in 0..24 {
                expected[column * 24 + value] += slope * rows[row * 24 + value];
            }
        }
        assert_eq!(gradient, expected, "{:?}", InstructionSet::best());
    }
}
