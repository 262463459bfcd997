//! Products on processors with AVX2 but without AVX-512: an element of a column becomes one or two 16-bit words, a
//! row's bytes are widened to words, and `VPMADDWD` adds the products of two neighbours in 32 bits (`VPDPWSSD` of
//! AVX-VNNI adds them to a sum as well).
//!
//! A lane's sum over [`PART`] elements is exact. Lanes are converted to f32 and added in a fixed order, as are parts,
//! so a product has the same bits beside any other rows and columns.

use std::arch::x86_64::*;
use std::ops::Range;

use smallvec::SmallVec;

use super::super::{DigitColumns, MeasuredColumn, ProductBlock};
use super::{BLOCK, STEP};
use crate::digits::{DIGITS, TWO_DIGITS, Unit};
use crate::layout::MatrixLayout;
use crate::prefetch::prefetch;

/// Elements whose products are summed in 32 bits: 128 sums of two products of a byte and a word, in each lane.
const PART: usize = 128 * WORDS;
/// Words of a vector.
const WORDS: usize = 16;
/// Rows of a tile with a single column.
const SINGLE_ROWS: usize = 4;
/// Maximum columns of a tile.
const COLUMNS: usize = 6;
/// Distance between the products of rows, if they are contiguous by row.
const ROW_STRIDE: usize = 8;

/// Adds products of neighbouring words.
trait AddProducts {
    /// Adds `a[2i] * b[2i] + a[2i + 1] * b[2i + 1]` to `sums[i]`.
    ///
    /// # Safety
    /// The processor has the instruction.
    unsafe fn add(sums: __m256i, a: __m256i, b: __m256i) -> __m256i;
}

/// `VPMADDWD` and `VPADDD`.
struct Vpmaddwd;

impl AddProducts for Vpmaddwd {
    #[inline(always)]
    unsafe fn add(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: as promised.
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)) }
    }
}

/// `VPDPWSSD`.
struct Vpdpwssd;

impl AddProducts for Vpdpwssd {
    #[inline(always)]
    unsafe fn add(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: as promised.
        unsafe { _mm256_dpwssd_avx_epi32(sums, a, b) }
    }
}

/// Words of each element of a column.
pub(super) fn words(unit: Unit) -> usize {
    if unit.digits <= TWO_DIGITS { 1 } else { 2 }
}

/// Writes words: for each 16 elements a vector of low words, followed by one of high words if elements have two, padded
/// with zeros.
///
/// # Safety
/// The processor has AVX2; the unit is that of the column.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn pack(of: MeasuredColumn<'_>, out: &mut [i8]) {
    let words = words(of.unit);
    let mut elements = of.column.elements(of.count);
    let inverse = _mm256_set1_ps(of.unit.inverse);
    for (i, out) in out.chunks_exact_mut(2 * WORDS * words).enumerate() {
        let (mut near, here) = ([0.0; WORDS], of.count.saturating_sub(i * WORDS).min(WORDS));
        if of.column.step == 1 {
            near[..here].copy_from_slice(&of.column.values[of.count.min(i * WORDS)..][..here]);
        } else {
            near.iter_mut().zip(&mut elements).for_each(|(near, element)| *near = *element);
        }
        // SAFETY: there are 16 elements, and room for as many words.
        unsafe {
            let integers = [0, 8].map(|at| {
                // nearest, ties to even
                _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(near.as_ptr().add(at)), inverse))
            });
            let [low, high] = match words {
                1 => [integers, integers],
                _ => {
                    let low = integers.map(|v| _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(v)));
                    let high = [0, 1].map(|i| _mm256_srai_epi32::<16>(_mm256_sub_epi32(integers[i], low[i])));
                    [low, high]
                }
            };
            for (word, [first, second]) in [low, high].into_iter().enumerate().take(words) {
                let both = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(first, second));
                _mm256_storeu_si256(out.as_mut_ptr().add(2 * WORDS * word).cast(), both);
            }
        }
    }
}

/// Passes the products of rows with columns to `put`, contiguous by row if `by_row`.
///
/// # Safety
/// The processor has AVX2; the rows are whole, and each column has words for all elements of a row.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn multiply_avx2(
    of: &DigitColumns,
    rows: &[i8],
    by_row: bool,
    mut put: impl FnMut(ProductBlock<'_>),
) {
    // SAFETY: as promised.
    unsafe { multiply::<Vpmaddwd>(of, rows, by_row, &mut put) };
}

