//! Rounding of values to codes of a grid: to nearest by default, or by error feedback.

use anec_base::Result;
use anec_kernels::level_table::LevelTable;
use half::f16;

/// 1.5 * 2^23: adding it to a number below 2^22 in magnitude rounds to an integer, ties to even.
pub(super) const ROUND: f32 = 12_582_912.0;

/// Numbers that a row's codes stand for.
#[derive(Clone, Copy, Debug)]
pub enum Grid<'a> {
    /// `scale * q` for integers `q` of a range; each block of columns has its own scale.
    Steps {
        /// Scale of each block.
        scales: &'a [f16],
        /// Number of columns in a block.
        block: usize,
        /// Least and largest code.
        range: [i8; 2],
    },
    /// `scale * levels[q]`, ascending.
    Levels {
        /// The palette.
        levels: &'a LevelTable,
        /// Divisor of the row's values.
        scale: f32,
    },
}

impl Grid<'_> {
    /// Returns the code nearest to a value of a column. Negative codes are in two's complement.
    pub fn nearest(&self, column: usize, value: f32) -> u8 {
        self.rounded(column, value).0
    }

    /// Returns the code nearest to a value of a column, and the number that it stands for.
    pub(crate) fn rounded(&self, column: usize, value: f32) -> (u8, f32) {
        match self {
            Grid::Steps { scales, block, range } => {
                let ([least, most], scale) = (range.map(f32::from), scales[column / block].to_f32());
                let code = ((value * (1.0 / scale)).clamp(least, most) + ROUND - ROUND) as i8;
                (code as u8, scale * f32::from(code))
            }
            Grid::Levels { levels, scale } => {
                let code = levels.nearest(value / scale);
                (code, scale * levels.levels()[usize::from(code)])
            }
        }
    }

    /// Returns the scale of a block of columns, or of the row.
    pub(crate) fn scale(&self, block: usize) -> f16 {
        match self {
            Grid::Steps { scales, .. } => scales[block],
            Grid::Levels { scale, .. } => f16::from_f32(*scale),
        }
    }

    /// Returns the number that a code stands for.
    pub fn value(&self, column: usize, code: u8) -> f32 {
        match self {
            Grid::Steps { scales, block, .. } => scales[column / block].to_f32() * f32::from(code as i8),
            Grid::Levels { levels, scale } => scale * levels.levels()[usize::from(code)],
        }
    }
}

/// Choice of codes for whole rows with known grids. The codes don't depend on which rows are asked for together or in
/// what order.
pub trait Rounding: Send + Sync {
    /// Number of rows that are rounded most efficiently together.
    fn rows_at_a_time(&self) -> u64 {
        1
    }

    /// Writes the code of every value of the rows from `first_row` on, one grid per row. `values` and `codes` have the
    /// length of all grids' rows together.
    ///
    /// # Errors
    /// Returns an error if data that the choice depends on can't be read.
    fn round(&self, first_row: u64, values: &[f32], grids: &[Grid<'_>], codes: &mut [u8]) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

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
