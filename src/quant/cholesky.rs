//! Cholesky factor of a symmetric matrix, in blocks of columns: the columns of a block are factorized one after the
//! other, then their products are subtracted from the rest of the matrix.

use anec_kernels::pool;
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView1, ArrayViewMut2, Axis, Slice};

/// Columns of a block, and rows that a thread updates at a time.
const BLOCK: usize = 128;

/// Replaces the lower triangle of a symmetric matrix by its Cholesky factor; elements above the diagonal are
/// overwritten. Returns false if the matrix isn't positive definite.
pub(super) fn factorize(matrix: &mut Array2<f64>) -> bool {
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
        let mut parts: Vec<_> = below.axis_chunks_iter_mut(Axis(0), BLOCK).collect();
        pool::for_each_mut(&mut parts, |_, rows| {
            rows.axis_iter_mut(Axis(0)).for_each(|mut row| {
                for j in 0..width {
                    row[j] = (row[j] - first(row.view(), j).dot(&first(block.row(j), j))) / block[[j, j]];
                }
            });
        });
        // their products are subtracted from the columns behind the block
        let solved = below.slice_axis(Axis(1), Slice::from(..width)).to_owned();
        let parts = below.axis_chunks_iter_mut(Axis(0), BLOCK).zip(solved.axis_chunks_iter(Axis(0), BLOCK));
        pool::for_each_mut(&mut parts.collect::<Vec<_>>(), |i, (rows, own)| {
            let count = i * BLOCK + own.nrows();
            let others = solved.slice_axis(Axis(0), Slice::from(..count));
            let mut rest = rows.slice_axis_mut(Axis(1), Slice::from(width..width + count));
            general_mat_mul(-1.0, own, &others.t(), 1.0, &mut rest);
        });
    }
    true
}

/// First `count` elements.
fn first(row: ArrayView1<'_, f64>, count: usize) -> ArrayView1<'_, f64> {
    row.slice_axis_move(Axis(0), Slice::from(..count))
}

/// Replaces the lower triangle of a small symmetric matrix by its factor. Returns false if it isn't positive definite.
fn factorize_block(mut matrix: ArrayViewMut2<'_, f64>) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_times_its_transpose_is_the_matrix() {
        for n in [0, 1, 5, 128, 129, 300] {
            let inputs =
                Array2::from_shape_fn((n + 9, n), |(i, j)| ((i * 37 + j * 101 + i * j) % 211) as f64 / 100.0 - 1.0);
            let matrix = inputs.t().dot(&inputs) + Array2::<f64>::eye(n);
            let mut factor = matrix.clone();
            assert!(factorize(&mut factor));
            let lower = Array2::from_shape_fn((n, n), |(i, j)| if j <= i { factor[[i, j]] } else { 0.0 });
            let away = (lower.dot(&lower.t()) - &matrix).mapv(f64::abs);
            assert!(away.iter().all(|value| *value < 1e-9 * n as f64), "{n}");
        }
    }

    #[test]
    fn indefinite_matrices_are_refused() {
        for (at, value) in [(0, -1.0), (200, 0.0), (140, f64::NAN), (3, f64::INFINITY)] {
            let mut matrix = Array2::<f64>::eye(201);
            matrix[[at, at]] = value;
            assert!(!factorize(&mut matrix), "{at}: {value}");
        }
    }
}
