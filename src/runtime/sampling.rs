//! Choice of the next token from logits: greedy, or temperature with top-k, top-p and min-p, after penalties for tokens
//! that the text already has.

use std::collections::HashMap;
use std::fmt::Display;

use super::error::RuntimeError;
use anec_base::SplitMix64;

/// Sampling parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens to keep; 0 for all.
    pub top_k: usize,
    /// Total probability of the most likely tokens to keep; 1 for all.
    pub top_p: f32,
    /// Minimum probability of a token relative to the most likely one; 0 for all.
    pub min_p: f32,
    /// Factor that divides the positive and multiplies the negative logits of every token in the prompt or the text; 1
    /// for none (Keskar and others 2019).
    pub repetition_penalty: f32,
    /// Amount subtracted from the logit of every token in the text; 0 for none.
    pub presence_penalty: f32,
    /// Amount subtracted from the logit of a token for each occurrence in the text; 0 for none.
    pub frequency_penalty: f32,
    /// Seed of the random numbers; equal seeds give equal texts.
    pub seed: u64,
}

/// Returns `value` if it is within its range; NaN is in no range.
///
/// # Errors
/// If it is outside; the error names the field.
pub fn within<N: PartialOrd + Display>(field: &'static str, value: N, least: N, most: N) -> Result<N, RuntimeError> {
    if value >= least && value <= most {
        return Ok(value);
    }
    let [value, least, most] = [value, least, most].map(|number| number.to_string());
    Err(RuntimeError::OutOfRange { field, value, least, most })
}

impl Sampling {
    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// If one is outside of its range.
    pub fn check(&self) -> Result<(), RuntimeError> {
        within("temperature", self.temperature, 0.0, 100.0)?;
        within("top_p", self.top_p, 0.0, 1.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        Ok(())
    }

    /// Returns what needs all logits where the `k` largest are known.
    pub(super) fn needs_logits(&self, k: usize) -> Option<&'static str> {
        if self.penalises() {
            Some("penalties need")
        } else if self.temperature > 0.0 && !(1..=k).contains(&self.top_k) {
            Some(if k == 1 { "sampling needs" } else { "sampling without a smaller `top_k` needs" })
        } else {
            None
        }
    }

    /// Returns the parameters nearest to these that need only the `k` largest logits.
    #[must_use]
    pub fn of_largest(self, k: usize) -> Self {
        let top_k = if self.top_k == 0 { k } else { self.top_k.min(k) };
        let sampling = Sampling { repetition_penalty: 1.0, presence_penalty: 0.0, frequency_penalty: 0.0, ..self };
        match k {
            0 | 1 => Sampling { temperature: 0.0, ..sampling },
            _ => Sampling { top_k, ..sampling },
        }
    }

    /// Returns whether any penalty applies.
    pub fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

/// Sampler with its random state and the tokens of the text.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: SplitMix64,
    /// Number of occurrences of each token in the continuation; 0 for a token that only the prompt has.
    seen: HashMap<u32, u32>,
}

impl Sampler {
    /// Creates a sampler at the start of its seed, for the continuation of `prompt`.
    pub fn new(sampling: Sampling, prompt: &[u32]) -> Self {
        let seen = if sampling.penalises() { prompt.iter().map(|token| (*token, 0)).collect() } else { HashMap::new() };
        Sampler { sampling, random: SplitMix64::new(sampling.seed), seen }
    }

