//! Distances between two vectors in few passes, with sums in f64 in lanes that the compiler keeps in vector registers.
//! The order of summation is the same for every instruction set.

use super::dispatch::{Vectorize, vectorized};

/// Values that are read at a time, and partial sums of each kind.
const LANES: usize = 16;

/// Sums over two vectors `a` and `b`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairSums {
    /// `Σ a b`
    pub dot: f64,
    /// `Σ a²` and `Σ b²`
    pub squares: [f64; 2],
    /// `Σ (a - b)²`
    pub difference: f64,
    /// Largest `|a - b|`; NaN if any is.
    pub max_difference: f64,
    /// Largest `|b|`; NaN if any is.
    pub peak: f64,
}

impl PairSums {
    /// Cosine of the vectors; 1 if both are zero, 0 if only one is.
    pub fn cosine(&self) -> f64 {
        let [a, b] = self.squares.map(f64::sqrt);
        if a * b == 0.0 { f64::from(a == b) } else { self.dot / (a * b) }
    }
}

/// Computes the sums over two vectors of the same length.
pub fn pair_sums(a: &[f32], b: &[f32]) -> PairSums {
    vectorized(PairWork { a, b })
}

struct PairWork<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

#[derive(Clone, Copy)]
struct PairLanes {
    dot: [f64; LANES],
    a: [f64; LANES],
    b: [f64; LANES],
    difference: [f64; LANES],
    max_difference: [f64; LANES],
    peak: [f32; LANES],
}

impl PairLanes {
    #[inline(always)]
    fn add(&mut self, a: &[f32; LANES], b: &[f32; LANES]) {
        for i in 0..LANES {
            let (a, b) = (f64::from(a[i]), f64::from(b[i]));
            self.dot[i] += a * b;
            self.a[i] += a * a;
            self.b[i] += b * b;
        }
        for i in 0..LANES {
            let difference = f64::from(a[i]) - f64::from(b[i]);
            self.difference[i] += difference * difference;
            self.max_difference[i] = larger(difference.abs(), self.max_difference[i]);
            let magnitude = b[i].abs();
            self.peak[i] = if magnitude > self.peak[i] { magnitude } else { self.peak[i] };
        }
    }
}

/// Larger of two values; NaN is ignored.
#[inline(always)]
fn larger(value: f64, than: f64) -> f64 {
    if value > than { value } else { than }
}

impl Vectorize for PairWork<'_> {
    type Output = PairSums;

    #[inline(always)]
    fn run(self) -> PairSums {
        let mut lanes = PairLanes {
            dot: [0.0; LANES],
            a: [0.0; LANES],
            b: [0.0; LANES],
            difference: [0.0; LANES],
            max_difference: [0.0; LANES],
            peak: [0.0; LANES],
        };
        let ((whole_a, rest_a), (whole_b, rest_b)) = (self.a.as_chunks::<LANES>(), self.b.as_chunks::<LANES>());
        for (a, b) in whole_a.iter().zip(whole_b) {
            lanes.add(a, b);
        }
        // zeros add nothing
        let filled = |rest: &[f32]| std::array::from_fn(|i| rest.get(i).copied().unwrap_or(0.0));
        lanes.add(&filled(rest_a), &filled(rest_b));
        let difference = total(&lanes.difference);
        let squares = [total(&lanes.a), total(&lanes.b)];
        let max_difference = lanes.max_difference.into_iter().fold(0.0, f64::max);
        let peak = f64::from(lanes.peak.into_iter().fold(0.0, f32::max));
        PairSums {
            dot: total(&lanes.dot),
            squares,
            difference,
            // a square is never negative, so the sum is NaN exactly if one of them is
            max_difference: if difference.is_nan() { f64::NAN } else { max_difference },
            peak: if squares[1].is_nan() { f64::NAN } else { peak },
        }
    }
}

#[inline(always)]
fn total(lanes: &[f64; LANES]) -> f64 {
    let mut sums = *lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// Positions of the `count` largest values in descending order, the first of equal ones first; all positions if there
/// are fewer. `None` if any value is NaN.
pub fn largest(values: &[f32], count: usize) -> Option<Vec<usize>> {
    vectorized(LargestWork { values, count })
}

struct LargestWork<'a> {
    values: &'a [f32],
    count: usize,
}

