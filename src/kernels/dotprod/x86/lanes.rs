//! Many columns, side by side: a lane of a vector holds four neighbours of one digit of a column, and all lanes are multiplied
//! with the same four neighbours of a row, so that no sum goes across lanes. What takes a byte without a sign is the digit here,
//! with 128 added; so 128 times the sum of the row's elements is taken away.

use std::arch::x86_64::*;

use smallvec::SmallVec;

use super::super::{DigitColumns, ProductBlock};
use super::{BLOCK, STEP};
use crate::aligned_buf::AlignedBuf;
use crate::digits::{DIGITS, FEW_DIGITS, LEAST_DIGITS};
use crate::layout::MatrixLayout;
use crate::pool;

/// Lanes of a vector.
const LANES: usize = 16;
/// Neighbours in a lane.
const NEAR: usize = 4;
/// Lanes of a group that are in use at least: with fewer, tiles of rows and columns are faster.
const LEAST_LANES: usize = 14;
/// Rows whose sums are in registers, each with its place in another.
const ROWS: usize = 8;
/// Most columns of a group.
const MOST: usize = LANES / LEAST_DIGITS;
/// Groups from which on threads are woken to pack them.
const MANY: usize = 4;

/// Columns with equally many digits that lie side by side.
struct Group {
    columns: SmallVec<[usize; MOST]>,
    digits: usize,
}

/// The columns that can be multiplied so.
pub(in super::super) struct ColumnLanes {
    groups: SmallVec<[Group; 4]>,
    /// Of each group, and of each four neighbours, a vector: the lowest digits of its columns first.
    packed: AlignedBuf,
    /// Those that are left, with [`LEAST_DIGITS`], [`FEW_DIGITS`] and [`DIGITS`].
    left: [SmallVec<[usize; 8]>; 3],
    /// Words of a group.
    of_group: usize,
    /// Whether a row's products lie side by side, else a column's do.
    by_row: bool,
}

impl ColumnLanes {
    /// The columns, as far as enough of them have equally many digits and rows can be divided into fours.
    pub fn new(of: &DigitColumns, by_row: bool) -> Self {
        let mut left = of.by_digits();
        let mut groups = SmallVec::new();
        if of.depth.is_multiple_of(NEAR) {
            for (columns, digits) in left.iter_mut().zip([LEAST_DIGITS, FEW_DIGITS, DIGITS]) {
                let mut rest = SmallVec::new();
                for columns in columns.chunks(LANES / digits) {
                    if columns.len() * digits < LEAST_LANES {
                        rest = columns.into();
                    } else {
                        groups.push(Group { columns: columns.into(), digits });
                    }
                }
                *columns = rest;
            }
        }
        let of_group = of.depth / NEAR * LANES;
        let mut packed = AlignedBuf::new(groups.len() * of_group);
        let mut parts: SmallVec<[_; 4]> = packed.words().chunks_exact_mut(of_group.max(1)).zip(&groups).collect();
        let pack = |_: usize, (words, group): &mut (&mut [u32], &Group)| group.pack(of, words);
        if parts.len() < MANY {
            parts.iter_mut().for_each(|part| pack(0, part));
        } else {
            pool::for_each_mut(&mut parts, pack);
        }
        drop(parts);
        ColumnLanes { groups, packed, left, of_group, by_row }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Those that are left, by their digits.
    pub fn left(&self) -> &[SmallVec<[usize; 8]>; 3] {
        &self.left
    }

    /// Gives the products of a block's rows, whose elements have these sums, with all groups.
    ///
    /// # Safety
    /// The processor has the instructions, there are no more than [`BLOCK`] rows, they are as long as the columns, and
    /// `of` are the columns that these were made of.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
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
                    LEAST_DIGITS => group.products::<LEAST_DIGITS>(of, block, lanes, put),
                    FEW_DIGITS => group.products::<FEW_DIGITS>(of, block, lanes, put),
                    _ => group.products::<DIGITS>(of, block, lanes, put),
                }
            }
        }
    }
}

