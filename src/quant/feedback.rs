//! Error feedback: codes that preserve products with real inputs rather than each weight by itself (GPTQ, Frantar et
//! al., arXiv 2210.17323).
//!
//! A row `w` of a weight is multiplied by inputs `x`. With `H = Σ xᵀx` over a text, codes with the values `ŵ` cost
//!
//! ```text
//! (w - ŵ) H (w - ŵ)ᵀ = Σ_j D_j ((w - ŵ) U)_j²        H = U D Uᵀ, U unit upper triangular
//! ```
//!
//! so that each column is rounded after the errors of the columns before it are added:
//!
//! ```text
//! ŵ_j = round(w_j + Σ_{k<j} (w_k - ŵ_k) U_kj)
//! ```
//!
//! These are GPTQ's codes in the form without an inverse (LDLQ: Chee et al., arXiv 2307.13304, theorem 6). Columns are
//! processed by descending `H_jj`: the most important ones are rounded while the most columns remain to compensate.
//!
//! Damping adds a share of each diagonal element and of the diagonal's median to the diagonal of `H` ([`Damping`]). It
//! keeps `H` positive definite for few tokens and for repeated or dead channels, and reduces the effect of chance
//! correlations. The usual choice, the mean, is dominated in some models by a few channels hundreds of times larger
//! than the others, whose share in `H` it would drown; without the median, channels that the text hardly activates
//! would compensate for errors of the large ones. `H` is factorized after scaling its diagonal to 1: damping keeps its
//! smallest eigenvalue far above the rounding errors of f32. Coordinate descent then reduces the remaining error column
//! by column (`descent.rs`).

use std::cmp::{Ordering, Reverse};

use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product;
use anec_kernels::pool;
use half::f16;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis};

use super::QuantError;
use super::cholesky::factorize;
use super::descent::{Descent, blocks_of};
use super::rounding::Grid;

/// Largest number of bits whose errors are large enough for chance correlations to matter.
const COARSE_BITS: u32 = 4;
/// Number of columns rounded in sequence before their errors are added to the others.
const BLOCK: usize = 128;
/// Number of rows that a thread works on at a time; rows are independent.
const ROWS: usize = 256;
/// Number of rows of a square matrix that a thread computes at a time.
const TILE: usize = 16;

/// Share of a channel's moment, and of the median moment, that is added to the channel's moment.
///
/// Codes of up to four bits make large errors, and the correlations that compensate for them must hold in other texts:
/// the share is 0.25 for equal numbers of channels and tokens, proportional otherwise, and limited to 0.05 to 0.5. For
/// finer codes it is 0.1. On Qwen2.5-Coder-0.5B in int8 the worst position has a cosine of 0.9978, against 0.9959 with
/// 0.05 and 0.9952 with the share of four bits; the average loss is equal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Damping(f64);

impl Damping {
    /// Share for coarse codes with enough tokens.
    pub const LEAST: Damping = Damping(0.05);
    /// Share for codes of more than four bits.
    pub const FINE: Damping = Damping(0.1);
    const MOST: Damping = Damping(0.5);
    const ONE_CHANNEL_A_TOKEN: f64 = 0.25;

    /// Returns the share for weights of `bits` bits whose inputs have `channels` channels over `tokens` tokens.
    pub fn of(channels: usize, tokens: u64, bits: u32) -> Self {
        if bits > COARSE_BITS {
            return Self::FINE;
        }
        let share = Self::ONE_CHANNEL_A_TOKEN * channels as f64 / tokens.max(1) as f64;
        Damping(share.clamp(Self::LEAST.0, Self::MOST.0))
    }
}

/// Distribution of rounding errors to other columns: the factor of a text's second moments.
pub struct ErrorFeedback {
    /// Columns in the order of rounding.
    order: Vec<usize>,
    /// `None` if all moments are zero.
    factor: Option<Factor>,
}

struct Factor {
    /// Transpose of the unit upper triangular matrix, in the order of the columns; zero on and above the diagonal.
    lower: Array2<f32>,
    /// Damped moments.
    moments: Array2<f32>,
}

/// Codes chosen for rows of a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct RowCodes {
    /// Code of each element.
    pub codes: Array2<u8>,
    /// Scales by rows and blocks, if each block of columns has one; `None` if they are those of the grids.
    pub scales: Option<Array2<f16>>,
}

