//! Distance measures of vectors.

use anec_kernels::distance;
use rayon::prelude::*;

/// Number of largest values that are compared as a set.
const TOP_COUNT: usize = 5;

/// Comparison of rows with reference rows. Any NaN makes all measures NaN, which passes no threshold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitMeasures {
    /// Smallest cosine of a row.
    pub cosine: f64,
    /// First percentile of the cosines by nearest rank: the smallest one of up to 100 rows.
    pub p1: f64,
    /// Median of the cosines.
    pub median: f64,
    /// Row of the smallest cosine; the first NaN, if there is one.
    pub worst: usize,
    /// Largest absolute difference.
    pub max_abs: f64,
    /// Smallest and largest ratio of a row's norm to its reference's.
    pub norm_ratio: [f64; 2],
    /// Share of rows whose largest value is at the reference's index.
    pub top1: f64,
    /// Mean share of the reference's five largest values among the row's five largest.
    pub top5: f64,
    /// Peak signal-to-noise ratio in decibels: the reference's largest magnitude over the root mean square difference
    /// of all rows. Infinite for equal rows.
    pub psnr: f64,
    /// Mean KL divergence of the softmaxes from the reference's, in nats.
    pub kl: f64,
    /// Number of compared rows.
    pub rows: usize,
}

/// Comparison of one row with its reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowMeasures {
    /// Cosine.
    pub cosine: f64,
    /// KL divergence of the row's softmax from the reference's, in nats.
    pub kl: f64,
    /// Whether the largest value is at the reference's index.
    pub agrees: bool,
    max_abs: f64,
    norm_ratio: f64,
    top5: f64,
    peak: f64,
    squares: f64,
    width: usize,
}

impl RowMeasures {
    /// Compares two rows of the same length.
    pub fn of(found: &[f32], reference: &[f32]) -> Self {
        let sums = distance::pair_sums(found, reference);
        let [ours, theirs] = [found, reference].map(|row| distance::largest(row, TOP_COUNT));
        let first = |places: &Option<Vec<usize>>| places.as_ref().and_then(|places| places.first().copied());
        RowMeasures {
            cosine: sums.cosine(),
            max_abs: sums.max_difference,
            norm_ratio: quotient(sums.squares[0].sqrt(), sums.squares[1].sqrt()),
            agrees: first(&ours) == first(&theirs),
            top5: shared(ours.as_deref(), theirs.as_deref()),
            kl: distance::divergence(reference, found),
            peak: sums.peak,
            squares: sums.difference,
            width: reference.len(),
        }
    }

    /// Compares all rows of `width` values; both slices have the same length.
    pub fn of_all(found: &[f32], reference: &[f32], width: usize) -> Vec<Self> {
        let width = width.max(1);
        let pairs = found.par_chunks_exact(width).zip(reference.par_chunks_exact(width));
        pairs.map(|(found, reference)| RowMeasures::of(found, reference)).collect()
    }
}

impl LogitMeasures {
    /// Compares rows of `width` values; both slices have the same length.
    pub fn of(found: &[f32], reference: &[f32], width: usize) -> Self {
        Self::over(&RowMeasures::of_all(found, reference, width))
    }

    /// Aggregates the comparisons of single rows.
    pub fn over(rows: &[RowMeasures]) -> Self {
        let count = rows.len() as f64;
        let sum = |of: fn(&RowMeasures) -> f64| rows.iter().map(of).sum::<f64>();
        let peak = rows.iter().map(|row| row.peak).fold(0.0, most);
        let mean_square = sum(|row| row.squares) / sum(|row| row.width as f64);
        // NaN ranks lowest
        let below = |a: f64, b: f64| b.is_nan().cmp(&a.is_nan()).then(a.total_cmp(&b));
        let mut cosines: Vec<f64> = rows.iter().map(|row| row.cosine).collect();
        cosines.sort_by(|a, b| below(*a, *b));
        let spoilt = cosines.first().is_some_and(|cosine| cosine.is_nan());
        let nearest_rank = |share: f64| match (spoilt, cosines.get(((share * count).ceil() as usize).saturating_sub(1)))
        {
            (true, _) => f64::NAN,
            (false, found) => found.copied().unwrap_or(f64::INFINITY),
        };
        LogitMeasures {
            cosine: nearest_rank(0.0),
            p1: nearest_rank(0.01),
            median: nearest_rank(0.5),
            worst: (0..rows.len()).min_by(|a, b| below(rows[*a].cosine, rows[*b].cosine)).unwrap_or(0),
            max_abs: rows.iter().map(|row| row.max_abs).fold(0.0, most),
            norm_ratio: [
                rows.iter().map(|row| row.norm_ratio).fold(f64::INFINITY, least),
                rows.iter().map(|row| row.norm_ratio).fold(f64::NEG_INFINITY, most),
            ],
            top1: sum(|row| f64::from(u8::from(row.agrees))) / count,
            top5: sum(|row| row.top5) / count,
            psnr: 20.0 * (peak / mean_square.sqrt()).log10(),
            kl: sum(|row| row.kl) / count,
            rows: rows.len(),
        }
    }
}

/// Minimum; NaN if either is NaN.
fn least(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) }
}

