//! Dot products of stored rows with a few columns: where a model spends its time when it writes one token after the
//! other. A stored row is read once, widened in registers and multiplied with every column.

use half::f16;

/// Most columns that [`dot_rows`] takes.
pub(crate) const MOST_COLUMNS: usize = 8;

/// An element that rows are stored in.
pub(crate) trait Stored: Copy + Sync {
    /// Its value.
    fn value(self) -> f32;

    /// Eight values from `at`.
    ///
    /// # Safety
    /// The processor has AVX2, FMA and F16C, and eight elements can be read from `at`.
    #[cfg(target_arch = "x86_64")]
    unsafe fn eight(at: *const Self) -> std::arch::x86_64::__m256;
}

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

impl Stored for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn eight(at: *const f32) -> __m256 {
        // SAFETY: the caller promises the elements and the features.
        unsafe { _mm256_loadu_ps(at) }
    }
}

impl Stored for f16 {
    #[inline(always)]
    fn value(self) -> f32 {
        self.to_f32()
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn eight(at: *const f16) -> __m256 {
        // SAFETY: the caller promises the elements and the features.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}

impl Stored for i8 {
    #[inline(always)]
    fn value(self) -> f32 {
        self.into()
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn eight(at: *const i8) -> __m256 {
        // SAFETY: the caller promises the elements and the features.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()))) }
    }
}

/// Adds to `out[r * columns.len() + c]` the dot product of row `r` and column `c`, times the row's scale. Each row of
/// `rows` and each column is `length` long; there are as many scales as rows.
///
/// # Panics
/// If a slice is too short or there are more than [`MOST_COLUMNS`] columns.
pub(crate) fn dot_rows<S: Stored>(rows: &[&[S]], columns: &[&[f32]], scales: &[f32], out: &mut [f32]) {
    let length = columns.first().map_or(0, |c| c.len());
    assert!(rows.iter().all(|r| r.len() == length) && columns.iter().all(|c| c.len() == length));
    assert!(columns.len() <= MOST_COLUMNS && scales.len() == rows.len() && out.len() == rows.len() * columns.len());
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
        // SAFETY: the features were just found, and the lengths checked.
        unsafe { vector_rows(rows, columns, scales, out) };
        return;
    }
    portable_rows(rows, columns, scales, out);
}

fn portable_rows<S: Stored>(rows: &[&[S]], columns: &[&[f32]], scales: &[f32], out: &mut [f32]) {
    for ((row, out), scale) in rows.iter().zip(out.chunks_exact_mut(columns.len())).zip(scales) {
        for (column, out) in columns.iter().zip(out) {
            let mut lanes = [0f32; 8];
            let (row_chunks, row_rest) = row.as_chunks::<8>();
            let (column_chunks, column_rest) = column.as_chunks::<8>();
            for (w, x) in row_chunks.iter().zip(column_chunks) {
                for i in 0..8 {
                    lanes[i] += w[i].value() * x[i];
                }
            }
            let rest: f32 = row_rest.iter().zip(column_rest).map(|(w, x)| w.value() * x).sum();
            *out += (lanes.iter().sum::<f32>() + rest) * scale;
        }
    }
}

/// # Safety
/// The processor has AVX2, FMA and F16C; rows and columns are equally long, and the other slices fit them.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn vector_rows<S: Stored>(rows: &[&[S]], columns: &[&[f32]], scales: &[f32], out: &mut [f32]) {
    let count = columns.len();
    let mut row = 0;
    // tiles that keep their sums in registers: four rows by one column, two rows by two or more
    while row < rows.len() {
        let left = rows.len() - row;
        let mut column = 0;
        let height = match count {
            1 if left >= 4 => 4,
            _ if left >= 2 => 2,
            _ => 1,
        };
        while column < count {
            let width = match count - column {
                4.. => 4,
                2..4 => 2,
                _ => 1,
            };
            let (w, x) = (&rows[row..row + height], &columns[column..column + width]);
            let mut sums = [0f32; 8];
            // SAFETY: as promised to this function.
            unsafe {
                match (height, width) {
                    (4, 1) => tile::<S, 4, 1>(w, x, &mut sums),
                    (2, 4) => tile::<S, 2, 4>(w, x, &mut sums),
                    (2, 2) => tile::<S, 2, 2>(w, x, &mut sums),
                    (2, 1) => tile::<S, 2, 1>(w, x, &mut sums),
                    (1, 4) => tile::<S, 1, 4>(w, x, &mut sums),
                    (1, 2) => tile::<S, 1, 2>(w, x, &mut sums),
                    _ => tile::<S, 1, 1>(w, x, &mut sums),
                }
            }
            for r in 0..height {
                for c in 0..width {
                    out[(row + r) * count + column + c] += sums[r * width + c] * scales[row + r];
                }
            }
            column += width;
        }
        row += height;
    }
}

/// # Safety
/// As [`vector_rows`], with `R` rows and `C` columns.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<S: Stored, const R: usize, const C: usize>(rows: &[&[S]], columns: &[&[f32]], sums: &mut [f32; 8]) {
    let length = columns[0].len();
    let w: [*const S; R] = std::array::from_fn(|r| rows[r].as_ptr());
    let x: [*const f32; C] = std::array::from_fn(|c| columns[c].as_ptr());
    // two sets of sums, so that one multiplication need not wait for the one before it; large tiles have enough sums
    // to wait for none, and sixteen registers in all
    let mut even = [[_mm256_setzero_ps(); C]; R];
    let mut odd = [[_mm256_setzero_ps(); C]; R];
    let mut k = 0;
    if R * C < 8 {
        while k + 16 <= length {
            // SAFETY: k + 16 elements are within every row and column.
            unsafe {
                step::<S, R, C>(&w, &x, k, &mut even);
                step::<S, R, C>(&w, &x, k + 8, &mut odd);
            }
            k += 16;
        }
    }
    while k + 8 <= length {
        // SAFETY: k + 8 elements are within every row and column.
        unsafe { step::<S, R, C>(&w, &x, k, &mut even) };
        k += 8;
    }
    for r in 0..R {
        for c in 0..C {
            let mut lanes = [0f32; 8];
            // SAFETY: eight floats fit the array.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_add_ps(even[r][c], odd[r][c])) };
            let rest: f32 = (k..length).map(|k| rows[r][k].value() * columns[c][k]).sum();
            sums[r * C + c] = lanes.iter().sum::<f32>() + rest;
        }
    }
}

/// Adds the products of eight elements from `k` of each row and column.
///
/// # Safety
/// As [`tile`]; `k + 8` elements are within every row and column.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step<S: Stored, const R: usize, const C: usize>(
    w: &[*const S; R],
    x: &[*const f32; C],
    k: usize,
    sums: &mut [[__m256; C]; R],
) {
    // SAFETY: as promised to this function.
    unsafe {
        let x: [__m256; C] = std::array::from_fn(|c| _mm256_loadu_ps(x[c].add(k)));
        for r in 0..R {
            let w = S::eight(w[r].add(k));
            for c in 0..C {
                sums[r][c] = _mm256_fmadd_ps(w, x[c], sums[r][c]);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Numbers in -1..1 that look random and are the same every time.
    pub(crate) fn noise(count: usize, mut seed: u32) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn check<S: Stored>(store: impl Fn(f32) -> S) {
        for length in [1, 7, 8, 16, 33, 100] {
            for row_count in [1, 2, 3, 4, 5, 7] {
                for column_count in 1..=MOST_COLUMNS {
                    let weights: Vec<Vec<S>> =
                        (0..row_count).map(|r| noise(length, r as u32).into_iter().map(&store).collect()).collect();
                    let inputs: Vec<Vec<f32>> = (0..column_count).map(|c| noise(length, 100 + c as u32)).collect();
                    let rows: Vec<&[S]> = weights.iter().map(Vec::as_slice).collect();
                    let columns: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
                    let scales: Vec<f32> = (0..row_count).map(|r| 1.0 + r as f32).collect();
                    let mut portable = vec![1.0; row_count * column_count];
                    portable_rows(&rows, &columns, &scales, &mut portable);
                    let mut fast = vec![1.0; row_count * column_count];
                    dot_rows(&rows, &columns, &scales, &mut fast);
                    for (i, (fast, portable)) in fast.iter().zip(&portable).enumerate() {
                        let (r, c) = (i / column_count, i % column_count);
                        let terms = weights[r].iter().zip(&inputs[c]).map(|(w, x)| f64::from(w.value() * x));
                        let exact = terms.sum::<f64>() * f64::from(scales[r]) + 1.0;
                        let size =
                            weights[r].iter().map(|w| f64::from(w.value().abs())).sum::<f64>() * f64::from(scales[r]);
                        assert!((f64::from(*fast) - exact).abs() <= 2e-6 * size + 1e-6, "{fast} {exact}");
                        assert!((f64::from(*portable) - exact).abs() <= 2e-6 * size + 1e-6, "{portable} {exact}");
                    }
                }
            }
        }
    }

    #[test]
    fn vector_and_portable_products_agree_with_exact_ones() {
        check(|v| v);
        check(f16::from_f32);
        check(|v| (v * 127.0) as i8);
    }
}