/// As [`multiply_avx2`], with AVX-VNNI.
///
/// # Safety
/// The processor has AVX-VNNI too; the rest as for [`multiply_avx2`].
#[target_feature(enable = "avx2,avxvnni")]
pub(super) unsafe fn multiply_vnni(
    of: &DigitColumns,
    rows: &[i8],
    by_row: bool,
    mut put: impl FnMut(ProductBlock<'_>),
) {
    // SAFETY: as promised.
    unsafe { multiply::<Vpdpwssd>(of, rows, by_row, &mut put) };
}

/// # Safety
/// As [`multiply_avx2`], with the instructions of `A`.
#[inline(always)]
unsafe fn multiply<A: AddProducts>(
    of: &DigitColumns,
    rows: &[i8],
    by_row: bool,
    put: &mut impl FnMut(ProductBlock<'_>),
) {
    let by_words = |count: usize| -> SmallVec<[usize; 8]> {
        (0..of.columns.len()).filter(|column| words(of.columns[*column].unit) == count).collect()
    };
    let (one, two) = (by_words(1), by_words(2));
    for (i, rows) in rows.chunks(BLOCK * of.depth.max(1)).enumerate() {
        let mut put = |block: ProductBlock<'_>| put(block.offset_by(i * BLOCK));
        // loops, not closures: a closure isn't compiled for the instruction set
        // SAFETY: as promised.
        unsafe {
            for columns in one.chunks(COLUMNS) {
                of_columns::<A, 1>(of, columns, rows, by_row, &mut put);
            }
            for columns in two.chunks(COLUMNS / 2) {
                of_columns::<A, 2>(of, columns, rows, by_row, &mut put);
            }
        }
    }
}

/// Products of a block's rows with up to `COLUMNS / D` columns of `D` words.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn of_columns<A: AddProducts, const D: usize>(
    of: &DigitColumns,
    columns: &[usize],
    rows: &[i8],
    by_row: bool,
    put: &mut impl FnMut(ProductBlock<'_>),
) {
    let count = rows.len() / of.depth;
    let mut products = [[0.0; ROW_STRIDE]; BLOCK];
    // a single column stays cached, and memory is read fastest sequentially; of several, a part stays cached
    let span = if columns.len() == 1 { SINGLE_ROWS } else { count };
    for (first, from) in (0..count).step_by(span).flat_map(|first| (0..of.depth).step_by(PART).map(move |k| (first, k)))
    {
        let part = Part { of, columns, rows, from, length: PART.min(of.depth - from) };
        let range = first..count.min(first + span);
        // SAFETY: as promised.
        unsafe {
            match columns.len() {
                1 => part.tiles::<A, SINGLE_ROWS, 1, D>(range, &mut products),
                2 => part.tiles::<A, 3, 2, D>(range, &mut products),
                3 if D == 2 => part.tiles::<A, 2, 3, D>(range, &mut products),
                3 => part.tiles::<A, 3, 3, D>(range, &mut products),
                4 => part.tiles::<A, 2, 4, D>(range, &mut products),
                5 => part.tiles::<A, 2, 5, D>(range, &mut products),
                _ => part.tiles::<A, 2, COLUMNS, D>(range, &mut products),
            }
        }
    }
    let mut units = [0.0; ROW_STRIDE];
    units.iter_mut().zip(columns).for_each(|(unit, column)| *unit = of.columns[*column].unit.size);
    for product in &mut products[..count] {
        product.iter_mut().zip(&units).for_each(|(product, unit)| *product *= unit);
    }
    if by_row {
        let layout = MatrixLayout { row: ROW_STRIDE, column: 1 };
        return put(ProductBlock { row: 0, rows: count, columns, products: products.as_flattened(), layout });
    }
    let mut by_column = [0.0; BLOCK * COLUMNS];
    for (c, column) in by_column.chunks_exact_mut(BLOCK).enumerate().take(columns.len()) {
        column.iter_mut().zip(&products[..count]).for_each(|(to, from)| *to = from[c]);
    }
    let layout = MatrixLayout { row: 1, column: BLOCK };
    put(ProductBlock { row: 0, rows: count, columns, products: &by_column, layout });
}

/// A part of the depth of some rows and columns.
struct Part<'a> {
    of: &'a DigitColumns,
    columns: &'a [usize],
    rows: &'a [i8],
    from: usize,
    length: usize,
}

impl Part<'_> {
    /// Adds the sums of a range of rows and all columns, in tiles of `R` rows, to `products`.
    ///
    /// # Safety
    /// As [`multiply`]; there are `C` columns of `D` words.
    #[inline(always)]
    unsafe fn tiles<A: AddProducts, const R: usize, const C: usize, const D: usize>(
        &self,
        range: Range<usize>,
        products: &mut [[f32; ROW_STRIDE]; BLOCK],
    ) {
        let Part { of, columns, rows, from, .. } = *self;
        let x: [*const i8; C] = std::array::from_fn(|c| of.of(columns[c]).wrapping_add(2 * from * D));
        for first in range.clone().step_by(R) {
            // the last row stands for missing ones
            let at = |r: usize| rows.as_ptr().wrapping_add((first + r).min(range.end - 1) * of.depth + from);
            // SAFETY: as promised.
            let sums = unsafe { self.tile::<A, R, C, D>(std::array::from_fn(at), x) };
            for (products, sums) in products[first..range.end].iter_mut().zip(sums) {
                products.iter_mut().zip(sums).for_each(|(product, sum)| *product += sum);
            }
        }
    }

    /// Sums of rows and columns.
    ///
    /// # Safety
    /// The rows have `length` elements, and the columns words for them.
    #[inline(always)]
    unsafe fn tile<A: AddProducts, const R: usize, const C: usize, const D: usize>(
        &self,
        rows: [*const i8; R],
        columns: [*const i8; C],
    ) -> [[f32; ROW_STRIDE]; R] {
        // SAFETY: as promised; prefetched memory need not exist.
        unsafe {
            let mut sums = [[[_mm256_setzero_si256(); D]; C]; R];
            for step in 0..self.length / WORDS {
                if C == 1 && step % 4 == 0 {
                    rows.iter().for_each(|row| prefetch(row.wrapping_add(step * WORDS + R * self.of.depth)));
                }
                let k = step * WORDS;
                let wide = rows.map(|row| _mm256_cvtepi8_epi16(_mm_loadu_si128(row.add(k).cast())));
                add::<A, R, C, D>(&mut sums, wide, columns, k);
            }
            let (rest, k) = (self.length % WORDS, self.length - self.length % WORDS);
            if rest > 0 {
                let wide = rows.map(|row| {
                    let mut bytes = [0i8; WORDS];
                    bytes.as_mut_ptr().copy_from_nonoverlapping(row.add(k), rest);
                    _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes.as_ptr().cast()))
                });
                add::<A, R, C, D>(&mut sums, wide, columns, k);
            }
            let mut all = [[0.0; ROW_STRIDE]; R];
            for r in 0..R {
                let mut lanes = [_mm256_setzero_ps(); ROW_STRIDE];
                for c in 0..C {
                    lanes[c] = joined(&sums[r][c]);
                }
                let [a, b, c, d, e, f, g, h] = lanes;
                _mm_storeu_ps(all[r].as_mut_ptr(), across([a, b, c, d]));
                if C > 4 {
                    _mm_storeu_ps(all[r][4..].as_mut_ptr(), across([e, f, g, h]));
                }
            }
            all
        }
    }
}

