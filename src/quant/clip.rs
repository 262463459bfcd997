//! Clipping range of a per-tensor scale: a smaller scale clips the few largest values and is finer for all others.
//!
//! The cost in products depends on the inputs. With second moments `m_j` of the inputs, the error of a scale `s` with
//! clipping range `e` is about
//!
//! ```text
//! s²/12 Σ m_j + Σ_{|w| > e} m_j (|w| - e)²
//! ```
//!
//! so that only values near the largest need to be scanned. Weights of a column whose inputs are hundreds of times
//! larger than the others aren't clipped; without known inputs nothing is. Rounding errors have either sign, but
//! clipping always reduces a row's gain. Where products are multiplied by each other, as those of gate and up are, this
//! would lose massive activations, so that the second sum counts `MULTIPLIED` times.

/// Knowledge about the inputs of a weight's columns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Inputs<'a> {
    /// No knowledge.
    #[default]
    Unknown,
    /// Similar magnitudes, because a rotation mixes the inputs.
    Uniform,
    /// Similar magnitudes, for a weight whose products are multiplied by those of another weight.
    UniformMultiplied,
    /// Second moment of each input.
    Moments(&'a [f32]),
}

impl<'a> Inputs<'a> {
    /// Returns the moments if there is one for each column.
    pub(crate) fn moments(self, columns: usize) -> Option<&'a [f32]> {
        match self {
            Inputs::Moments(moments) => Some(moments).filter(|moments| moments.len() == columns),
            _ => None,
        }
    }
}

/// Divisions of the largest magnitude: clipping ranges from half of it up are tried.
const PARTS: u32 = 32;
/// Weight of the column that counts most. Sums are integers, so that they don't depend on their order.
const FULL: f64 = (1u32 << 16) as f64;
/// Share of the mean that is added to a column's moment.
const LEAST: f64 = 0.05;
/// Factor of clipping errors in products that are multiplied by each other.
const MULTIPLIED: f64 = 8.0;
/// Bits dropped from a magnitude in the histogram: those below one part in 128.
const DROPPED: u32 = 16;

/// Weights of errors.
pub(crate) struct ColumnWeights {
    /// Weight of each column.
    each: Vec<u32>,
    /// Factor of clipping errors.
    beyond: f64,
}

impl ColumnWeights {
    /// Returns the weights for known inputs; `None` if nothing is known.
    pub(crate) fn of(inputs: Inputs<'_>, columns: usize) -> Option<Self> {
        match inputs {
            Inputs::Uniform => return Some(ColumnWeights { each: vec![1; columns], beyond: 1.0 }),
            Inputs::UniformMultiplied => return Some(ColumnWeights { each: vec![1; columns], beyond: MULTIPLIED }),
            Inputs::Unknown | Inputs::Moments(_) => {}
        }
        let moments = inputs.moments(columns)?;
        let mean = moments.iter().map(|moment| f64::from(*moment)).sum::<f64>() / columns.max(1) as f64;
        let most = moments.iter().map(|moment| f64::from(*moment)).fold(0.0, f64::max) + LEAST * mean;
        let whole = |moment: &f32| ((f64::from(*moment) + LEAST * mean) / most * FULL).round().max(1.0) as u32;
        let each = || moments.iter().map(whole).collect();
        (most > 0.0 && most.is_finite()).then(|| ColumnWeights { each: each(), beyond: 1.0 })
    }

    /// Appends histogram places and weights of the values above about half of `most`.
    pub(crate) fn near(&self, rows: &[f32], most: f32, found: &mut Vec<(u16, u32)>) {
        let least = most / 2.0;
        for row in rows.chunks(self.each.len().max(1)) {
            let near = row.iter().zip(&self.each).filter(|(value, _)| value.abs() > least);
            found.extend(near.map(|(value, weight)| ((value.abs().to_bits() >> DROPPED) as u16, *weight)));
        }
    }
}

/// Histogram of a weight's values near its largest magnitude.
pub(crate) struct Tail {
    /// Sums of weights by magnitude.
    sums: Vec<u64>,
    /// Sum of all column weights.
    row: u64,
    columns: usize,
    rows: u64,
    beyond: f64,
}

impl Tail {
    /// Returns an empty histogram.
    pub(crate) fn new(weights: &ColumnWeights) -> Self {
        let row = weights.each.iter().map(|weight| u64::from(*weight)).sum();
        let (sums, columns) = (vec![0; 1 << (31 - DROPPED)], weights.each.len().max(1));
        Tail { sums, row, columns, rows: 0, beyond: weights.beyond }
    }

    /// Adds `values` values in whole rows, of which `found` lie near the largest magnitude.
    pub(crate) fn add(&mut self, values: usize, found: &[(u16, u32)]) {
        self.rows += (values / self.columns) as u64;
        found.iter().for_each(|(place, weight)| self.sums[usize::from(*place)] += u64::from(*weight));
    }

