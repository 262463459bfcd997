//! Rotation that minimizes the largest weights, learned from the weights alone (SpinQuant, arXiv:2405.16406, without
//! data): `Q = Q_0 diag(R_1, R_2, ..)` with a randomised Hadamard matrix `Q_0` and orthogonal blocks `R_i`, so that an
//! element costs no more than a product with a row of its block.
//!
//! A tensor's scale is its largest magnitude, approximated by the 24-norm: Adam descends on `sum_t log |X_t R|_24`,
//! where `X_t` are the rows of largest norm of tensor `t` (columns for weights that write to the stream). Steps follow
//! skew matrices `S` by the Cayley transform `R <- R (I + S)^-1 (I - S)`, approximated by `R (I - 2 S + 2 S^2 - 2 S^3)`
//! and a Newton-Schulz step towards an orthogonal matrix.

use std::hash::{DefaultHasher, Hasher};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product;
use anec_kernels::norm24::{self, norm24_slopes};
use anec_kernels::pool;
use anec_kernels::quantize::largest_magnitude;
use ndarray::{Array2, ArrayViewMut2, Axis, Zip};

use super::hadamard::HadamardRotation;
use crate::error::Result;
use crate::weight::{SourceWeight, SquareMatrix, WeightExtent};

/// Maximum and minimum number of channels in a block.
const WIDEST: u64 = 128;
const NARROWEST: u64 = 8;
/// Maximum and minimum number of rows sampled from a tensor.
const ROWS: usize = 128;
const FEWEST_ROWS: usize = 16;
/// Maximum number of sampled elements, and number of weights per sampled element, so that learning never dominates the
/// conversion of a small model.
const ELEMENTS: u64 = 1 << 24;
const SHARE: u64 = 24;
/// Number of steps and size of the first; sizes decrease to zero.
const STEPS: usize = 250;
const RATE: f32 = 0.01;
/// Decay rates of Adam's averages.
const MOMENTUM: f32 = 0.9;
const SQUARES: f32 = 0.99;
/// Number of partial gradients, summed in order, and of threads that read samples.
const PARTS: usize = 8;

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
        let samples = self.samples()?;
        let mut digest = DefaultHasher::new();
        digest.write_usize(self.width);
        samples.iter().flatten().for_each(|value| digest.write_u32(value.to_bits()));
        let digest = digest.finish();
        let blocks = match &*last {
            Some((known, blocks)) if *known == digest => blocks.clone(),
            _ => Arc::new(learn(&samples, self.random.size() as usize, self.width)),
        };
        *last = Some((digest, blocks.clone()));
        Ok(self.blocks.get_or_init(|| blocks))
    }

    /// Returns the `count` rows of largest norm.
    fn samples(&self) -> Result<Vec<Array2<f32>>> {
        let size = self.random.size() as usize;
        let tensors = self.readers.len() + self.writers.len();
        let weights: u64 = self.readers.iter().chain(&self.writers).map(|weight| weight.elements()).sum();
        let rows = ELEMENTS.min(weights / SHARE) as usize / (size * tensors.max(1));
        let count = rows.clamp(FEWEST_ROWS.min(ELEMENTS as usize / (size * tensors.max(1))).max(1), ROWS);
        let sample = |index: usize| {
            let mut rows = match self.writers.get(index) {
                Some(writer) => largest_columns(writer, count)?,
                None => largest_rows(&self.readers[index - self.writers.len()], count)?,
            };
            if let Some(rows) = rows.as_slice_mut() {
                self.random.multiply_rows(rows)?;
            }
            Ok(rows)
        };
        let indices: Vec<usize> = (0..tensors).collect();
        in_parts(&indices, |part| part.iter().map(|index| sample(*index)).collect::<Result<Vec<_>>>())
            .into_iter()
            .collect::<Result<Vec<_>>>()
            .map(|parts| parts.into_iter().flatten().collect())
    }
}

impl SquareMatrix for LearnedRotation {
    fn size(&self) -> u64 {
        self.0.random.size()
    }

    fn name(&self) -> String {
        format!("learned from {}", self.0.random.name())
    }

    fn multiply_rows(&self, rows: &mut [f32]) -> Result<()> {
        self.0.random.multiply_rows(rows)?;
        let size = self.size() as usize;
        if let Ok(mut rows) = ArrayViewMut2::from_shape((rows.len() / size, size), rows) {
            for (mut part, block) in rows.axis_chunks_iter_mut(Axis(1), self.0.width).zip(self.0.blocks()?) {
                let product = part.dot(block);
                part.assign(&product);
            }
        }
        Ok(())
    }