impl Vectorize for LargestWork<'_> {
    type Output = Option<Vec<usize>>;

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut found: Vec<usize> = Vec::with_capacity(self.count.min(self.values.len()) + 1);
        let mut nan = false;
        for (number, block) in self.values.chunks(BLOCK).enumerate() {
            // mostly, only the maximum of a block is compared
            let mut lanes = [f32::NEG_INFINITY; LANES];
            let mut spoilt = [false; LANES];
            let (whole, rest) = block.as_chunks::<LANES>();
            for values in whole {
                for i in 0..LANES {
                    lanes[i] = if values[i] > lanes[i] { values[i] } else { lanes[i] };
                    spoilt[i] |= values[i].is_nan();
                }
            }
            nan |= spoilt.into_iter().any(|spoilt| spoilt) || rest.iter().any(|value| value.is_nan());
            let most = lanes.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, f32::max);
            if found.len() == self.count && found.last().is_none_or(|least| !(most > self.values[*least])) {
                continue;
            }
            for (offset, value) in block.iter().enumerate() {
                let before = found.iter().take_while(|place| self.values[**place] >= *value).count();
                if before < self.count {
                    found.insert(before, number * BLOCK + offset);
                    found.truncate(self.count);
                }
            }
        }
        (!nan).then_some(found)
    }
}

/// Kullback-Leibler divergence of softmax(q) from softmax(p), in nats: `Σ p (log p - log q)`. With the maximum `m` and
/// `S(v) = Σ exp(v - m(v))`, it is `Σ exp(p - m(p)) (p - q) / S(p) - (m(p) - m(q)) - ln(S(p) / S(q))`: one pass of
/// exponentials, and exactly zero for equal vectors.
pub fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let [largest_p, largest_q] = [p, q].map(|values| f64::from(super::reduce::max(values)));
    let [sum_p, sum_q, weighted] = vectorized(DivergenceWork { p, q, largest: [largest_p, largest_q] });
    weighted / sum_p - (largest_p - largest_q) - (sum_p / sum_q).ln()
}

struct DivergenceWork<'a> {
    p: &'a [f32],
    q: &'a [f32],
    largest: [f64; 2],
}

impl Vectorize for DivergenceWork<'_> {
    type Output = [f64; 3];

    #[inline(always)]
    fn run(self) -> [f64; 3] {
        let mut lanes = [[0.0; LANES]; 3];
        let (mut of_p, mut of_q) = ([0.0; BLOCK], [0.0; BLOCK]);
        for (p, q) in self.p.chunks(BLOCK).zip(self.q.chunks(BLOCK)) {
            exponentials(p, self.largest[0], &mut of_p);
            exponentials(q, self.largest[1], &mut of_q);
            add_to(&mut lanes[0], &of_p[..p.len()]);
            add_to(&mut lanes[1], &of_q[..q.len()]);
            for ((of_p, p), q) in of_p.iter_mut().zip(p).zip(q) {
                *of_p *= f64::from(*p) - f64::from(*q);
            }
            add_to(&mut lanes[2], &of_p[..p.len()]);
        }
        lanes.map(|lanes| total(&lanes))
    }
}

/// Exponentials that are computed before they are summed, so that the compiler vectorizes the loop.
const BLOCK: usize = 256;

/// Computes `e^(v - largest)` of each value.
#[inline(always)]
fn exponentials(values: &[f32], largest: f64, out: &mut [f64; BLOCK]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = exp(f64::from(*value) - largest);
    }
}

/// Adds values to the lanes in turn.
#[inline(always)]
fn add_to(lanes: &mut [f64; LANES], values: &[f64]) {
    let (whole, rest) = values.as_chunks::<LANES>();
    for values in whole {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane += value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += value;
    }
}

