//! Sums of products as the Neural Engine's multiply-accumulate units are published to form them.
//!
//! Factors are fp16. Products are summed in tiles of four neighbours, one after the other, in units of the twelfth bit of
//! the larger of each two; the tiles are summed in f32; a sum that reaches 32768 in magnitude is infinite and stays so. A bias is added afterwards. The published probes come
//! out as measured: 4096 and 1024 ones give 5116, sixteen triples of m, -m and 1 keep sixteen ones up to m = 4090 and four
//! from 4096 on.

use super::{EngineEffect, EngineEffects};
use crate::weight::LoadedWeight;
use anec_kernels::layout::MatrixLayout;
use anec_kernels::pool;
use anec_kernels::round::round_to_f16;
use anec_kernels::weight::Elements;

/// Where sums end.
const LIMIT: f32 = 32768.0;
/// Products that are summed with few bits.
const TILE: usize = 4;
/// Smallest normal fp16.
const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
/// Multiplications below which threads are not worth waking.
const SMALL_WORK: usize = 1 << 14;

/// `out[o, t] = sum over k of weight[o, k] x[k, t] + bias[o]`, as `anec_kernels::product::multiply` without effects.
pub(crate) fn multiply(
    effects: EngineEffects,
    weight: &LoadedWeight,
    (x, x_layout): (&[f32], MatrixLayout),
    tokens: usize,
    bias: Option<&[f32]>,
    (out, out_layout): (&mut [f32], MatrixLayout),
) {
    if !effects.has_sums() {
        return anec_kernels::product::multiply(weight, (x, x_layout), tokens, bias, (out, out_layout));
    }
    let (rows, columns) = (weight.rows(), weight.columns());
    let columns_of_x = factors(effects, tokens, columns, |t, k| x[k * x_layout.row + t * x_layout.column]);
    let mut product = vec![0.0; rows * tokens];
    let palette = matches!(weight.elements(), Elements::Codes(_)) && effects.has(EngineEffect::PaletteBeforeScale);
    let compute = |row: usize, product: &mut [f32]| {
        let mut factors = vec![0.0; columns];
        weight.expand_row(row, &mut factors);
        let scale = match weight.scales().of_row(row) {
            [scale] if palette && *scale != 0.0 => *scale,
            _ => 1.0,
        };
        factors.iter_mut().for_each(|factor| *factor /= scale);
        prepare(effects, &mut factors);
        for (sum, x) in product.iter_mut().zip(columns_of_x.chunks(columns.max(1))) {
            *sum = dot(effects, &factors, x) * scale + bias.map_or(0.0, |bias| bias[row]);
        }
    };
    by_rows(&mut product, tokens, rows * tokens * columns, compute);
    for (row, sums) in product.chunks_exact(tokens.max(1)).enumerate() {
        for (token, sum) in sums.iter().enumerate() {
            out[row * out_layout.row + token * out_layout.column] = *sum;
        }
    }
}

/// The product of `[m, k]` and `[k, n]`, row-major, as `anec_kernels::matrix::product` without effects.
pub(crate) fn product(
    effects: EngineEffects,
    (m, k, n): (usize, usize, usize),
    (a, a_layout): (&[f32], MatrixLayout),
    (b, b_layout): (&[f32], MatrixLayout),
    out: &mut [f32],
) {
    if !effects.has_sums() {
        return anec_kernels::matrix::product((m, k, n), (a, a_layout), (b, b_layout), out);
    }
    let columns = factors(effects, n, k, |column, i| b[i * b_layout.row + column * b_layout.column]);
    let compute = |row: usize, out: &mut [f32]| {
        let mut factors: Vec<f32> = (0..k).map(|i| a[row * a_layout.row + i * a_layout.column]).collect();
        prepare(effects, &mut factors);
        for (sum, column) in out.iter_mut().zip(columns.chunks(k.max(1))) {
            *sum = dot(effects, &factors, column);
        }
    };
    out.chunks_exact_mut(n.max(1)).take(m).enumerate().for_each(|(row, out)| compute(row, out));
}

/// Rows of `length` sums each, in parallel where that is worth it.
fn by_rows(out: &mut [f32], length: usize, work: usize, compute: impl Fn(usize, &mut [f32]) + Sync) {
    if length == 0 {
        return;
    }
    if work > SMALL_WORK {
        pool::for_each_chunk(out, length, |row, out| compute(row, out));
    } else {
        out.chunks_exact_mut(length).enumerate().for_each(|(row, out)| compute(row, out));
    }
}

/// `count` vectors of `length` factors each, ready to be multiplied.
fn factors(effects: EngineEffects, count: usize, length: usize, at: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    let mut factors: Vec<f32> =
        (0..count).flat_map(|i| (0..length).map(move |k| (i, k))).map(|(i, k)| at(i, k)).collect();
    prepare(effects, &mut factors);
    factors
}

/// What factors are when they reach the multipliers.
fn prepare(effects: EngineEffects, factors: &mut [f32]) {
    if effects.has(EngineEffect::WeightsRounded) {
        round_to_f16(factors);
    }
    if effects.has(EngineEffect::SubnormalsFlushed) {
        factors.iter_mut().filter(|factor| factor.abs() < SMALLEST_NORMAL).for_each(|factor| *factor = 0.0);
    }
}

