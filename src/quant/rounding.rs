//! Which code of a grid a value becomes. The nearest, if nobody knows better; error feedback decides otherwise.

use anec_base::Result;
use half::f16;

/// The numbers that a row's codes stand for.
#[derive(Clone, Copy, Debug)]
pub enum Grid<'a> {
    /// `scale * q` for whole `q` of a range; blocks of equally many columns have a scale each.
    Steps {
        /// A scale for each block.
        scales: &'a [f16],
        /// Columns of a block.
        block: usize,
        /// The least and the largest code.
        range: [i8; 2],
    },
    /// `scale * levels[q]`, ascending.
    Levels {
        /// The palette.
        levels: &'a [f32],
        /// What the row's values were divided by.
        scale: f32,
    },
}

impl Grid<'_> {
    /// The code whose number is nearest to a value of a column. Negative codes are in two's complement.
    pub fn nearest(&self, column: usize, value: f32) -> u8 {
        match self {
            Grid::Steps { scales, block, range } => {
                let [least, most] = range.map(f32::from);
                let steps = value * (1.0 / scales[column / block].to_f32());
                steps.clamp(least, most).round_ties_even() as i8 as u8
            }
            Grid::Levels { levels, scale } => nearest_level(levels, value / scale),
        }
    }

    /// The scale of a block of columns, or of the row.
    pub(crate) fn scale(&self, block: usize) -> f16 {
        match self {
            Grid::Steps { scales, .. } => scales[block],
            Grid::Levels { scale, .. } => f16::from_f32(*scale),
        }
    }

    /// The number that a code stands for.
    pub fn value(&self, column: usize, code: u8) -> f32 {
        match self {
            Grid::Steps { scales, block, .. } => scales[column / block].to_f32() * f32::from(code as i8),
            Grid::Levels { levels, scale } => scale * levels[usize::from(code)],
        }
    }
}

/// The index of the level nearest to a value; the lower of two that are equally near.
pub(crate) fn nearest_level(levels: &[f32], value: f32) -> u8 {
    // twice the middle between two levels is their sum
    let twice = value + value;
    let mut first = 0;
    let mut count = levels.len() - 1;
    while count > 0 {
        let half = count / 2;
        let middle = first + half;
        let above = levels[middle] + levels[middle + 1] < twice;
        first = if above { middle + 1 } else { first };
        count = if above { count - half - 1 } else { half };
    }
    first as u8
}

/// Chooses the codes of whole rows, whose grids are known. An implementation gives the same codes whatever rows it is
/// asked for together, and in whatever order.
pub trait Rounding: Send + Sync {
    /// Rows that are best rounded together.
    fn rows_at_a_time(&self) -> u64 {
        1
    }

    /// Writes the code of every value: rows from `first_row` on, one after another, each with its grid. `values` and
    /// `codes` are as long as the grids' rows together.
    ///
    /// # Errors
    /// When what the choice rests on can't be had.
    fn round(&self, first_row: u64, values: &[f32], grids: &[Grid<'_>], codes: &mut [u8]) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_level_is_that_of_a_search_through_all() {
        for levels in [&[-1.0f32][..], &[-1.0, 0.5], &[-3.0, -1.0, 0.0, 0.0, 0.25, 7.0, 9.0, 9.0]] {
            for i in -1000..1000 {
                let value = i as f32 / 97.0;
                let found = levels[usize::from(nearest_level(levels, value))];
                let least = levels.iter().map(|level| (level - value).abs()).fold(f32::INFINITY, f32::min);
                assert_eq!((found - value).abs(), least, "{value} {levels:?}");
            }
        }
    }

    #[test]
    fn codes_of_steps_stand_for_multiples_of_the_scale() {
        let scales = [0.5, 2.0].map(f16::from_f32);
        let grid = Grid::Steps { scales: &scales, block: 2, range: [-8, 7] };
        for (column, value, code, found) in
            [(0, 1.3, 3, 1.5), (1, -9.0, -8, -4.0), (0, 9.0, 7, 3.5), (2, 5.1, 3, 6.0), (3, -0.9, 0, 0.0)]
        {
            assert_eq!(grid.nearest(column, value) as i8, code);
            assert_eq!(grid.value(column, code as u8), found);
        }
    }
}
