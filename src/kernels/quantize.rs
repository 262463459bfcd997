//! Inner loops of conversion, vectorized by the compiler for each instruction set. All give the same bits: there is no
//! fused multiply-add, and sums run in a fixed number of lanes. Counts add without overflow checks, which would prevent
//! vectorization; a run is too short to overflow.

use crate::vectorized_fn;

/// Lanes of a sum.
const LANES: usize = 16;
/// Values that are summed in f32 lanes before the lanes are added in f64.
const RUN: usize = 4096;
/// 1.5 * 2^23: adding it to a number below 2^22 in magnitude leaves the nearest integer (ties to even) in the low bits.
const ROUND: f32 = 12_582_912.0;

/// Sums of squares over values and their quantized results.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Squares {
    /// Sum over the values.
    pub source: f64,
    /// Sum over the results.
    pub result: f64,
    /// Sum over the differences.
    pub error: f64,
}

/// Lanes of [`Squares`], and counts of vanished values.
struct LaneSums {
    squares: [[f32; LANES]; 3],
    gone: [u32; LANES],
}

impl LaneSums {
    const ZERO: Self = LaneSums { squares: [[0.0; LANES]; 3], gone: [0; LANES] };

    /// Adds values and their results.
    #[inline(always)]
    fn add(&mut self, x: &[f32; LANES], y: &[f32; LANES]) {
        for i in 0..LANES {
            let e = x[i] - y[i];
            self.squares[0][i] += x[i] * x[i];
            self.squares[1][i] += y[i] * y[i];
            self.squares[2][i] += e * e;
            self.gone[i] = self.gone[i].wrapping_add(u32::from((y[i] == 0.0) & (x[i] != 0.0)));
        }
    }

    /// Totals over the lanes, from the first lane to the last.
    #[inline(always)]
    fn totals(&self) -> (Squares, u64) {
        let mut totals = [0f64; 3];
        for lane in 0..LANES {
            for (total, lanes) in totals.iter_mut().zip(&self.squares) {
                *total += f64::from(lanes[lane]);
            }
        }
        let [source, result, error] = totals;
        let gone = self.gone.iter().fold(0, |sum: u64, count| sum.wrapping_add(u64::from(*count)));
        (Squares { source, result, error }, gone)
    }
}

/// Rounds values lane by lane with `round`, which also writes the output, and measures the results. f32 sums are added
/// in f64 after every `run` of values.
#[inline(always)]
fn rounded<T: Copy + Default>(
    values: &[f32],
    out: &mut [T],
    run: usize,
    round: impl Fn(&[f32; LANES], &mut [T; LANES]) -> [f32; LANES],
) -> (Squares, u64) {
    let mut squares = Squares::default();
    let mut vanished = 0;
    for (values, out) in values.chunks(run).zip(out.chunks_mut(run)) {
        let mut sums = LaneSums::ZERO;
        let (chunks, rest) = values.as_chunks::<LANES>();
        let (out_chunks, out_rest) = out.as_chunks_mut::<LANES>();
        for (x, out) in chunks.iter().zip(out_chunks) {
            sums.add(x, &round(x, out));
        }
        if !rest.is_empty() {
            let (mut x, mut last) = ([0f32; LANES], [T::default(); LANES]);
            x[..rest.len()].copy_from_slice(rest);
            sums.add(&x, &round(&x, &mut last));
            out_rest.copy_from_slice(&last[..out_rest.len()]);
        }
        let (own, gone) = sums.totals();
        squares += own;
        vanished += gone;
    }
    (squares, vanished)
}

impl std::ops::AddAssign for Squares {
    fn add_assign(&mut self, other: Self) {
        self.source += other.source;
        self.result += other.result;
        self.error += other.error;
    }
}

vectorized_fn! {
    /// Returns the largest magnitude. NaN and infinities count as larger than every number, so the result is finite
    /// exactly if all values are.
    pub fn largest_magnitude<'a>(values: &'a [f32]) -> f32 = largest_magnitude_generic
}

#[inline(always)]
fn largest_magnitude_generic(values: &[f32]) -> f32 {
    // without the sign bit, floats are ordered like their bits
    f32::from_bits(values.iter().fold(0, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff)))
}

vectorized_fn! {
    /// Rounds `values / scale` to the nearest integers within `range` (-128 to 127 at most), as bytes. Returns sums of
    /// squares, and the count of non-zero values that became zero. Values must be finite, `scale` positive; `out` is as
    /// long as `values`.
    pub fn quantize<'a>(values: &'a [f32], scale: f32, range: [i8; 2], out: &'a mut [u8]) -> (Squares, u64) =
        quantize_generic
}

