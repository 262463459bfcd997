//! Pseudo-random numbers that depend on a seed and a position only, so that they can be computed in any order.

use anec_base::SplitMix64;
use anec_kernels::vectorized_fn;

/// Sequence of normally distributed numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normal {
    /// Seed of the sequence.
    pub seed: u64,
    /// Mean.
    pub mean: f32,
    /// Standard deviation.
    pub standard_deviation: f32,
}

impl Normal {
    /// Fills `out` with elements `first ..`.
    pub fn fill(&self, first: u64, out: &mut [f32]) {
        fill(*self, first, out);
    }
}

vectorized_fn! {
    fn fill<'a>(normal: Normal, first: u64, out: &'a mut [f32]) -> () = fill_generic
}

#[inline(always)]
fn fill_generic(Normal { seed, mean, standard_deviation }: Normal, first: u64, out: &mut [f32]) {
    /// Standard deviation of the sum of four numbers uniform in 0 ..= 65535.
    const UNIT: f32 = 37837.227;
    const MIDDLE: f32 = 2.0 * 65535.0;
    let scale = standard_deviation / UNIT;
    for (i, value) in out.iter_mut().enumerate() {
        let bits = mix(seed, first.wrapping_add(i as u64));
        let sum = (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48);
        *value = mean + scale * (sum as i32 as f32 - MIDDLE);
    }
}

/// Returns 64 bits for position `i`: the output function of the splitmix64 generator.
#[inline(always)]
pub fn mix(seed: u64, i: u64) -> u64 {
    SplitMix64::hash(seed.wrapping_mul(0xD1B5_4A32_D192_ED03).wrapping_add(i.wrapping_mul(SplitMix64::STEP)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_chunking_gives_the_same_numbers_of_the_right_spread() {
        let normal = Normal { seed: 7, mean: 1.0, standard_deviation: 0.5 };
        let mut whole = vec![0.0; 100_000];
        normal.fill(5, &mut whole);
        let mut pieces = vec![0.0; 100_000];
        for (i, piece) in pieces.chunks_mut(777).enumerate() {
            normal.fill(5 + 777 * i as u64, piece);
        }
        assert_eq!(whole, pieces);
        let mean = whole.iter().sum::<f32>() / 1e5;
        let variance = whole.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 1e5;
        assert!((mean - 1.0).abs() < 0.01 && (variance.sqrt() - 0.5).abs() < 0.01, "{mean} {variance}");
        let mut other = vec![0.0; 100_000];
        Normal { seed: 8, ..normal }.fill(5, &mut other);
        assert!(whole.iter().zip(&other).filter(|(a, b)| a == b).count() < 100);
    }
}