/// Maximum; NaN if either is NaN.
fn most(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// Ratio; 0 / 0 is 1, because the result equals the expectation.
fn quotient(a: f64, b: f64) -> f64 {
    if a == 0.0 && b == 0.0 { 1.0 } else { a / b }
}

/// Cosine of two vectors; 1 if both are zero, 0 if only one is.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    distance::pair_sums(a, b).cosine()
}

/// Share of one row's top values among the other's; 0 if either row contains NaN.
fn shared(found: Option<&[usize]>, reference: Option<&[usize]>) -> f64 {
    let (Some(found), Some(reference)) = (found, reference) else { return 0.0 };
    reference.iter().filter(|place| found.contains(place)).count() as f64 / reference.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_rows_have_no_distance() {
        let rows = [1.0, -2.0, 3.0, 0.5, 0.25, 8.0];
        let measures = LogitMeasures::of(&rows, &rows, 3);
        assert!((measures.cosine - 1.0).abs() < 1e-12 && measures.kl.abs() < 1e-12);
        assert_eq!((measures.max_abs, measures.norm_ratio, measures.top1, measures.rows), (0.0, [1.0, 1.0], 1.0, 2));
    }

    #[test]
    fn the_worst_row_counts() {
        // the second row is rotated by 90 degrees and doubled
        let measures = LogitMeasures::of(&[1.0, 0.0, 0.0, 2.0], &[1.0, 0.0, 1.0, 0.0], 2);
        assert_eq!((measures.cosine, measures.max_abs, measures.norm_ratio), (0.0, 2.0, [1.0, 2.0]));
        assert_eq!(measures.top1, 0.5);
    }

    #[test]
    fn one_row_in_a_hundred_may_lie_below_the_first_percentile() {
        // cosines 0.000, 0.005, …: the row at an angle with cosine c is [c, sqrt(1 - c²)]
        let rows = |count: usize| -> Vec<RowMeasures> {
            let row = |i: usize| {
                let c = (i * 37 % count) as f32 / count as f32;
                RowMeasures::of(&[c, (1.0 - c * c).sqrt()], &[1.0, 0.0])
            };
            (0..count).map(row).collect()
        };
        let of = |count| LogitMeasures::over(&rows(count));
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
        let (few, many) = (of(100), of(1000));
        assert!(near(few.p1, 0.0) && near(few.median, 0.49), "{few:?}");
        assert!(near(many.p1, 0.009) && near(many.cosine, 0.0) && near(many.median, 0.499), "{many:?}");
        assert_eq!(many.worst, 0);
        let mut rows = rows(200);
        rows[7].cosine = f64::NAN;
        let spoilt = LogitMeasures::over(&rows);
        assert!(spoilt.cosine.is_nan() && spoilt.p1.is_nan() && spoilt.median.is_nan());
        assert_eq!(spoilt.worst, 7);
    }

    #[test]
    fn the_five_largest_are_compared_as_a_set() {
        let reference = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0];
        let top5 = |found: &[f32], reference: &[f32]| RowMeasures::of(found, reference).top5;
        assert_eq!(top5(&[5.0, 6.0, 7.0, 8.0, 9.0, 4.0, 3.0], &reference), 1.0);
        assert_eq!(top5(&[9.0, 8.0, 7.0, 1.0, 5.0, 6.0, 3.0], &reference), 0.8);
        assert_eq!(top5(&[1.0, 2.0], &[2.0, 1.0]), 1.0);
        assert_eq!(top5(&[f32::NAN, 2.0], &[2.0, 1.0]), 0.0);
    }

    #[test]
    fn noise_is_measured_against_the_peak() {
        // a difference of 0.1 everywhere at a peak of 10: 40 decibels
        let reference = [10.0, -5.0, 1.0, 0.0];
        let found: Vec<f32> = reference.iter().map(|v| v + 0.1).collect();
        assert!((LogitMeasures::of(&found, &reference, 4).psnr - 40.0).abs() < 1e-3);
        assert_eq!(LogitMeasures::of(&reference, &reference, 4).psnr, f64::INFINITY);
    }

    #[test]
    fn divergence_is_that_of_two_coins() {
        // softmax of [ln 3, 0] is [3/4, 1/4]; against a fair coin: 3/4 ln(3/2) + 1/4 ln(1/2)
        let expected = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((RowMeasures::of(&[5.0, 5.0], &[3f32.ln(), 0.0]).kl - expected).abs() < 1e-7);
    }

    #[test]
    fn nan_propagates_to_all_measures() {
        let measures = LogitMeasures::of(&[1.0, f32::NAN, 1.0, 2.0], &[1.0, 2.0, 1.0, 2.0], 2);
        assert!(measures.cosine.is_nan() && measures.max_abs.is_nan() && measures.norm_ratio[1].is_nan());
        assert_eq!(measures.top1, 0.5);
    }

    #[test]
    fn the_cosine_of_a_zero_row_is_zero() {
        assert_eq!(cosine(&[0.0, 0.0], &[0.0, 0.0]), 1.0);
        assert_eq!(cosine(&[0.0, 0.0], &[0.0, 1.0]), 0.0);
    }
}