    fn multiply_columns(&self, matrix: &mut [f32], columns: usize) -> Result<()> {
        self.0.random.multiply_columns(matrix, columns)?;
        if let Ok(mut matrix) = ArrayViewMut2::from_shape((self.size() as usize, columns), matrix) {
            for (mut part, block) in matrix.axis_chunks_iter_mut(Axis(0), self.0.width).zip(self.0.blocks()?) {
                let product = block.t().dot(&part);
                part.assign(&product);
            }
        }
        Ok(())
    }
}

/// Returns the `count` rows of largest norm.
fn largest_rows(weight: &SourceWeight, count: usize) -> Result<Array2<f32>> {
    let chosen = largest(&WeightExtent::of(weight)?.row_squares, count);
    let columns = weight.columns() as usize;
    let mut rows = Array2::zeros((chosen.len(), columns));
    for (mut row, index) in rows.outer_iter_mut().zip(chosen) {
        if let Some(row) = row.as_slice_mut() {
            weight.read_rows(index as u64, row)?;
        }
    }
    Ok(rows)
}

/// Returns the `count` columns of largest norm, as rows.
fn largest_columns(weight: &SourceWeight, count: usize) -> Result<Array2<f32>> {
    let chosen = largest(&WeightExtent::of(weight)?.column_squares, count);
    let mut rows = Array2::zeros((chosen.len(), weight.rows() as usize));
    let mut row = vec![0.0; weight.columns() as usize];
    for (index, mut column) in rows.axis_iter_mut(Axis(1)).enumerate() {
        weight.read_rows(index as u64, &mut row)?;
        column.iter_mut().zip(&chosen).for_each(|(to, from)| *to = row[*from]);
    }
    weight.release(0..weight.elements());
    Ok(rows)
}

/// Returns the indices of the `count` largest numbers.
fn largest(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order.truncate(count);
    order
}

