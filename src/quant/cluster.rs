//! Exact one-dimensional k-means.
//!
//! In one dimension clusters are intervals of the sorted points, so that the best `k` clusters follow from the best `k
//! - 1` of every prefix (Wang and Song, "Ckmeans.1d.dp", The R Journal 3/2, 2011). With `W` and `S` the prefix sums of
//! weights and of weighted values, a cluster of points `j..i` lowers the sum of weighted squares by `S² / W`, and
//!
//! `gain(k, i) = max over j of gain(k - 1, j) + (S(i) - S(j))² / (W(i) - W(j))`.
//!
//! The best `j` grows with `i`, so that one half's search bounds the other's, and with `k`: fewer than `k n log n`
//! steps in all.

/// Value with a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightedPoint {
    /// Value.
    pub value: f64,
    /// Weight; positive.
    pub weight: f64,
}

/// Number of points above which the halves of a search run on different threads.
const MANY: usize = 2048;

/// Returns the centres, ascending, of the `count` clusters with the least weighted sum of squared distances. `points`
/// must be ascending. `pinned` fixes the centres of the first and the last cluster. If there are at most `count`
/// points, they are the centres, the last repeated.
///
/// # Panics
/// Panics if there are no points or no clusters, or if centres are pinned and there are fewer than two clusters.
pub fn centres(points: &[WeightedPoint], count: usize, pinned: Option<[f64; 2]>) -> Vec<f64> {
    assert!(!points.is_empty() && count > 0 && (pinned.is_none() || count > 1), "{} points", points.len());
    if points.len() <= count {
        let last = points[points.len() - 1].value;
        let mut all: Vec<f64> = points.iter().map(|point| point.value).collect();
        all.resize(count, last);
        return all;
    }
    let sums = Sums::of(points);
    let ends = clusters(&sums, count, pinned);
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let mut centres: Vec<f64> = starts.zip(&ends).map(|(start, end)| mean(&points[start..*end])).collect();
    if let Some([first, last]) = pinned {
        centres[0] = first;
        centres[count - 1] = last;
    }
    centres
}

/// Mean of some points. The difference of prefix sums would cancel where these points have little weight.
fn mean(points: &[WeightedPoint]) -> f64 {
    let of = |term: fn(&WeightedPoint) -> f64| points.iter().map(term).sum::<f64>();
    let mean = of(|point| point.weight * point.value) / of(|point| point.weight);
    mean.clamp(points[0].value, points[points.len() - 1].value)
}

/// Prefix sums.
struct Sums {
    weights: Vec<f64>,
    values: Vec<f64>,
}

impl Sums {
    fn of(points: &[WeightedPoint]) -> Self {
        let running = |term: fn(&WeightedPoint) -> f64| {
            let mut sum = 0.0;
            let later = points.iter().map(|point| {
                sum += term(point);
                sum
            });
            std::iter::once(0.0).chain(later).collect()
        };
        Sums { weights: running(|point| point.weight), values: running(|point| point.weight * point.value) }
    }

    fn count(&self) -> usize {
        self.weights.len() - 1
    }

    #[inline(always)]
    fn of_interval(&self, start: usize, end: usize) -> (f64, f64) {
        (self.weights[end] - self.weights[start], self.values[end] - self.values[start])
    }

    /// Returns the reduction of the sum of squares by a cluster around its mean.
    #[inline(always)]
    fn gain(&self, start: usize, end: usize) -> f64 {
        let (weight, value) = self.of_interval(start, end);
        value * value / weight
    }

    /// Returns the reduction of the sum of squares by a cluster around `centre`.
    fn gain_at(&self, start: usize, end: usize, centre: f64) -> f64 {
        let (weight, value) = self.of_interval(start, end);
        centre * (value + value - centre * weight)
    }
}

/// Returns the end of each of the best clusters.
fn clusters(sums: &Sums, count: usize, pinned: Option<[f64; 2]>) -> Vec<usize> {
    let all = sums.count();
    // for each prefix: the gain of as many clusters as rounds, and the start of the last cluster
    let mut gains: Vec<f64> = vec![f64::NEG_INFINITY; all + 1];
    for (end, gain) in gains.iter_mut().enumerate().skip(1) {
        *gain = match pinned {
            Some([first, _]) => sums.gain_at(0, end, first),
            None => sums.gain(0, end),
        };
    }
    let mut starts: Vec<Vec<u32>> = Vec::with_capacity(count);
    for round in 2..count {
        // leave enough points for the clusters that follow
        let ends = round..all - (count - round) + 1;
        let (mut next, mut start) = (vec![f64::NEG_INFINITY; ends.len()], vec![0; ends.len()]);
        let before = starts.last().map_or(&[][..], |before| &before[1..]);
        Search { sums, gains: &gains, before, round }.fill(ends.start, &mut next, &mut start, round - 1..ends.end - 1);
        gains[..ends.start].fill(f64::NEG_INFINITY);
        gains[ends.clone()].copy_from_slice(&next);
        gains[ends.end..].fill(f64::NEG_INFINITY);
        starts.push(start);
    }
    let mut ends = vec![all; count];
    if count == 1 {
        return ends;
    }
    let last = |start: usize| {
        let own = match pinned {
            Some([_, last]) => sums.gain_at(start, all, last),
            None => sums.gain(start, all),
        };
        gains[start] + own
    };
    let better = |best: usize, start: usize| if last(start) > last(best) { start } else { best };
    ends[count - 2] = (count - 1..all).fold(count - 1, better);
    for round in (2..count).rev() {
        // round `round` stores ends from `round` on
        ends[round - 2] = starts[round - 2][ends[round - 1] - round] as usize;
    }
    ends
}