/// `ln Σ e^v`; NaN if any value is.
pub fn log_sum_exp(values: &[f32]) -> f64 {
    let largest = f64::from(super::reduce::max(values));
    largest + vectorized(ExpWork { values, largest }).ln()
}

struct ExpWork<'a> {
    values: &'a [f32],
    largest: f64,
}

impl Vectorize for ExpWork<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let (mut lanes, mut exps) = ([0.0; LANES], [0.0; BLOCK]);
        for values in self.values.chunks(BLOCK) {
            exponentials(values, self.largest, &mut exps);
            add_to(&mut lanes, &exps[..values.len()]);
        }
        total(&lanes)
    }
}

/// `e^x` for `x <= 0`, within 4 units in the last place; 0 below -708. NaN of NaN.
#[inline(always)]
fn exp(x: f64) -> f64 {
    // adding 1.5 * 2^52 leaves the rounded integer in the low bits
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    /// `1 / k!`, from the twelfth on.
    const TERMS: [f64; 11] = [
        2.087_675_698_786_809_7e-9,
        2.505_210_838_544_172e-8,
        2.755_731_922_398_589e-7,
        2.755_731_922_398_589e-6,
        2.480_158_730_158_730_2e-5,
        1.984_126_984_126_984_1e-4,
        1.388_888_888_888_889e-3,
        8.333_333_333_333_333e-3,
        4.166_666_666_666_666_4e-2,
        1.666_666_666_666_666_6e-1,
        0.5,
    ];
    let shifted = x * std::f64::consts::LOG2_E + SHIFT;
    let n = (shifted.to_bits() as i64).wrapping_sub(SHIFT.to_bits() as i64);
    let whole = shifted - SHIFT;
    // ln 2 in two parts, the first of which ends with 21 zeros
    let r = (x - whole * 6.931_471_803_691_238e-1) - whole * 1.908_214_929_270_587_7e-10;
    let mut p = TERMS[0];
    for term in &TERMS[1..] {
        p = p * r + term;
    }
    let value = p * r * r + r + 1.0;
    let power = f64::from_bits((n.wrapping_add(1023) as u64) << 52);
    if x < -708.0 { 0.0 } else { value * power }
}

/// Adds `(a - b)²` and `b²` of every column to `sums`, over rows of that width.
pub fn add_columns(a: &[f32], b: &[f32], sums: &mut [[f64; 2]]) {
    vectorized(ColumnWork { a, b, sums });
}

struct ColumnWork<'a> {
    a: &'a [f32],
    b: &'a [f32],
    sums: &'a mut [[f64; 2]],
}

impl Vectorize for ColumnWork<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.sums.len().max(1);
        for (a, b) in self.a.chunks_exact(width).zip(self.b.chunks_exact(width)) {
            for ((sums, a), b) in self.sums.iter_mut().zip(a).zip(b) {
                let (a, b) = (f64::from(*a), f64::from(*b));
                sums[0] += (a - b) * (a - b);
                sums[1] += b * b;
            }
        }
    }
}

/// `a - b`, element by element.
pub fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// Bits of the largest magnitude; at least infinity's if a value isn't finite.
pub fn largest_magnitude_bits(values: &[f32]) -> u32 {
    // magnitudes are ordered like their bits
    vectorized(MagnitudeWork { values })
}

struct MagnitudeWork<'a> {
    values: &'a [f32],
}

