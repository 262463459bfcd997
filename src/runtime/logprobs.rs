//! Log-probabilities of tokens under the model's own distribution, before penalties, temperature and cuts.

use super::sampling::argmax;

/// Log-probability of a token, and the likeliest alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Natural logarithm of the token's probability.
    pub logprob: f32,
    /// Likeliest tokens at this position with their log-probabilities, descending; ties by token id.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Returns the log-probabilities of `token` and of the `count` likeliest tokens, from a row of logits.
    pub fn of(logits: &[f32], token: u32, count: usize) -> Self {
        let largest = logits.get(argmax(logits) as usize).copied().unwrap_or(0.0);
        let sum: f64 = logits.iter().filter(|l| !l.is_nan()).map(|logit| f64::from(logit - largest).exp()).sum();
        let logarithm = |logit: f32| (f64::from(logit - largest) - sum.ln()) as f32;
        let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let mut best: Vec<u32> = (0..logits.len() as u32).filter(|token| !logits[*token as usize].is_nan()).collect();
        if count < best.len() && count > 0 {
            best.select_nth_unstable_by(count - 1, by_logit);
        }
        best.truncate(count);
        best.sort_unstable_by(by_logit);
        Logprobs {
            logprob: logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| logarithm(*logit)),
            top: best.into_iter().map(|token| (token, logarithm(logits[token as usize]))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_equal_the_softmax() {
        let logits = [1.0f32, 3.0, 2.0, -1.0, 3.0];
        let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let expected = |i: usize| (f64::from(logits[i]).exp() / total).ln() as f32;
        let found = Logprobs::of(&logits, 2, 3);
        assert!((found.logprob - expected(2)).abs() < 1e-6);
        assert_eq!(found.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 4, 2]);
        assert!(found.top.iter().all(|(token, logprob)| (logprob - expected(*token as usize)).abs() < 1e-6));
        assert!(Logprobs::of(&logits, 0, 0).top.is_empty());
        assert_eq!(Logprobs::of(&logits, 0, 9).top.len(), 5);
    }
}
