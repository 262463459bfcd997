//! 64 neighbours at a time: `VPDPBUSD` (AVX-512 VNNI) adds the products of bytes to 16 sums of 32 bits. It takes a byte
//! without a sign, so 128 is added to each element of a row, and 128 times the sum of a column's digits is taken away.

use std::arch::x86_64::*;

use smallvec::SmallVec;

use super::super::ahead::ask;
use super::super::digits::{DIGITS, DIGITS_MIDDLE, FEW_DIGITS, LEAST_DIGITS, Unit};
use super::super::dot::AHEAD;
use super::{DigitColumn, DigitColumns, MeasuredColumn, ProductBlock};

mod lanes;
mod stored;

pub(super) use lanes::ColumnLanes;
pub(in super::super) use stored::{StoredProducts, StoredRows};

/// Elements of a vector.
pub(super) const STEP: usize = 64;
/// Rows that are multiplied at a time with several columns: their sums with two columns, and what gives them, fill the
/// registers.
const ROWS: usize = 3;
/// As many, with columns of fewer digits.
const FEW_ROWS: usize = 4;
/// Columns that are multiplied with a block's rows before the next ones are: their sums and digits remain near.
const COLUMNS: usize = 16;
/// Rows whose products are given at a time, whole tiles.
const BLOCK: usize = 4 * ROWS * FEW_ROWS;
/// The sums of a block's rows with each digit of a column, and room for the last tile to be whole.
type BlockSums = [[i32; BLOCK + 4]; DIGITS];
/// What is added to an element.
const MIDDLE: i8 = -128;
/// How far ahead, in bytes, a row that is read alone is asked for once more, into the innermost cache: it's in the second by then.
/// To ask for it there at once is as fast on some processors and slower on others, which wait for memory in fewer places there.
const NEAR: usize = 1024;

/// What multiplies bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Instruction {
    /// Sums of four products.
    Vpdpbusd,
}

impl Instruction {
    /// How many there are.
    #[cfg(test)]
    pub const COUNT: usize = 1;

    /// Those that this processor has.
    pub fn available() -> impl Iterator<Item = Instruction> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vnni");
        has.then_some(Instruction::Vpdpbusd).into_iter()
    }

    /// What this processor has.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let has = Self::available().next().is_some();
        let tables = has && is_x86_feature_detected!("avx512vbmi");
        [has.then_some("VNNI"), tables.then_some("VBMI")].into_iter().flatten()
    }

    /// Whether it is the best that there is for any number of columns.
    pub fn takes_many(self) -> bool {
        #[cfg(target_os = "linux")]
        return !crate::amx::is_available();
        #[cfg(not(target_os = "linux"))]
        true
    }
}

/// How many digits of a column's elements are stored: those that it has, so that they take no more of the nearest cache.
pub(super) fn stored(unit: Unit) -> usize {
    unit.digits
}

/// Writes digits: of each [`STEP`] elements a vector for each digit, the lowest first, and zeros behind the last element.
/// Gives what the sums begin with.
///
/// # Safety
/// The processor has the instruction; the unit is that of the column.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn pack(_: Instruction, of: MeasuredColumn<'_>, digits: &mut [i8]) -> [i32; DIGITS] {
    let steps = digits.chunks_exact_mut(STEP * stored(of.unit));
    let mut elements = of.column.elements(of.count);
    let mut sums = [_mm512_setzero_si512(); DIGITS];
    for (i, digits) in steps.enumerate() {
        let (mut near, here) = ([0.0; STEP], STEP.min(of.count - i * STEP));
        if of.column.step == 1 {
            near[..here].copy_from_slice(&of.column.values[i * STEP..][..here]);
        } else {
            near.iter_mut().zip(&mut elements).for_each(|(near, element)| *near = *element);
        }
        // SAFETY: there are four vectors of elements.
        let all: [__m512i; 4] = std::array::from_fn(|i| unsafe { vector_of_digits(&near[i * 16..], of.unit.inverse) });
        for (digit, digits) in digits.as_chunks_mut::<STEP>().0.iter_mut().enumerate() {
            let shift = _mm_cvtsi32_si128(8 * digit as i32);
            let [a, b, c, d] = all.map(|all| _mm512_cvtepi32_epi8(_mm512_srl_epi32(all, shift)));
            let halves = [_mm256_set_m128i(b, a), _mm256_set_m128i(d, c)];
            let vector = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(halves[0]), halves[1]);
            // SAFETY: there is room for 64 bytes.
            unsafe { _mm512_storeu_si512(digits.as_mut_ptr().cast(), vector) };
            sums[digit] = _mm512_dpbusd_epi32(sums[digit], _mm512_set1_epi8(1), vector);
        }
    }
    sums.map(|sum| _mm512_reduce_add_epi32(sum) * i32::from(MIDDLE))
}