impl Vectorize for MagnitudeWork<'_> {
    type Output = u32;

    #[inline(always)]
    fn run(self) -> u32 {
        self.values.iter().map(|value| value.to_bits() & 0x7fff_ffff).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::InstructionSet;

    /// Numbers of the size of logits.
    fn row(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        (0..count).map(|_| 24.0 * next() - 12.0).collect()
    }

    #[test]
    fn sums_are_those_that_go_one_by_one() {
        for count in [0, 1, 15, 16, 17, 1000] {
            let (a, b) = (row(count, 1), row(count, 2));
            let pairs = || a.iter().zip(&b).map(|(a, b)| (f64::from(*a), f64::from(*b)));
            let sums = pair_sums(&a, &b);
            let near = |found: f64, expected: f64| (found - expected).abs() <= 1e-12 * expected.abs().max(1.0);
            assert!(near(sums.dot, pairs().map(|(a, b)| a * b).sum()));
            assert!(near(sums.squares[0], pairs().map(|(a, _)| a * a).sum()));
            assert!(near(sums.squares[1], pairs().map(|(_, b)| b * b).sum()));
            assert!(near(sums.difference, pairs().map(|(a, b)| (a - b).powi(2)).sum()));
            assert_eq!(sums.max_difference, pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f64::max));
            assert_eq!(sums.peak, pairs().map(|(_, b)| b.abs()).fold(0.0, f64::max));
            let sets = InstructionSet::available().map(|set| set.run(PairWork { a: &a, b: &b }));
            assert!(sets.into_iter().all(|other| other == sums), "every instruction set gives the same bits");
        }
    }

    #[test]
    fn a_nan_spoils_every_sum_it_is_part_of() {
        for place in [0, 16, 18] {
            let (mut a, b) = (row(19, 1), row(19, 2));
            a[place] = f32::NAN;
            let (sums, other) = (pair_sums(&a, &b), pair_sums(&b, &a));
            assert!(sums.max_difference.is_nan() && sums.cosine().is_nan() && !sums.peak.is_nan());
            assert!(other.peak.is_nan());
            assert!(divergence(&a, &b).is_nan() && divergence(&b, &a).is_nan() && log_sum_exp(&a).is_nan());
            assert_eq!((largest(&a, 5), largest_magnitude_bits(&a)), (None, f32::NAN.to_bits()));
        }
    }

    #[test]
    fn the_largest_are_the_first_of_a_sorted_row() {
        for count in [0, 3, 5, 64, 1000] {
            let mut values = row(count, 7);
            // equal values
            values.iter_mut().for_each(|value| *value = value.round());
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
            order.truncate(5);
            assert_eq!(largest(&values, 5), Some(order));
        }
        assert_eq!(largest(&[f32::NEG_INFINITY; 70], 2), Some(vec![0, 1]));
    }

    #[test]
    fn exponentials_are_the_library_s() {
        for i in 0..100_000 {
            let x = -f64::from(i) * 0.007_077;
            let (found, expected) = (exp(x), x.exp());
            assert!((found - expected).abs() <= 4.0 * f64::EPSILON * expected, "e^{x}: {found}, expected {expected}");
        }
        assert_eq!([exp(0.0), exp(-709.0), exp(f64::NEG_INFINITY)], [1.0, 0.0, 0.0]);
        assert!(exp(f64::NAN).is_nan());
    }

    #[test]
    fn divergences_are_those_of_the_definition() {
        for count in [1, 16, 1000] {
            let (p, q) = (row(count, 3), row(count, 4));
            let sum = |values: &[f32]| values.iter().map(|v| f64::from(*v).exp()).sum::<f64>();
            let (log_p, log_q) = (sum(&p).ln(), sum(&q).ln());
            let terms = p.iter().zip(&q).map(|(p, q)| {
                let (p, q) = (f64::from(*p) - log_p, f64::from(*q) - log_q);
                p.exp() * (p - q)
            });
            let expected: f64 = terms.sum();
            assert!((divergence(&p, &q) - expected).abs() < 1e-12 * expected.max(1.0));
            assert!((log_sum_exp(&p) - log_p).abs() < 1e-12);
            assert_eq!(divergence(&p, &p), 0.0);
            let shifted: Vec<f32> = p.iter().map(|v| v + 100.0).collect();
            assert!(divergence(&p, &shifted).abs() < 1e-6, "an added constant changes nothing");
        }
    }

    #[test]
    fn columns_are_summed_over_all_rows() {
        let mut sums = vec![[0.0; 2]; 2];
        add_columns(&[1.0, 2.0, 3.0, 4.0], &[1.0, 1.0, 1.0, 2.0], &mut sums);
        assert_eq!(sums, [[4.0, 2.0], [5.0, 5.0]]);
        assert_eq!(difference(&[3.0, 1.0], &[1.0, 4.0]), [2.0, -3.0]);
    }
}
