//! Many columns in lanes: a lane of a vector holds four neighbours of one digit of a column, and all lanes are
//! multiplied with the same four neighbours of a row, so that no sum crosses lanes. The unsigned operand is the digit,
//! with 128 added; 128 times the sum of the row's elements is subtracted.
//!
//! Columns whose elements mostly take one digit are among those of one digit, and their second digits are [Rare].

use std::arch::x86_64::*;

use smallvec::SmallVec;

use super::super::{DigitColumns, MeasuredColumn, ProductBlock};
use super::{BLOCK, Instruction, STEP, by_digits};
use crate::aligned_buf::AlignedBuf;
use crate::digits::{DIGITS, ONE_DIGIT};
use crate::layout::MatrixLayout;
use crate::pool;

mod pack;
mod rare;

use rare::Rare;

/// Lanes of a vector.
const LANES: usize = 16;
/// Neighbours in a lane.
const NEIGHBOURS: usize = 4;
/// Minimum digits of a vector's columns: with fewer, tiles of rows and columns are faster.
const MIN_DIGITS: usize = 14;
/// Maximum vectors of a group: their sums with six rows, and the operands, fill the registers.
const VECTORS: usize = 4;
/// Maximum columns of a group.
const MAX_COLUMNS: usize = VECTORS * LANES / ONE_DIGIT;
/// Rows and columns that are transposed at a time.
const HALF: usize = LANES / 2;
/// Distance of columns in products by column: whole transposed tiles of a block's rows.
const COLUMN: usize = BLOCK + HALF;

/// Returns whether columns of `depth` elements can be in lanes.
pub(super) fn take(depth: usize) -> bool {
    depth.is_multiple_of(NEIGHBOURS)
}

/// Columns of a group, all with the same number of digits in lanes.
struct Group {
    columns: SmallVec<[usize; LANES]>,
    /// Digits in lanes.
    digits: usize,
    /// First word of its lanes.
    place: usize,
    /// Second digits of columns that mostly have one.
    rare: Option<Rare>,
}

/// Columns in lanes.
pub(in super::super) struct ColumnLanes {
    groups: SmallVec<[Group; 4]>,
    /// For each group and each four neighbours, its vectors: the lowest digits of a vector's columns first.
    packed: AlignedBuf,
    /// Columns without lanes, with one digit, with two, and so on.
    left: [SmallVec<[usize; 8]>; DIGITS],
    /// Whether products are contiguous by row, else by column.
    by_row: bool,
}

