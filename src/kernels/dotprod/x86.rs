//! Byte products on x86-64. Without AVX-512 VNNI, rows are multiplied as [words].
//!
//! Products of 64 neighbours at a time: `VPDPBUSD` (AVX-512 VNNI) adds byte products to 16 sums of 32 bits. One operand
//! is unsigned, so 128 is added to each element of a row, and 128 times the sum of a column's digits is subtracted.

use std::arch::x86_64::*;

use smallvec::SmallVec;

use super::super::digits::{Activations, DIGITS, DIGITS_MIDDLE, FEW_DIGITS, ONE_DIGIT, TWO_DIGITS, Unit};
use super::super::dispatch::{InstructionSet, Set};
use super::super::dot::PREFETCH_DISTANCE;
use super::super::prefetch::prefetch;
use super::{DigitColumn, DigitColumns, MeasuredColumn, ProductBlock};

mod lanes;
mod stored;
mod words;

pub(super) use lanes::ColumnLanes;
pub(in super::super) use stored::{StoredProducts, StoredRows};

/// Elements of a vector.
pub(super) const STEP: usize = 64;
/// Rows that are multiplied at a time with several columns: their sums with two columns, and the operands, fill the
/// registers.
const ROWS: usize = 3;
/// Rows at a time for columns of fewer digits.
const FEW_ROWS: usize = 4;
/// Columns that are multiplied with a block's rows before the next ones, so that their sums and digits stay cached.
const COLUMNS: usize = 16;
/// Rows whose products are delivered at a time; whole tiles.
const BLOCK: usize = 4 * ROWS * FEW_ROWS;
/// Sums of a block's rows with each digit of a column, and room for a whole last tile.
type BlockSums = [[i32; BLOCK + 4]; DIGITS];
/// Offset of an element.
const MIDDLE: i8 = -128;
/// Distance in bytes of a second prefetch of a single row, from the second-level to the first-level cache. Prefetching
/// to the first level at once is as fast on some processors, and slower on those with fewer outstanding requests there.
const NEAR_PREFETCH_DISTANCE: usize = 1024;

/// Instruction that sums products of rows of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Instruction {
    /// Sums of two products of words (AVX2).
    Vpmaddwd,
    /// Sums of two products of words (AVX-VNNI).
    Vpdpwssd,
    /// Sums of four products of bytes (AVX-512 VNNI).
    Vpdpbusd,
}

impl Instruction {
    /// Number of instructions.
    #[cfg(test)]
    pub const COUNT: usize = 3;

    /// Available instructions.
    pub fn available() -> impl Iterator<Item = Instruction> {
        let sets = [
            (Set::Avx2, Instruction::Vpmaddwd),
            (Set::AvxVnni, Instruction::Vpdpwssd),
            (Set::Avx512Vnni, Instruction::Vpdpbusd),
        ];
        sets.into_iter().filter(|(set, _)| InstructionSet::has(*set)).map(|(_, instruction)| instruction)
    }

    /// Best available instruction for activations, if it is faster than f32 products. Words gain only without AVX-512,
    /// and only for activations that mostly take one word.
    pub fn best(activations: Activations) -> Option<Instruction> {
        let best = Self::available().last()?;
        let gains =
            best == Instruction::Vpdpbusd || activations != Activations::F32 && !InstructionSet::has(Set::Avx512);
        gains.then_some(best)
    }

    /// Activations that this instruction gains from: of a word, 8 bits are no faster than 16.
    pub fn activations(self, asked: Activations) -> Activations {
        if asked == Activations::I8 && self != Instruction::Vpdpbusd { Activations::I16 } else { asked }
    }

    /// Returns whether many columns that are neighbours in the rows of a matrix are packed straight from the rows.
    pub fn packs_rows(self, depth: usize) -> bool {
        self == Instruction::Vpdpbusd && lanes::take(depth)
    }

