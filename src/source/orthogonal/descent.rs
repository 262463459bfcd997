//! Descent to the blocks of a rotation that minimize the largest elements of samples.
//!
//! A tensor's scale is its largest magnitude, approximated by the 24-norm: Adam descends on `sum_t log |X_t R|_24`,
//! where `X_t` are the sampled pieces of tensor `t`. Each step looks at every fourth tensor, and the steps of the first
//! half at the leading pieces. Steps follow skew matrices `S` by the Cayley transform `R <- R (I + S)^-1 (I - S)`,
//! approximated by `R (I - 2 S + 2 S^2)`, and every fourth by a Newton-Schulz step towards an orthogonal matrix.

use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product_of_few;
use anec_kernels::norm24::{Peak, add_gradient, peaks};
use anec_kernels::pool;
use anec_kernels::quantize::largest_magnitude;
use ndarray::{Array2, Zip};

use super::samples::TensorSample;

/// Number of steps and size of the first; sizes decrease to zero.
const STEPS: usize = 200;
const RATE: f32 = 0.015;
/// Number of groups of tensors, of which each step takes the next.
const GROUPS: usize = 4;
/// Number of steps from one Newton-Schulz step to the next.
const CORRECTED: usize = 4;
/// Decay rates of Adam's averages.
const MOMENTUM: f32 = 0.9;
const SQUARES: f32 = 0.99;
/// Number of partial gradients, summed in order.
const PARTS: usize = 8;

/// A block while it is learned.
struct Block {
    matrix: Array2<f32>,
    /// Adam's averages of the gradient and of its squares.
    means: Array2<f32>,
    squares: Array2<f32>,
}

/// Samples whose gradients are added by one thread.
struct Part<'a> {
    /// Number of the first sample.
    first: usize,
    samples: &'a [TensorSample],
    gradient: Vec<Array2<f32>>,
    buffers: Buffers,
}

/// Products of a sample by block, and their peaks.
#[derive(Default)]
struct Buffers {
    products: Vec<Vec<f32>>,
    peaks: Vec<Peak>,
}

/// Returns the `count` blocks of `width` channels that minimize the samples' largest elements.
pub(super) fn learn(samples: &[TensorSample], count: usize, width: usize) -> Vec<Array2<f32>> {
    let zeros = || vec![Array2::<f32>::zeros((width, width)); count];
    let mut blocks: Vec<Block> = (0..count).map(|_| Block::new(width)).collect();
    let length = samples.len().div_ceil(PARTS).max(1);
    let part = |(index, samples)| {
        let first = index * length;
        Part { first, samples, gradient: zeros(), buffers: Buffers::default() }
    };
    let mut parts: Vec<Part<'_>> = samples.chunks(length).enumerate().map(part).collect();
    let groups = GROUPS.min(samples.len()).max(1);
    for step in 0..STEPS {
        pool::for_each_mut(&mut parts, |_, part| {
            part.gradient.iter_mut().for_each(|block| block.fill(0.0));
            for (index, sample) in part.samples.iter().enumerate() {
                if (part.first + index) % groups == step % groups {
                    let only_leading = step < STEPS / 2;
                    add_sample(sample, only_leading, &blocks, &mut part.buffers, &mut part.gradient);
                }
            }
        });
        let rate = RATE * (1.0 - step as f32 / STEPS as f32);
        pool::for_each_mut(&mut blocks, |index, block| {
            let mut gradient = Array2::zeros((width, width));
            parts.iter().for_each(|part| gradient += &part.gradient[index]);
            block.descend(&gradient, rate, step + 1);
        });
    }
    blocks.into_iter().map(|block| block.matrix).collect()
}

impl Block {
    fn new(width: usize) -> Self {
        let zeros = || Array2::zeros((width, width));
        Block { matrix: Array2::eye(width), means: zeros(), squares: zeros() }
    }

    /// Turns the block against its gradient `G`, given transposed. Steps are counted from 1.
    fn descend(&mut self, gradient: &Array2<f32>, rate: f32, step: usize) {
        let product = times(gradient, &self.matrix);
        // half of Rᵀ G - Gᵀ R
        let mut skew = (&product.t() - &product) / 2.0;
        let rate = rate / 2.0 / (1.0 - MOMENTUM.powi(step as i32));
        let square_age = 1.0 - SQUARES.powi(step as i32);
        Zip::from(&mut skew).and(&mut self.means).and(&mut self.squares).for_each(|skew, mean, square| {
            *mean = *mean * MOMENTUM + *skew * (1.0 - MOMENTUM);
            *square = *square * SQUARES + *skew * *skew * (1.0 - SQUARES);
            *skew = rate * *mean / ((*square / square_age).sqrt() + 1e-12);
        });
        // R (I + S)^-1 (I - S)
        let mut cayley = (times(&skew, &skew) - &skew) * 2.0;
        cayley.diag_mut().iter_mut().for_each(|value| *value += 1.0);
        self.matrix = times(&self.matrix, &cayley);
        if step.is_multiple_of(CORRECTED) {
            self.matrix = orthogonal(&self.matrix);
        }
    }
}

