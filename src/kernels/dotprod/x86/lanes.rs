//! Many columns in lanes: a lane of a vector holds four neighbours of one digit of a column, and all lanes are
//! multiplied with the same four neighbours of a row, so that no sum crosses lanes. The unsigned operand is the digit,
//! with 128 added; 128 times the sum of the row's elements is subtracted.

use std::arch::x86_64::*;

use smallvec::SmallVec;

use super::super::{DigitColumns, ProductBlock};
use super::{BLOCK, Instruction, STEP};
use crate::aligned_buf::AlignedBuf;
use crate::digits::{DIGITS, FEW_DIGITS, ONE_DIGIT, TWO_DIGITS};
use crate::layout::MatrixLayout;
use crate::pool;

/// Lanes of a vector.
const LANES: usize = 16;
/// Neighbours in a lane.
const NEIGHBOURS: usize = 4;
/// Minimum used lanes of a group: with fewer, tiles of rows and columns are faster.
const MIN_LANES: usize = 14;
/// Rows whose sums are in registers.
const ROWS: usize = 8;
/// Maximum columns of a group.
const MAX_COLUMNS: usize = LANES / ONE_DIGIT;
/// Products of a row that are joined at a time.
const HALF: usize = LANES / 2;
/// Minimum groups for which threads are used to pack them.
const MIN_PARALLEL_GROUPS: usize = 4;

/// Columns of a group, all with the same number of digits.
struct Group {
    columns: SmallVec<[usize; MAX_COLUMNS]>,
    digits: usize,
}

/// Columns in lanes.
pub(in super::super) struct ColumnLanes {
    groups: SmallVec<[Group; 4]>,
    /// For each group and each four neighbours, a vector: the lowest digits of its columns first.
    packed: AlignedBuf,
    /// Columns without lanes, with one digit, with two, and so on.
    left: [SmallVec<[usize; 8]>; DIGITS],
    /// Words of a group.
    of_group: usize,
    /// Whether products are contiguous by row, else by column.
    by_row: bool,
}

impl ColumnLanes {
    /// Groups columns if enough of them have the same number of digits and rows consist of fours.
    pub fn new(of: &DigitColumns, by_row: bool) -> Self {
        let mut left = of.by_digits();
        let mut groups = SmallVec::new();
        if of.instruction == Instruction::Vpdpbusd && of.depth.is_multiple_of(NEIGHBOURS) {
            for (columns, digits) in left.iter_mut().zip(ONE_DIGIT..) {
                let mut rest = SmallVec::new();
                for columns in columns.chunks(LANES / digits) {
                    if columns.len() * digits < MIN_LANES {
                        rest = columns.into();
                    } else {
                        groups.push(Group { columns: columns.into(), digits });
                    }
                }
                *columns = rest;
            }
        }
        let of_group = of.depth / NEIGHBOURS * LANES;
        let mut packed = AlignedBuf::new(groups.len() * of_group);
        let mut parts: SmallVec<[_; 4]> = packed.words().chunks_exact_mut(of_group.max(1)).zip(&groups).collect();
        let pack = |_: usize, (words, group): &mut (&mut [u32], &Group)| group.pack(of, words);
        if parts.len() < MIN_PARALLEL_GROUPS {
            parts.iter_mut().for_each(|part| pack(0, part));
        } else {
            pool::for_each_mut(&mut parts, pack);
        }
        drop(parts);
        ColumnLanes { groups, packed, left, of_group, by_row }
    }

    /// Returns whether products are wanted contiguous by row.
    pub fn is_by_row(&self) -> bool {
        self.by_row
    }

    /// Returns whether no columns are in lanes.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Columns without lanes, by number of digits.
    pub fn left(&self) -> &[SmallVec<[usize; 8]>; DIGITS] {
        &self.left
    }