/// Adds the products of 16 elements of rows and columns, those of the columns from element `k` on.
///
/// # Safety
/// The processor has the instructions of `A`, and the columns have the words.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "words are loaded once, and are in one register at a time")]
unsafe fn add<A: AddProducts, const R: usize, const C: usize, const D: usize>(
    sums: &mut [[[__m256i; D]; C]; R],
    rows: [__m256i; R],
    columns: [*const i8; C],
    k: usize,
) {
    for c in 0..C {
        for d in 0..D {
            // SAFETY: as promised.
            unsafe {
                let words = _mm256_load_si256(columns[c].add(2 * (k * D + WORDS * d)).cast());
                for r in 0..R {
                    sums[r][c][d] = A::add(sums[r][c][d], rows[r], words);
                }
            }
        }
    }
}

/// Joins the sums of low and high words, lane by lane.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn joined<const D: usize>(sums: &[__m256i; D]) -> __m256 {
    // SAFETY: as promised.
    unsafe {
        let low = _mm256_cvtepi32_ps(sums[0]);
        match D {
            1 => low,
            _ => _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sums[D - 1]), _mm256_set1_ps(65536.0)), low),
        }
    }
}

/// Sum of each vector's lanes.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn across([a, b, c, d]: [__m256; 4]) -> __m128 {
    // SAFETY: as promised.
    unsafe {
        let all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all))
    }
}

const _: () = assert!(STEP.is_multiple_of(WORDS) && COLUMNS <= ROW_STRIDE && DIGITS == 4);