#[inline(always)]
fn quantize_generic(values: &[f32], scale: f32, range: [i8; 2], out: &mut [u8]) -> (Squares, u64) {
    let inverse = 1.0 / scale;
    let [least, most] = range.map(f32::from);
    rounded(values, out, RUN, |x, q| {
        let mut shifted = [0f32; LANES];
        for i in 0..LANES {
            let steps = x[i] * inverse;
            let steps = if steps > most { most } else { steps };
            let steps = if steps < least { least } else { steps };
            shifted[i] = steps + ROUND;
        }
        for i in 0..LANES {
            q[i] = shifted[i].to_bits() as u8;
        }
        shifted.map(|shifted| (shifted - ROUND) * scale)
    })
}

vectorized_fn! {
    /// Counts values larger than `limit` in magnitude.
    pub fn count_above<'a>(values: &'a [f32], limit: f32) -> u64 = count_above_generic
}

#[inline(always)]
fn count_above_generic(values: &[f32], limit: f32) -> u64 {
    let count = |run: &[f32]| run.iter().fold(0u32, |count, v| count.wrapping_add(u32::from(v.abs() > limit)));
    values.chunks(RUN).map(|run| u64::from(count(run))).sum()
}

vectorized_fn! {
    /// Returns sums of squares of `values` and their `results`, and the count of non-zero values that became zero.
    pub fn compare<'a>(values: &'a [f32], results: &'a [f32]) -> (Squares, u64) = compare_generic
}

#[inline(always)]
fn compare_generic(values: &[f32], results: &[f32]) -> (Squares, u64) {
    let mut squares = Squares::default();
    let mut vanished = 0;
    for (values, results) in values.chunks(RUN).zip(results.chunks(RUN)) {
        let mut sums = LaneSums::ZERO;
        let (x_chunks, x_rest) = values.as_chunks::<LANES>();
        let (y_chunks, y_rest) = results.as_chunks::<LANES>();
        for (x, y) in x_chunks.iter().zip(y_chunks) {
            sums.add(x, y);
        }
        if !x_rest.is_empty() {
            let (mut x, mut y) = ([0f32; LANES], [0f32; LANES]);
            x[..x_rest.len()].copy_from_slice(x_rest);
            y[..y_rest.len()].copy_from_slice(y_rest);
            sums.add(&x, &y);
        }
        let (own, gone) = sums.totals();
        squares += own;
        vanished += gone;
    }
    (squares, vanished)
}

/// Values that are rounded to fp16 before their f32 sums are added in f64.
const HALVES: usize = 1024;
/// Smallest normal fp16.
const SMALLEST_NORMAL: u32 = 0x3880_0000;
vectorized_fn! {
    /// Rounds values to the nearest fp16 (ties to even), as little-endian bytes. Returns the measures of [`quantize`].
    /// No value is beyond fp16; `out` is as long as `values`.
    pub fn round_to_halves<'a>(values: &'a [f32], out: &'a mut [[u8; 2]]) -> (Squares, u64) = round_to_halves_generic
}

#[inline(always)]
fn round_to_halves_generic(values: &[f32], out: &mut [[u8; 2]]) -> (Squares, u64) {
    rounded(values, out, HALVES, round_lanes)
}

