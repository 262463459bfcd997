//! Products with `(A x H) diag(s)`: `H` the Hadamard matrix of a power of two, `A` a small dense matrix, `s` signs.
//!
//! All instruction sets give the same bits: a butterfly is one addition and one subtraction for any vector width.

use super::dispatch::{Vectorize, vectorized};

/// Lanes of a group. Butterflies of a shorter distance stay within a group.
const LANES: usize = 16;

/// A matrix `(A x H) diag(s)` of `m * width` rows and columns.
#[derive(Clone, Copy, Debug)]
pub struct KroneckerHadamard<'a> {
    /// `s`: `m * width` factors.
    pub signs: &'a [f32],
    /// `A`, row-major, `m` by `m`.
    pub mixing: &'a [f32],
    /// Rows of `H`, a power of two.
    pub width: usize,
}

impl KroneckerHadamard<'_> {
    /// Computes `matrix <- (A x H) diag(s) matrix` for a row-major matrix of `columns` columns. `scratch` is
    /// overwritten.
    ///
    /// # Panics
    /// If `matrix` doesn't have `m * width` rows, `mixing` isn't square, or `width` isn't a power of two.
    pub fn multiply(self, matrix: &mut [f32], columns: usize, scratch: &mut Vec<f32>) {
        assert!(self.width.is_power_of_two() && self.signs.len().is_multiple_of(self.width), "width {}", self.width);
        let blocks = self.signs.len() / self.width;
        assert_eq!(self.mixing.len(), blocks * blocks, "the mixing matrix is square");
        assert_eq!(matrix.len(), self.signs.len() * columns, "rows");
        vectorized(Multiply { by: self, matrix, columns, scratch });
    }
}

struct Multiply<'a> {
    by: KroneckerHadamard<'a>,
    matrix: &'a mut [f32],
    columns: usize,
    scratch: &'a mut Vec<f32>,
}

impl Vectorize for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Multiply { by, matrix, columns, scratch } = self;
        if columns == 0 || matrix.is_empty() {
            return;
        }
        // loops, not closures: a closure isn't compiled for each instruction set
        if columns == 1 {
            for (value, sign) in matrix.iter_mut().zip(by.signs) {
                *value *= sign;
            }
        } else {
            for (row, sign) in matrix.chunks_exact_mut(columns).zip(by.signs) {
                for value in row {
                    *value *= sign;
                }
            }
        }
        let block = by.width * columns;
        for block in matrix.chunks_exact_mut(block) {
            hadamard(block, columns);
        }
        scratch.clear();
        scratch.extend_from_slice(matrix);
        let blocks = matrix.len() / block;
        for (factors, to) in by.mixing.chunks_exact(blocks).zip(matrix.chunks_exact_mut(block)) {
            mix(factors, scratch, to);
        }
    }
}

/// Computes `to <- sum of factors[i] * block i of from`.
#[inline(always)]
fn mix(factors: &[f32], from: &[f32], to: &mut [f32]) {
    let block = to.len();
    let whole = block - block % LANES;
    let (groups, rest) = to.split_at_mut(whole);
    for (group, to) in groups.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut sums = [0f32; LANES];
        for (factor, from) in factors.iter().zip(from.chunks_exact(block)) {
            let from = &from[group * LANES..][..LANES];
            for (sum, value) in sums.iter_mut().zip(from) {
                *sum += factor * value;
            }
        }
        *to = sums;
    }
    for (index, to) in rest.iter_mut().enumerate() {
        let mut sum = 0.0;
        for (factor, from) in factors.iter().zip(from.chunks_exact(block)) {
            sum += factor * from[whole + index];
        }
        *to = sum;
    }
}

/// Computes `matrix <- H matrix` for a power of two of rows.
#[inline(always)]
fn hadamard(matrix: &mut [f32], columns: usize) {
    let mut half = columns;
    if columns == 1 && matrix.len() >= LANES {
        for group in matrix.as_chunks_mut::<LANES>().0 {
            butterflies::<1>(group);
            butterflies::<2>(group);
            butterflies::<4>(group);
            butterflies::<8>(group);
        }
        half = LANES;
    }
    // two stages in one pass over memory
    while 4 * half <= matrix.len() {
        for four in matrix.chunks_exact_mut(4 * half) {
            let (ab, cd) = four.split_at_mut(2 * half);
            let ((a, b), (c, d)) = (ab.split_at_mut(half), cd.split_at_mut(half));
            for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
                let (sum_ab, less_ab, sum_cd, less_cd) = (*a + *b, *a - *b, *c + *d, *c - *d);
                (*a, *b, *c, *d) = (sum_ab + sum_cd, less_ab + less_cd, sum_ab - sum_cd, less_ab - less_cd);
            }
        }
        half *= 4;
    }
    if half < matrix.len() {
        let (upper, lower) = matrix.split_at_mut(half);
        for (a, b) in upper.iter_mut().zip(lower) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

/// Sums and differences of elements that are `HALF` apart, within a group.
#[inline(always)]
fn butterflies<const HALF: usize>(group: &mut [f32; LANES]) {
    let from = *group;
    for (index, to) in group.iter_mut().enumerate() {
        let sign = if index & HALF == 0 { 1.0 } else { -1.0 };
        *to = from[index ^ HALF] + sign * from[index];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::InstructionSet;

    /// Definition in f64: `sum_j A[a][b] H[h][g] s[b g] x[b g]`.
    fn by_definition(by: KroneckerHadamard<'_>, matrix: &[f32], columns: usize) -> Vec<f64> {
        let blocks = by.signs.len() / by.width;
        let mut out = vec![0f64; matrix.len()];
        for to in 0..by.signs.len() {
            for from in 0..by.signs.len() {
                let flips = ((to % by.width) & (from % by.width)).count_ones();
                let sign = if flips.is_multiple_of(2) { 1.0 } else { -1.0 };
                let factor = f64::from(by.mixing[to / by.width * blocks + from / by.width] * by.signs[from]) * sign;
                for column in 0..columns {
                    out[to * columns + column] += factor * f64::from(matrix[from * columns + column]);
                }
            }
        }
        out
    }

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn products_are_those_of_the_definition_with_the_same_bits_on_every_processor() {
        for (blocks, width, columns) in
            [(1, 1, 1), (7, 2, 1), (3, 8, 1), (1, 16, 1), (5, 32, 1), (7, 128, 1), (3, 64, 5), (1, 4, 64), (5, 1, 3)]
        {
            let (rows, seed) = (blocks * width, (blocks * 31 + width) as u32);
            let signs: Vec<f32> = numbers(rows, seed).iter().map(|value| value.signum()).collect();
            let mixing = numbers(blocks * blocks, seed + 1);
            let by = KroneckerHadamard { signs: &signs, mixing: &mixing, width };
            let matrix = numbers(rows * columns, seed + 2);
            let expected = by_definition(by, &matrix, columns);
            let mut first: Option<Vec<f32>> = None;
            for set in InstructionSet::available() {
                let (mut found, mut scratch) = (matrix.clone(), Vec::new());
                set.run(Multiply { by, matrix: &mut found, columns, scratch: &mut scratch });
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((f64::from(*found) - expected).abs() < 1e-4, "{found} {expected}");
                }
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(first.get_or_insert_with(|| found.clone())), bits(&found), "{set:?}");
            }
        }
    }
}