    /// Passes the products of a block's rows, whose elements have these sums, with all groups to `put`.
    ///
    /// # Safety
    /// The processor has the instructions, there are at most [`BLOCK`] rows, they are as long as the columns, and `of`
    /// are the columns that the lanes were made of.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    pub unsafe fn of_block(
        &self,
        of: &DigitColumns,
        rows: &[i8],
        sums: &[i32],
        put: &mut impl FnMut(ProductBlock<'_>),
    ) {
        for (i, group) in self.groups.iter().enumerate() {
            let lanes = self.packed.pointer().wrapping_add(i * self.of_group).cast();
            let block = (rows, sums, self.by_row, i == 0);
            // SAFETY: as promised.
            unsafe {
                match group.digits {
                    ONE_DIGIT => group.products::<ONE_DIGIT>(of, block, lanes, put),
                    TWO_DIGITS => group.products::<TWO_DIGITS>(of, block, lanes, put),
                    FEW_DIGITS => group.products::<FEW_DIGITS>(of, block, lanes, put),
                    _ => group.products::<DIGITS>(of, block, lanes, put),
                }
            }
        }
    }
}

impl Group {
    /// Writes a vector of lanes for each four neighbours. Unused lanes are zeros.
    fn pack(&self, of: &DigitColumns, words: &mut [u32]) {
        /// Adds 128 to four digits.
        const MIDDLE: u32 = 0x8080_8080;
        let width = LANES / self.digits;
        if self.columns.len() * self.digits < LANES {
            words.fill(0);
        }
        let columns: SmallVec<[&[[u32; STEP / NEIGHBOURS]]; MAX_COLUMNS]> =
            self.columns.iter().map(|column| bytemuck::cast_slice(of.digits_of(*column))).collect();
        for (step, out) in words.chunks_mut(STEP / NEIGHBOURS * LANES).enumerate() {
            for (c, column) in columns.iter().enumerate() {
                for (digit, digits) in column[step * self.digits..][..self.digits].iter().enumerate() {
                    let lane = digit * width + c;
                    for (out, near) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(digits) {
                        out[lane] = near ^ MIDDLE;
                    }
                }
            }
        }
    }

    /// Passes the products of a block's rows with the columns, which have `D` digits, to `put`. Prefetches rows if
    /// `ask`.
    ///
    /// # Safety
    /// As [`ColumnLanes::of_block`]; the lanes are those of the columns.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    unsafe fn products<const D: usize>(
        &self,
        of: &DigitColumns,
        (rows, sums, by_row, ask): (&[i8], &[i32], bool, bool),
        lanes: *const i8,
        put: &mut impl FnMut(ProductBlock<'_>),
    ) {
        let (depth, count, first) = (of.depth, sums.len(), rows.as_ptr());
        let mut units = [0.0; MAX_COLUMNS];
        units.iter_mut().zip(&self.columns).for_each(|(unit, column)| *unit = of.columns[*column].unit.size);
        let mut products = [0.0; BLOCK * MAX_COLUMNS];
        let layout = match by_row {
            true => MatrixLayout { row: MAX_COLUMNS, column: 1 },
            false => MatrixLayout { row: 1, column: BLOCK },
        };
        for row in (0..count).step_by(ROWS) {
            // the last row stands for missing ones
            let rows = std::array::from_fn(|r| first.wrapping_add((row + r).min(count - 1) * depth));
            let next = ask.then(|| first.wrapping_add((row + ROWS) * depth));
            // SAFETY: as promised.
            let found = unsafe { of_rows(rows, lanes, depth, next) };
            let of_row = |r: usize| {
                let taken = sums[(row + r).min(count - 1)].wrapping_mul(1 << 7);
                let found = _mm512_cvtepi32_ps(_mm512_sub_epi32(found[r], _mm512_set1_epi32(taken)));
                // SAFETY: the array has as many numbers as the vector.
                _mm512_mul_ps(joined::<D>(found), unsafe { _mm512_loadu_ps(units.as_ptr()) })
            };
            let found: [__m512; ROWS] = std::array::from_fn(of_row);
            let lower = (0, found.map(|row| _mm512_castps512_ps256(row)));
            let upper = || (HALF, found.map(|row| _mm512_extractf32x8_ps::<1>(row)));
            // columns of several digits take half of the lanes at most
            for (column, found) in std::iter::once(lower).chain((D == ONE_DIGIT).then(upper)) {
                let (found, first, step) = match by_row {
                    true => (found, row * MAX_COLUMNS + column, MAX_COLUMNS),
                    false => (transposed(found), row + column * BLOCK, BLOCK),
                };
                for (i, found) in found.into_iter().enumerate() {
                    // SAFETY: the slice has eight numbers, and there is room for whole tiles of rows.
                    unsafe { _mm256_storeu_ps(products[first + i * step..][..HALF].as_mut_ptr(), found) };
                }
            }
        }
        put(ProductBlock { row: 0, rows: count, columns: &self.columns, products: &products, layout });
    }
}

