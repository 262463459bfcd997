//! Second moments of the inputs of projections, added up as functions run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anec_exec::Tensor;

use super::moments::SecondMoments;
use super::observed::{ObservedInput, ObservedTokens};

/// Moments of the observed values of one function, by name.
#[derive(Clone)]
pub struct MomentLog(Arc<Mutex<BTreeMap<String, Place>>>);

/// Observed value.
struct Place {
    index: usize,
    channels: usize,
    tokens: ObservedTokens,
    /// Moments per expert, or of all tokens; empty until the value is computed.
    moments: Vec<SecondMoments>,
    /// Input of experts, until the routing of its tokens is known.
    waiting: Option<Vec<f32>>,
}

impl MomentLog {
    /// Returns an empty log.
    pub fn new(observed: &[ObservedInput<'_>]) -> Self {
        let place = |(index, input): (usize, &ObservedInput<'_>)| {
            let (channels, tokens) = (input.channels, input.tokens.clone());
            (input.value.clone(), Place { index, channels, tokens, moments: Vec::new(), waiting: None })
        };
        MomentLog(Arc::new(Mutex::new(observed.iter().enumerate().map(place).collect())))
    }

    /// Adds a value if it is observed.
    pub fn add(&self, name: &str, tensor: &Tensor) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(place), Some(values)) = (places.get_mut(name), tensor.floats()) else { return };
        match place.tokens {
            ObservedTokens::All => place.of(1)[0].add(values),
            ObservedTokens::Before { .. } => place.waiting = Some(values.to_vec()),
            ObservedTokens::Inside { experts } => {
                let of_each = values.len() / experts.max(1);
                let tokens = of_each / place.channels.max(1);
                if tokens == 0 {
                    return;
                }
                let own = values.chunks_exact(of_each);
                own.clone().zip(place.of(experts)).for_each(|(values, moments)| moments.add(values));
                let before = places.values_mut().filter(|before| before.waits_for(name));
                for before in before {
                    let Some(entered) = before.waiting.take() else { continue };
                    for (own, moments) in own.clone().zip(before.of(experts)) {
                        moments.add(&of_tokens(&entered, tokens, &shared(own, tokens)));
                    }
                }
            }
        }
    }

    /// Returns the moments of each observed value, in the order of `new`, and clears the log.
    pub fn take(&self) -> Vec<Vec<SecondMoments>> {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found: Vec<_> = places.values_mut().map(|p| (p.index, std::mem::take(&mut p.moments))).collect();
        found.sort_by_key(|(index, _)| *index);
        found.into_iter().map(|(_, moments)| moments).collect()
    }
}

impl Place {
    /// Returns `count` moments, creating them at the first call.
    fn of(&mut self, count: usize) -> &mut [SecondMoments] {
        if self.moments.is_empty() {
            self.moments = (0..count).map(|_| SecondMoments::new(self.channels)).collect();
        }
        &mut self.moments
    }

    fn waits_for(&self, name: &str) -> bool {
        matches!(&self.tokens, ObservedTokens::Before { inside, .. } if inside == name)
    }
}

/// Returns the tokens routed to an expert, from its output `[channels, tokens]`.
fn shared(values: &[f32], tokens: usize) -> Vec<usize> {
    (0..tokens).filter(|t| values.iter().skip(*t).step_by(tokens).any(|value| *value != 0.0)).collect()
}

/// Returns some columns of `[channels, tokens]`.
fn of_tokens(values: &[f32], tokens: usize, wanted: &[usize]) -> Vec<f32> {
    values.chunks_exact(tokens).flat_map(|row| wanted.iter().map(|t| row[*t])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(value: &str, channels: usize, tokens: ObservedTokens) -> ObservedInput<'static> {
        ObservedInput { value: value.into(), channels, tokens, targets: Vec::new() }
    }

    #[test]
    fn experts_count_the_tokens_routed_to_them() {
        let before = ObservedTokens::Before { experts: 3, inside: "inner".into() };
        let observed = [observed("x", 2, before), observed("inner", 1, ObservedTokens::Inside { experts: 3 })];
        let log = MomentLog::new(&observed);
        // three tokens; the first expert has the first and the last, the second the middle one, the third none
        log.add("x", &Tensor::new(vec![1, 2, 3, 1], vec![1.0, 2.0, 3.0, 10.0, 20.0, 30.0]));
        log.add("other", &Tensor::new(vec![1, 2, 1, 1], vec![7.0, 7.0]));
        log.add("inner", &Tensor::new(vec![1, 3, 3, 1], vec![0.5, 0.0, 2.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0]));
        let found = log.take();
        let diagonal = |moments: &SecondMoments| -> Vec<f32> { moments.sums().diag().to_vec() };
        let entered: Vec<Vec<f32>> = found[0].iter().map(diagonal).collect();
        assert_eq!(entered, [vec![10.0, 1000.0], vec![4.0, 400.0], vec![0.0, 0.0]]);
        assert_eq!(found[0][0].sums()[[1, 0]], 100.0);
        let left: Vec<Vec<f32>> = found[1].iter().map(diagonal).collect();
        assert_eq!(left, [vec![4.25], vec![16.0], vec![0.0]]);
        assert!(log.take().iter().all(Vec::is_empty), "it is forgotten");
    }
}