/// The sum of products of two vectors.
fn dot(effects: EngineEffects, a: &[f32], b: &[f32]) -> f32 {
    let by_tiles = effects.has(EngineEffect::LaneTiles);
    let (sum, peak) = if by_tiles { add_tiles::<true>(a, b) } else { add_tiles::<false>(a, b) };
    if effects.has(EngineEffect::SumsSaturate) && peak >= LIMIT {
        return saturated(by_tiles, a, b);
    }
    if effects.has(EngineEffect::SubnormalsFlushed) && sum.abs() < SMALLEST_NORMAL {
        return 0.0;
    }
    sum
}

/// The sum over the products of four neighbours.
fn tile<const ALIGNED: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut products = a.iter().zip(b).map(|(a, b)| a * b);
    let first = products.next().unwrap_or(0.0);
    products.fold(first, |sum, product| if ALIGNED { add_aligned(sum, product) } else { sum + product })
}

/// The sum over all tiles, and the largest magnitude on the way.
fn add_tiles<const ALIGNED: bool>(a: &[f32], b: &[f32]) -> (f32, f32) {
    let (mut sum, mut peak) = (0f32, 0f32);
    let (whole, rest) = a.as_chunks::<TILE>();
    let (other, other_rest) = b.as_chunks::<TILE>();
    for (a, b) in whole.iter().zip(other) {
        sum += tile::<ALIGNED>(a, b);
        peak = peak.max(sum.abs());
    }
    sum += tile::<ALIGNED>(rest, other_rest);
    (sum, peak.max(sum.abs()))
}

/// Infinite, with the sign of the first sum that left the range.
#[cold]
fn saturated(by_tiles: bool, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = 0f32;
    for (a, b) in a.chunks(TILE).zip(b.chunks(TILE)) {
        sum += if by_tiles { tile::<true>(a, b) } else { tile::<false>(a, b) };
        if sum.abs() >= LIMIT {
            break;
        }
    }
    f32::INFINITY.copysign(sum)
}

/// A sum of which both terms are held in units of the larger one's twelfth bit, to nearest even.
fn add_aligned(a: f32, b: f32) -> f32 {
    const EXPONENT: u32 = 0x7f80_0000;
    // what is added to this and taken away again has lost the bits below the unit: 1.5 times 2^23 units
    let power = a.abs().max(b.abs()).to_bits() & EXPONENT;
    let shift = f32::from_bits(power.wrapping_add(12 << 23)) * 1.5;
    (a + shift - shift) + (b + shift - shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    /// A sum, as a product with ones, as the engine stores it.
    fn sum(effects: EngineEffects, values: &[f32]) -> f32 {
        f16::from_f32(dot(effects, values, &vec![1.0; values.len()])).to_f32()
    }

    #[test]
    fn sums_saturate_at_32768() {
        let all = EngineEffects::ALL;
        assert_eq!(sum(all, &[32752.0]), 32752.0);
        assert_eq!(sum(all, &[32768.0]), f32::INFINITY);
        assert_eq!(sum(all, &[-16384.0, -16384.0]), f32::NEG_INFINITY);
        assert_eq!(sum(all.without(EngineEffect::SumsSaturate), &[32768.0]), 32768.0);
        // on the way, too, though the result would be in range
        let there_and_back = [20000.0, 0.0, 0.0, 0.0, 20000.0, 0.0, 0.0, 0.0, -30000.0];
        assert_eq!(sum(all, &there_and_back), f32::INFINITY);
        assert_eq!(sum(all.without(EngineEffect::SumsSaturate), &there_and_back), 10000.0);
    }

    #[test]
    fn tiles_of_four_lanes_lose_what_was_seen_to_be_lost() {
        let all = EngineEffects::ALL;
        let mut values = vec![1.0; 1025];
        values[0] = 4096.0;
        assert_eq!(sum(all, &values), 5116.0);
        assert_eq!(sum(all.without(EngineEffect::LaneTiles), &values), 5120.0);
        assert_eq!(sum(all, &vec![1.0; 16000]), 16000.0);
        for (magnitude, survivors) in [(1024.0, 16.0), (3000.0, 16.0), (4090.0, 16.0), (4096.0, 4.0), (16000.0, 4.0)] {
            let triples: Vec<f32> = [magnitude, -magnitude, 1.0].into_iter().cycle().take(48).collect();
            assert_eq!(sum(all, &triples), survivors, "{magnitude}");
        }
    }

    #[test]
    fn subnormals_are_flushed_where_products_are_summed() {
        let smallest = 2f32.powi(-24);
        let all = EngineEffects::ALL;
        assert_eq!(sum(all, &[3.0 * smallest, 5.0 * smallest]), 0.0);
        assert_eq!(
            sum(all.without(EngineEffect::SubnormalsFlushed), &[3.0 * smallest, 5.0 * smallest]),
            8.0 * smallest
        );
    }

    #[test]
    fn terms_of_a_sum_lose_what_is_below_the_larger_ones_twelfth_bit() {
        assert_eq!(add_aligned(4096.0, 1.0), 4096.0);
        assert_eq!(add_aligned(-4096.0, 1.0), -4096.0);
        assert_eq!(add_aligned(4090.0, 1.0), 4091.0);
        assert_eq!(add_aligned(4096.0, 3.0), 4100.0);
        assert_eq!(add_aligned(0.0, 0.0), 0.0);
        assert_eq!(add_aligned(f32::INFINITY, 1.0), f32::INFINITY);
    }
}
