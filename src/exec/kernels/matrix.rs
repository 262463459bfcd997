//! Products of two f32 matrices.

use gemm::{Parallelism, gemm};

use super::dot::{MOST_COLUMNS, Rows, Sums, add_dots};
use super::product::Layout;

/// Most rows of the first matrix for which adding up scaled rows of the second beats packing it.
const FEW: usize = 4;

/// `out = a b`, of sizes `[m, k]` and `[k, n]`; `out` is row-major and overwritten.
///
/// # Panics
/// If a slice is too short for its layout.
pub(crate) fn product(
    (m, k, n): (usize, usize, usize),
    (a, a_layout): (&[f32], Layout),
    (b, b_layout): (&[f32], Layout),
    out: &mut [f32],
    parallel: bool,
) {
    assert!(a.len() >= a_layout.extent(m, k) && b.len() >= b_layout.extent(k, n) && out.len() >= m * n);
    if m == 0 || n == 0 {
        return;
    }
    if k > 0 && m <= MOST_COLUMNS && a_layout.column == 1 && b_layout.row == 1 {
        return by_dots((m, k, n), (a, a_layout), (b, b_layout), out);
    }
    if m <= FEW && b_layout.column == 1 {
        for (i, out) in out[..m * n].chunks_exact_mut(n).enumerate() {
            out.fill(0.0);
            for j in 0..k {
                add_scaled(out, a[i * a_layout.row + j * a_layout.column], &b[j * b_layout.row..][..n]);
            }
        }
        return;
    }
    let parallelism = if parallel { Parallelism::Rayon(0) } else { Parallelism::None };
    // SAFETY: the layouts stay within the slices, as checked above, and out is row-major.
    unsafe {
        gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            false,
            a.as_ptr(),
            a_layout.column as isize,
            a_layout.row as isize,
            b.as_ptr(),
            b_layout.column as isize,
            b_layout.row as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Both matrices have their `k` elements in one piece.
fn by_dots(
    (m, k, n): (usize, usize, usize),
    (a, a_layout): (&[f32], Layout),
    (b, b_layout): (&[f32], Layout),
    out: &mut [f32],
) {
    let mut columns: [&[f32]; MOST_COLUMNS] = [&[]; MOST_COLUMNS];
    for (i, column) in columns[..m].iter_mut().enumerate() {
        *column = &a[i * a_layout.row..][..k];
    }
    out.fill(0.0);
    let rows = Rows { values: b, stride: b_layout.column, count: n };
    add_dots(rows, &columns[..m], |_| 1.0, Sums { values: out, row: 1, column: n });
}

/// `out += factor * values`.
fn add_scaled(out: &mut [f32], factor: f32, values: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn vector(out: &mut [f32], factor: f32, values: &[f32]) {
            for (out, value) in out.iter_mut().zip(values) {
                *out = factor.mul_add(*value, *out);
            }
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the features were just found.
            return unsafe { vector(out, factor, values) };
        }
    }
    for (out, value) in out.iter_mut().zip(values) {
        *out += factor * value;
    }
}

#[cfg(test)]
mod tests {
    use super::super::dot::tests::noise;
    use super::*;

    #[test]
    fn every_path_gives_the_same_product() {
        for (m, k, n) in [(1, 16, 5), (3, 7, 9), (4, 10, 6), (8, 5, 3), (20, 17, 11), (2, 0, 3)] {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let layouts =
                |rows: usize, columns: usize| [Layout { row: columns, column: 1 }, Layout { row: 1, column: rows }];
            for a_layout in layouts(m, k) {
                for b_layout in layouts(k, n) {
                    let mut out = vec![f32::NAN; m * n];
                    product((m, k, n), (&a, a_layout), (&b, b_layout), &mut out, false);
                    for i in 0..m {
                        for j in 0..n {
                            let exact: f32 = (0..k)
                                .map(|l| {
                                    a[i * a_layout.row + l * a_layout.column]
                                        * b[l * b_layout.row + j * b_layout.column]
                                })
                                .sum();
                            assert!((out[i * n + j] - exact).abs() < 1e-5, "{m} {k} {n}: {} {exact}", out[i * n + j]);
                        }
                    }
                }
            }
        }
    }
}
