//! Byte products on 64-bit Arm: `SDOT` and `SMMLA`.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::digits::{Activations, DIGITS, Unit, digits_of};
use super::super::dispatch::{InstructionSet, Set};
use super::super::simd::{Lanes, neon::Neon};
use super::{DigitColumns, MeasuredColumn, ProductBlock};

/// Rows that are multiplied at a time: their sums fill half of the registers.
const ROWS: usize = 4;
/// Elements of a vector of bytes.
pub(super) const STEP: usize = 16;

/// Instruction that multiplies bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Instruction {
    /// Sums of four products.
    Sdot,
    /// Products of two rows and two columns of eight.
    Smmla,
}

impl Instruction {
    /// Number of instructions.
    #[cfg(test)]
    pub const COUNT: usize = 2;

    /// Available instructions, the best one last.
    pub fn available() -> impl Iterator<Item = Instruction> {
        let has = |instruction: &Instruction| match instruction {
            Instruction::Sdot => InstructionSet::has(Set::Dotprod),
            Instruction::Smmla => InstructionSet::has(Set::I8mm),
        };
        [Instruction::Sdot, Instruction::Smmla].into_iter().filter(has)
    }

    /// Best available instruction for activations.
    pub fn best(_: Activations) -> Option<Instruction> {
        Self::available().last()
    }

    /// Activations that these instructions gain from: they take all digits at once.
    pub fn activations(self, _: Activations) -> Activations {
        Activations::F32
    }

    /// Returns whether products have the same bits as with other instructions of which this is true.
    #[cfg(test)]
    pub fn sums_digits(self) -> bool {
        true
    }

    /// Returns false: columns are packed one by one.
    pub fn packs_rows(self, _: usize) -> bool {
        false
    }

    /// Names of the available instructions.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::available().map(|instruction| match instruction {
            Instruction::Sdot => "SDOT",
            Instruction::Smmla => "SMMLA",
        })
    }

    /// Returns whether it is faster than f32 products for any number of columns.
    pub fn takes_many(self) -> bool {
        self == Instruction::Smmla
    }
}

/// Columns in lanes; there are none on this architecture, where all columns are multiplied in tiles.
pub(super) struct ColumnLanes {
    columns: usize,
}