impl ColumnLanes {
    /// Groups columns of `depth` elements if enough of them have the same number of digits and rows consist of fours.
    ///
    /// # Panics
    /// If a column has another length.
    pub fn new(instruction: Instruction, depth: usize, all: &[MeasuredColumn<'_>], by_row: bool) -> Self {
        assert!(all.iter().all(|column| column.count == depth));
        let mut left = by_digits(all.iter().map(|column| column.unit));
        let mut groups = SmallVec::<[Group; 4]>::new();
        let mut words = 0;
        if instruction == Instruction::Vpdpbusd && take(depth) {
            // columns of mostly one digit are among those of one
            let is_mostly_one = |column: &usize| all[*column].unit.is_mostly_one;
            let [one, two, ..] = &mut left;
            one.extend(two.iter().copied().filter(is_mostly_one));
            one.sort_unstable();
            two.retain(|column| !is_mostly_one(column));
            for (columns, digits) in left.iter_mut().zip(ONE_DIGIT..) {
                let last = columns.len() - columns.len() % (LANES / digits);
                let used: usize = columns[last..].iter().map(|column| all[*column].unit.digits).sum();
                let taken = if used < MIN_DIGITS { last } else { columns.len() };
                for own in columns[..taken].chunks(VECTORS * (LANES / digits)) {
                    let rare = own.iter().any(is_mostly_one).then(Rare::default);
                    let group = Group { columns: own.into(), digits, place: words, rare };
                    words += group.words(depth);
                    groups.push(group);
                }
                columns.drain(..taken);
            }
            let [one, two, ..] = &mut left;
            two.extend(one.iter().copied().filter(is_mostly_one));
            one.retain(|column| !is_mostly_one(column));
        }
        let mut packed = AlignedBuf::new(words);
        let (mut rest, mut parts) = (&mut packed.words()[..words], SmallVec::<[_; 4]>::new());
        for group in &mut groups {
            let (own, others) = std::mem::take(&mut rest).split_at_mut(group.words(depth));
            parts.push((own, group));
            rest = others;
        }
        // SAFETY: the processor has the instruction.
        pool::for_each_mut(&mut parts, |_, (words, group)| unsafe { group.pack(all, words) });
        drop(parts);
        ColumnLanes { groups, packed, left, by_row }
    }

    /// Returns whether products are wanted contiguous by row.
    pub fn is_by_row(&self) -> bool {
        self.by_row
    }

    /// Returns whether no columns are in lanes.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Columns without lanes.
    pub fn left(&self) -> impl Iterator<Item = usize> {
        self.left.iter().flatten().copied()
    }

    /// Columns without lanes, by number of digits.
    pub fn left_by_digits(&self) -> &[SmallVec<[usize; 8]>; DIGITS] {
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
        let mut products = [0.0; COLUMN * MAX_COLUMNS];
        let layout = match self.by_row {
            true => MatrixLayout { row: MAX_COLUMNS, column: 1 },
            false => MatrixLayout { row: 1, column: COLUMN },
        };
        for (i, group) in self.groups.iter().enumerate() {
            let lanes = self.packed.pointer().wrapping_add(group.place).cast();
            let block = (rows, sums, self.by_row, i == 0);
            // SAFETY: as promised.
            unsafe {
                match group.vectors() {
                    1 => group.products::<1, 12>(of, block, lanes, &mut products),
                    2 => group.products::<2, 12>(of, block, lanes, &mut products),
                    3 => group.products::<3, 8>(of, block, lanes, &mut products),
                    _ => group.products::<VECTORS, 6>(of, block, lanes, &mut products),
                }
            }
            put(ProductBlock { row: 0, rows: sums.len(), columns: &group.columns, products: &products, layout });
        }
    }
}

impl Group {
    /// Columns of a vector.
    fn width(&self) -> usize {
        LANES / self.digits
    }

    /// Number of vectors for each four neighbours.
    fn vectors(&self) -> usize {
        self.columns.len().div_ceil(self.width())
    }

    /// Number of words of its lanes.
    fn words(&self, depth: usize) -> usize {
        depth / NEIGHBOURS * self.vectors() * LANES
    }

