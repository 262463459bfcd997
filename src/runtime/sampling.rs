//! Chooses the next token from logits: greedy, or temperature with top-k, top-p and min-p.

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token; above, logits are divided by it.
    pub temperature: f32,
    /// Only this many most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens that together have this probability; 1 for all.
    pub top_p: f32,
    /// Only tokens with at least this share of the most likely one's probability; 0 for all.
    pub min_p: f32,
    /// Seed of the random numbers; equal seeds give equal texts.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// A sampler with its random state.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
}

impl Sampler {
    /// A sampler at the start of its seed.
    pub fn new(sampling: Sampling) -> Self {
        Sampler { sampling, state: sampling.seed }
    }

    /// The next token.
    pub fn next(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        if temperature <= 0.0 {
            return argmax(logits);
        }
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| f64::from((logit - largest) / temperature).exp();
        let mut candidates: Vec<(u32, f64)> =
            logits.iter().enumerate().filter(|(_, l)| !l.is_nan()).map(|(i, l)| (i as u32, weight(*l))).collect();
        if candidates.is_empty() {
            return 0;
        }
        // the order of equal weights is by token, so that a seed always means the same text
        let by_weight = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if top_k > 0 && top_k < candidates.len() {
            candidates.select_nth_unstable_by(top_k - 1, by_weight);
            candidates.truncate(top_k);
        }
        if top_p < 1.0 || min_p > 0.0 {
            candidates.retain(|(_, w)| *w >= f64::from(min_p));
            candidates.sort_unstable_by(by_weight);
            let total: f64 = candidates.iter().map(|(_, w)| w).sum();
            let mut sum = 0.0;
            let nucleus = candidates.iter().position(|(_, w)| {
                sum += w;
                sum >= total * f64::from(top_p)
            });
            candidates.truncate(nucleus.map_or(candidates.len(), |last| last + 1));
        } else {
            candidates.sort_unstable_by_key(|(token, _)| *token);
        }
        let total: f64 = candidates.iter().map(|(_, w)| w).sum();
        let mut left = self.uniform() * total;
        for (token, weight) in &candidates {
            left -= weight;
            if left < 0.0 {
                return *token;
            }
        }
        candidates[candidates.len() - 1].0
    }

    /// A number in `[0, 1)`: SplitMix64 (Steele, Lea, Flood 2014), upper 53 bits.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The index of the largest logit, the first of equals.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] || logits[best].is_nan() {
            best = i;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, -1.0];

    fn draws(sampling: Sampling) -> [usize; 4] {
        let mut sampler = Sampler::new(sampling);
        let mut counts = [0; 4];
        (0..20_000).for_each(|_| counts[sampler.next(&LOGITS) as usize] += 1);
        counts
    }

    #[test]
    fn temperature_zero_takes_the_most_likely() {
        assert_eq!(Sampler::new(Sampling::default()).next(&LOGITS), 1);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let counts = draws(Sampling { temperature: 1.0, ..Default::default() });
        let weights: Vec<f64> = LOGITS.iter().map(|l| f64::from(*l).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(weights) {
            assert!((*count as f64 / 20_000.0 - weight / total).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn cuts_leave_what_they_promise_and_renormalise() {
        let warm = Sampling { temperature: 1.0, ..Default::default() };
        let [a, b, c, d] = draws(Sampling { top_k: 2, ..warm });
        assert!(a == 0 && d == 0 && b > c && c > 4000, "top-k");
        // probabilities are .086, .638, .235, .012 of the four; .8 needs the first two in order of weight
        let [a, _, c, d] = draws(Sampling { top_p: 0.8, ..warm });
        assert!(a == 0 && d == 0 && c > 4000, "top-p");
        let [a, _, c, d] = draws(Sampling { min_p: 0.3, ..warm });
        assert!(a == 0 && d == 0 && c > 4000, "min-p");
    }

    #[test]
    fn a_seed_means_one_text() {
        let warm = |seed| Sampling { temperature: 0.8, seed, ..Default::default() };
        let text = |seed| {
            let mut sampler = Sampler::new(warm(seed));
            (0..50).map(|_| sampler.next(&LOGITS)).collect::<Vec<_>>()
        };
        assert_eq!(text(7), text(7));
        assert_ne!(text(7), text(8));
    }
}