    /// Applies the penalties to a row of logits.
    pub fn penalise(&self, logits: &mut [f32]) {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.sampling;
        for (token, count) in &self.seen {
            let Some(logit) = logits.get_mut(*token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            if *count > 0 {
                *logit -= presence_penalty + frequency_penalty * *count as f32;
            }
        }
    }

    /// Adds a token to the text.
    pub fn accept_token(&mut self, token: u32) {
        if self.sampling.penalises() {
            *self.seen.entry(token).or_insert(0) += 1;
        }
    }

    /// Returns the next token. Logits of -inf are never chosen unless there are no others.
    pub fn next(&mut self, logits: &[f32]) -> u32 {
        self.next_of(&[], logits)
    }

    /// Returns the next of the tokens with these logits, as if all others had logits of -inf; empty `tokens` stand for
    /// all tokens.
    pub(super) fn next_of(&mut self, tokens: &[u32], logits: &[f32]) -> u32 {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let token = |index: u32| tokens.get(index as usize).copied().unwrap_or(index);
        if temperature <= 0.0 {
            return token(argmax(logits));
        }
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| f64::from((logit - largest) / temperature).exp();
        let mut candidates: Vec<(u32, f64)> = logits
            .iter()
            .enumerate()
            .filter(|(_, l)| **l > f32::NEG_INFINITY)
            .map(|(i, l)| (token(i as u32), weight(*l)))
            .collect();
        if candidates.is_empty() {
            return token(argmax(logits));
        }
        // ties are broken by token id, so that a seed always gives the same text
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
        // an infinite logit gives NaN weights
        if candidates.is_empty() {
            return token(argmax(logits));
        }
        let total: f64 = candidates.iter().map(|(_, w)| w).sum();
        let mut left = self.random.uniform() * total;
        for (token, weight) in &candidates {
            left -= weight;
            if left < 0.0 {
                return *token;
            }
        }
        candidates[candidates.len() - 1].0
    }
}

/// Returns the index of the largest logit, the first of equals.
pub fn argmax(logits: &[f32]) -> u32 {
    /// Block size; a block is searched only if it has a larger logit than before.
    const PIECE: usize = 64;
    let mut best = 0;
    for (i, piece) in logits.chunks(PIECE).enumerate() {
        // a NaN is never larger
        if logits[best].is_nan() || piece.iter().fold(false, |larger, logit| larger | (*logit > logits[best])) {
            for (k, logit) in piece.iter().enumerate() {
                if *logit > logits[best] || logits[best].is_nan() {
                    best = i * PIECE + k;
                }
            }
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, -1.0];

    fn draws(sampling: Sampling) -> [usize; 4] {
        let mut sampler = Sampler::new(sampling, &[]);
        let mut counts = [0; 4];
        (0..20_000).for_each(|_| counts[sampler.next(&LOGITS) as usize] += 1);
        counts
    }

    #[test]
    fn defaults_keep_to_the_logits_that_are_known() {
        let own = Sampling { temperature: 0.7, top_k: 20, repetition_penalty: 1.1, ..Sampling::default() };
        assert_eq!(own.of_largest(1), Sampling { top_k: 20, ..Sampling::default() }, "greedy");
        for (k, top_k) in [(8, 8), (40, 20)] {
            let kept = own.of_largest(k);
            assert_eq!(kept, Sampling { temperature: 0.7, top_k, ..Sampling::default() });
            assert_eq!(kept.needs_logits(k), None);
        }
        assert_eq!(Sampling { temperature: 1.0, ..Sampling::default() }.of_largest(5).top_k, 5);
    }

    #[test]
    fn the_largest_logits_are_sampled_as_if_they_were_all() {
        let warm = Sampling { temperature: 0.8, top_k: 2, seed: 3, ..Sampling::default() };
        let (mut all, mut largest) = (Sampler::new(warm, &[]), Sampler::new(warm, &[]));
        for _ in 0..100 {
            assert_eq!(all.next(&LOGITS), largest.next_of(&[1, 2, 0], &[3.0, 2.0, 1.0]));
        }
    }

    #[test]
    fn temperature_zero_takes_the_most_likely() {
        assert_eq!(Sampler::new(Sampling::default(), &[]).next(&LOGITS), 1);
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
    fn truncated_distributions_are_renormalised() {
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
    fn penalties_follow_their_definitions() {
        let sampling =
            Sampling { repetition_penalty: 2.0, presence_penalty: 0.25, frequency_penalty: 0.5, ..Default::default() };
        // the prompt has tokens 1 and 3, the text has 2 twice
        let mut sampler = Sampler::new(sampling, &[1, 1, 3]);
        sampler.accept_token(2);
        sampler.accept_token(2);
        let mut logits = LOGITS;
        sampler.penalise(&mut logits);
        assert_eq!(logits, [1.0, 3.0 / 2.0, 2.0 / 2.0 - 0.25 - 2.0 * 0.5, -2.0]);
        let mut untouched = LOGITS;
        Sampler::new(Sampling::default(), &[1, 2]).penalise(&mut untouched);
        assert_eq!(untouched, LOGITS);
    }

    #[test]
    fn parameters_have_ranges_and_the_error_names_the_field() {
        assert!(Sampling::default().check().is_ok());
        let with = |change: fn(&mut Sampling)| {
            let mut sampling = Sampling::default();
            change(&mut sampling);
            sampling.check().unwrap_err().to_string()
        };
        assert_eq!(with(|s| s.min_p = 2.0), "`min_p` is 2, but has to be from 0 to 1");
        assert_eq!(with(|s| s.temperature = -1.0), "`temperature` is -1, but has to be from 0 to 100");
        assert_eq!(with(|s| s.temperature = f32::NAN), "`temperature` is NaN, but has to be from 0 to 100");
        assert!(with(|s| s.top_p = -1.0).contains("`top_p`"));
        assert!(with(|s| s.repetition_penalty = 0.0).contains("`repetition_penalty` is 0, but has to be from 0.01"));
        assert!(with(|s| s.presence_penalty = f32::INFINITY).contains("`presence_penalty` is inf"));
        assert!(with(|s| s.frequency_penalty = -3.0).contains("`frequency_penalty`"));
    }

    #[test]
    fn infinite_logits_give_a_token() {
        let sampling = Sampling { temperature: 1.0, min_p: 1.0, top_p: 0.5, ..Sampling::default() };
        for logits in [[f32::INFINITY, 1.0], [f32::INFINITY; 2], [f32::NAN; 2], [f32::NEG_INFINITY; 2]] {
            assert!(Sampler::new(sampling, &[]).next(&logits) < 2);
        }
    }

    #[test]
    fn closed_tokens_are_never_taken() {
        let mut sampler = Sampler::new(Sampling { temperature: 5.0, ..Default::default() }, &[]);
        let closed = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 0.0];
        assert!((0..1000).all(|_| matches!(sampler.next(&closed), 1 | 3)));
    }

    #[test]
    fn a_seed_means_one_text() {
        let warm = |seed| Sampling { temperature: 0.8, seed, ..Default::default() };
        let text = |seed| {
            let mut sampler = Sampler::new(warm(seed), &[]);
            (0..50).map(|_| sampler.next(&LOGITS)).collect::<Vec<_>>()
        };
        assert_eq!(text(7), text(7));
        assert_ne!(text(7), text(8));
    }
}