impl Group {
    /// Writes a vector of lanes for each four neighbours. Lanes of no column are zeros.
    fn pack(&self, of: &DigitColumns, words: &mut [u32]) {
        /// Adds 128 to four digits.
        const MIDDLE: u32 = 0x8080_8080;
        let width = LANES / self.digits;
        if self.columns.len() * self.digits < LANES {
            words.fill(0);
        }
        let columns: SmallVec<[&[[u32; STEP / NEAR]]; MOST]> =
            self.columns.iter().map(|column| bytemuck::cast_slice(of.digits_of(*column))).collect();
        for (step, out) in words.chunks_mut(STEP / NEAR * LANES).enumerate() {
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

    /// Gives the products of a block's rows with the columns, which have `D` digits. Asks for rows before they are needed if
    /// they haven't been asked for.
    ///
    /// # Safety
    /// As [`ColumnLanes::of_block`]; the lanes are those of the columns.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn products<const D: usize>(
        &self,
        of: &DigitColumns,
        (rows, sums, by_row, ask): (&[i8], &[i32], bool, bool),
        lanes: *const i8,
        put: &mut impl FnMut(ProductBlock<'_>),
    ) {
        let (depth, count, first) = (of.depth, sums.len(), rows.as_ptr());
        let mut units = [0.0; MOST];
        units.iter_mut().zip(&self.columns).for_each(|(unit, column)| *unit = of.columns[*column].unit.size);
        let mut products = [0.0; BLOCK * MOST];
        let layout = match by_row {
            true => MatrixLayout { row: MOST, column: 1 },
            false => MatrixLayout { row: 1, column: BLOCK },
        };
        for row in (0..count).step_by(ROWS) {
            // the last row stands for those that are missing
            let rows = std::array::from_fn(|r| first.wrapping_add((row + r).min(count - 1) * depth));
            let next = ask.then(|| first.wrapping_add((row + ROWS) * depth));
            // SAFETY: as promised.
            let found = unsafe { of_rows(rows, lanes, depth, next) };
            let of_row = |r: usize| {
                let taken = sums[(row + r).min(count - 1)].wrapping_mul(1 << 7);
                let found = _mm512_cvtepi32_ps(_mm512_sub_epi32(found[r], _mm512_set1_epi32(taken)));
                // SAFETY: an array of as many numbers.
                let units = unsafe { _mm256_loadu_ps(units.as_ptr()) };
                _mm256_mul_ps(_mm512_castps512_ps256(joined::<D>(found)), units)
            };
            let found = std::array::from_fn(of_row);
            let (found, first, step) = match by_row {
                true => (found, row * MOST, MOST),
                false => (transposed(found), row, BLOCK),
            };
            for (i, found) in found.into_iter().enumerate() {
                // SAFETY: eight numbers, and there is room for whole tiles of rows.
                unsafe { _mm256_storeu_ps(products[first + i * step..][..MOST].as_mut_ptr(), found) };
            }
        }
        put(ProductBlock { row: 0, rows: count, columns: &self.columns, products: &products, layout });
    }
}

/// What sums by digits stand for, of each column in the lane of its lowest: as [`joined`](crate::digits::joined).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn joined<const D: usize>(sums: __m512) -> __m512 {
    let of_digit = |digit: usize| {
        let from: [i32; LANES] = std::array::from_fn(|lane| ((lane + digit * (LANES / D)) % LANES) as i32);
        // SAFETY: an array of as many numbers.
        _mm512_permutexvar_ps(unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }, sums)
    };
    let shift = _mm512_set1_ps(256.0);
    (0..D - 1).rev().fold(of_digit(D - 1), |upper, digit| _mm512_add_ps(_mm512_mul_ps(upper, shift), of_digit(digit)))
}

/// Rows as columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn transposed(rows: [__m256; 8]) -> [__m256; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    // twos, fours and halves of two rows
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

/// The sums of rows with each lane. Asks for as many rows from `next` on.
///
/// # Safety
/// The processor has the instructions; rows have `depth` elements, which are fours, and there are as many vectors of lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
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
        (from..depth.min(from + STEP)).step_by(NEAR).for_each(&mut add);
    }
    sums
}
