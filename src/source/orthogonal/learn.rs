//! Rotation that minimizes the largest weights, learned from the weights alone (SpinQuant, arXiv:2405.16406, without
//! data): `Q = Q_0 diag(R_1, R_2, ..)` with a randomised Hadamard matrix `Q_0` and orthogonal blocks `R_i`, so that an
//! element costs no more than a product with a row of its block.
//!
//! `descent` finds the blocks for `samples` of the weights.

use std::hash::{DefaultHasher, Hasher};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product_of_few;
use ndarray::Array2;

use super::descent::learn;
use super::hadamard::HadamardRotation;
use super::samples::{TensorSample, samples};
use crate::error::Result;
use crate::weight::{SourceWeight, SquareMatrix};

/// Maximum and minimum number of channels in a block. The minimum is the widest vector, so that all processors with
/// fused multiplications give the same bits.
const WIDEST: u64 = 128;
const NARROWEST: u64 = 16;
/// Columns multiplied at a time, which fit into a core's cache with a block.
const COLUMNS: usize = 128;

/// Blocks of a rotation.
type Blocks = Arc<Vec<Array2<f32>>>;

/// Blocks learned last, with the digest of their input, because a conversion with calibration opens its source several
/// times. The lock is held while learning.
static LAST: Mutex<Option<(u64, Blocks)>> = Mutex::new(None);

/// Learned rotation, computed at first use.
pub struct LearnedRotation(Arc<Inner>);

struct Inner {
    random: HadamardRotation,
    width: usize,
    readers: Vec<SourceWeight>,
    writers: Vec<SourceWeight>,
    blocks: OnceLock<Blocks>,
}

impl LearnedRotation {
    /// Returns the block width that divides the channels; `None` if it is too small to learn anything.
    pub fn blocks(random: &HadamardRotation) -> Option<u64> {
        let width = WIDEST.min(1 << random.size().trailing_zeros());
        (width >= NARROWEST).then_some(width)
    }

    /// Returns the rotation for the weights that read and write the stream, before rotation.
    pub fn new(random: HadamardRotation, width: u64, readers: Vec<SourceWeight>, writers: Vec<SourceWeight>) -> Self {
        let blocks = OnceLock::new();
        LearnedRotation(Arc::new(Inner { random, width: width as usize, readers, writers, blocks }))
    }

    /// Returns a weight that is computed after the rotation is known.
    pub fn deferred(&self) -> SourceWeight {
        let inner = self.0.clone();
        SourceWeight::computed("learned rotation", 0, move || inner.blocks().map(|_| Vec::new()))
    }
}

impl Inner {
    fn blocks(&self) -> Result<&[Array2<f32>]> {
        if let Some(blocks) = self.blocks.get() {
            return Ok(blocks);
        }
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(blocks) = self.blocks.get() {
            return Ok(blocks);
        }
        let samples = samples(&self.random, self.width, &self.readers, &self.writers)?;
        let mut digest = DefaultHasher::new();
        digest.write_usize(self.width);
        let values = samples.iter().flat_map(TensorSample::values);
        values.for_each(|value| digest.write_u32(value.to_bits()));
        let digest = digest.finish();
        let blocks = match &*last {
            Some((known, blocks)) if *known == digest => blocks.clone(),
            _ => Arc::new(learn(&samples, self.random.size() as usize / self.width, self.width)),
        };
        *last = Some((digest, blocks.clone()));
        Ok(self.blocks.get_or_init(|| blocks))
    }
}

impl SquareMatrix for LearnedRotation {
    fn size(&self) -> u64 {
        self.0.random.size()
    }

    fn name(&self) -> String {
        format!("learned from {}", self.0.random.name())
    }

    fn is_orthogonal(&self) -> bool {
        true
    }

