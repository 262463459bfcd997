//! Choice of formats under a budget: one format per group of weights, with the least total loss or the fewest bytes.
//! This is the multiple-choice knapsack problem, solved exactly in bytes rounded up to units:
//!
//! `least(g, b) = min over formats f of group g: loss(g, f) + least(g - 1, b - bytes(g, f))`

/// Cost of a format for a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Size in bytes.
    pub bytes: u64,
    /// Loss.
    pub loss: f64,
}

impl Cost {
    /// Whether the model computes finite numbers with this format.
    fn is_usable(&self) -> bool {
        self.loss < f64::MAX
    }
}

/// Limit to keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// Maximum number of bytes, at the least loss.
    Bytes(u64),
    /// Maximum loss, at the fewest bytes.
    Loss(f64),
}

/// Number of units that the total of bytes is divided into; a plan can waste one unit per group.
const UNITS: u64 = 1 << 16;

/// Returns the index of each group's format, or `None` if no choice keeps the limit. The first of equally good formats
/// is taken.
pub fn choose(groups: &[Vec<Cost>], limit: Limit) -> Option<Vec<usize>> {
    let most: u64 = groups.iter().map(|costs| costs.iter().map(|cost| cost.bytes).max().unwrap_or(0)).sum();
    let all = match limit {
        Limit::Bytes(bytes) => bytes.min(most),
        Limit::Loss(_) => most,
    };
    let unit = most.div_ceil(UNITS).max(1);
    // rounding up each group's bytes keeps the limit; without one, it needs extra room
    let room = match limit {
        Limit::Bytes(_) if all < most => (all / unit) as usize,
        _ => (all / unit) as usize + groups.len() + 1,
    };
    let mut least = vec![0f64; room + 1];
    let mut picks: Vec<Vec<u8>> = Vec::with_capacity(groups.len());
    for costs in groups {
        let mut next = vec![f64::INFINITY; room + 1];
        let mut pick = vec![u8::MAX; room + 1];
        let usable = costs.iter().enumerate().take(usize::from(u8::MAX)).filter(|(_, cost)| cost.is_usable());
        for (index, cost) in usable {
            let units = cost.bytes.div_ceil(unit) as usize;
            for at in units..=room {
                let loss = least[at - units] + cost.loss;
                if loss < next[at] {
                    (next[at], pick[at]) = (loss, index as u8);
                }
            }
        }
        least = next;
        picks.push(pick);
    }
    let mut at = match limit {
        // rounded-up sizes don't fit, but the exact sizes of the smallest formats may
        Limit::Bytes(bytes) if !least[room].is_finite() => {
            let fits = |chosen: &Vec<usize>| {
                groups.iter().zip(chosen).map(|(costs, index)| costs[*index].bytes).sum::<u64>() <= bytes
            };
            return smallest(groups).filter(fits);
        }
        Limit::Bytes(_) => Some(room),
        // tolerance for the rounding of sums
        Limit::Loss(loss) => (0..=room).find(|at| least[*at] <= loss * (1.0 + 1e-12)),
    }?;
    let mut chosen = Vec::with_capacity(groups.len());
    for (costs, pick) in groups.iter().zip(&picks).rev() {
        let index = usize::from(pick[at]);
        at -= costs[index].bytes.div_ceil(unit) as usize;
        chosen.push(index);
    }
    chosen.reverse();
    Some(chosen)
}

/// Returns each group's smallest usable format, or `None` if a group has none.
pub fn smallest(groups: &[Vec<Cost>]) -> Option<Vec<usize>> {
    let least = |costs: &Vec<Cost>| {
        let usable = (0..costs.len()).filter(|index| costs[*index].is_usable());
        usable.min_by_key(|index| costs[*index].bytes)
    };
    groups.iter().map(least).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(bytes: u64, loss: f64) -> Cost {
        Cost { bytes, loss }
    }

    /// Exhaustive search.
    fn by_trial(groups: &[Vec<Cost>], limit: Limit) -> Option<(f64, u64)> {
        let mut sums = vec![(0.0, 0)];
        for costs in groups {
            sums = sums.iter().flat_map(|(l, b)| costs.iter().map(move |c| (l + c.loss, b + c.bytes))).collect();
        }
        match limit {
            Limit::Bytes(most) => sums.into_iter().filter(|(_, b)| *b <= most).min_by(|a, b| a.0.total_cmp(&b.0)),
            Limit::Loss(most) => sums.into_iter().filter(|(l, _)| *l <= most * (1.0 + 1e-12)).min_by_key(|(_, b)| *b),
        }
    }

    #[test]
    fn no_other_choice_is_better() {
        let mut state = 7u64;
        let mut next = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        for _ in 0..20 {
            let groups: Vec<Vec<Cost>> =
                (0..6).map(|_| (0..4).map(|_| cost(1 + next(90), next(1000) as f64 / 100.0)).collect()).collect();
            for limit in [Limit::Bytes(60 + next(300)), Limit::Loss(next(3000) as f64 / 100.0)] {
                let expected = by_trial(&groups, limit);
                let found = choose(&groups, limit).map(|chosen| {
                    let costs = chosen.iter().zip(&groups).map(|(index, costs)| costs[*index]);
                    costs.fold((0.0, 0), |(l, b), c| (l + c.loss, b + c.bytes))
                });
                match (limit, found, expected) {
                    (Limit::Bytes(_), Some(a), Some(b)) => assert!((a.0 - b.0).abs() < 1e-9, "{a:?} {b:?}"),
                    (Limit::Loss(_), Some(a), Some(b)) => assert_eq!(a.1, b.1),
                    (_, found, expected) => assert_eq!(found, expected),
                }
            }
        }
    }

    #[test]
    fn sensitive_groups_keep_their_bytes_and_large_models_fit() {
        // the second group is a hundred times more sensitive
        let groups: Vec<Vec<Cost>> = [0.01, 1.0, 0.01]
            .map(|loss| vec![cost(8_000_000_001, 0.0), cost(4_000_000_001, loss), cost(2_000_000_001, 4.0 * loss)])
            .to_vec();
        assert_eq!(choose(&groups, Limit::Bytes(16_500_000_000)), Some(vec![1, 0, 1]));
        assert_eq!(choose(&groups, Limit::Loss(0.0)), Some(vec![0, 0, 0]));
        assert_eq!(choose(&groups, Limit::Bytes(u64::MAX)), Some(vec![0, 0, 0]));
        assert_eq!(choose(&groups, Limit::Bytes(5_000_000_000)), None);
        assert_eq!(choose(&[], Limit::Bytes(1)), Some(vec![]));
        // the sizes of the smallest formats are an exact limit
        assert_eq!(choose(&groups, Limit::Bytes(6_000_000_003)), Some(vec![2, 2, 2]));
        assert_eq!(choose(&groups, Limit::Bytes(6_000_000_002)), None);
        // formats that break the model are never chosen, however small
        for count in [1, 2] {
            let broken = vec![vec![cost(8, 0.1), cost(1, f64::MAX)]; count];
            assert_eq!(choose(&broken, Limit::Bytes(16)), Some(vec![0; count]));
            assert_eq!(choose(&broken, Limit::Bytes(2)), None);
        }
    }
}