/// Processes fixed parts of a list on threads and returns the results in order. These are separate threads, because a
/// thread of the pool that waits here could block the work it waits for. If the system gives no thread, the caller does
/// the work.
fn in_parts<T: Sync, R: Send>(items: &[T], work: impl Fn(&[T]) -> R + Sync) -> Vec<R> {
    let (length, work) = (items.len().div_ceil(PARTS).max(1), &work);
    std::thread::scope(|scope| {
        let start = |part| std::thread::Builder::new().spawn_scoped(scope, move || work(part)).map_err(|_| work(part));
        let threads: Vec<_> = items.chunks(length).map(start).collect();
        let joined = threads.into_iter().map(|started| started.map_or_else(Ok, |thread| thread.join()));
        joined.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// A block while it is learned.
struct Block {
    /// `R`, and Adam's averages of the tangents.
    matrix: Array2<f32>,
    means: Array2<f32>,
    squares: Array2<f32>,
}

/// Returns the blocks that minimize the samples' largest elements.
fn learn(samples: &[Array2<f32>], size: usize, width: usize) -> Vec<Array2<f32>> {
    let zeros = || Array2::<f32>::zeros((width, width));
    let block = |_| Block { matrix: Array2::eye(width), means: zeros(), squares: zeros() };
    let mut blocks: Vec<Block> = (0..size / width).map(block).collect();
    let part_length = samples.len().div_ceil(PARTS).max(1);
    let mut parts: Vec<_> = samples.chunks(part_length).map(|part| (part, Vec::new())).collect();
    for step in 0..STEPS {
        pool::for_each_mut(&mut parts, |_, (part, gradient)| {
            *gradient = vec![zeros(); blocks.len()];
            let mut products = Vec::new();
            for sample in part.iter() {
                add_gradient(sample, &blocks, &mut products, gradient);
            }
        });
        let rate = RATE * (1.0 - step as f32 / STEPS as f32);
        pool::for_each_mut(&mut blocks, |index, block| {
            let mut gradient = zeros();
            parts.iter().for_each(|(_, part)| gradient += &part[index]);
            block.descend(&gradient, rate, step as i32 + 1);
        });
    }
    blocks.into_iter().map(|block| block.matrix).collect()
}

impl Block {
    /// Turns the block against its gradient `G`, given transposed. Steps are counted from 1.
    fn descend(&mut self, gradient: &Array2<f32>, rate: f32, step: i32) {
        let product = gradient.dot(&self.matrix);
        // half of Rᵀ G - Gᵀ R
        let mut skew = (&product.t() - &product) / 2.0;
        let rate = rate / 2.0 / (1.0 - MOMENTUM.powi(step));
        let square_age = 1.0 - SQUARES.powi(step);
        Zip::from(&mut skew).and(&mut self.means).and(&mut self.squares).for_each(|skew, mean, square| {
            *mean = *mean * MOMENTUM + *skew * (1.0 - MOMENTUM);
            *square = *square * SQUARES + *skew * *skew * (1.0 - SQUARES);
            *skew = rate * *mean / ((*square / square_age).sqrt() + 1e-12);
        });
        // R (I + S)^-1 (I - S)
        let square = skew.dot(&skew);
        let cayley = Array2::eye(skew.nrows()) - &skew * 2.0 + &square * 2.0 - square.dot(&skew) * 2.0;
        self.matrix = orthogonal(&self.matrix.dot(&cayley));
    }
}

/// Returns the result of a Newton-Schulz step, which is nearer to orthogonal.
fn orthogonal(block: &Array2<f32>) -> Array2<f32> {
    block * 1.5 - block.dot(&block.t().dot(block)) * 0.5
}

/// Returns `log |X R|_24` and adds the transpose of its gradient by the blocks of `R` to `gradient`. `products` is a
/// buffer for `X R`, by blocks.
fn add_gradient(sample: &Array2<f32>, blocks: &[Block], products: &mut Vec<f32>, gradient: &mut [Array2<f32>]) -> f64 {
    let (rows, size) = sample.dim();
    let Some(values) = sample.as_slice().filter(|values| !values.is_empty()) else { return 0.0 };
    let width = size / blocks.len();
    products.resize(values.len(), 0.0);
    for (index, (block, products)) in blocks.iter().zip(products.chunks_exact_mut(rows * width)).enumerate() {
        let part = (&values[index * width..], MatrixLayout { row: size, column: 1 });
        let block = (block.matrix.as_slice().unwrap_or_default(), MatrixLayout { row: width, column: 1 });
        product((rows, width, width), part, block, products);
    }
    let largest = largest_magnitude(products);
    if largest == 0.0 {
        return 0.0;
    }
    let sum = norm24_slopes(products, largest);
    let inverse = 1.0 / sum as f32;
    for (index, (gradient, slopes)) in gradient.iter_mut().zip(products.chunks_exact(rows * width)).enumerate() {
        let Some(gradient) = gradient.as_slice_mut() else { return 0.0 };
        norm24::add_gradient((&values[index * width..], size, width), (slopes, width), inverse, gradient);
    }
    f64::from(largest).ln() + sum.ln() / 24.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::SourceTensor;

    fn random(name: &str, rows: u64, columns: u64, seed: u64) -> SourceWeight {
        SourceWeight::from(SourceTensor::random(name, &[rows, columns], seed, 0.0, 1.0).unwrap())
    }

    #[test]
    fn the_gradient_is_that_of_small_differences() {
        let mut sample = Array2::<f32>::zeros((5, 16));
        random("x", 5, 16, 3).read(0, sample.as_slice_mut().unwrap()).unwrap();
        let block = || Block { matrix: Array2::eye(8), means: Array2::zeros((8, 8)), squares: Array2::zeros((8, 8)) };
        let gradient = |blocks: &[Block]| {
            let mut sum = vec![Array2::zeros((8, 8)); 2];
            (add_gradient(&sample, blocks, &mut Vec::new(), &mut sum), sum)
        };
        let (_, gradient_of) = gradient(&[block(), block()]);
        for (index, row, column) in [(0, 0, 0), (0, 3, 5), (1, 7, 2)] {
            let moved = |by: f32| {
                let mut blocks = [block(), block()];
                blocks[index].matrix[[row, column]] += by;
                gradient(&blocks).0
            };
            let difference = (moved(1e-2) - moved(-1e-2)) / 2e-2;
            let found = f64::from(gradient_of[index][[column, row]]);
            assert!((found - difference).abs() < 0.02 * difference.abs().max(0.01), "{found} {difference}");
        }
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
