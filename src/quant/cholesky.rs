//! Cholesky factor of a symmetric matrix, in blocks of columns: the columns of a block are factorized one after the
//! other, then their products are subtracted from the rest of the matrix.

use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product;
use anec_kernels::pool;
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis, Slice};

/// Columns of a block, and rows that a thread updates at a time.
const BLOCK: usize = 128;

/// Replaces the lower triangle of a symmetric matrix by its Cholesky factor; elements above the diagonal are
/// overwritten. Returns false if the matrix isn't positive definite, or so nearly indefinite that f32 can't tell.
pub(super) fn factorize(matrix: &mut Array2<f32>) -> bool {
    let n = matrix.nrows();
    for start in (0..n).step_by(BLOCK) {
        let width = BLOCK.min(n - start);
        let columns = matrix.slice_axis_mut(Axis(1), Slice::from(start..));
        let (mut above, mut below) = columns.split_at(Axis(0), start + width);
        let mut block = above.slice_axis_mut(Axis(0), Slice::from(start..));
        block.slice_axis_inplace(Axis(1), Slice::from(..width));
        if !factorize_block(block.view_mut()) {
            return false;
        }
        // rows below the block become solutions x of x Lᵀ = row
        let inverse = transposed_inverse(block.view());
        let Some(inverse) = inverse.as_slice() else { return false };
        let inverse = (inverse, MatrixLayout { row: width, column: 1 });
        let mut parts: Vec<_> = below.axis_chunks_iter_mut(Axis(0), BLOCK).collect();
        pool::for_each_mut(&mut parts, |_, rows| {
            let mut rows = rows.slice_axis_mut(Axis(1), Slice::from(..width));
            let own: Vec<f32> = rows.iter().copied().collect();
            let mut solved = vec![0f32; own.len()];
            let own = (&own[..], MatrixLayout { row: width, column: 1 });
            product((rows.nrows(), width, width), own, inverse, &mut solved);
            rows.iter_mut().zip(solved).for_each(|(value, solved)| *value = solved);
        });
        // their products are subtracted from the columns behind the block
        let solved = below.slice_axis(Axis(1), Slice::from(..width)).to_owned();
        let Some(solved) = solved.as_slice() else { return false };
        let mut parts: Vec<_> = below.axis_chunks_iter_mut(Axis(0), BLOCK).collect();
        pool::for_each_mut(&mut parts, |i, rows| {
            let (before, own) = (i * BLOCK, rows.nrows());
            let count = before + own;
            let mut products = vec![0f32; own * count];
            let own_rows = (&solved[before * width..], MatrixLayout { row: width, column: 1 });
            let others = (solved, MatrixLayout { row: 1, column: width });
            product((own, width, count), own_rows, others, &mut products);
            let mut rest = rows.slice_axis_mut(Axis(1), Slice::from(width..width + count));
            for (mut rest, products) in rest.axis_iter_mut(Axis(0)).zip(products.chunks_exact(count)) {
                rest.iter_mut().zip(products).for_each(|(value, product)| *value -= product);
            }
        });
    }
    true
}

/// First `count` elements.
fn first(row: ArrayView1<'_, f32>, count: usize) -> ArrayView1<'_, f32> {
    row.slice_axis_move(Axis(0), Slice::from(..count))
}

/// Replaces the lower triangle of a small symmetric matrix by its factor. Returns false if it isn't positive definite.
fn factorize_block(mut matrix: ArrayViewMut2<'_, f32>) -> bool {
    for j in 0..matrix.nrows() {
        let (mut above, mut below) = matrix.view_mut().split_at(Axis(0), j + 1);
        let own = first(above.row(j), j);
        let pivot = (above[[j, j]] - own.dot(&own)).sqrt();
        // false for NaN, too
        if !(pivot > 0.0 && pivot.is_finite()) {
            return false;
        }
        for mut row in below.axis_iter_mut(Axis(0)) {
            row[j] = (row[j] - first(row.view(), j).dot(&own)) / pivot;
        }
        above[[j, j]] = pivot;
    }
    true
}

/// Transpose of the inverse of a lower triangular matrix; what is above the diagonal isn't read.
fn transposed_inverse(lower: ArrayView2<'_, f32>) -> Array2<f32> {
    let n = lower.nrows();
    let mut columns = Array2::<f32>::zeros((n, n));
    for (j, mut column) in columns.axis_iter_mut(Axis(0)).enumerate() {
        for i in j..n {
            let known = Slice::from(j..i);
            let sum = lower.row(i).slice_axis(Axis(0), known).dot(&column.slice_axis(Axis(0), known));
            column[i] = (f32::from(u8::from(i == j)) - sum) / lower[[i, i]];
        }
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_times_its_transpose_is_the_matrix() {
        for n in [0, 1, 5, 128, 129, 300] {
            let inputs =
                Array2::from_shape_fn((n + 9, n), |(i, j)| ((i * 37 + j * 101 + i * j) % 211) as f64 / 100.0 - 1.0);
            let matrix = inputs.t().dot(&inputs) + Array2::<f64>::eye(n);
            let mut factor = matrix.mapv(|value| value as f32);
            assert!(factorize(&mut factor));
            let lower = Array2::from_shape_fn((n, n), |(i, j)| if j <= i { f64::from(factor[[i, j]]) } else { 0.0 });
            let largest = matrix.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
            let away = (lower.dot(&lower.t()) - &matrix).mapv(f64::abs);
            assert!(away.iter().all(|value| *value < 1e-6 * largest), "{n}");
        }
    }

    #[test]
    fn indefinite_matrices_are_refused() {
        for (at, value) in [(0, -1.0), (200, 0.0), (140, f32::NAN), (3, f32::INFINITY)] {
            let mut matrix = Array2::<f32>::eye(201);
            matrix[[at, at]] = value;
            assert!(!factorize(&mut matrix), "{at}: {value}");
        }
    }
}