    /// Returns the clipping range of least error for `most` steps to either side.
    pub(crate) fn end(&self, largest: f32, most: i8) -> f32 {
        let first = (largest / 2.0).to_bits() >> DROPPED;
        let last = largest.to_bits() >> DROPPED;
        let all = self.row as f64 * self.rows as f64;
        let error = |end: f32| {
            let step = f64::from(end) / f64::from(most);
            let (mut inside, mut beyond) = (all, 0.0);
            for place in first..=last {
                // the middle of the histogram's bin
                let magnitude = f32::from_bits(place << DROPPED | 1 << (DROPPED - 1)).min(largest);
                let weight = self.sums.get(place as usize).map_or(0.0, |sum| *sum as f64);
                if magnitude > end {
                    inside -= weight;
                    beyond += weight * f64::from(magnitude - end).powi(2);
                }
            }
            step * step / 12.0 * inside + self.beyond * beyond
        };
        let mut best = (error(largest), largest);
        for parts in (PARTS / 2..PARTS).rev() {
            let end = largest * parts as f32 / PARTS as f32;
            let own = error(end);
            if own < best.0 {
                best = (own, end);
            }
        }
        best.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reproducible numbers of a roughly normal distribution.
    fn values(count: usize) -> Vec<f32> {
        let mut x = 0x9E37_79B9_7F4A_7C15u64;
        let mut next = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..count).map(|_| (0..12).map(|_| next()).sum::<f32>() * 0.02).collect()
    }

    fn end(values: &[f32], inputs: Inputs<'_>, columns: usize) -> f32 {
        let weights = ColumnWeights::of(inputs, columns).unwrap();
        let (mut tail, mut most) = (Tail::new(&weights), 0f32);
        for rows in values.chunks(columns * 8) {
            let mut found = Vec::new();
            most = rows.iter().fold(most, |most, value| most.max(value.abs()));
            weights.near(rows, most, &mut found);
            tail.add(rows.len(), &found);
        }
        tail.end(most, 127)
    }

    /// Error in products, summed weight by weight.
    fn error(values: &[f32], end: f32, moments: &[f32]) -> f64 {
        let scale = end / 127.0;
        let back = |value: f32| (value / scale).round().clamp(-127.0, 127.0) * scale;
        values.iter().zip(moments.iter().cycle()).map(|(v, m)| f64::from((v - back(*v)).powi(2) * m)).sum()
    }

    #[test]
    fn the_clipping_range_has_about_the_least_error() {
        let (columns, mut values) = (64, values(64 * 4000));
        values[777] = 0.19;
        let moments: Vec<f32> = (0..columns).map(|j| 0.5 + (j % 7) as f32).collect();
        for (inputs, moments) in [(Inputs::Uniform, &vec![1.0; columns]), (Inputs::Moments(&moments), &moments)] {
            let found = end(&values, inputs, columns);
            let least = (64..=128).map(|parts| error(&values, 0.19 * parts as f32 / 128.0, moments));
            let least = least.fold(f64::INFINITY, f64::min);
            assert!(found < 0.15, "{found}");
            assert!(error(&values, found, moments) < 1.05 * least);
            assert!(error(&values, found, moments) < 0.7 * error(&values, 0.19, moments));
        }
    }

    /// A lone large value in a column of large inputs.
    #[test]
    fn weights_of_massive_inputs_are_not_clipped() {
        let (columns, mut values) = (64, values(64 * 4000));
        values[64 * 12 + 9] = 0.19;
        let mut moments = vec![1.0; columns];
        moments[9] = 1e6;
        // except for a little that the column's other weights gain
        assert!(end(&values, Inputs::Moments(&moments), columns) > 0.18);
        assert!(end(&values, Inputs::Uniform, columns) < 0.15);
    }

    #[test]
    fn clipping_is_weaker_where_products_are_multiplied() {
        let values = values(64 * 4000);
        let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
        let [alike, multiplied] = [Inputs::Uniform, Inputs::UniformMultiplied].map(|inputs| end(&values, inputs, 64));
        assert!(alike < multiplied && multiplied < largest, "{alike} {multiplied} {largest}");
    }

    #[test]
    fn weights_need_known_inputs() {
        assert!(ColumnWeights::of(Inputs::Unknown, 3).is_none());
        assert!(ColumnWeights::of(Inputs::Moments(&[0.0; 3]), 3).is_none());
        assert!(ColumnWeights::of(Inputs::Moments(&[1.0; 2]), 3).is_none(), "of another weight");
        assert!(ColumnWeights::of(Inputs::Moments(&[0.0, 1.0, 0.0]), 3).is_some());
        let zeros = [0.0; 12];
        assert_eq!(end(&zeros, Inputs::Uniform, 3), 0.0);
    }
}