    /// Writes the products of a block's rows, `R` at a time, with the columns, in `V` vectors. Prefetches if `ask`.
    ///
    /// # Safety
    /// As [`ColumnLanes::of_block`]; the lanes are those of the columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    unsafe fn products<const V: usize, const R: usize>(
        &self,
        of: &DigitColumns,
        (rows, sums, by_row, ask): (&[i8], &[i32], bool, bool),
        lanes: *const i8,
        products: &mut [f32; COLUMN * MAX_COLUMNS],
    ) {
        let (depth, count, first) = (of.depth, sums.len(), rows.as_ptr());
        let (width, digits) = (self.width(), self.digits);
        let mut units = [0.0; MAX_COLUMNS];
        units.iter_mut().zip(&self.columns).for_each(|(unit, column)| *unit = of.columns[*column].unit.size);
        for row in (0..count).step_by(R) {
            // the last row stands for missing ones
            let rows = std::array::from_fn(|r| first.wrapping_add((row + r).min(count - 1) * depth));
            let next = ask.then(|| first.wrapping_add((row + R) * depth));
            // SAFETY: as promised.
            let found: [[__m512i; R]; V] = unsafe { of_rows(rows, lanes, depth, next) };
            // SAFETY: as promised; they were packed with the lanes.
            let rare: Option<[[__m512i; R]; V]> = self.rare.as_ref().map(|rare| unsafe { rare.of_rows(rows) });
            // lanes behind a vector's columns are overwritten by those of the next one
            for (v, (found, column)) in found.iter().zip((0..).step_by(width)).enumerate() {
                // SAFETY: the slice has as many numbers as the vector.
                let units = unsafe { _mm512_loadu_ps(units[column..][..LANES].as_ptr()) };
                let of_row = |r: usize| {
                    let taken = sums[(row + r).min(count - 1)].wrapping_mul(1 << 7);
                    let found = _mm512_cvtepi32_ps(_mm512_sub_epi32(found[r], _mm512_set1_epi32(taken)));
                    let all = match &rare {
                        Some(rare) => {
                            let upper = _mm512_cvtepi32_ps(rare[v][r]);
                            _mm512_add_ps(_mm512_mul_ps(upper, _mm512_set1_ps(256.0)), found)
                        }
                        None => joined(found, digits),
                    };
                    _mm512_mul_ps(all, units)
                };
                if by_row {
                    for r in 0..R {
                        let out = &mut products[(row + r) * MAX_COLUMNS + column..][..LANES];
                        // SAFETY: the slice has as many numbers as the vector.
                        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), of_row(r)) };
                    }
                    continue;
                }
                for first in (0..R).step_by(HALF) {
                    let tile: [__m512; HALF] = std::array::from_fn(|r| of_row((first + r).min(R - 1)));
                    let lower = (0, tile.map(|row| _mm512_castps512_ps256(row)));
                    let upper = || (HALF, tile.map(|row| _mm512_extractf32x8_ps::<1>(row)));
                    // columns of several digits take half of the lanes at most
                    for (half, tile) in std::iter::once(lower).chain((digits == ONE_DIGIT).then(upper)) {
                        for (c, tile) in transposed(tile).into_iter().enumerate() {
                            let out = &mut products[(column + half + c) * COLUMN + row + first..][..HALF];
                            // SAFETY: the slice has eight numbers.
                            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), tile) };
                        }
                    }
                }
            }
        }
    }
}

/// Joins sums by digit, each column in the lane of its lowest digit, as [`joined`](crate::digits::joined).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
fn joined(sums: __m512, digits: usize) -> __m512 {
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let of_digit = |digit: usize| {
        // only the low four bits of a lane's number count
        let first = _mm512_set1_epi32((digit * (LANES / digits)) as i32);
        _mm512_permutexvar_ps(_mm512_add_epi32(lanes, first), sums)
    };
    let (shift, highest) = (_mm512_set1_ps(256.0), digits - 1);
    let join = |upper, digit| _mm512_add_ps(_mm512_mul_ps(upper, shift), of_digit(digit));
    (0..highest).rev().fold(of_digit(highest), join)
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

/// Sums of rows with each lane of each vector. Prefetches as many rows from `next` on.
///
/// # Safety
/// The processor has the instructions; rows have `depth` elements, a multiple of four, with `V` vectors of lanes for
/// each four.
// inlined, the sums would leave the registers
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
unsafe fn of_rows<const V: usize, const R: usize>(
    rows: [*const i8; R],
    lanes: *const i8,
    depth: usize,
    next: Option<*const i8>,
) -> [[__m512i; R]; V] {
    let mut sums = [[_mm512_setzero_si512(); R]; V];
    for from in (0..depth).step_by(STEP) {
        if let Some(next) = next {
            (0..R).for_each(|r| _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(from * R + r * STEP)));
        }
        for from in (from..depth.min(from + STEP)).step_by(NEIGHBOURS) {
            // SAFETY: as promised.
            let vector = |v: usize| unsafe { _mm512_load_si512(lanes.add((from * V + v * NEIGHBOURS) * LANES).cast()) };
            let lanes: [__m512i; V] = std::array::from_fn(vector);
            for (r, row) in rows.into_iter().enumerate() {
                // SAFETY: as promised.
                let near = _mm512_set1_epi32(unsafe { row.add(from).cast::<i32>().read_unaligned() });
                for (sums, lanes) in sums.iter_mut().zip(lanes) {
                    sums[r] = _mm512_dpbusd_epi32(sums[r], lanes, near);
                }
            }
        }
    }
    sums
}