/// Rounds to fp16, and returns the results as f32. Adding a power of two whose last bit has the weight of fp16's last
/// bit rounds a magnitude to it. Subnormal numbers have the last bit of the smallest normal one.
#[inline(always)]
fn round_lanes(x: &[f32; LANES], halves: &mut [[u8; 2]; LANES]) -> [f32; LANES] {
    /// Bits of f32's mantissa that fp16 lacks.
    const LOST: u32 = 13;
    /// Exponent bits of an f32.
    const EXPONENT: u32 = 0x7f80_0000;
    /// Exponent of the smallest normal fp16, at the position of fp16's exponent.
    const REBIAS: u32 = SMALLEST_NORMAL >> LOST;
    let mut rounded = [0f32; LANES];
    for i in 0..LANES {
        let magnitude = x[i].to_bits() & 0x7fff_ffff;
        let sign = x[i].to_bits() ^ magnitude;
        let exponent = (magnitude & EXPONENT).max(SMALLEST_NORMAL);
        let power = exponent.wrapping_add(LOST << 23);
        let sum = f32::from_bits(magnitude) + f32::from_bits(power);
        // units beyond the power are the mantissa with its first bit, which adds one to the exponent
        let units = sum.to_bits().wrapping_sub(power);
        let half = units.wrapping_add((exponent >> LOST).wrapping_sub(REBIAS));
        let value = (sum - f32::from_bits(power)).to_bits();
        halves[i] = ((half | sign >> 16) as u16).to_le_bytes();
        rounded[i] = f32::from_bits(value | sign);
    }
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn quantizing_is_rounding_to_the_nearest_step(
            values in proptest::collection::vec(-3.0f32..3.0, 0..200), scale in 1e-3f32..0.1
        ) {
            let mut out = vec![0; values.len()];
            let (squares, vanished) = quantize(&values, scale, [-127, 127], &mut out);
            let mut expected = Squares::default();
            // an error is the difference of two numbers that were each rounded to f32
            let mut roundings = 0.0;
            for (x, q) in values.iter().zip(&out) {
                let q = f64::from(*q as i8);
                let (x, scale) = (f64::from(*x), f64::from(scale));
                prop_assert!((-127.0..=127.0).contains(&q));
                let off = (x / scale).clamp(-127.0, 127.0) - q;
                prop_assert!(off.abs() <= 0.5 + 1e-4, "{x} {scale} {q}");
                expected += Squares { source: x * x, result: (q * scale).powi(2), error: (x - q * scale).powi(2) };
                roundings += (x - q * scale).abs() * x.abs() * 4.0 * f64::from(f32::EPSILON);
            }
            let gone = values.iter().zip(&out).filter(|(x, q)| **x != 0.0 && **q == 0).count();
            prop_assert_eq!(vanished, gone as u64);
            for (a, b, more) in [
                (squares.source, expected.source, 0.0),
                (squares.result, expected.result, 0.0),
                (squares.error, expected.error, roundings),
            ] {
                prop_assert!((a - b).abs() <= 1e-5 * b + 1e-12 + more, "{a} {b}");
            }
        }

        #[test]
        fn the_largest_magnitude_is_found(values in proptest::collection::vec(-1e30f32..1e30, 0..100)) {
            prop_assert_eq!(largest_magnitude(&values), values.iter().fold(0.0, |m, v| v.abs().max(m)));
        }
    }

    #[test]
    fn non_finite_values_are_larger_than_everything() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 17, 40] {
                let mut values = vec![f32::MAX; 41];
                values[place] = bad;
                assert!(!largest_magnitude(&values).is_finite());
            }
        }
    }

    #[test]
    fn ties_go_to_even_and_the_ends_are_clamped() {
        let mut out = [0; 6];
        quantize(&[0.5, 1.5, -2.5, 127.4, 200.0, -200.0], 1.0, [-127, 127], &mut out);
        assert_eq!(out.map(|q| q as i8), [0, 2, -2, 127, 127, -127]);
    }

    #[test]
    fn all_processors_give_the_same_bits() {
        let values: Vec<f32> =
            (0..10_000u32).map(|i| (i.wrapping_mul(2_654_435_761) as f32 / 4e9 - 0.5) * 0.3).collect();
        let (mut fast, mut plain) = (vec![0; values.len()], vec![0; values.len()]);
        let range = [-127, 127];
        assert_eq!(quantize(&values, 0.001, range, &mut fast), quantize_generic(&values, 0.001, range, &mut plain));
        assert_eq!(fast, plain);
        let (mut fast, mut plain) = (vec![[0; 2]; values.len()], vec![[0; 2]; values.len()]);
        assert_eq!(round_to_halves(&values, &mut fast), round_to_halves_generic(&values, &mut plain));
        assert_eq!(fast, plain);
        assert_eq!(compare(&values, &values[..]), compare_generic(&values, &values[..]));
        assert_eq!(count_above(&values, 0.1), count_above_generic(&values, 0.1));
    }

    #[test]
    fn halves_are_the_nearest_and_measured_like_any_numbers() {
        // all fp16 numbers, midpoints between two of them, their f32 neighbours, and both zeros
        let ends = (0..=f16::MAX.to_bits()).flat_map(|bits| {
            let (low, high) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
            let middle = if high.is_finite() { (low + high) / 2.0 } else { low };
            [low, middle, middle.next_down().max(0.0), middle.next_up()]
        });
        let values: Vec<f32> = ends.flat_map(|value| [value, -value]).filter(|v| v.abs() <= 65504.0).collect();
        let mut out = vec![[0; 2]; values.len()];
        let mut expected = Squares::default();
        let mut gone = 0;
        let (squares, vanished) = round_to_halves(&values, &mut out);
        for (values, out) in values.chunks(HALVES).zip(out.chunks(HALVES)) {
            let back: Vec<f32> = values.iter().map(|v| f16::from_f32(*v).to_f32()).collect();
            let found: Vec<f32> = out.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect();
            assert!(back.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()));
            let (squares, vanished) = compare(values, &back);
            expected += squares;
            gone += vanished;
        }
        assert_eq!((squares, vanished), (expected, gone));
    }

    #[test]
    fn values_that_become_zero_are_counted() {
        let (squares, vanished) = compare(&[1.0, 1e-9, 0.0, -2.0], &[1.0, 0.0, 0.0, -1.0]);
        assert_eq!(vanished, 1);
        assert_eq!((squares.source, squares.result), (5.0, 2.0));
        assert!((squares.error - 1.0).abs() < 1e-12);
    }
}