impl ErrorFeedback {
    /// Returns the feedback for inputs with the second moments `Σ xᵀx`, `[columns, columns]`, of which only the lower
    /// triangle is read. If all moments are zero, weights are rounded to nearest.
    ///
    /// # Errors
    /// Returns [`QuantError::Moments`] if a moment on the diagonal is negative, NaN or infinite, or if the matrix can't
    /// be factorized.
    pub fn of(sums: Array2<f32>, damping: Damping) -> Result<Self, QuantError> {
        let n = sums.nrows();
        let diagonal: Vec<f32> = (0..n).map(|j| sums[[j, j]]).collect();
        if let Some(channel) = diagonal.iter().position(|value| !value.is_finite() || *value < 0.0) {
            return Err(QuantError::Moments { channel, value: diagonal[channel] });
        }
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by_key(|j| (Reverse(diagonal[*j].to_bits()), *j));
        let mut live: Vec<f64> = diagonal.iter().filter(|value| **value > 0.0).map(|value| f64::from(*value)).collect();
        live.sort_by(f64::total_cmp);
        let Some(median) = live.get(live.len() / 2) else { return Ok(ErrorFeedback { order, factor: None }) };
        let mut moments = square(n, |i, j| sums[[i.max(j), i.min(j)]]);
        drop(sums);
        // rounding errors in nearly singular moments can need more damping
        let Damping(least) = damping;
        for damping in [least, 4.0 * least, 16.0 * least] {
            let damped: Vec<f64> =
                diagonal.iter().map(|value| f64::from(*value) * (1.0 + damping) + damping * median).collect();
            let units: Vec<f64> = damped.iter().map(|value| value.sqrt()).collect();
            // the reversed Cholesky factor of the reversed matrix is upper triangular
            let place = |i: usize| order[n - 1 - i];
            // only the lower triangle is read
            let mut reversed = square(n, |i, j| match i.cmp(&j) {
                Ordering::Less => 0.0,
                Ordering::Equal => 1.0,
                Ordering::Greater => {
                    (f64::from(moments[[place(i), place(j)]]) / (units[place(i)] * units[place(j)])) as f32
                }
            });
            if factorize(&mut reversed) {
                let lower = square(n, |j, k| {
                    if k >= j {
                        return 0.0;
                    }
                    let (row, column) = (n - 1 - k, n - 1 - j);
                    let own = f64::from(reversed[[row, column]] / reversed[[column, column]]);
                    (own * units[order[k]] / units[order[j]]) as f32
                });
                moments.diag_mut().iter_mut().zip(damped).for_each(|(own, damped)| *own = damped as f32);
                return Ok(ErrorFeedback { order, factor: Some(Factor { lower, moments }) });
            }
        }
        Err(QuantError::Moments { channel: 0, value: f32::NAN })
    }

    /// Number of columns of the weights.
    pub fn columns(&self) -> usize {
        self.order.len()
    }

