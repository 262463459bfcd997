//! Randomised Hadamard matrices: `Q = diag(s) (A x H) / sqrt(2^k)` for `n = m 2^k` channels, `m` odd, with random signs
//! `s`, a random orthogonal `m` by `m` matrix `A` and the Hadamard matrix `H` of `2^k`, so that a row costs `n (m + k)`
//! operations. Their random numbers depend on a seed only.

use anec_kernels::hadamard::KroneckerHadamard;
use ndarray::{Array1, Array2, Axis};

use crate::error::Result;
use crate::tensor::SourceTensor;
use crate::weight::SquareMatrix;

/// Randomised Hadamard matrix of any size.
pub struct HadamardRotation {
    seed: u64,
    signs: Vec<f32>,
    /// `A^T / sqrt(2^k)`, row-major
    mixing: Vec<f32>,
    /// `2^k`
    width: usize,
}

impl HadamardRotation {
    /// Returns the matrix for `size` channels.
    ///
    /// # Errors
    /// Returns an error if `size` is too large.
    pub fn new(size: u64, seed: u64) -> Result<Self> {
        let width = 1usize << size.trailing_zeros();
        let odd = size as usize / width;
        let signs = normal("signs", size, 2 * seed)?.iter().map(|value| value.signum() as f32).collect();
        let mixing = random_orthogonal(odd, 2 * seed + 1)?.mapv(|value| (value / (width as f64).sqrt()) as f32);
        Ok(HadamardRotation { seed, signs, mixing: mixing.t().iter().copied().collect(), width })
    }

    /// Computes `matrix <- Q^T matrix`. Rows are multiplied as columns: `(x Q)^T = Q^T x^T`.
    fn multiply(&self, matrix: &mut [f32], columns: usize, scratch: &mut Vec<f32>) {
        let by = KroneckerHadamard { signs: &self.signs, mixing: &self.mixing, width: self.width };
        by.multiply(matrix, columns, scratch);
    }
}

/// Number of columns multiplied at a time, which fit into a core's cache.
const COLUMNS: usize = 64;

impl SquareMatrix for HadamardRotation {
    fn size(&self) -> u64 {
        self.signs.len() as u64
    }

    fn name(&self) -> String {
        format!("hadamard {} of seed {}", self.size(), self.seed)
    }

    fn is_orthogonal(&self) -> bool {
        true
    }

    fn multiply_rows(&self, rows: &mut [f32]) -> Result<()> {
        let mut scratch = Vec::new();
        rows.chunks_exact_mut(self.signs.len()).for_each(|row| self.multiply(row, 1, &mut scratch));
        Ok(())
    }

    fn multiply_columns(&self, matrix: &mut [f32], columns: usize) -> Result<()> {
        let (mut strip, mut scratch) = (Vec::new(), Vec::new());
        for first in (0..columns).step_by(COLUMNS) {
            let count = COLUMNS.min(columns - first);
            strip.clear();
            matrix.chunks_exact(columns).for_each(|row| strip.extend_from_slice(&row[first..first + count]));
            self.multiply(&mut strip, count, &mut scratch);
            for (row, strip) in matrix.chunks_exact_mut(columns).zip(strip.chunks_exact(count)) {
                row[first..first + count].copy_from_slice(strip);
            }
        }
        Ok(())
    }
}

/// Returns a random orthogonal matrix: a product of reflections at random vectors, each with one more leading zero (G.
/// W. Stewart 1980).
fn random_orthogonal(size: usize, seed: u64) -> Result<Array2<f64>> {
    let random = Array1::from(normal("reflections", (size * size) as u64, seed)?);
    let mut product = Array2::eye(size);
    for (index, vector) in random.exact_chunks(size).into_iter().enumerate() {
        let mut vector = vector.to_owned();
        vector.iter_mut().take(index).for_each(|value| *value = 0.0);
        let reflected = product.dot(&vector) * (2.0 / vector.dot(&vector));
        product -= &(reflected.insert_axis(Axis(1)).dot(&vector.insert_axis(Axis(0))));
    }
    Ok(product)
}

/// Returns normally distributed numbers.
fn normal(name: &str, count: u64, seed: u64) -> Result<Vec<f64>> {
    let mut values = vec![0.0; count as usize];
    SourceTensor::random(name, &[count], seed, 0.0, 1.0)?.read(0, &mut values)?;
    Ok(values.into_iter().map(f64::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dense(q: &HadamardRotation) -> Array2<f64> {
        let n = q.size() as usize;
        let mut rows: Vec<f32> = Array2::<f32>::eye(n).into_raw_vec_and_offset().0;
        q.multiply_rows(&mut rows).unwrap();
        Array2::from_shape_vec((n, n), rows.into_iter().map(f64::from).collect()).unwrap()
    }

    proptest! {
        #[test]
        fn any_width_has_an_orthogonal_matrix_that_multiplies_from_both_sides(
            n in 1u64..100, columns in 1usize..150, seed in 0u64..1000
        ) {
            let q = HadamardRotation::new(n, seed).unwrap();
            let dense = dense(&q);
            let away = (dense.t().dot(&dense) - Array2::<f64>::eye(n as usize)).mapv(f64::abs);
            prop_assert!(away.iter().all(|value| *value < 1e-5), "{away}");
            let mut values = vec![0.0; n as usize * columns];
            SourceTensor::random("w", &[n * columns as u64], seed, 0.0, 1.0).unwrap().read(0, &mut values).unwrap();
            let w = Array2::from_shape_vec((n as usize, columns), values.clone()).unwrap().mapv(f64::from);
            q.multiply_columns(&mut values, columns).unwrap();
            for (found, expected) in values.iter().zip(&dense.t().dot(&w)) {
                prop_assert!((f64::from(*found) - expected).abs() < 1e-4);
            }
        }
    }

    #[test]
    fn a_single_large_channel_is_spread_over_all() {
        let q = HadamardRotation::new(896, 1).unwrap();
        let mut row = vec![0.0; 896];
        row[5] = 100.0;
        q.multiply_rows(&mut row).unwrap();
        assert!(row.iter().all(|value| value.abs() < 10.0 && *value != 0.0));
        let other = HadamardRotation::new(896, 2).unwrap();
        assert_ne!(dense(&q), dense(&other));
        assert_ne!(q.name(), other.name());
    }
}
