//! Optimal scales of channels between two weights that are quantized with one scale per tensor.
//!
//! Channel `j` is a row of the producer and a column of the consumer. Scaling it by `s_j` multiplies the row by `s_j`
//! and divides the column by it. With the largest magnitudes `u_j` of the row and `d_j` of the column, the tensors'
//! quantization scales are proportional to `max(s u)` and `max(d / s)`, and the rounding error of the output is
//!
//! ```text
//! max(s u)^2 sum_j G_j / s_j^2  +  max(d / s)^2 sum_j H_j s_j^2
//! ```
//!
//! where `G_j` weighs errors of the producer's row and `H_j` those of the consumer's column. For given bounds `max(s u)
//! <= 1` and `max(d / s) <= B`, each `s_j` is best at `(G_j / (B^2 H_j))^(1/4)`, clamped to the bounds; `B` is
//! searched.

/// Number and range of search steps.
const STEPS: i32 = 60;
const RANGE: f64 = 1000.0;
/// Smallest magnitude relative to the largest; smaller ones count as this.
const MIN_RATIO: f64 = 1e-4;
/// Smallest magnitude: 127 times the smallest scale of int8, which is the smallest normal fp16.
const SMALLEST: f64 = 127.0 / 16384.0;

/// Channels between two weights.
pub(super) struct Channels {
    /// Largest magnitude of the producer's row.
    pub(super) produced: Vec<f64>,
    /// Largest magnitude of the consumer's column.
    pub(super) consumed: Vec<f64>,
    /// `G`
    pub(super) of_producer: Vec<f64>,
    /// `H`
    pub(super) of_consumer: Vec<f64>,
    /// Root of the second moment of the values.
    pub(super) magnitude: Vec<f64>,
}

impl Channels {
    /// Computes the best scales. A common factor changes nothing; it is chosen so that the largest magnitude of values
    /// doesn't grow, as far as both tensors' quantization scales stay normal fp16 numbers.
    pub(super) fn balance(mut self) -> Vec<f64> {
        for values in [&mut self.produced, &mut self.consumed, &mut self.of_producer, &mut self.of_consumer] {
            let largest = largest(values);
            if !(largest > 0.0 && largest.is_finite()) {
                return vec![1.0; values.len()];
            }
            let least = MIN_RATIO * largest;
            values.iter_mut().for_each(|value| *value = value.max(least));
        }
        let Channels { produced: u, consumed: d, of_producer: g, of_consumer: h, magnitude } = self;
        let least = u.iter().zip(&d).map(|(u, d)| u * d).fold(0.0, f64::max);
        let units = |bound: f64| -> Vec<f64> {
            let best = |j: usize| (g[j] / (bound * bound * h[j])).powf(0.25).max(d[j] / bound).min(1.0 / u[j]);
            (0..u.len()).map(best).collect()
        };
        let cost = |s: &[f64]| {
            let (mut rows, mut columns) = (0f64, 0f64);
            let (mut of_rows, mut of_columns) = (0.0, 0.0);
            for (j, s) in s.iter().enumerate() {
                (rows, columns) = (rows.max(s * u[j]), columns.max(d[j] / s));
                of_rows += g[j] / (s * s);
                of_columns += h[j] * s * s;
            }
            rows * rows * of_rows + columns * columns * of_columns
        };
        let candidates = (0..STEPS).map(|step| units(least * RANGE.powf(f64::from(step) / f64::from(STEPS - 1))));
        let best = candidates.map(|s| (cost(&s), s)).min_by(|(a, _), (b, _)| a.total_cmp(b));
        let Some((_, mut s)) = best else { return vec![1.0; u.len()] };
        let times = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).fold(0.0, f64::max);
        let (before, after) = (largest(&magnitude), times(&s, &magnitude));
        let kept = if after > 0.0 { before / after } else { 1.0 };
        let over = u.iter().zip(&s).map(|(u, s)| u * s).fold(0.0, f64::max);
        let under = d.iter().zip(&s).map(|(d, s)| d / s).fold(0.0, f64::max);
        // c max(s u) >= SMALLEST and max(d / s) / c >= SMALLEST
        let (low, high) = (SMALLEST / over, under / SMALLEST);
        let constant = if low <= high { kept.clamp(low, high) } else { (low * high).sqrt() };
        s.iter_mut().for_each(|s| *s *= constant);
        s
    }
}

/// Largest of several magnitudes.
pub(super) fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn channels(numbers: &[(f64, f64, f64, f64)]) -> Channels {
        Channels {
            produced: numbers.iter().map(|n| n.0).collect(),
            consumed: numbers.iter().map(|n| n.1).collect(),
            of_producer: numbers.iter().map(|n| n.2).collect(),
            of_consumer: numbers.iter().map(|n| n.3).collect(),
            magnitude: numbers.iter().map(|n| n.3.sqrt()).collect(),
        }
    }

    fn cost(c: &Channels, s: &[f64]) -> f64 {
        let (mut rows, mut columns, mut of_rows, mut of_columns) = (0f64, 0f64, 0.0, 0.0);
        for (j, s) in s.iter().enumerate() {
            (rows, columns) = (rows.max(s * c.produced[j]), columns.max(c.consumed[j] / s));
            of_rows += c.of_producer[j] / (s * s);
            of_columns += c.of_consumer[j] * s * s;
        }
        rows * rows * of_rows + columns * columns * of_columns
    }

    proptest! {
        #[test]
        fn balanced_units_cost_no_more_than_equal_ones_and_values_do_not_grow(
            numbers in proptest::collection::vec((0.01f64..1.0, 0.01f64..1.0, 0.01f64..1.0, 0.01f64..1.0), 1..20)
        ) {
            let s = channels(&numbers).balance();
            let c = channels(&numbers);
            // the optimum may lie between two search steps
            prop_assert!(cost(&c, &s) <= 1.05 * cost(&c, &vec![1.0; s.len()]));
            let grown = s.iter().zip(&c.magnitude).map(|(s, m)| s * m).fold(0.0, f64::max);
            prop_assert!(grown <= largest(&c.magnitude) * 1.0001);
        }
    }

    #[test]
    fn a_row_that_takes_the_scale_for_itself_is_made_small() {
        let mut numbers = vec![(0.1, 0.1, 1.0, 1.0); 16];
        numbers[3].0 = 10.0;
        let s = channels(&numbers).balance();
        assert!(s[3] < 0.3 * s[0], "{s:?}");
        assert!(cost(&channels(&numbers), &s) < 0.1 * cost(&channels(&numbers), &[1.0; 16]));
    }

    #[test]
    fn dead_channels_and_numbers_that_are_none_do_no_harm() {
        let mut numbers = vec![(0.5, 0.5, 1.0, 1.0); 4];
        numbers[1] = (0.0, 0.0, 0.0, 0.0);
        assert!(channels(&numbers).balance().iter().all(|s| s.is_finite() && *s > 0.0));
        assert_eq!(channels(&[(0.0, 0.0, 0.0, 0.0); 3]).balance(), [1.0; 3]);
        numbers[2].0 = f64::INFINITY;
        assert_eq!(channels(&numbers).balance(), [1.0; 4]);
    }
}