    /// Chooses the codes of rows of a weight, `[rows, columns]`, each with its grid. The first column is `first_column`
    /// of the whole weight. Rows are independent, so that a weight can be given in parts. Scales of whole blocks are
    /// adjusted.
    pub fn codes(&self, weight: ArrayView2<'_, f32>, grids: &[Grid<'_>], first_column: usize) -> RowCodes {
        self.choose(weight, grids, first_column, true)
    }

    /// Chooses codes, by error feedback alone if `descend` is false.
    fn choose(&self, weight: ArrayView2<'_, f32>, grids: &[Grid<'_>], first_column: usize, descend: bool) -> RowCodes {
        let (rows, columns) = weight.dim();
        let mut codes = Array2::zeros((rows, columns));
        let block = blocks_of(grids, first_column, columns);
        let mut scales = block.map(|block| Array2::zeros((rows, columns / block)));
        let of_parts: Vec<Option<ArrayViewMut2<'_, f16>>> = match &mut scales {
            Some(scales) => scales.axis_chunks_iter_mut(Axis(0), ROWS).map(Some).collect(),
            None => (0..rows.div_ceil(ROWS)).map(|_| None).collect(),
        };
        let parts = codes.axis_chunks_iter_mut(Axis(0), ROWS).zip(of_parts);
        let mut parts: Vec<_> = parts.zip(weight.axis_chunks_iter(Axis(0), ROWS)).zip(grids.chunks(ROWS)).collect();
        pool::for_each_mut(&mut parts, |_, (((codes, scales), weight), grids)| {
            let weight = weight.view();
            let nearest = |row: usize, column, value| grids[row].rounded(first_column + column, value);
            self.round(weight, nearest, |row, column, code| codes[[row, column]] = code);
            match &self.factor {
                Some(factor) if descend => {
                    let mut descent = Descent::new(&factor.moments, weight, grids, first_column, codes.view());
                    descent.run();
                    descent.write(codes.view_mut(), scales.as_mut().map(|scales| scales.view_mut()));
                }
                _ => scales.iter_mut().for_each(|scales| {
                    let first = first_column / block.unwrap_or(1);
                    scales
                        .indexed_iter_mut()
                        .for_each(|((row, block), scale)| *scale = grids[row].scale(first + block));
                }),
            }
        });
        RowCodes { codes, scales }
    }

    /// Rounds rows, block of columns by block of columns.
    fn round(
        &self,
        weight: ArrayView2<'_, f32>,
        nearest: impl Fn(usize, usize, f32) -> (u8, f32),
        mut set: impl FnMut(usize, usize, u8),
    ) {
        let (rows, columns) = weight.dim();
        let Some(factor) = self.factor.as_ref().and_then(|factor| factor.lower.as_slice()) else {
            weight.indexed_iter().for_each(|((row, column), value)| set(row, column, nearest(row, column, *value).0));
            return;
        };
        // w - ŵ, column-major
        let mut errors = vec![0f32; rows * columns];
        let mut wanted = vec![0f32; rows * BLOCK.min(columns)];
        let mut carried = vec![0f32; wanted.len()];
        for start in (0..columns).step_by(BLOCK) {
            let end = (start + BLOCK).min(columns);
            let (known, new) = errors.split_at_mut(rows * start);
            let wanted = &mut wanted[..rows * (end - start)];
            for (j, wanted) in (start..end).zip(wanted.chunks_exact_mut(rows)) {
                wanted.iter_mut().zip(weight.column(self.order[j])).for_each(|(wanted, value)| *wanted = *value);
            }
            // errors of the columns of earlier blocks
            if start > 0 {
                let carried = &mut carried[..wanted.len()];
                let factor = (&factor[start * columns..], MatrixLayout { row: columns, column: 1 });
                let known = (&*known, MatrixLayout { row: rows, column: 1 });
                product((end - start, start, rows), factor, known, carried);
                wanted.iter_mut().zip(carried).for_each(|(wanted, carried)| *wanted += *carried);
            }
            for (j, error) in (start..end).zip(new.chunks_exact_mut(rows)) {
                let column = self.order[j];
                let (own, later) = wanted[rows * (j - start)..].split_at_mut(rows);
                for (row, (error, wanted)) in error.iter_mut().zip(own).enumerate() {
                    let (code, value) = nearest(row, column, *wanted);
                    set(row, column, code);
                    *error = weight[[row, column]] - value;
                }
                for (k, later) in (j + 1..end).zip(later.chunks_exact_mut(rows)) {
                    let share = factor[k * columns + j];
                    later.iter_mut().zip(error.iter()).for_each(|(wanted, error)| *wanted += *error * share);
                }
            }
        }
    }
}