/// Search for the last cluster of every prefix.
struct Search<'a> {
    sums: &'a Sums,
    /// Gain of every prefix with one cluster fewer.
    gains: &'a [f64],
    /// Start of the last cluster with one cluster fewer, from the end `round` on; empty for a single cluster.
    before: &'a [u32],
    round: usize,
}

impl Search<'_> {
    /// Computes the gains of prefixes from `first` on and the starts of their last clusters, which lie in `range`.
    fn fill(&self, first: usize, gains: &mut [f64], starts: &mut [u32], range: std::ops::Range<usize>) {
        if gains.is_empty() {
            return;
        }
        let middle = gains.len() / 2;
        let end = first + middle;
        let starts_end = range.end.min(end);
        // rounding may swap the bounds where clusters are equally good
        let before = self.before.get(end - self.round).map(|before| *before as usize).filter(|at| *at < starts_end);
        let least = range.start.max(before.unwrap_or(0));
        let (mut most, mut best) = (f64::NEG_INFINITY, least);
        for start in least..starts_end {
            let gain = self.gains[start] + self.sums.gain(start, end);
            if gain > most {
                (most, best) = (gain, start);
            }
        }
        let (gains_before, rest) = gains.split_at_mut(middle);
        let (starts_before, rest_of_starts) = starts.split_at_mut(middle);
        (rest[0], rest_of_starts[0]) = (most, best as u32);
        let (gains_after, starts_after) = (&mut rest[1..], &mut rest_of_starts[1..]);
        let many = gains_after.len() > MANY;
        let mut before = || self.fill(first, gains_before, starts_before, range.start..best + 1);
        let mut after = || self.fill(end + 1, gains_after, starts_after, best..range.end);
        if many {
            rayon::join(before, after);
        } else {
            before();
            after();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(count: usize, seed: u64) -> Vec<WeightedPoint> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / (1u64 << 31) as f64
        };
        let mut points: Vec<WeightedPoint> =
            (0..count).map(|_| WeightedPoint { value: next() * next() * 4.0 - 1.0, weight: 0.1 + next() }).collect();
        points.sort_by(|a, b| a.value.total_cmp(&b.value));
        points
    }

    /// Weighted squared distance to the nearest centres.
    fn cost(points: &[WeightedPoint], centres: &[f64]) -> f64 {
        let nearest = |x: f64| centres.iter().map(|c| (c - x) * (c - x)).fold(f64::INFINITY, f64::min);
        points.iter().map(|point| point.weight * nearest(point.value)).sum()
    }

    /// Least cost of all divisions of the points.
    fn least(points: &[WeightedPoint], count: usize, pinned: Option<[f64; 2]>, first: bool) -> f64 {
        let own = |part: &[WeightedPoint], centre: Option<f64>| {
            let weight: f64 = part.iter().map(|p| p.weight).sum();
            let centre = centre.unwrap_or(part.iter().map(|p| p.weight * p.value).sum::<f64>() / weight);
            part.iter().map(|p| p.weight * (p.value - centre) * (p.value - centre)).sum::<f64>()
        };
        if count == 1 {
            return own(points, pinned.map(|[_, last]| last));
        }
        let centre = if first { pinned.map(|[first, _]| first) } else { None };
        (1..points.len() - count + 2)
            .map(|cut| own(&points[..cut], centre) + least(&points[cut..], count - 1, pinned, false))
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn no_other_clusters_have_a_smaller_sum_of_squares() {
        for seed in 0..6 {
            let points = points(12, seed);
            let ends = [points[0].value, points[11].value];
            for count in 1..6 {
                for pinned in [None, Some(ends)].into_iter().filter(|pinned| pinned.is_none() || count > 1) {
                    let found = centres(&points, count, pinned);
                    assert!(found.is_sorted() && found.len() == count, "{found:?}");
                    let (found, least) = (cost(&points, &found), least(&points, count, pinned, true));
                    // with pinned centres, points may be nearer to another cluster's centre than to their own
                    assert!(found <= least * (1.0 + 1e-9), "{seed} {count} {pinned:?}: {found} {least}");
                    assert!(pinned.is_some() || found >= least * (1.0 - 1e-9), "{seed} {count}: {found} {least}");
                }
            }
        }
    }

    #[test]
    fn many_points_in_threads_are_those_of_one() {
        let points = points(9000, 3);
        let all = centres(&points, 16, None);
        let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(alone.install(|| centres(&points, 16, None)), all);
        // moving any centre makes the clusters worse
        let least = cost(&points, &all);
        for i in 0..16 {
            for step in [-1e-3, 1e-3] {
                let mut moved = all.clone();
                moved[i] += step;
                assert!(cost(&points, &moved) > least);
            }
        }
    }

    #[test]
    fn few_points_are_their_own_centres() {
        let point = |value| WeightedPoint { value, weight: 2.0 };
        assert_eq!(centres(&[point(-1.0), point(3.0)], 4, Some([-1.0, 3.0])), [-1.0, 3.0, 3.0, 3.0]);
        assert_eq!(centres(&[point(5.0)], 1, None), [5.0]);
    }
}
