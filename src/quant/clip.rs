//! Where the steps of a whole tensor end: a scale smaller than that of the largest magnitude cuts off the few largest values,
//! and is finer for all others.
//!
//! What that costs in products depends on what the columns are multiplied by. With inputs of the second moments `m_j`, the
//! error of a scale `s` whose steps end at `e` is about
//!
//! ```text
//! s²/12 Σ m_j + Σ_{|w| > e} m_j (|w| - e)²
//! ```
//!
//! so that the values near the largest are all that is looked at. Where a column is hundreds of times as large as the others,
//! its weights aren't cut off; where nothing is known of the columns, nothing is. Rounding is as often too much as too little, but
//! what is cut off is always too little: it is a row's gain that becomes smaller. Where products are multiplied by each other, as those
//! of gate and up are, that is how massive activations are lost, and the second sum counts `MULTIPLIED` times.

/// What is known of what the columns of a weight are multiplied by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Inputs<'a> {
    /// Nothing.
    #[default]
    Unknown,
    /// None is much larger than another: a rotation mixes them.
    Alike,
    /// The same, of a weight whose products are multiplied by those of another.
    AlikeMultiplied,
    /// The second moment of each.
    Moments(&'a [f32]),
}

impl<'a> Inputs<'a> {
    /// The moments, if there is one for each column.
    pub(crate) fn moments(self, columns: usize) -> Option<&'a [f32]> {
        match self {
            Inputs::Moments(moments) => Some(moments).filter(|moments| moments.len() == columns),
            _ => None,
        }
    }
}

/// Ends that are tried: the largest magnitude times so many of [`PARTS`] parts, and less down to half of it.
const PARTS: u32 = 32;
/// The weight of the column that counts most. Sums are whole numbers, which don't depend on their order.
const FULL: f64 = (1u32 << 16) as f64;
/// Part of the mean that is added to a column's moment.
const LEAST: f64 = 0.05;
/// How much more what is cut off counts where products are multiplied by each other and nothing makes up for it.
const MULTIPLIED: f64 = 8.0;
/// Bits that a magnitude loses in a histogram: those below one in 128.
const DROPPED: u32 = 16;

/// How much errors count.
pub(crate) struct ColumnWeights {
    /// Of each column.
    each: Vec<u32>,
    /// By how much more what is cut off counts.
    beyond: f64,
}

impl ColumnWeights {
    /// By what is known of the inputs; none if that is nothing.
    pub(crate) fn of(inputs: Inputs<'_>, columns: usize) -> Option<Self> {
        match inputs {
            Inputs::Alike => return Some(ColumnWeights { each: vec![1; columns], beyond: 1.0 }),
            Inputs::AlikeMultiplied => return Some(ColumnWeights { each: vec![1; columns], beyond: MULTIPLIED }),
            Inputs::Unknown | Inputs::Moments(_) => {}
        }
        let moments = inputs.moments(columns)?;
        let mean = moments.iter().map(|moment| f64::from(*moment)).sum::<f64>() / columns.max(1) as f64;
        let most = moments.iter().map(|moment| f64::from(*moment)).fold(0.0, f64::max) + LEAST * mean;
        let whole = |moment: &f32| ((f64::from(*moment) + LEAST * mean) / most * FULL).round().max(1.0) as u32;
        let each = || moments.iter().map(whole).collect();
        (most > 0.0 && most.is_finite()).then(|| ColumnWeights { each: each(), beyond: 1.0 })
    }

    /// Places in the histogram, and weights, of the values of rows that are larger than half of `most` or a little less.
    pub(crate) fn near(&self, rows: &[f32], most: f32, found: &mut Vec<(u16, u32)>) {
        let least = most / 2.0;
        for row in rows.chunks(self.each.len().max(1)) {
            let near = row.iter().zip(&self.each).filter(|(value, _)| value.abs() > least);
            found.extend(near.map(|(value, weight)| ((value.abs().to_bits() >> DROPPED) as u16, *weight)));
        }
    }
}

/// The values of a weight that are near its largest magnitude.
pub(crate) struct Tail {
    /// Sums of weights by magnitude.
    sums: Vec<u64>,
    /// Sum over a row of all columns' weights.
    row: u64,
    columns: usize,
    rows: u64,
    beyond: f64,
}