/// Returns a square matrix of computed elements.
fn square(n: usize, element: impl Fn(usize, usize) -> f32 + Sync) -> Array2<f32> {
    let mut matrix = Array2::zeros((n, n));
    if let Some(values) = matrix.as_slice_mut().filter(|_| n > 0) {
        // column by column, so that elements that come from a transpose are neighbours in memory
        pool::for_each_chunk(values, TILE * n, |tile, values| {
            let rows = values.len() / n;
            for j in 0..n {
                (0..rows).for_each(|row| values[row * n + j] = element(tile * TILE + row, j));
            }
        });
    }
    matrix
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_kernels::level_table::LevelTable;
    use anec_kernels::quantize;
    use half::f16;
    use ndarray::ArrayView1;

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

    /// Second moments of correlated inputs, some much larger than others.
    fn moments(tokens: usize, channels: usize) -> Array2<f32> {
        let mix = noise(channels, channels, 5);
        let mut inputs = noise(tokens, channels, 7).dot(&mix);
        for (channel, mut column) in inputs.columns_mut().into_iter().enumerate() {
            column *= 1.0 + (channel * 7 % 11) as f32;
        }
        inputs.t().dot(&inputs)
    }

    fn absmax(weight: &Array2<f32>) -> f32 {
        weight.iter().fold(0f32, |most, value| most.max(value.abs()))
    }

    /// Returns a scale for each row.
    fn scales_of_rows(weight: &Array2<f32>, most: f32) -> Vec<Vec<f16>> {
        let largest = |row: ArrayView1<'_, f32>| row.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
        weight.rows().into_iter().map(|row| vec![f16::from_f32(largest(row) / most)]).collect()
    }

    /// Returns the integer grid of each row.
    fn integers(scales: &[Vec<f16>], block: usize, most: i8) -> Vec<Grid<'_>> {
        scales.iter().map(|scales| Grid::Steps { scales, block, range: [-most, most] }).collect()
    }

    fn values(grids: &[Grid<'_>], chosen: &RowCodes) -> Array2<f32> {
        Array2::from_shape_fn(chosen.codes.dim(), |(row, column)| {
            let code = chosen.codes[[row, column]];
            match (&chosen.scales, &grids[row]) {
                (Some(scales), Grid::Steps { block, .. }) => {
                    scales[[row, column / block]].to_f32() * f32::from(code as i8)
                }
                (_, grid) => grid.value(column, code),
            }
        })
    }

    /// `Σ (w - ŵ) H (w - ŵ)ᵀ`.
    fn cost(weight: &Array2<f32>, values: &Array2<f32>, moments: &Array2<f32>) -> f64 {
        let (error, moments) = ((weight - values).mapv(f64::from), moments.mapv(f64::from));
        (error.dot(&moments) * &error).sum()
    }

    /// GPTQ as published, before any rearrangement (optimal brain quantization in a fixed order): each column is
    /// rounded, its error spread over the others by the inverse of the moments, and its row eliminated from the
    /// inverse.
    fn by_the_paper(weight: &Array2<f32>, moments: &Array2<f32>, scale: f32) -> Array2<u8> {
        let n = weight.ncols();
        let mut diagonal: Vec<f64> = (0..n).map(|j| f64::from(moments[[j, j]])).collect();
        diagonal.sort_by(f64::total_cmp);
        let median = diagonal[n / 2];
        let mut damped = moments.mapv(f64::from);
        (0..n).for_each(|j| damped[[j, j]] += Damping::LEAST.0 * (damped[[j, j]] + median));
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| moments[[*b, *b]].total_cmp(&moments[[*a, *a]]));
        let mut left = inverse(damped);
        let mut weight = weight.mapv(f64::from);
        let mut codes = Array2::zeros(weight.dim());
        for j in order {
            for row in 0..weight.nrows() {
                let q = (weight[[row, j]] / f64::from(scale)).round_ties_even().clamp(-127.0, 127.0);
                codes[[row, j]] = q as i8 as u8;
                let error = (weight[[row, j]] - q * f64::from(scale)) / left[[j, j]];
                (0..n).for_each(|k| weight[[row, k]] -= error * left[[j, k]]);
            }
            let (row, pivot) = (left.row(j).to_owned(), left[[j, j]]);
            for a in 0..n {
                for b in 0..n {
                    left[[a, b]] -= row[a] * row[b] / pivot;
                }
            }
        }
        codes
    }

    /// Gauss-Jordan elimination.
    fn inverse(mut matrix: Array2<f64>) -> Array2<f64> {
        let n = matrix.nrows();
        let mut out = Array2::eye(n);
        for j in 0..n {
            let pivot = matrix[[j, j]];
            for k in 0..n {
                matrix[[j, k]] /= pivot;
                out[[j, k]] /= pivot;
            }
            for row in (0..n).filter(|row| *row != j) {
                let factor = matrix[[row, j]];
                for k in 0..n {
                    matrix[[row, k]] -= factor * matrix[[j, k]];
                    out[[row, k]] -= factor * out[[j, k]];
                }
            }
        }
        out
    }

    #[test]
    fn the_codes_are_those_of_the_paper() {
        for (rows, columns) in [(5, 9), (3, 40), (2, 150)] {
            let (weight, moments) = (noise(rows, columns, 3), moments(2 * columns, columns));
            let scales = vec![vec![f16::from_f32(absmax(&weight) / 20.0)]; rows];
            let codes = ErrorFeedback::of(moments.clone(), Damping::LEAST).unwrap();
            let codes = codes.choose(weight.view(), &integers(&scales, columns, 127), 0, false).codes;
            let expected = by_the_paper(&weight, &moments, scales[0][0].to_f32());
            // f32 and f64 can round a midpoint differently, after which codes diverge
            let same = codes.iter().zip(&expected).filter(|(a, b)| a == b).count();
            assert!(same * 50 >= codes.len() * 49, "{same} of {} codes of {rows} x {columns}", codes.len());
        }
    }

    #[test]
    fn every_grid_loses_less_than_by_rounding() {
        // more rows and columns than a block, and no multiple of it
        let (rows, columns) = (300, 333);
        let (weight, moments) = (noise(rows, columns, 3), moments(400, columns));
        let (feedback, rounding) = (
            ErrorFeedback::of(moments.clone(), Damping::LEAST).unwrap(),
            ErrorFeedback { order: (0..columns).collect(), factor: None },
        );
        let compare = |grids: &[Grid<'_>], most: f64| {
            let costs = [&feedback, &rounding]
                .map(|how| cost(&weight, &values(grids, &how.codes(weight.view(), grids, 0)), &moments));
            assert!(costs[0] < most * costs[1], "{costs:?}");
        };
        let palette = LevelTable::new((0..16).map(|i| (i as f32 / 7.5 - 1.0).powi(3)).collect());
        let levels = |scale: &dyn Fn(usize) -> f32| -> Vec<Grid<'_>> {
            (0..rows).map(|row| Grid::Levels { levels: &palette, scale: scale(row) }).collect()
        };
        compare(&levels(&|_| 1.0), 0.6);
        compare(&levels(&|row| 1.0 + row as f32 / 300.0), 0.6);
        let one = vec![vec![f16::from_f32(absmax(&weight) / 127.0)]; rows];
        compare(&integers(&one, columns, 127), 0.5);
        compare(&integers(&scales_of_rows(&weight, 127.0), columns, 127), 0.5);
        let largest = |part: ArrayView1<'_, f32>| part.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
        let of_row = |row: ArrayView1<'_, f32>| -> Vec<f16> {
            row.axis_chunks_iter(Axis(0), 32).map(|part| f16::from_f32(largest(part) / 7.0)).collect()
        };
        let blocks: Vec<Vec<f16>> = weight.rows().into_iter().map(of_row).collect();
        compare(&integers(&blocks, 32, 7), 0.5);
    }

    #[test]
    fn coarse_codes_are_damped_by_the_channels_of_a_token() {
        assert_eq!(Damping::of(1000, 1000, 4), Damping(0.25));
        assert_eq!(Damping::of(500, 1000, 2), Damping(0.125));
        assert_eq!(
            [Damping::of(896, 1 << 20, 4), Damping::of(896, 10, 4), Damping::of(896, 0, 4)],
            [Damping::LEAST, Damping::MOST, Damping::MOST]
        );
        assert_eq!([Damping::of(896, 10, 8), Damping::of(896, 0, 6)], [Damping::FINE; 2]);
    }

    /// Correlations of few tokens arise by chance and don't hold for others.
    #[test]
    fn few_tokens_are_relied_upon_less() {
        let (rows, columns) = (60, 120);
        let inputs = |tokens: usize, seed: u64| {
            let mut inputs = noise(tokens, columns, seed).dot(&noise(columns, columns, 5));
            inputs.scaled_add(8.0, &noise(tokens, columns, seed + 1));
            inputs.t().dot(&inputs)
        };
        let (few, others) = (inputs(100, 31), inputs(4000, 57));
        let weight = noise(rows, columns, 3);
        let scales = scales_of_rows(&weight, 7.0);
        let grids = integers(&scales, columns, 7);
        let cost = |damping| {
            let feedback = ErrorFeedback::of(few.clone(), damping).unwrap();
            cost(&weight, &values(&grids, &feedback.codes(weight.view(), &grids, 0)), &others)
        };
        let damping = Damping::of(columns, 100, 4);
        assert!(cost(damping) < 0.9 * cost(Damping::LEAST), "{} {}", cost(damping), cost(Damping::LEAST));
    }

    #[test]
    fn without_moments_weights_are_rounded_as_ever() {
        let weight = noise(9, 300, 11);
        let scale = f16::from_f32(absmax(&weight) / 127.0);
        let feedback = ErrorFeedback::of(Array2::zeros((300, 300)), Damping::LEAST).unwrap();
        let codes = feedback.codes(weight.view(), &integers(&vec![vec![scale]; 9], 300, 127), 0);
        let mut expected = vec![0; weight.len()];
        quantize::quantize(weight.as_slice().unwrap(), scale.to_f32(), [-127, 127], &mut expected);
        assert_eq!(codes.codes.as_slice().unwrap(), expected);
    }

    #[test]
    fn one_token_and_dead_channels_are_moments_too() {
        let columns = 40;
        let mut token = noise(1, columns, 13);
        for dead in [0, 7, 39] {
            token[[0, dead]] = 0.0;
        }
        let moments = token.t().dot(&token);
        let mut weight = noise(6, columns, 17);
        weight.row_mut(2).fill(0.25);
        weight.row_mut(3).fill(0.0);
        let scales = scales_of_rows(&weight, 7.0);
        let grids = integers(&scales, columns, 7);
        let rounding =
            ErrorFeedback::of(Array2::zeros(moments.dim()), Damping::LEAST).unwrap().codes(weight.view(), &grids, 0);
        let codes = ErrorFeedback::of(moments.clone(), Damping::LEAST).unwrap().codes(weight.view(), &grids, 0);
        // only the product with the one token counts; it is almost exact
        let costs = [&codes, &rounding].map(|codes| cost(&weight, &values(&grids, codes), &moments));
        assert!(costs[0] < 0.1 * costs[1], "{costs:?}");
        for dead in [0, 7, 39] {
            assert_eq!(codes.codes.column(dead), rounding.codes.column(dead), "a dead channel hears of no error");
        }
        assert!(codes.codes.row(3).iter().all(|code| *code == 0));
    }

    /// Errors of a few channels hundreds of times larger than the others are compensated by the others.
    #[test]
    fn errors_of_massive_channels_are_made_up_for() {
        let columns = 120;
        let mut inputs = noise(500, columns, 7).dot(&noise(columns, columns, 5));
        for massive in [3, 50] {
            inputs.column_mut(massive).mapv_inplace(|value| value * 300.0);
        }
        let moments = inputs.t().dot(&inputs);
        let weight = noise(40, columns, 3);
        let scales = scales_of_rows(&weight, 127.0);
        let grids = integers(&scales, columns, 127);
        let rounding = ErrorFeedback { order: (0..columns).collect(), factor: None };
        let feedback = ErrorFeedback::of(moments.clone(), Damping::LEAST).unwrap();
        let [chosen, nearest] = [&feedback, &rounding].map(|how| values(&grids, &how.codes(weight.view(), &grids, 0)));
        assert!(cost(&weight, &chosen, &moments) < 0.3 * cost(&weight, &nearest, &moments));
    }

    /// A palette is fixed: a constant row takes one level, a row of zeros the level nearest to zero.
    #[test]
    fn constant_rows_and_one_token_suit_palettes() {
        let columns = 60;
        let token = noise(1, columns, 13);
        let moments = token.t().dot(&token);
        let mut weight = noise(4, columns, 17);
        weight.row_mut(1).fill(0.5);
        weight.row_mut(2).fill(0.0);
        let palette = LevelTable::new((0..16).map(|i| i as f32 / 8.0 - 1.0).collect());
        let grids = vec![Grid::Levels { levels: &palette, scale: 1.0 }; 4];
        let codes = ErrorFeedback::of(moments.clone(), Damping::LEAST).unwrap().codes(weight.view(), &grids, 0);
        assert!(codes.codes.row(1).iter().all(|code| *code == 12) && codes.codes.row(2).iter().all(|code| *code == 8));
        let dead = ErrorFeedback::of(Array2::zeros((columns, columns)), Damping::LEAST).unwrap();
        let nearest = dead.codes(weight.view(), &grids, 0);
        let costs = [&codes, &nearest].map(|codes| cost(&weight, &values(&grids, codes), &moments));
        assert!(costs[0] < 0.1 * costs[1], "{costs:?}");
    }

    /// Columns of a part of the weight, such as an expert's, use the scales of their position.
    #[test]
    fn blocks_are_counted_from_the_first_column() {
        let weight = noise(5, 64, 3);
        let largest = |part: ArrayView1<'_, f32>| part.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
        let of_row = |row: ArrayView1<'_, f32>| -> Vec<f16> {
            row.axis_chunks_iter(Axis(0), 16).map(|part| f16::from_f32(largest(part) / 7.0)).collect()
        };
        let blocks: Vec<Vec<f16>> = weight.rows().into_iter().map(of_row).collect();
        let grids = integers(&blocks, 16, 7);
        let nearest = |columns: usize| ErrorFeedback { order: (0..columns).collect(), factor: None };
        let whole = nearest(64).codes(weight.view(), &grids, 0);
        let part = nearest(40).codes(weight.slice_axis(Axis(1), (24..64).into()), &grids, 24);
        // scales aren't adjusted in parts that don't begin with a block
        assert_eq!((part.scales, whole.scales.map(|scales| scales.dim())), (None, Some((5, 4))));
        assert_eq!(part.codes, whole.codes.slice_axis(Axis(1), (24..64).into()));
        let feedback = ErrorFeedback::of(moments(80, 32), Damping::LEAST).unwrap();
        let found = feedback.codes(weight.slice_axis(Axis(1), (32..64).into()), &grids, 32);
        let own: Vec<Vec<f16>> = blocks.iter().map(|scales| scales[2..].to_vec()).collect();
        let alone = feedback.codes(weight.slice_axis(Axis(1), (32..64).into()), &integers(&own, 16, 7), 0);
        assert_eq!(found, alone);
    }

    #[test]
    fn invalid_moments_are_refused() {
        let mut moments = moments(20, 10);
        moments[[4, 4]] = f32::NAN;
        let error = ErrorFeedback::of(moments.clone(), Damping::LEAST).err().unwrap();
        assert_eq!(error.to_string(), "the second moment of input channel 4 is NaN, expected a number from 0 on");
        moments[[4, 4]] = -1.0;
        assert!(ErrorFeedback::of(moments.clone(), Damping::LEAST).is_err());
        moments[[4, 4]] = f32::INFINITY;
        assert!(ErrorFeedback::of(moments.clone(), Damping::LEAST).is_err());
        moments[[4, 4]] = 1.0;
        moments[[9, 3]] = f32::NAN;
        assert!(ErrorFeedback::of(moments.clone(), Damping::LEAST).is_err(), "off the diagonal");
    }

    #[test]
    fn codes_are_the_same_from_run_to_run_and_in_parts() {
        let (weight, moments) = (noise(600, 200, 19), moments(300, 200));
        let scales = scales_of_rows(&weight, 127.0);
        let feedback = ErrorFeedback::of(moments.clone(), Damping::LEAST).unwrap();
        let grids = integers(&scales, 200, 127);
        let whole = feedback.codes(weight.view(), &grids, 0);
        assert_eq!(ErrorFeedback::of(moments.clone(), Damping::LEAST).unwrap().codes(weight.view(), &grids, 0), whole);
        let part = |rows: std::ops::Range<usize>| {
            feedback.codes(weight.slice_axis(Axis(0), rows.clone().into()), &grids[rows], 0)
        };
        assert_eq!(ndarray::concatenate![Axis(0), part(0..250).codes, part(250..600).codes], whole.codes);
        let of_row = |row: ArrayView1<'_, f32>| vec![f16::from_f32(row[0].abs().max(0.5) / 5.0); 10];
        let scales: Vec<Vec<f16>> = weight.rows().into_iter().map(of_row).collect();
        let grids = integers(&scales, 20, 7);
        let whole = feedback.codes(weight.view(), &grids, 0);
        let parts = [0..250, 250..600].map(|rows| {
            feedback.codes(weight.slice_axis(Axis(0), rows.clone().into()), &grids[rows], 0).scales.unwrap()
        });
        assert_eq!(ndarray::concatenate![Axis(0), parts[0], parts[1]], whole.scales.unwrap());
    }
}
