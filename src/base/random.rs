//! Reproducible pseudo-random numbers.

/// SplitMix64 (Steele, Lea, Flood 2014): each output is a hash of the state, which grows by a constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Increment of the state: 2^64 divided by the golden ratio, odd.
    pub const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    /// Creates a generator; equal seeds give equal numbers.
    pub const fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }

    /// Returns the next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        Self::hash(self.0)
    }

    /// Returns a number in `[0, 1)` from the upper 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns the output for a state.
    #[inline(always)]
    pub const fn hash(mut z: u64) -> u64 {
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_the_published_ones() {
        // from the reference implementation, seed 1234567
        let mut random = SplitMix64::new(1_234_567);
        let first = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(first, std::array::from_fn(|_| random.bits()));
        assert!((0..1000).map(|_| random.uniform()).all(|number| (0.0..1.0).contains(&number)));
    }
}