impl Tail {
    /// Of nothing yet.
    pub(crate) fn new(weights: &ColumnWeights) -> Self {
        let row = weights.each.iter().map(|weight| u64::from(*weight)).sum();
        let (sums, columns) = (vec![0; 1 << (31 - DROPPED)], weights.each.len().max(1));
        Tail { sums, row, columns, rows: 0, beyond: weights.beyond }
    }

    /// Adds so many values in whole rows, of which those near the largest were found.
    pub(crate) fn add(&mut self, values: usize, found: &[(u16, u32)]) {
        self.rows += (values / self.columns) as u64;
        found.iter().for_each(|(place, weight)| self.sums[usize::from(*place)] += u64::from(*weight));
    }

    /// Where `most` steps to either side are to end, for the least error.
    pub(crate) fn end(&self, largest: f32, most: i8) -> f32 {
        let first = (largest / 2.0).to_bits() >> DROPPED;
        let last = largest.to_bits() >> DROPPED;
        let all = self.row as f64 * self.rows as f64;
        let error = |end: f32| {
            let step = f64::from(end) / f64::from(most);
            let (mut inside, mut beyond) = (all, 0.0);
            for place in first..=last {
                // the middle of what shares the place
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

    /// Numbers like those of a normal distribution, the same each time.
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

    /// The error in products, weight by weight.
    fn error(values: &[f32], end: f32, moments: &[f32]) -> f64 {
        let scale = end / 127.0;
        let back = |value: f32| (value / scale).round().clamp(-127.0, 127.0) * scale;
        values.iter().zip(moments.iter().cycle()).map(|(v, m)| f64::from((v - back(*v)).powi(2) * m)).sum()
    }

    #[test]
    fn the_end_is_about_that_of_the_least_error() {
        let (columns, mut values) = (64, values(64 * 4000));
        values[777] = 0.19;
        let moments: Vec<f32> = (0..columns).map(|j| 0.5 + (j % 7) as f32).collect();
        for (inputs, moments) in [(Inputs::Alike, &vec![1.0; columns]), (Inputs::Moments(&moments), &moments)] {
            let found = end(&values, inputs, columns);
            let least = (64..=128).map(|parts| error(&values, 0.19 * parts as f32 / 128.0, moments));
            let least = least.fold(f64::INFINITY, f64::min);
            assert!(found < 0.15, "{found}");
            assert!(error(&values, found, moments) < 1.05 * least);
            assert!(error(&values, found, moments) < 0.7 * error(&values, 0.19, moments));
        }
    }

    /// The same lone value, in a column that is multiplied by large numbers.
    #[test]
    fn what_meets_massive_inputs_is_not_cut_off() {
        let (columns, mut values) = (64, values(64 * 4000));
        values[64 * 12 + 9] = 0.19;
        let mut moments = vec![1.0; columns];
        moments[9] = 1e6;
        // but for a little that the column's other weights gain
        assert!(end(&values, Inputs::Moments(&moments), columns) > 0.18);
        assert!(end(&values, Inputs::Alike, columns) < 0.15);
    }

    #[test]
    fn less_is_cut_off_where_products_are_multiplied() {
        let values = values(64 * 4000);
        let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
        let [alike, multiplied] = [Inputs::Alike, Inputs::AlikeMultiplied].map(|inputs| end(&values, inputs, 64));
        assert!(alike < multiplied && multiplied < largest, "{alike} {multiplied} {largest}");
    }

    #[test]
    fn nothing_is_known_of_no_inputs() {
        assert!(ColumnWeights::of(Inputs::Unknown, 3).is_none());
        assert!(ColumnWeights::of(Inputs::Moments(&[0.0; 3]), 3).is_none());
        assert!(ColumnWeights::of(Inputs::Moments(&[1.0; 2]), 3).is_none(), "of another weight");
        assert!(ColumnWeights::of(Inputs::Moments(&[0.0, 1.0, 0.0]), 3).is_some());
        let zeros = [0.0; 12];
        assert_eq!(end(&zeros, Inputs::Alike, 3), 0.0);
    }
}
