//! Search for the nearest level of a palette.
//!
//! The level nearest to `v` is given by the number of midpoints between adjacent levels below `v`. A table of equal
//! cells over the range of the midpoints holds how many there are below each cell; those within the cell are compared.
//! Computing a cell rounds, but monotonically: a larger number never has a lower cell, so no midpoint of a lower cell
//! is above a number of a higher one.

use super::dispatch::{Vectorize, vectorized};

/// Maximum levels: an index is a byte.
const MAX_LEVELS: usize = 256;
/// Cells per level.
const CELLS_PER_LEVEL: usize = 16;
/// Values that are looked up together.
const VALUES_AT_A_TIME: usize = 64;

/// Levels of a palette in ascending order, and a table to find the one nearest to a value.
#[derive(Clone, Debug)]
pub struct LevelTable {
    levels: Vec<f32>,
    /// Twice each midpoint of adjacent levels, which is their sum; infinite behind the last.
    sums: Box<[f32; MAX_LEVELS]>,
    /// Number of sums in lower cells.
    below: Vec<u8>,
    /// Cells per unit of sums.
    per_unit: f32,
    /// Maximum sums in a cell.
    most: usize,
}

impl LevelTable {
    /// Table for ascending levels.
    ///
    /// # Panics
    /// If there are none or more than 256, they aren't ascending, or one is infinite or NaN.
    pub fn new(levels: Vec<f32>) -> Self {
        assert!((1..=MAX_LEVELS).contains(&levels.len()), "{} levels", levels.len());
        assert!(levels.is_sorted() && levels.iter().all(|level| level.is_finite()), "{levels:?}");
        let mut sums = Box::new([f32::INFINITY; MAX_LEVELS]);
        sums.iter_mut().zip(levels.windows(2)).for_each(|(sum, pair)| *sum = pair[0] + pair[1]);
        let known = &sums[..levels.len() - 1];
        let range = known.last().map_or(0.0, |last| last - sums[0]);
        let cells = levels.len() * CELLS_PER_LEVEL;
        let per_unit = if range > 0.0 && range.is_finite() { (cells as f32 / range).min(f32::MAX) } else { 0.0 };
        let mut counts = vec![0; cells];
        known.iter().for_each(|sum| counts[cell(*sum, sums[0], per_unit, cells)] += 1);
        let most = counts.iter().copied().max().unwrap_or(0);
        let running = counts.iter().scan(0, |before, count| Some(std::mem::replace(before, *before + count) as u8));
        let below = running.collect();
        LevelTable { levels, sums, below, per_unit, most }
    }

    /// Levels of the palette.
    #[inline]
    pub fn levels(&self) -> &[f32] {
        &self.levels
    }

    /// Index of the level nearest to a value; the lower of two equally near ones.
    #[inline]
    pub fn nearest(&self, value: f32) -> u8 {
        let twice = value + value;
        let mut index = self.below[self.cell(twice)];
        for _ in 0..self.most {
            index += u8::from(self.sums[usize::from(index)] < twice);
        }
        index
    }

    /// Indices of the levels nearest to each value divided by `scale`.
    ///
    /// # Panics
    /// If `indices` and `values` differ in length.
    pub fn nearest_of_all(&self, values: &[f32], scale: f32, indices: &mut [u8]) {
        assert_eq!(values.len(), indices.len());
        vectorized(Nearest { table: self, values, scale, indices });
    }

    #[inline(always)]
    fn cell(&self, sum: f32) -> usize {
        cell(sum, self.sums[0], self.per_unit, self.below.len())
    }
}

/// Cell of a sum, clamped to the first and last cell.
#[inline(always)]
fn cell(sum: f32, first: f32, per_unit: f32, cells: usize) -> usize {
    let at = (sum - first) * per_unit;
    // NaN, from an infinite first sum, is in the first cell
    let at = if at > 0.0 { at } else { 0.0 };
    let last = (cells - 1) as f32;
    let at = if at < last { at } else { last };
    // SAFETY: from 0 to the number of cells, which is small.
    unsafe { at.to_int_unchecked::<i32>() as usize }
}

/// Work of [`LevelTable::nearest_of_all`].
struct Nearest<'a> {
    table: &'a LevelTable,
    values: &'a [f32],
    scale: f32,
    indices: &'a mut [u8],
}

impl Vectorize for Nearest<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Nearest { table, values, scale, indices } = self;
        let parts = values.chunks(VALUES_AT_A_TIME).zip(indices.chunks_mut(VALUES_AT_A_TIME));
        for (values, indices) in parts {
            let mut twice = [0.0; VALUES_AT_A_TIME];
            for (twice, value) in twice.iter_mut().zip(values) {
                let value = value / scale;
                *twice = value + value;
            }
            let mut found = twice.map(|twice| table.below[table.cell(twice)]);
            for _ in 0..table.most {
                for (index, twice) in found.iter_mut().zip(&twice) {
                    *index += u8::from(table.sums[usize::from(*index)] < *twice);
                }
            }
            indices.copy_from_slice(&found[..indices.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Number of midpoints below a value, by a linear search.
    fn nearest_of(levels: &[f32], value: f32) -> usize {
        levels.windows(2).take_while(|pair| pair[0] + pair[1] < value + value).count()
    }

    fn check(mut levels: Vec<f32>, values: &[f32], scale: f32) {
        levels.sort_by(f32::total_cmp);
        let table = LevelTable::new(levels);
        let mut found = vec![0; values.len()];
        table.nearest_of_all(values, scale, &mut found);
        for (value, found) in values.iter().zip(found) {
            let value = value / scale;
            assert_eq!(usize::from(found), nearest_of(table.levels(), value), "{value} {:?}", table.levels());
            assert_eq!(table.nearest(value), found);
            let least = table.levels().iter().map(|level| (level - value).abs()).fold(f32::INFINITY, f32::min);
            let off = (table.levels()[usize::from(found)] - value).abs();
            assert!(off <= least * (1.0 + 1e-6), "{value}: {off} {least}");
        }
    }

    proptest! {
        #[test]
        fn the_nearest_level_is_that_of_a_search_through_all(
            count in 1usize..257, spread in 0i32..30, scale in 0.01f32..100.0, seed: u32
        ) {
            let noise = |count, seed| super::super::dot::tests::noise(count, seed);
            // some levels are far apart, and many values are between the others
            let levels: Vec<f32> = noise(count, seed).iter().map(|v| v * v.abs().powi(spread)).collect();
            let values: Vec<f32> = noise(200, !seed).iter().map(|v| v * v.abs().powi(spread) * scale * 1.2).collect();
            check(levels.clone(), &values, scale);
            check(levels.clone(), &levels, 1.0);
            check(levels.iter().map(|level| (level * 8.0).round()).collect(), &levels, 0.125);
        }
    }

    #[test]
    fn levels_may_be_equal_extreme_or_alone() {
        let values = [0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 1e-45, f32::MAX / 2.0, f32::MIN / 2.0];
        for levels in [&[0.0][..], &[-0.0, 0.0], &[2.0; 256], &[-65504.0, 65504.0], &[-1e-45, 0.0, 1e-45], &[-1.0, 1.0]]
        {
            check(levels.to_vec(), &values, 1.0);
        }
    }

    #[test]
    #[should_panic(expected = "257 levels")]
    fn more_levels_than_a_byte_has_are_refused() {
        LevelTable::new(vec![0.0; 257]);
    }
}