    /// Names of the instructions in use.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let name = Self::best(Activations::I16).map(|instruction| match instruction {
            Instruction::Vpmaddwd => "VPMADDWD",
            Instruction::Vpdpwssd => "AVX-VNNI",
            Instruction::Vpdpbusd => "VNNI",
        });
        let tables = InstructionSet::has(Set::Avx512Vbmi);
        [name, tables.then_some("VBMI")].into_iter().flatten()
    }

    /// Returns whether products have the same bits as with other instructions of which this is true.
    #[cfg(test)]
    pub fn sums_digits(self) -> bool {
        self == Instruction::Vpdpbusd
    }

    /// Returns whether it is faster than f32 products for any number of columns.
    pub fn takes_many(self) -> bool {
        true
    }
}

/// Bytes that store an element of a column: as few as possible, to save cache.
pub(super) fn stored(instruction: Instruction, unit: Unit) -> usize {
    match instruction {
        Instruction::Vpdpbusd => unit.digits,
        Instruction::Vpmaddwd | Instruction::Vpdpwssd => 2 * words::words(unit),
    }
}

/// Packs a column for an instruction. Returns the initial sums.
///
/// # Safety
/// The processor has the instruction; the unit is that of the column.
pub(super) unsafe fn pack(instruction: Instruction, of: MeasuredColumn<'_>, out: &mut [i8]) -> [i32; DIGITS] {
    // SAFETY: as promised.
    unsafe {
        match instruction {
            Instruction::Vpdpbusd => pack_digits(of, out),
            Instruction::Vpmaddwd | Instruction::Vpdpwssd => {
                words::pack(of, out);
                [0; DIGITS]
            }
        }
    }
}

/// Passes the products of rows, whose elements have the sums `row_sums`, with columns and their lanes to `put`.
///
/// # Safety
/// The processor has the instruction of the columns; the rows are whole, and each column has all elements of a row.
/// There are sums of all rows unless there are no lanes.
pub(super) unsafe fn multiply(
    (of, lanes): (&DigitColumns, &ColumnLanes),
    rows: &[i8],
    row_sums: &[i32],
    put: impl FnMut(ProductBlock<'_>),
) {
    // SAFETY: as promised.
    unsafe {
        match of.instruction {
            Instruction::Vpdpbusd => multiply_digits((of, lanes), rows, row_sums, put),
            Instruction::Vpmaddwd => words::multiply_avx2(of, rows, lanes.is_by_row(), put),
            Instruction::Vpdpwssd => words::multiply_vnni(of, rows, lanes.is_by_row(), put),
        }
    }
}

/// Writes digits: for each [`STEP`] elements one vector per digit, the lowest first, padded with zeros. Returns the
/// initial sums.
///
/// # Safety
/// The processor has `VPDPBUSD`; the unit is that of the column.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn pack_digits(of: MeasuredColumn<'_>, digits: &mut [i8]) -> [i32; DIGITS] {
    let steps = digits.chunks_exact_mut(STEP * of.unit.digits);
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

/// Digits of elements, as from [`digits_of`](super::super::digits::digits_of).
///
/// # Safety
/// There are 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn vector_of_digits(elements: &[f32], inverse: f32) -> __m512i {
    // SAFETY: as promised.
    let elements = unsafe { _mm512_loadu_ps(elements.as_ptr()) };
    // nearest, ties to even
    let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(elements, _mm512_set1_ps(inverse)));
    let middle = _mm512_set1_epi32(DIGITS_MIDDLE.cast_signed());
    _mm512_xor_si512(_mm512_add_epi32(rounded, middle), middle)
}

impl DigitColumns {
    /// Columns with one digit, with two, and so on.
    fn by_digits(&self) -> [SmallVec<[usize; 8]>; DIGITS] {
        by_digits(self.columns.iter().map(|column| column.unit))
    }
}