impl ColumnLanes {
    pub fn new(_: Instruction, _: usize, columns: &[MeasuredColumn<'_>], _: bool) -> Self {
        ColumnLanes { columns: columns.len() }
    }

    /// All columns.
    pub fn left(&self) -> impl Iterator<Item = usize> {
        0..self.columns
    }

    /// Returns true.
    pub fn is_empty(&self) -> bool {
        true
    }
}

/// Number of stored digits of a column's elements: all, which the instructions take at once.
pub(super) fn stored(_: Instruction, _: Unit) -> usize {
    DIGITS
}

/// Writes digits: for each 16 elements, one vector per digit, the lowest first (`SDOT`); or for the first eight of them
/// the two low digits, the two high ones, and likewise for the others (`SMMLA`). Padded with zeros. Returns the initial
/// sums: zeros.
///
/// # Safety
/// The unit is that of the column.
pub(super) unsafe fn pack(instruction: Instruction, of: MeasuredColumn<'_>, digits: &mut [i8]) -> [i32; DIGITS] {
    let (steps, _) = digits.as_chunks_mut::<{ STEP * DIGITS }>();
    let mut elements = of.column.elements(of.count);
    for digits in steps {
        for k in 0..STEP {
            // SAFETY: as promised.
            let all = |element: &f32| unsafe { digits_of(*element, of.unit.inverse) }.to_le_bytes();
            for (digit, own) in elements.next().map_or([0; DIGITS], all).into_iter().enumerate() {
                let place = match instruction {
                    Instruction::Sdot => digit * STEP + k,
                    Instruction::Smmla => k / 8 * 32 + digit * 8 + k % 8,
                };
                digits[place] = own as i8;
            }
        }
    }
    [0; DIGITS]
}

/// Passes the products of rows with columns to `put`.
///
/// # Safety
/// The processor has the instruction; the rows are whole, and each column has digits for all elements of a row.
pub(super) unsafe fn multiply(
    (of, _): (&DigitColumns, &ColumnLanes),
    rows: &[i8],
    _: &[i32],
    mut put: impl FnMut(ProductBlock<'_>),
) {
    let (count, columns) = (rows.len().checked_div(of.depth).unwrap_or(0), of.columns.len());
    for first in (0..count).step_by(ROWS) {
        let here = ROWS.min(count - first);
        // the last row stands for missing ones
        let of_tile = std::array::from_fn(|r| &rows[(first + r.min(here - 1)) * of.depth..][..of.depth]);
        let mut give = |column: usize, sums: [[i32; DIGITS]; ROWS]| {
            let products = sums.map(|sums| of.columns[column].product(sums));
            put(ProductBlock::of_column(first, &column, &products[..here]));
        };
        let mut column = 0;
        while column < columns {
            // SAFETY: as promised.
            unsafe {
                match of.instruction {
                    Instruction::Sdot => give(column, by_sdot(of_tile, of.of(column))),
                    Instruction::Smmla if column + 1 < columns => {
                        let [one, other] = by_smmla(of_tile, [of.of(column), of.of(column + 1)]);
                        give(column, one);
                        column += 1;
                        give(column, other);
                    }
                    Instruction::Smmla => {
                        let [sums] = by_smmla(of_tile, [of.of(column)]);
                        give(column, sums);
                    }
                }
            }
            column += 1;
        }
    }
}

/// Rows, read one vector of bytes of each at a time.
struct Vectors<'a> {
    rows: [&'a [i8]; ROWS],
    /// Remainders behind the last whole vector, padded with zeros.
    rests: [[i8; STEP]; ROWS],
}

impl<'a> Vectors<'a> {
    /// Vectors of equally long rows.
    fn of(rows: [&'a [i8]; ROWS]) -> Self {
        let rests = rows.map(|row| {
            let (_, rest) = row.as_chunks::<STEP>();
            std::array::from_fn(|k| rest.get(k).copied().unwrap_or(0))
        });
        Vectors { rows, rests }
    }

    /// Number of vectors of each row.
    fn count(&self) -> usize {
        self.rows[0].len().div_ceil(STEP)
    }

    /// Addresses of the rows' vectors. Prefetches those of the following rows.
    #[inline(always)]
    fn at(&self, i: usize) -> [*const i8; ROWS] {
        let (from, length) = (i.wrapping_mul(STEP), self.rows[0].len());
        if from.wrapping_add(STEP) > length {
            return self.rests.each_ref().map(|rest| rest.as_ptr());
        }
        let at = self.rows.map(|row| row.as_ptr().wrapping_add(from));
        if i.is_multiple_of(4) {
            // SAFETY: every processor of this architecture has NEON; a prefetch accepts any address.
            at.iter().for_each(|at| unsafe { Neon::prefetch(at.wrapping_add(length.wrapping_mul(ROWS))) });
        }
        at
    }
}

/// Sums of products of rows with each digit of a column.
///
/// # Safety
/// The processor has `dotprod`; the rows are equally long, and the column has digits for all of their elements.
#[target_feature(enable = "neon,dotprod")]
unsafe fn by_sdot(rows: [&[i8]; ROWS], x: *const i8) -> [[i32; DIGITS]; ROWS] {
    let mut sums = [[vdupq_n_s32(0); DIGITS]; ROWS];
    let (rows, mut x) = (Vectors::of(rows), x);
    for i in 0..rows.count() {
        let at = rows.at(i);
        // SAFETY: 16 elements of each row and their digits are readable, as promised.
        unsafe {
            let digits: [int8x16_t; DIGITS] = std::array::from_fn(|digit| vld1q_s8(x.wrapping_add(digit * STEP)));
            for (sums, at) in sums.iter_mut().zip(at) {
                let row = vld1q_s8(at);
                sums.iter_mut().zip(digits).for_each(|(sum, digits)| *sum = sdot(*sum, row, digits));
            }
        }
        x = x.wrapping_add(DIGITS * STEP);
    }
    sums.map(|sums| sums.map(|sum| vaddvq_s32(sum)))
}

/// Sums of products of rows with each digit of columns.
///
/// # Safety
/// The processor has `i8mm`; the rows are equally long, and the columns have digits for all of their elements.
#[target_feature(enable = "neon,i8mm")]
unsafe fn by_smmla<const C: usize>(rows: [&[i8]; ROWS], x: [*const i8; C]) -> [[[i32; DIGITS]; ROWS]; C] {
    // two rows by two digits; the first row's sums come first
    let mut sums = [[[vdupq_n_s32(0); DIGITS / 2]; ROWS / 2]; C];
    let (rows, mut x) = (Vectors::of(rows), x);
    for i in 0..rows.count() {
        let at = rows.at(i);
        // SAFETY: as above.
        unsafe {
            let pairs: [[int8x16_t; 2]; ROWS / 2] = std::array::from_fn(|pair| {
                let one = vreinterpretq_s64_s8(vld1q_s8(at[2 * pair]));
                let other = vreinterpretq_s64_s8(vld1q_s8(at[2 * pair + 1]));
                [vzip1q_s64(one, other), vzip2q_s64(one, other)].map(|both| vreinterpretq_s8_s64(both))
            });
            for (sums, x) in sums.iter_mut().zip(x) {
                let two: [int8x16_t; DIGITS] = std::array::from_fn(|i| vld1q_s8(x.wrapping_add(i * STEP)));
                for (sums, [low, high]) in sums.iter_mut().zip(pairs) {
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = smmla(smmla(*sum, low, two[i]), high, two[DIGITS / 2 + i]);
                    }
                }
            }
        }
        x = x.map(|x| x.wrapping_add(DIGITS * STEP));
    }
    sums.map(|sums| {
        let mut out = [[0; DIGITS]; ROWS];
        for (pair, sums) in sums.into_iter().enumerate() {
            for (digits, sum) in sums.into_iter().enumerate() {
                out[2 * pair][2 * digits] = vgetq_lane_s32::<0>(sum);
                out[2 * pair][2 * digits + 1] = vgetq_lane_s32::<1>(sum);
                out[2 * pair + 1][2 * digits] = vgetq_lane_s32::<2>(sum);
                out[2 * pair + 1][2 * digits + 1] = vgetq_lane_s32::<3>(sum);
            }
        }
        out
    })
}

/// `sum[i] + sum over j in 0..4 of a[4 i + j] * b[4 i + j]`; the intrinsic isn't stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction computes with registers alone, and the processor has it.
    unsafe {
        asm!("sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
             options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// `sum[2 i + j] + sum over k in 0..8 of a[8 i + k] * b[8 j + k]`; the intrinsic isn't stable.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn smmla(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: as above.
    unsafe {
        asm!("smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
             options(pure, nomem, nostack, preserves_flags));
    }
    sum
}