/// Joins sums by digit, each column in the lane of its lowest digit, as [`joined`](crate::digits::joined).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
fn joined<const D: usize>(sums: __m512) -> __m512 {
    let of_digit = |digit: usize| {
        let from: [i32; LANES] = std::array::from_fn(|lane| ((lane + digit * (LANES / D)) % LANES) as i32);
        // SAFETY: the array has as many numbers as the vector.
        _mm512_permutexvar_ps(unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }, sums)
    };
    let shift = _mm512_set1_ps(256.0);
    (0..D - 1).rev().fold(of_digit(D - 1), |upper, digit| _mm512_add_ps(_mm512_mul_ps(upper, shift), of_digit(digit)))
}

/// Transposes eight vectors of eight numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
fn transposed(rows: [__m256; 8]) -> [__m256; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    // interleave pairs, fours, and halves of two rows
    let twos = |x, y| (_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
    let fours = |x, y| (_mm256_shuffle_ps::<0x44>(x, y), _mm256_shuffle_ps::<0xee>(x, y));
    let halves = |x, y| (_mm256_permute2f128_ps::<0x20>(x, y), _mm256_permute2f128_ps::<0x31>(x, y));
    let four = |(ab, ab_high), (cd, cd_high)| {
        let ((first, second), (third, fourth)) = (fours(ab, cd), fours(ab_high, cd_high));
        [first, second, third, fourth]
    };
    let (upper, lower) = (four(twos(a, b), twos(c, d)), four(twos(e, f), twos(g, h)));
    let all: [_; 4] = std::array::from_fn(|i| halves(upper[i], lower[i]));
    [all[0].0, all[1].0, all[2].0, all[3].0, all[0].1, all[1].1, all[2].1, all[3].1]
}

/// Sums of rows with each lane. Prefetches as many rows from `next` on.
///
/// # Safety
/// The processor has the instructions; rows have `depth` elements, a multiple of four, with a vector of lanes for each
/// four.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
unsafe fn of_rows(
    rows: [*const i8; ROWS],
    lanes: *const i8,
    depth: usize,
    mut next: Option<*const i8>,
) -> [__m512i; ROWS] {
    let mut sums = [_mm512_setzero_si512(); ROWS];
    let mut add = |from: usize| {
        // SAFETY: as promised.
        let lanes = unsafe { _mm512_load_si512(lanes.add(from * LANES).cast()) };
        for (sum, row) in sums.iter_mut().zip(rows) {
            // SAFETY: as promised.
            let near = unsafe { row.add(from).cast::<i32>().read_unaligned() };
            *sum = _mm512_dpbusd_epi32(*sum, lanes, _mm512_set1_epi32(near));
        }
    };
    for from in (0..depth).step_by(STEP) {
        if let Some(next) = &mut next {
            for _ in 0..ROWS {
                _mm_prefetch::<_MM_HINT_T1>(*next);
                *next = next.wrapping_add(STEP);
            }
        }
        (from..depth.min(from + STEP)).step_by(NEIGHBOURS).for_each(&mut add);
    }
    sums
}