/// The digits of elements, as [`digits_of`](super::super::digits::digits_of) gives them.
///
/// # Safety
/// There are 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn vector_of_digits(elements: &[f32], inverse: f32) -> __m512i {
    // SAFETY: as promised.
    let elements = unsafe { _mm512_loadu_ps(elements.as_ptr()) };
    // to the nearest, ties to even
    let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(elements, _mm512_set1_ps(inverse)));
    let middle = _mm512_set1_epi32(DIGITS_MIDDLE.cast_signed());
    _mm512_xor_si512(_mm512_add_epi32(rounded, middle), middle)
}

impl DigitColumns {
    /// Which columns have [`LEAST_DIGITS`], [`FEW_DIGITS`] and [`DIGITS`].
    fn by_digits(&self) -> [SmallVec<[usize; 8]>; 3] {
        [LEAST_DIGITS, FEW_DIGITS, DIGITS]
            .map(|digits| (0..self.columns.len()).filter(|c| self.columns[*c].unit.digits == digits).collect())
    }
}

/// Gives the products of rows, whose elements have these sums, with columns and their lanes.
///
/// # Safety
/// The processor has the instruction; the rows are whole, and each column has digits for all elements of a row. There are
/// sums of all rows unless there are no lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn multiply(
    (of, lanes): (&DigitColumns, &ColumnLanes),
    rows: &[i8],
    row_sums: &[i32],
    mut put: impl FnMut(ProductBlock<'_>),
) {
    let count = rows.len().checked_div(of.depth).unwrap_or(0);
    let [least, few, others] = lanes.left();
    let most = [least, few, others].into_iter().map(SmallVec::len).max().unwrap_or(0);
    let mut sums: SmallVec<[BlockSums; 8]> = SmallVec::from_elem([[0; BLOCK + 4]; DIGITS], most.min(COLUMNS));
    for first in (0..count).step_by(BLOCK) {
        let here = BLOCK.min(count - first);
        let block = &rows[first * of.depth..][..here * of.depth];
        let mut put = |block: ProductBlock<'_>| put(block.moved_by(first));
        // SAFETY: as promised.
        unsafe {
            if !lanes.is_empty() {
                lanes.of_block(of, block, &row_sums[first..first + here], &mut put);
            }
            of_block::<FEW_ROWS, LEAST_DIGITS>(of, least, block, &mut sums, &mut put);
            of_block::<FEW_ROWS, FEW_DIGITS>(of, few, block, &mut sums, &mut put);
            of_block::<ROWS, DIGITS>(of, others, block, &mut sums, &mut put);
        }
    }
}

/// Gives the products of a block's rows with some columns, which have `D` digits.
///
/// # Safety
/// As [`multiply`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn of_block<const R: usize, const D: usize>(
    of: &DigitColumns,
    columns: &[usize],
    rows: &[i8],
    sums: &mut [BlockSums],
    put: &mut impl FnMut(ProductBlock<'_>),
) {
    for (i, columns) in columns.chunks(COLUMNS).enumerate() {
        // SAFETY: as promised.
        unsafe { add_up::<R, D>(of, columns, (rows, i == 0), sums) };
        for (sums, c) in sums.iter().zip(columns) {
            let products = products::<D>(of.columns[*c], sums);
            put(ProductBlock::of_column(0, c, &products[..rows.len() / of.depth]));
        }
    }
}

/// The sums of a block's rows with each of some columns, which have `D` digits: of `R` rows at a time where there are several
/// columns. Asks for the rows that follow if they haven't been asked for.
///
/// # Safety
/// As [`multiply`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_up<const R: usize, const D: usize>(
    of: &DigitColumns,
    columns: &[usize],
    (rows, ask): (&[i8], bool),
    sums: &mut [BlockSums],
) {
    let (depth, count, first) = (of.depth, rows.len() / of.depth, rows.as_ptr());
    // SAFETY: as promised; the last row stands for those that are missing.
    unsafe {
        if let [column] = *columns {
            for row in 0..count {
                let of_row = of_row::<D>(first.add(row * depth), of.of(column), depth);
                sums[0].iter_mut().zip(of_row).for_each(|(sums, sum)| sums[row] = sum);
            }
            return;
        }
        for row in (0..count).step_by(R) {
            let rows = std::array::from_fn(|r| first.add((row + r).min(count - 1) * depth));
            let mut next = ask.then(|| first.wrapping_add((row + R) * depth));
            for (pair, sums) in columns.chunks(2).zip(sums.chunks_mut(2)) {
                let mut put = |c: usize, tile: [[i32; 4]; D]| {
                    sums[c].iter_mut().zip(tile).for_each(|(sums, tile)| sums[row..row + 4].copy_from_slice(&tile));
                };
                if let [one, other] = *pair {
                    let [first, second] = of_tile::<R, 2, D>(rows, [of.of(one), of.of(other)], depth, next.take());
                    put(0, first);
                    put(1, second);
                } else {
                    let [tile] = of_tile::<R, 1, D>(rows, [of.of(pair[0])], depth, next.take());
                    put(0, tile);
                }
            }
        }
    }
}

