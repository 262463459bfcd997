//! The 24-norm, a smooth approximation of the largest magnitude, and its gradient. All processors give the same bits.

use super::dispatch::{Vectorize, vectorized};

/// Lanes of a sum.
const LANES: usize = 16;
/// Values that are summed in f32 lanes before the lanes are added in f64.
const RUN: usize = 1024;
/// Fraction of the largest magnitude below which values count as zero: their slopes are less than a five-millionth of
/// the largest, and slopes of zero cost nothing in [`add_gradient`].
const SMALL: f32 = 0.5;

/// Replaces values `v` by `r^23 / m` and returns the sum of `r^24`, where `r = v / m` and `m` is `largest`, the
/// non-zero largest magnitude among them and others. With the sum `s` over all, `ln |v|_24 = ln m + ln(s) / 24`, and
/// its gradient is the new values divided by `s`.
pub fn norm24_slopes(values: &mut [f32], largest: f32) -> f64 {
    struct Work<'a> {
        values: &'a mut [f32],
        inverse: f32,
    }
    impl Vectorize for Work<'_> {
        type Output = f64;

        #[inline(always)]
        fn run(self) -> f64 {
            slopes(self.values, self.inverse)
        }
    }
    vectorized(Work { values, inverse: 1.0 / largest })
}

/// Adds `factor * slopes^T rows` to `gradient`, `[slopes of a row, columns]`: for products `rows R`, the transpose of
/// the gradient by `R`. `rows` are `columns` values each, `stride` apart; most slopes are expected to be zero.
///
/// # Panics
/// If `rows` or `gradient` are too short.
pub fn add_gradient(
    (rows, stride, columns): (&[f32], usize, usize),
    (slopes, of_row): (&[f32], usize),
    factor: f32,
    gradient: &mut [f32],
) {
    struct Work<'a> {
        rows: (&'a [f32], usize, usize),
        slopes: (&'a [f32], usize),
        factor: f32,
        gradient: &'a mut [f32],
    }
    impl Vectorize for Work<'_> {
        type Output = ();

        #[inline(always)]
        fn run(self) {
            let Work { rows: (rows, stride, columns), slopes: (slopes, of_row), factor, gradient } = self;
            for (row, slopes) in slopes.chunks_exact(of_row).enumerate() {
                let values = &rows[row * stride..][..columns];
                for (slope, sums) in slopes.iter().zip(gradient.chunks_exact_mut(columns)) {
                    if *slope != 0.0 {
                        let slope = slope * factor;
                        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += slope * value);
                    }
                }
            }
        }
    }
    vectorized(Work { rows: (rows, stride, columns), slopes: (slopes, of_row), factor, gradient });
}

#[inline(always)]
fn slopes(values: &mut [f32], inverse: f32) -> f64 {
    let mut sum = 0f64;
    for run in values.chunks_mut(RUN) {
        let mut lanes = [0f32; LANES];
        let (chunks, rest) = run.as_chunks_mut::<LANES>();
        for chunk in chunks {
            lanes_of(chunk, inverse, &mut lanes);
        }
        let mut last = [0f32; LANES];
        last[..rest.len()].copy_from_slice(rest);
        lanes_of(&mut last, inverse, &mut lanes);
        rest.copy_from_slice(&last[..rest.len()]);
        sum += lanes.into_iter().map(f64::from).sum::<f64>();
    }
    sum
}

#[inline(always)]
fn lanes_of(values: &mut [f32; LANES], inverse: f32, sums: &mut [f32; LANES]) {
    for (value, sum) in values.iter_mut().zip(sums) {
        let ratio = *value * inverse;
        let ratio = if ratio.abs() < SMALL { 0.0 } else { ratio };
        let square = ratio * ratio;
        let third = square * ratio;
        let fourth = square * square;
        let (seventh, eighth) = (fourth * third, fourth * fourth);
        let slope = eighth * eighth * seventh;
        *sum += slope * ratio;
        *value = slope * inverse;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_the_gradient_of_the_norm() {
        let values: Vec<f32> = (0..1500).map(|i| ((i * 37 % 101) as f32 - 50.0) / 30.0).collect();
        let largest = 50.0 / 30.0f32;
        let mut slopes = values.clone();
        let sum = norm24_slopes(&mut slopes, largest);
        let exact: f64 = values.iter().map(|value| f64::from(value / largest).powi(24)).sum();
        assert!((sum / exact - 1.0).abs() < 1e-5, "{sum} {exact}");
        for (value, slope) in values.iter().zip(&slopes) {
            let exact = f64::from(value / largest).powi(23) / f64::from(largest);
            assert!((f64::from(*slope) - exact).abs() < 1e-6, "{value}: {slope} {exact}");
        }
        let mut plain = values;
        assert_eq!(sum, super::slopes(&mut plain, 1.0 / largest));
        assert_eq!(plain, slopes, "vector units change no bit");
    }

    #[test]
    fn gradients_are_sums_of_outer_products() {
        let values: Vec<f32> = (0..3 * 7).map(|i| (i * 5 % 11) as f32 - 5.0).collect();
        let slopes = [0.0, 2.0, -1.0, 0.0, 0.5, 0.0];
        let mut gradient = vec![1.0; 2 * 4];
        // rows of four values, seven apart
        add_gradient((&values, 7, 4), (&slopes, 2), 0.5, &mut gradient);
        for column in 0..2 {
            for value in 0..4 {
                let sum: f32 = (0..3).map(|row| 0.5 * slopes[row * 2 + column] * values[row * 7 + value]).sum();
                assert_eq!(gradient[column * 4 + value], 1.0 + sum, "{column} {value}");
            }
        }
    }
}
