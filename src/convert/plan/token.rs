//! Weights and calls of one token. Of experts in functions of their own, only those that the token is routed to count.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::ConvertPlan;
use anec_bundle::Stage;
use anec_family::ExpertCounts;

/// Weights that one token reads, and its calls of functions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenCost {
    /// Bytes of weights.
    pub weight_bytes: f64,
    /// Number of calls.
    pub calls: f64,
}

impl TokenCost {
    fn add(&mut self, weight_bytes: u64, calls: f64) {
        self.weight_bytes += weight_bytes as f64 * calls;
        self.calls += calls;
    }
}

impl ConvertPlan {
    /// Expected and maximum cost of a token. The expected cost assumes that every choice of experts is equally likely.
    pub fn of_one_token(&self) -> [TokenCost; 2] {
        let [mut expected, mut most] = [TokenCost::default(); 2];
        let mut parts: BTreeMap<usize, Vec<(u64, Range<u64>)>> = BTreeMap::new();
        for package in &self.packages {
            let Stage::Experts { layer, .. } = package.stage else {
                [&mut expected, &mut most].into_iter().for_each(|cost| cost.add(package.weight_bytes, 1.0));
                continue;
            };
            let ranges = package.functions.iter().filter_map(|request| match request.stage {
                Stage::Experts { first, end, .. } => Some(first..end),
                _ => None,
            });
            let mut ranges: Vec<Range<u64>> = ranges.collect();
            // functions of several lengths share their weights
            ranges.dedup();
            let each = package.weight_bytes / ranges.len().max(1) as u64;
            parts.entry(layer).or_default().extend(ranges.into_iter().map(|range| (each, range)));
        }
        for (layer, mut parts) in parts {
            let Some(counts) = self.experts[layer] else { continue };
            parts.iter().for_each(|(bytes, range)| expected.add(*bytes, probability(counts, range)));
            parts.sort_unstable_by_key(|part| Reverse(part.0));
            let called = counts.per_token + u64::from(counts.joined);
            parts.iter().take(called as usize).for_each(|(bytes, _)| most.add(*bytes, 1.0));
        }
        [expected, most]
    }
}

/// Probability that a token is routed to an expert of the range. The function that joins the experts' outputs, the last
/// one, is always called.
fn probability(counts: ExpertCounts, range: &Range<u64>) -> f64 {
    if range.end > counts.count {
        return 1.0;
    }
    let (all, others) = (counts.count, counts.count - (range.end - range.start));
    let missed = (0..counts.per_token).map(|chosen| others.saturating_sub(chosen) as f64 / (all - chosen) as f64);
    1.0 - missed.product::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_chosen_as_often_as_its_experts_are() {
        // two of four: {0,1}, {0,2}, {0,3}, {1,2}, {1,3}, {2,3}
        let counts = ExpertCounts::new(4, 2);
        let close = |range: Range<u64>, expected: f64| (probability(counts, &range) - expected).abs() < 1e-12;
        assert!(close(0..1, 3.0 / 6.0) && close(0..2, 5.0 / 6.0) && close(0..3, 1.0) && close(0..4, 1.0));
        let joined = ExpertCounts { joined: true, ..counts };
        assert_eq!(probability(joined, &(4..5)), 1.0);
    }
}