/// The sums of a row and a column. Two sets of them, so that no product waits for the one before it.
///
/// # Safety
/// As [`multiply`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn of_row<const D: usize>(mut row: *const i8, mut column: *const i8, depth: usize) -> [i32; DIGITS] {
    let mut sums = [[[[_mm512_setzero_si512(); 1]; D]; 1]; 2];
    // SAFETY: as promised; what is asked for need not be there.
    unsafe {
        for _ in 0..depth / (2 * STEP) {
            for sums in &mut sums {
                _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(AHEAD));
                ask(row.wrapping_add(NEAR));
                add_products(sums, [raised(row)], [column]);
                (row, column) = (row.add(STEP), column.add(D * STEP));
            }
        }
        if !(depth / STEP).is_multiple_of(2) {
            add_products(&mut sums[0], [raised(row)], [column]);
            (row, column) = (row.add(STEP), column.add(D * STEP));
        }
        if !depth.is_multiple_of(STEP) {
            add_products(&mut sums[1], [raised_part(row, depth % STEP)], [column]);
        }
    }
    let [[one], [other]] = sums;
    across::<D>(std::array::from_fn(|digit| _mm512_add_epi32(one[digit][0], other[digit][0])))
}

/// The products of a block's rows with a column of `D` digits whose sums these are.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn products<const D: usize>(column: DigitColumn, sums: &BlockSums) -> [f32; BLOCK] {
    std::array::from_fn(|row| column.product(std::array::from_fn(|digit| if digit < D { sums[digit][row] } else { 0 })))
}

/// The sums of some columns' digits with each of some rows, no more than four. Asks for as many rows from `next` on.
///
/// # Safety
/// As [`multiply`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn of_tile<const R: usize, const C: usize, const D: usize>(
    mut rows: [*const i8; R],
    mut columns: [*const i8; C],
    depth: usize,
    mut next: Option<*const i8>,
) -> [[[i32; 4]; D]; C] {
    let mut sums = [[[_mm512_setzero_si512(); R]; D]; C];
    // SAFETY: as promised; what is asked for need not be there.
    unsafe {
        for _ in 0..depth / STEP {
            if let Some(next) = &mut next {
                for _ in 0..R {
                    _mm_prefetch::<_MM_HINT_T1>(*next);
                    *next = next.wrapping_add(STEP);
                }
            }
            add_products(&mut sums, rows.map(|row| raised(row)), columns);
            rows = rows.map(|row| row.add(STEP));
            columns = columns.map(|column| column.add(D * STEP));
        }
        if !depth.is_multiple_of(STEP) {
            add_products(&mut sums, rows.map(|row| raised_part(row, depth % STEP)), columns);
        }
    }
    sums.map(|sums| sums.map(|rows| across(rows)))
}

/// Adds the products of some elements of rows and each digit of columns.
///
/// # Safety
/// There are as many digits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[expect(clippy::needless_range_loop, reason = "digits are loaded once, and are in one register at a time")]
unsafe fn add_products<const R: usize, const C: usize, const D: usize>(
    sums: &mut [[[__m512i; R]; D]; C],
    rows: [__m512i; R],
    columns: [*const i8; C],
) {
    for c in 0..C {
        for digit in 0..D {
            // SAFETY: as promised.
            let digits = unsafe { _mm512_load_si512(columns[c].add(digit * STEP).cast()) };
            for r in 0..R {
                sums[c][digit][r] = _mm512_dpbusd_epi32(sums[c][digit][r], rows[r], digits);
            }
        }
    }
}

/// Elements of a row, each with [`MIDDLE`] added.
///
/// # Safety
/// There are 64.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn raised(row: *const i8) -> __m512i {
    // SAFETY: as promised.
    _mm512_xor_si512(unsafe { _mm512_loadu_si512(row.cast()) }, _mm512_set1_epi8(MIDDLE))
}

/// As [`raised`] for fewer elements; the digits behind them are zeros.
///
/// # Safety
/// There are as many.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn raised_part(row: *const i8, count: usize) -> __m512i {
    // SAFETY: as promised.
    let row = unsafe { _mm512_maskz_loadu_epi8((1 << count) - 1, row) };
    _mm512_xor_si512(row, _mm512_set1_epi8(MIDDLE))
}

/// The sum of each vector's elements; zeros for those up to four that are missing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn across<const N: usize>(vectors: [__m512i; N]) -> [i32; 4] {
    let [a, b, c, d] = std::array::from_fn(|i| if i < N { vectors[i] } else { _mm512_setzero_si512() });
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    let all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let all = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
    let all = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all));
    let mut sums = [0; 4];
    // SAFETY: the array has as many bytes as the vector.
    unsafe { _mm_storeu_si128(sums.as_mut_ptr().cast(), all) };
    sums
}
