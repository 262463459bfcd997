//! Coordinate descent on codes and scales after error feedback. Each step makes one code or scale optimal while all
//! others stay, in terms of
//!
//! ```text
//! (w - ŵ) H (w - ŵ)ᵀ
//! ```
//!
//! Error feedback rounds a column before the errors of later columns are known. Here every column takes all others into
//! account: with `g = (w - ŵ) H` the optimum for column `j` is `ŵ_j + g_j / H_jj`, and the nearest code is the best
//! code. Likewise the best scale of a block of columns `B` with the integers `q` is `s + (q g_B) / (q H_BB qᵀ)`. Steps
//! that don't reduce the sum are skipped.
//!
//! For integers with a scale per block of columns, codes and scales are optimized in turn; for other grids, codes only.
//! Columns are processed in groups: `g` of a group is a matrix product and is then updated column by column.

use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product;
use half::f16;
use ndarray::{Array2, ArrayView2, ArrayViewMut2};

use super::fp16::LARGEST;
use super::rounding::{Grid, ROUND};

/// Approximate number of columns in a group, rounded to whole blocks.
const GROUP: usize = 64;
/// Maximum number of columns in a block whose scale is optimized.
const WIDEST: usize = 256;
/// Number of passes over all columns, for grids of few and of many numbers.
const TURNS: [usize; 2] = [4, 1];
/// Largest number of codes that counts as few.
const FEW: usize = 16;

/// Returns the number of columns that share an adjustable scale, if the columns from `first_column` on are whole
/// blocks.
pub(super) fn blocks_of(grids: &[Grid<'_>], first_column: usize, columns: usize) -> Option<usize> {
    match grids.first()? {
        Grid::Steps { block, scales, .. } if scales.len() > 1 && *block <= WIDEST => {
            (first_column.is_multiple_of(*block) && columns.is_multiple_of(*block)).then_some(*block)
        }
        _ => None,
    }
}

/// Some rows of a weight. Matrices are column-major, one column per column of the weight.
pub(super) struct Descent<'a> {
    rows: usize,
    columns: usize,
    /// `H`, symmetric.
    moments: &'a Array2<f32>,
    grids: &'a [Grid<'a>],
    first_column: usize,
    /// Number of columns in a block with an adjustable scale.
    block: Option<usize>,
    codes: Vec<u8>,
    /// Values of the codes.
    values: Vec<f32>,
    /// `w - ŵ`.
    errors: Vec<f32>,
    /// Scales by block, then row.
    scales: Vec<f32>,
}