/// Returns the result of a Newton-Schulz step, which is nearer to orthogonal.
fn orthogonal(block: &Array2<f32>) -> Array2<f32> {
    let squares = times(&block.t().as_standard_layout().into_owned(), block);
    block * 1.5 - times(block, &squares) * 0.5
}

/// Returns the product of two square matrices in row-major order.
fn times(a: &Array2<f32>, b: &Array2<f32>) -> Array2<f32> {
    let mut product = Array2::zeros(a.raw_dim());
    let width = a.nrows();
    if let (Some(a), Some(b), Some(out)) = (a.as_slice(), b.as_slice(), product.as_slice_mut()) {
        let layout = MatrixLayout { row: width, column: 1 };
        product_of_few((width, width, width), (a, layout), (b, layout), out);
    }
    product
}

/// Returns `log |X R|_24` and adds the transpose of its gradient by the blocks of `R` to `gradient`.
fn add_sample(
    sample: &TensorSample,
    only_leading: bool,
    blocks: &[Block],
    buffers: &mut Buffers,
    gradient: &mut [Array2<f32>],
) -> f64 {
    let Buffers { products, peaks: found } = buffers;
    products.resize_with(blocks.len(), Vec::new);
    let mut largest = 0f32;
    for ((pieces, block), products) in sample.blocks.iter().zip(blocks).zip(&mut *products) {
        let (values, width) = (pieces.values(only_leading), block.matrix.nrows());
        products.resize(values.len(), 0.0);
        let layout = MatrixLayout { row: width, column: 1 };
        let block = (block.matrix.as_slice().unwrap_or_default(), layout);
        product_of_few((values.len() / width, width, width), (values, layout), block, products);
        largest = largest.max(largest_magnitude(products));
    }
    if largest == 0.0 {
        return 0.0;
    }
    found.clear();
    let mut sum = 0.0;
    let mut of_block = |products: &Vec<f32>| {
        let first = found.len();
        sum += peaks(products, largest, found);
        first..found.len()
    };
    let ranges: Vec<_> = products.iter().map(&mut of_block).collect();
    let factor = 1.0 / sum as f32;
    for ((pieces, range), gradient) in sample.blocks.iter().zip(ranges).zip(gradient) {
        let width = gradient.nrows();
        if let Some(gradient) = gradient.as_slice_mut() {
            add_gradient(pieces.values(only_leading), width, &found[range], factor, gradient);
        }
    }
    f64::from(largest).ln() + sum.ln() / 24.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::SourceTensor;

    fn sample(rows: usize, size: usize, width: usize, count: usize) -> TensorSample {
        let mut values = vec![0.0; rows * size];
        let tensor = SourceTensor::random("x", &[rows as u64, size as u64], 3, 0.0, 1.0).unwrap();
        tensor.read(0, &mut values).unwrap();
        TensorSample::of(&values, size, width, count)
    }

    #[test]
    fn the_gradient_is_that_of_small_differences() {
        let sample = sample(5, 32, 16, 10);
        let gradient = |blocks: &[Block]| {
            let mut sum = vec![Array2::zeros((16, 16)); 2];
            (add_sample(&sample, false, blocks, &mut Buffers::default(), &mut sum), sum)
        };
        let (_, gradient_of) = gradient(&[Block::new(16), Block::new(16)]);
        for (index, row, column) in [(0, 0, 0), (0, 3, 5), (1, 7, 2)] {
            let moved = |by: f32| {
                let mut blocks = [Block::new(16), Block::new(16)];
                blocks[index].matrix[[row, column]] += by;
                gradient(&blocks).0
            };
            let difference = (moved(1e-2) - moved(-1e-2)) / 2e-2;
            let found = f64::from(gradient_of[index][[column, row]]);
            assert!((found - difference).abs() < 0.02 * difference.abs().max(0.01), "{found} {difference}");
        }
    }

    #[test]
    fn blocks_stay_orthogonal_and_lower_the_norm() {
        let samples: Vec<TensorSample> = (0..3).map(|i| sample(30 + i, 32, 16, 40)).collect();
        let blocks = learn(&samples, 2, 16);
        for block in &blocks {
            let away = (block.t().dot(block) - Array2::<f32>::eye(16)).mapv(f32::abs);
            assert!(away.iter().all(|value| *value < 1e-5), "{away}");
        }
        let norm = |blocks: &[Block]| -> f64 {
            let mut gradient = vec![Array2::zeros((16, 16)); 2];
            let mut norm = |sample| add_sample(sample, false, blocks, &mut Buffers::default(), &mut gradient);
            samples.iter().map(&mut norm).sum()
        };
        let learned: Vec<Block> = blocks.into_iter().map(|matrix| Block { matrix, ..Block::new(16) }).collect();
        let plain = [Block::new(16), Block::new(16)];
        assert!(norm(&learned) < norm(&plain) - 0.3, "{} {}", norm(&learned), norm(&plain));
    }
}