    fn multiply_rows(&self, rows: &mut [f32]) -> Result<()> {
        self.0.random.multiply_rows(rows)?;
        let (size, width) = (self.size() as usize, self.0.width);
        let count = rows.len() / size;
        let mut products = vec![0.0; count * width];
        for (index, block) in self.0.blocks()?.iter().enumerate() {
            let part = &mut rows[(index * width).min(count * size)..];
            let layouts = [size, width].map(|row| MatrixLayout { row, column: 1 });
            let block = (block.as_slice().unwrap_or_default(), layouts[1]);
            product_of_few((count, width, width), (part, layouts[0]), block, &mut products);
            for (row, product) in part.chunks_mut(size).zip(products.chunks_exact(width)) {
                row[..width].copy_from_slice(product);
            }
        }
        Ok(())
    }

    fn multiply_columns(&self, matrix: &mut [f32], columns: usize) -> Result<()> {
        self.0.random.multiply_columns(matrix, columns)?;
        let width = self.0.width;
        let (mut strip, mut products) = (Vec::new(), vec![0.0; width * COLUMNS]);
        for (block, part) in self.0.blocks()?.iter().zip(matrix.chunks_exact_mut((width * columns).max(1))) {
            let transposed = (block.as_slice().unwrap_or_default(), MatrixLayout { row: 1, column: width });
            for first in (0..columns).step_by(COLUMNS) {
                let count = COLUMNS.min(columns - first);
                // whole vectors, so that all processors give the same bits
                let padded = count.next_multiple_of(NARROWEST as usize);
                strip.clear();
                for row in part.chunks_exact(columns) {
                    strip.extend_from_slice(&row[first..first + count]);
                    strip.resize(strip.len() + padded - count, 0.0);
                }
                let (strip, layout) = (&strip[..], MatrixLayout { row: padded, column: 1 });
                let products = &mut products[..width * padded];
                product_of_few((width, width, padded), transposed, (strip, layout), products);
                for (row, product) in part.chunks_exact_mut(columns).zip(products.chunks_exact(padded)) {
                    row[first..first + count].copy_from_slice(&product[..count]);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::SourceTensor;

    fn random(name: &str, rows: u64, columns: u64, seed: u64) -> SourceWeight {
        SourceWeight::from(SourceTensor::random(name, &[rows, columns], seed, 0.0, 1.0).unwrap())
    }

    #[test]
    fn a_learned_rotation_is_orthogonal_and_makes_the_largest_weights_smaller() {
        let readers: Vec<SourceWeight> = (0..3).map(|i| random("r", 40, 48, i)).collect();
        let writers = vec![random("w", 48, 30, 9)];
        let plain = HadamardRotation::new(48, 1).unwrap();
        let width = LearnedRotation::blocks(&plain).unwrap();
        assert_eq!(width, 16);
        let learned = LearnedRotation::new(HadamardRotation::new(48, 1).unwrap(), width, readers.clone(), writers);
        let mut rows: Vec<f32> = Array2::<f32>::eye(48).into_raw_vec_and_offset().0;
        learned.multiply_rows(&mut rows).unwrap();
        let dense = Array2::from_shape_vec((48, 48), rows).unwrap();
        let away = (dense.t().dot(&dense) - Array2::<f32>::eye(48)).mapv(f32::abs);
        assert!(away.iter().all(|value| *value < 1e-5), "{away}");
        let logs = |q: &dyn SquareMatrix| -> f64 {
            let most = |weight: &SourceWeight| {
                let mut rows = vec![0.0; weight.elements() as usize];
                weight.read(0, &mut rows).unwrap();
                q.multiply_rows(&mut rows).unwrap();
                f64::from(rows.iter().fold(0f32, |most, value| most.max(value.abs()))).ln()
            };
            readers.iter().map(most).sum()
        };
        assert!(logs(&learned) < logs(&plain) - 0.3, "{} {}", logs(&learned), logs(&plain));
        // columns are multiplied by the transpose
        let mut matrix = vec![0.0; 48 * 5];
        random("m", 48, 5, 4).read(0, &mut matrix).unwrap();
        let expected = dense.t().dot(&Array2::from_shape_vec((48, 5), matrix.clone()).unwrap());
        learned.multiply_columns(&mut matrix, 5).unwrap();
        assert!(matrix.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 1e-4));
    }
}