impl<'a> Descent<'a> {
    /// Returns rows with their grids and initial codes.
    pub(super) fn new(
        moments: &'a Array2<f32>,
        weight: ArrayView2<'_, f32>,
        grids: &'a [Grid<'a>],
        first_column: usize,
        codes: ArrayView2<'_, u8>,
    ) -> Self {
        let (rows, columns) = weight.dim();
        let block = blocks_of(grids, first_column, columns);
        let all = || (0..columns).flat_map(|column| (0..rows).map(move |row| (row, column)));
        let value = |(row, column): (usize, usize)| grids[row].value(first_column + column, codes[[row, column]]);
        let values: Vec<f32> = all().map(value).collect();
        let errors = all().zip(&values).map(|((row, column), value)| weight[[row, column]] - value).collect();
        let codes = all().map(|place| codes[place]).collect();
        let scales = block.map_or_else(Vec::new, |block| {
            let blocks = first_column / block..(first_column + columns) / block;
            blocks.flat_map(|index| grids.iter().map(move |grid| grid.scale(index).to_f32())).collect()
        });
        Descent { rows, columns, moments, grids, first_column, block, codes, values, errors, scales }
    }

    /// Optimizes all columns, in the number of passes for the grid.
    pub(super) fn run(&mut self) {
        let few = match self.grids.first() {
            Some(Grid::Steps { range: [least, most], .. }) => most.abs_diff(*least) < FEW as u8,
            Some(Grid::Levels { levels, .. }) => levels.levels().len() <= FEW,
            None => return,
        };
        let width = self.block.map_or(GROUP, |block| (GROUP / block).max(1) * block);
        let mut slopes = vec![0f32; self.rows * width];
        for _ in 0..TURNS[usize::from(!few)] {
            for start in (0..self.columns).step_by(width) {
                self.group(start, (start + width).min(self.columns), &mut slopes);
            }
        }
    }

    /// Writes codes and, if given, adjusted scales, row-major.
    pub(super) fn write(&self, mut codes: ArrayViewMut2<'_, u8>, scales: Option<ArrayViewMut2<'_, f16>>) {
        codes.indexed_iter_mut().for_each(|((row, column), code)| *code = self.codes[column * self.rows + row]);
        for ((row, block), scale) in scales.into_iter().flat_map(|scales| scales.into_indexed_iter_mut()) {
            *scale = f16::from_f32(self.scales[block * self.rows + row]);
        }
    }

    /// Optimizes the columns of a group.
    fn group(&mut self, start: usize, end: usize, slopes: &mut [f32]) {
        let (rows, count) = (self.rows, end - start);
        let slopes = &mut slopes[..rows * count];
        self.multiply_moments(start, count, 0, &self.errors, slopes);
        let Some(block) = self.block else {
            (start..end).for_each(|column| self.column(column, end, &mut slopes[rows * (column - start)..]));
            return;
        };
        let mut products = vec![0f32; rows * count];
        for first in (start..end).step_by(block) {
            let slopes = &mut slopes[rows * (first - start)..];
            self.scale(first, end, slopes, &mut products);
            (first..first + block).for_each(|column| self.column(column, end, &mut slopes[rows * (column - first)..]));
        }
    }

    /// `out = M H`, for columns `start..start + count` of `H` and its rows from `from` on. `M` has `rows` rows; it and
    /// `out` are column-major.
    fn multiply_moments(&self, start: usize, count: usize, from: usize, matrix: &[f32], out: &mut [f32]) {
        let Some(moments) = self.moments.as_slice() else { return };
        let (rows, width) = (self.rows, self.moments.ncols());
        // columns of H are its rows
        let moments = (&moments[start * width + from..], MatrixLayout { row: width, column: 1 });
        product((count, matrix.len() / rows, rows), moments, (matrix, MatrixLayout { row: rows, column: 1 }), out);
    }

    /// Optimizes the scale of the block that begins at `first`. `slopes` are those of the columns from there to `end`.
    fn scale(&mut self, first: usize, end: usize, slopes: &mut [f32], products: &mut [f32]) {
        let (rows, block) = (self.rows, self.block.unwrap_or(1));
        let products = &mut products[..rows * (end - first)];
        let own = rows * first..rows * (first + block);
        let integers: Vec<f32> = self.codes[own.clone()].iter().map(|code| f32::from(*code as i8)).collect();
        self.multiply_moments(first, end - first, first, &integers, products);
        let (mut squares, mut gains) = (vec![0f32; rows], vec![0f32; rows]);
        for column in 0..block {
            let at = rows * column..rows * (column + 1);
            for (row, integer) in integers[at.clone()].iter().enumerate() {
                squares[row] += integer * products[at.start + row];
                gains[row] += integer * slopes[at.start + row];
            }
        }
        let scales = &mut self.scales[rows * (first / block)..][..rows];
        let mut changes = vec![0f32; rows];
        for (row, change) in changes.iter_mut().enumerate() {
            let new = scales[row] + gains[row] / squares[row];
            let magnitude = f16::from_f32(new.abs().min(LARGEST)).max(f16::MIN_POSITIVE).to_f32();
            let by = magnitude.copysign(new) - scales[row];
            // also false for NaN: if all integers are zero, any scale fits
            if by * (2.0 * gains[row] - by * squares[row]) > 0.0 {
                (*change, scales[row]) = (by, magnitude.copysign(new));
            }
        }
        let places = integers.chunks_exact(rows).zip(own.step_by(rows));
        for (integers, at) in places {
            let (values, errors) = (&mut self.values[at..at + rows], &mut self.errors[at..at + rows]);
            for row in 0..rows {
                let by = changes[row] * integers[row];
                values[row] += by;
                errors[row] -= by;
            }
        }
        for (slopes, products) in slopes.chunks_exact_mut(rows).zip(products.chunks_exact(rows)) {
            (0..rows).for_each(|row| slopes[row] -= changes[row] * products[row]);
        }
    }

    /// Optimizes the codes of a column. `slopes` are those of the columns from it to `end`.
    fn column(&mut self, column: usize, end: usize, slopes: &mut [f32]) {
        let rows = self.rows;
        let at = rows * column..rows * (column + 1);
        let (own, later) = slopes.split_at_mut(rows);
        let inverse = 1.0 / self.moments[(column, column)];
        let (codes, values) = (&mut self.codes[at.clone()], &mut self.values[at.clone()]);
        // the slope is no longer needed and is replaced by the change
        match (self.block, self.grids.first()) {
            (Some(block), Some(Grid::Steps { range, .. })) => {
                let [least, most] = range.map(f32::from);
                let scales = &self.scales[rows * (column / block)..][..rows];
                for row in 0..rows {
                    let wanted = (values[row] + own[row] * inverse) / scales[row];
                    let integer = (wanted.max(least).min(most) + ROUND) - ROUND;
                    codes[row] = integer as i8 as u8;
                    own[row] = integer * scales[row] - values[row];
                    values[row] = integer * scales[row];
                }
            }
            _ => {
                for (row, grid) in self.grids.iter().enumerate() {
                    let (code, value) = grid.rounded(self.first_column + column, values[row] + own[row] * inverse);
                    codes[row] = code;
                    own[row] = value - values[row];
                    values[row] = value;
                }
            }
        }
        if own.iter().all(|change| *change == 0.0) {
            return;
        }
        self.errors[at].iter_mut().zip(&*own).for_each(|(error, change)| *error -= change);
        for (other, later) in (column + 1..end).zip(later.chunks_exact_mut(rows)) {
            let share = self.moments[(column, other)];
            later.iter_mut().zip(&*own).for_each(|(slope, change)| *slope -= change * share);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_kernels::level_table::LevelTable;

    /// Reproducible numbers from -1 to 1.
    fn noise(rows: usize, columns: usize, seed: u64) -> Array2<f32> {
        let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        Array2::from_shape_fn((rows, columns), |_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
    }

    /// Second moments of correlated inputs.
    fn moments(columns: usize) -> Array2<f32> {
        let inputs = noise(2 * columns, columns, 7).dot(&noise(columns, columns, 5));
        let products = inputs.t().dot(&inputs);
        (&products + &products.t()) / 2.0
    }

    struct Case {
        weight: Array2<f32>,
        moments: Array2<f32>,
        scales: Vec<Vec<f16>>,
        block: usize,
        range: [i8; 2],
    }

    impl Case {
        fn new(rows: usize, columns: usize, block: usize, range: [i8; 2]) -> Self {
            let weight = noise(rows, columns, 3);
            let scale = f16::from_f32(1.0 / f32::from(range[1]));
            Case { weight, moments: moments(columns), scales: vec![vec![scale; columns / block]; rows], block, range }
        }

        fn grids(&self) -> Vec<Grid<'_>> {
            let grid = |scales| Grid::Steps { scales, block: self.block, range: self.range };
            self.scales.iter().map(|scales| grid(&scales[..])).collect()
        }

        fn nearest(&self) -> Array2<u8> {
            let grids = self.grids();
            Array2::from_shape_fn(self.weight.dim(), |(row, column)| {
                grids[row].nearest(column, self.weight[[row, column]])
            })
        }

        /// `(w - ŵ) H (w - ŵ)ᵀ` of each row.
        fn costs(&self, codes: &Array2<u8>, scales: &Array2<f16>) -> Vec<f64> {
            let columns = self.weight.ncols();
            let value =
                |row, column| scales[[row, column / self.block]].to_f64() * f64::from(codes[[row, column]] as i8);
            let error = |row: usize, column| f64::from(self.weight[[row, column]]) - value(row, column);
            let cost = |row| {
                let errors: Vec<f64> = (0..columns).map(|column| error(row, column)).collect();
                let product = |i: usize| (0..columns).map(|j| f64::from(self.moments[(i, j)]) * errors[j]).sum::<f64>();
                (0..columns).map(|i| errors[i] * product(i)).sum::<f64>()
            };
            (0..self.weight.nrows()).map(cost).collect()
        }

        fn scales(&self) -> Array2<f16> {
            Array2::from_shape_fn((self.weight.nrows(), self.scales[0].len()), |(row, block)| self.scales[row][block])
        }

        fn descended(&self, codes: &Array2<u8>) -> (Array2<u8>, Array2<f16>) {
            let grids = self.grids();
            let mut descent = Descent::new(&self.moments, self.weight.view(), &grids, 0, codes.view());
            descent.run();
            let (mut found, mut scales) = (codes.clone(), self.scales());
            descent.write(found.view_mut(), descent.block.is_some().then(|| scales.view_mut()));
            (found, scales)
        }
    }

    #[test]
    fn no_row_loses_more_than_before() {
        // incomplete groups, blocks wider than a group, a single scale
        for (columns, block, range) in [
            (160, 32, [-8, 7]),
            (96, 96, [-8, 7]),
            (256, 128, [-8, 7]),
            (150, 150, [-127, 127]),
            (144, 16, [-127, 127]),
        ] {
            let case = Case::new(40, columns, block, range);
            let nearest = case.nearest();
            let (codes, scales) = case.descended(&nearest);
            let (before, after) = (case.costs(&nearest, &case.scales()), case.costs(&codes, &scales));
            for (before, after) in before.iter().zip(&after) {
                assert!(after <= &(before * 1.0001), "{columns} {block}: {after} {before}");
            }
            let [before, after] = [before, after].map(|costs| costs.iter().sum::<f64>());
            assert!(after < 0.6 * before, "{columns} {block}: {after} {before}");
        }
    }

    #[test]
    fn scales_are_found_where_they_serve_blocks() {
        let case = Case::new(20, 128, 32, [-8, 7]);
        let (_, scales) = case.descended(&case.nearest());
        assert!(scales.iter().zip(&case.scales()).any(|(new, old)| new != old));
        // one scale for a row stays, because other columns share it
        let case = Case::new(20, 128, 128, [-8, 7]);
        assert_eq!(case.descended(&case.nearest()).1, case.scales());
        // blocks of a part that begins within a block
        let case = Case::new(1, 128, 32, [-8, 7]);
        assert_eq!(blocks_of(&case.grids(), 0, 64), Some(32));
        assert_eq!(blocks_of(&case.grids(), 32, 64), Some(32));
        assert_eq!(blocks_of(&case.grids(), 16, 64), None);
        assert_eq!(blocks_of(&case.grids(), 64, 48), None);
    }

    /// Multiples of scales other than the initial ones: the scales are found and the result is lossless.
    #[test]
    fn scales_of_the_weight_itself_are_found() {
        let (rows, columns) = (8, 64);
        let mut case = Case::new(rows, columns, 32, [-8, 7]);
        case.weight =
            Array2::from_shape_fn((rows, columns), |(row, column)| ((row * 5 + column * 3) % 16) as f32 - 8.0);
        for (sign, scale) in [(1.0, 1.03), (-1.0, -0.97)] {
            let mut case =
                Case { weight: &case.weight * sign, scales: Vec::new(), moments: case.moments.clone(), ..case };
            case.scales = vec![vec![f16::from_f32(scale); 2]; rows];
            let (codes, scales) = case.descended(&case.nearest());
            assert!(scales.iter().all(|scale| f64::from(scale.to_f32() * sign - 1.0).abs() < 1e-3), "{scales}");
            assert!(case.costs(&codes, &scales).iter().all(|cost| *cost < 1e-3));
        }
    }

    /// A block of zeros keeps its scale.
    #[test]
    fn zeros_stay_zeros() {
        let mut case = Case::new(4, 64, 32, [-8, 7]);
        case.weight.fill(0.0);
        let (codes, scales) = case.descended(&case.nearest());
        assert!(codes.iter().all(|code| *code == 0));
        assert_eq!(scales, case.scales());
    }

    #[test]
    fn codes_of_palettes_lose_less() {
        let (weight, moments) = (noise(30, 100, 3), moments(100));
        let levels = LevelTable::new((0..16).map(|i| (i as f32 / 7.5 - 1.0).powi(3)).collect());
        let grids = vec![Grid::Levels { levels: &levels, scale: 1.5 }; 30];
        let case = Case { weight, moments, scales: vec![vec![f16::ONE]; 30], block: 100, range: [-8, 7] };
        let codes =
            Array2::from_shape_fn((30, 100), |(row, column)| grids[row].nearest(column, case.weight[[row, column]]));
        let cost = |codes: &Array2<u8>| {
            let values =
                Array2::from_shape_fn((30, 100), |(row, column)| grids[row].value(column, codes[[row, column]]));
            let of_values = Case {
                weight: &case.weight - &values,
                moments: case.moments.clone(),
                scales: case.scales.clone(),
                ..case
            };
            of_values.costs(&Array2::zeros((30, 100)), &case.scales()).iter().sum::<f64>()
        };
        let mut descent = Descent::new(&case.moments, case.weight.view(), &grids, 0, codes.view());
        descent.run();
        let mut found = codes.clone();
        descent.write(found.view_mut(), None);
        assert!(cost(&found) < 0.6 * cost(&codes), "{} {}", cost(&found), cost(&codes));
    }
}