/// Columns with one digit, with two, and so on, by the units of all columns.
fn by_digits(units: impl Iterator<Item = Unit>) -> [SmallVec<[usize; 8]>; DIGITS] {
    let mut found: [SmallVec<[usize; 8]>; DIGITS] = Default::default();
    units.enumerate().for_each(|(c, unit)| found[unit.digits - ONE_DIGIT].push(c));
    found
}

/// Passes the products of rows, whose elements have the sums `row_sums`, with columns and their lanes to `put`.
///
/// # Safety
/// The processor has `VPDPBUSD`; the rows are whole, and each column has digits for all elements of a row. There
/// are sums of all rows unless there are no lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn multiply_digits(
    (of, lanes): (&DigitColumns, &ColumnLanes),
    rows: &[i8],
    row_sums: &[i32],
    mut put: impl FnMut(ProductBlock<'_>),
) {
    let count = rows.len().checked_div(of.depth).unwrap_or(0);
    let [one, two, few, others] = lanes.left_by_digits();
    let most = [one, two, few, others].into_iter().map(SmallVec::len).max().unwrap_or(0);
    let mut sums: SmallVec<[BlockSums; 8]> = SmallVec::from_elem([[0; BLOCK + 4]; DIGITS], most.min(COLUMNS));
    for first in (0..count).step_by(BLOCK) {
        let here = BLOCK.min(count - first);
        let block = &rows[first * of.depth..][..here * of.depth];
        let mut put = |block: ProductBlock<'_>| put(block.offset_by(first));
        // SAFETY: as promised.
        unsafe {
            if !lanes.is_empty() {
                lanes.of_block(of, block, &row_sums[first..first + here], &mut put);
            }
            of_block::<FEW_ROWS, ONE_DIGIT>(of, one, block, &mut sums, &mut put);
            of_block::<FEW_ROWS, TWO_DIGITS>(of, two, block, &mut sums, &mut put);
            of_block::<FEW_ROWS, FEW_DIGITS>(of, few, block, &mut sums, &mut put);
            of_block::<ROWS, DIGITS>(of, others, block, &mut sums, &mut put);
        }
    }
}

/// Passes the products of a block's rows with some columns of `D` digits to `put`.
///
/// # Safety
/// As [`multiply_digits`].
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

/// Sums of a block's rows with each of some columns of `D` digits, `R` rows at a time if there are several columns.
/// Prefetches the following rows if `ask`.
///
/// # Safety
/// As [`multiply_digits`].
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

/// Sums of a row and a column, in two sets, so that products don't wait for each other.
///
/// # Safety
/// As [`multiply_digits`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn of_row<const D: usize>(mut row: *const i8, mut column: *const i8, depth: usize) -> [i32; DIGITS] {
    let mut sums = [[[[_mm512_setzero_si512(); 1]; D]; 1]; 2];
    // SAFETY: as promised; what is asked for need not be there.
    unsafe {
        for _ in 0..depth / (2 * STEP) {
            for sums in &mut sums {
                _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(PREFETCH_DISTANCE));
                prefetch(row.wrapping_add(NEAR_PREFETCH_DISTANCE));
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

/// Products of a block's rows with a column of `D` digits, from their sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn products<const D: usize>(column: DigitColumn, sums: &BlockSums) -> [f32; BLOCK] {
    std::array::from_fn(|row| column.product(std::array::from_fn(|digit| if digit < D { sums[digit][row] } else { 0 })))
}

/// Sums of some columns' digits with each of up to four rows. Prefetches as many rows from `next` on.
///
/// # Safety
/// As [`multiply_digits`].
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
/// The digits exist.
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

/// Fewer than 64 elements, each with [`MIDDLE`] added; their missing digits are zeros.
///
/// # Safety
/// There are `count`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn raised_part(row: *const i8, count: usize) -> __m512i {
    // SAFETY: as promised.
    let row = unsafe { _mm512_maskz_loadu_epi8((1 << count) - 1, row) };
    _mm512_xor_si512(row, _mm512_set1_epi8(MIDDLE))
}

/// Sum of each vector's elements; zero for missing vectors, up to four in all.
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
