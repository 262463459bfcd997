//! Products of rows of bytes with columns on 64-bit Arm processors, which multiply bytes and add the products up in 32
//! bits: four neighbours at a time (`SDOT`, the feature `dotprod`, Armv8.2), or eight for two rows and two digits at a time
//! (`SMMLA`, the feature `i8mm`, Armv8.6: Apple's processors from A15 and M2 on). A column becomes integers of four
//! [digits](super::digits). Every sum is exact until its digits are joined, so a product has the same bits whatever is
//! beside it, and by either instruction.

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use smallvec::SmallVec;

use super::aligned_buf::AlignedBuf;
use super::columns::StridedColumn;
use super::digits::{DIGITS, MOST_DEPTH, Unit, digits_of, joined};
use super::pool;
use super::simd::{Lanes, neon::Neon};

/// Rows that are multiplied at a time: their sums fill half of the registers.
const ROWS: usize = 4;
/// Elements that a vector of bytes holds.
const STEP: usize = 16;
/// Columns of elements above which threads are woken to pack them.
const SMALL_PACK: usize = 1 << 15;

/// What multiplies bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Instruction {
    /// Sums of four products.
    Sdot,
    /// Products of two rows and two columns of eight.
    Smmla,
}

impl Instruction {
    /// Those that this processor has, the best last.
    pub fn available() -> impl Iterator<Item = Instruction> {
        let has = |instruction: &Instruction| match instruction {
            Instruction::Sdot => is_aarch64_feature_detected!("dotprod"),
            Instruction::Smmla => is_aarch64_feature_detected!("i8mm"),
        };
        [Instruction::Sdot, Instruction::Smmla].into_iter().filter(has)
    }
}

/// Columns as digits. Of each 16 elements, a vector for each digit, the lowest first (`SDOT`); or of the first eight of them
/// the two low digits, the two high ones, and likewise of the others (`SMMLA`). Zeros follow the last element.
pub(super) struct DigitColumns {
    digits: AlignedBuf,
    /// What the integers of each count.
    units: SmallVec<[f32; 8]>,
    depth: usize,
    instruction: Instruction,
}

impl<'a> StridedColumn<'a> {
    /// The bits, without the sign, of the largest of them.
    fn largest(self, count: usize) -> u32 {
        self.elements(count).fold(0, |largest, element| element.abs().to_bits().max(largest))
    }

    /// So many elements, if they can be written in digits: all are finite, and sums of their products fit 32 bits.
    pub fn measured(self, count: usize) -> Option<MeasuredColumn<'a>> {
        let fits = (self.step > 0 || count == 1) && (1..=MOST_DEPTH).contains(&count);
        let unit = fits.then(|| Unit::of(self.largest(count))).flatten()?;
        Some(MeasuredColumn { column: self, count, unit })
    }
}

/// A column that can be written in digits, and what its integers count: made by [`StridedColumn::measured`] alone.
#[derive(Clone, Copy)]
pub(super) struct MeasuredColumn<'a> {
    column: StridedColumn<'a>,
    count: usize,
    unit: Unit,
}

impl DigitColumns {
    /// Columns of `depth` elements each.
    ///
    /// # Panics
    /// If one has more or fewer.
    pub fn new(instruction: Instruction, depth: usize, columns: &[MeasuredColumn<'_>]) -> DigitColumns {
        assert!(columns.iter().all(|column| column.count == depth));
        let of_column = depth.next_multiple_of(STEP);
        let mut digits = AlignedBuf::new(columns.len() * of_column);
        let mut parts: SmallVec<[&mut [u32]; 8]> = digits.words().chunks_exact_mut(of_column.max(1)).collect();
        let pack = |c: usize, words: &mut &mut [u32]| columns[c].pack(instruction, bytemuck::cast_slice_mut(words));
        if columns.len() * depth > SMALL_PACK {
            pool::for_each_mut(&mut parts, pack);
        } else {
            parts.iter_mut().enumerate().for_each(|(c, part)| pack(c, part));
        }
        drop(parts);
        let units = columns.iter().map(|column| column.unit.size).collect();
        DigitColumns { digits, units, depth, instruction }
    }

    /// Gives the products of rows, one after the other, with the columns: `put(row, column, product)`.
    ///
    /// # Panics
    /// If the rows aren't whole.
    pub fn multiply(&self, rows: &[i8], mut put: impl FnMut(usize, usize, f32)) {
        assert!(rows.len().is_multiple_of(self.depth));
        let (count, columns) = (rows.len().checked_div(self.depth).unwrap_or(0), self.units.len());
        for first in (0..count).step_by(ROWS) {
            let here = ROWS.min(count - first);
            // the last row stands for those that are missing
            let of_tile = std::array::from_fn(|r| &rows[(first + r.min(here - 1)) * self.depth..][..self.depth]);
            let mut give = |column: usize, sums: [[i32; DIGITS]; ROWS]| {
                for (r, sums) in sums.into_iter().enumerate().take(here) {
                    put(first + r, column, joined(sums) * self.units[column]);
                }
            };
            let mut column = 0;
            while column < columns {
                // SAFETY: the processor has the instruction; each column has digits for all elements of a row.
                unsafe {
                    match self.instruction {
                        Instruction::Sdot => give(column, by_sdot(of_tile, self.of(column))),
                        Instruction::Smmla if column + 1 < columns => {
                            let [one, other] = by_smmla(of_tile, [self.of(column), self.of(column + 1)]);
                            give(column, one);
                            column += 1;
                            give(column, other);
                        }
                        Instruction::Smmla => {
                            let [sums] = by_smmla(of_tile, [self.of(column)]);
                            give(column, sums);
                        }
                    }
                }
                column += 1;
            }
        }
    }

    /// Where the digits of a column begin.
    fn of(&self, column: usize) -> *const i8 {
        self.digits.pointer().wrapping_add(column * self.depth.next_multiple_of(STEP)).cast()
    }
}

impl MeasuredColumn<'_> {
    /// Writes the digits.
    fn pack(&self, instruction: Instruction, digits: &mut [i8]) {
        let (steps, _) = digits.as_chunks_mut::<{ STEP * DIGITS }>();
        let mut elements = self.column.elements(self.count);
        for digits in steps {
            for k in 0..STEP {
                // SAFETY: the unit is that of this column.
                let of = |element: &f32| unsafe { digits_of(*element, self.unit.inverse) }.to_le_bytes();
                for (digit, own) in elements.next().map_or([0; DIGITS], of).into_iter().enumerate() {
                    let place = match instruction {
                        Instruction::Sdot => digit * STEP + k,
                        Instruction::Smmla => k / 8 * 32 + digit * 8 + k % 8,
                    };
                    digits[place] = own as i8;
                }
            }
        }
    }
}

/// Rows, a vector of bytes of each at a time.
struct Vectors<'a> {
    rows: [&'a [i8]; ROWS],
    /// What is left behind the last whole vector, zeros behind it.
    rests: [[i8; STEP]; ROWS],
}

impl<'a> Vectors<'a> {
    /// Of rows that are equally long.
    fn of(rows: [&'a [i8]; ROWS]) -> Self {
        let rests = rows.map(|row| {
            let (_, rest) = row.as_chunks::<STEP>();
            std::array::from_fn(|k| rest.get(k).copied().unwrap_or(0))
        });
        Vectors { rows, rests }
    }

    /// How many there are of each row.
    fn count(&self) -> usize {
        self.rows[0].len().div_ceil(STEP)
    }

    /// Where those of the rows are. Asks for those of the rows that come next.
    #[inline(always)]
    fn at(&self, i: usize) -> [*const i8; ROWS] {
        let (from, length) = (i.wrapping_mul(STEP), self.rows[0].len());
        if from.wrapping_add(STEP) > length {
            return self.rests.each_ref().map(|rest| rest.as_ptr());
        }
        let at = self.rows.map(|row| row.as_ptr().wrapping_add(from));
        if i.is_multiple_of(4) {
            // SAFETY: every processor of this architecture has NEON; the address need not be one that can be read.
            at.iter().for_each(|at| unsafe { Neon::prefetch(at.wrapping_add(length.wrapping_mul(ROWS))) });
        }
        at
    }
}

/// The sums of products of rows with each digit of a column.
///
/// # Safety
/// The processor has `dotprod`; the rows are equally long, and the column has digits for all of their elements.
#[target_feature(enable = "neon,dotprod")]
unsafe fn by_sdot(rows: [&[i8]; ROWS], x: *const i8) -> [[i32; DIGITS]; ROWS] {
    let mut sums = [[vdupq_n_s32(0); DIGITS]; ROWS];
    let (rows, mut x) = (Vectors::of(rows), x);
    for i in 0..rows.count() {
        let at = rows.at(i);
        // SAFETY: 16 elements of each row and their digits can be read, as promised.
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

/// The sums of products of rows with each digit of columns.
///
/// # Safety
/// The processor has `i8mm`; the rows are equally long, and the columns have digits for all of their elements.
#[target_feature(enable = "neon,i8mm")]
unsafe fn by_smmla<const C: usize>(rows: [&[i8]; ROWS], x: [*const i8; C]) -> [[[i32; DIGITS]; ROWS]; C] {
    // two rows by two digits: those of the first row come first
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::dot::tests::noise;
    use super::*;

    /// Products `[rows, columns]`.
    fn products(instruction: Instruction, a: &[i8], depth: usize, columns: &[StridedColumn<'_>]) -> Vec<f32> {
        let columns: Vec<_> = columns.iter().map(|column| column.measured(depth).expect("all are finite")).collect();
        let digits = DigitColumns::new(instruction, depth, &columns);
        let mut out = vec![f32::NAN; a.len() / depth * columns.len()];
        digits.multiply(a, |r, c, product| out[r * columns.len() + c] = product);
        out
    }

    #[test]
    fn the_instructions_of_this_processor_are_found() {
        let found: Vec<_> = Instruction::available().collect();
        if found.len() < 2 {
            anec_base::skipped(&format!("of SDOT and SMMLA, this processor has {found:?}"));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn products_of_every_size_are_exact_but_for_their_columns_rounding(
            rows in 1usize..30, depth in 1usize..300, count in 1usize..12, step in 1usize..4, seed: u32
        ) {
            let a: Vec<i8> = noise(rows * depth, seed).iter().map(|v| (v * 128.0) as i8).collect();
            let mut x = noise(depth * step * count, !seed);
            x.iter_mut().step_by(17).for_each(|v| *v *= 300.0);
            let columns: Vec<StridedColumn<'_>> = x.chunks(depth * step).map(|values| StridedColumn { values, step }).collect();
            let mut first = None;
            for instruction in Instruction::available() {
                let found = products(instruction, &a, depth, &columns);
                for (i, found) in found.iter().enumerate() {
                    let (row, column) = (&a[i / count * depth..][..depth], columns[i % count]);
                    let elements = || column.values.iter().step_by(step);
                    let terms = row.iter().zip(elements()).map(|(a, x)| f64::from(*a) * f64::from(*x));
                    let largest = elements().fold(0.0f64, |largest, x| f64::from(x.abs()).max(largest));
                    let exact: f64 = terms.sum();
                    // half a unit for each element, and the rounding of the sum
                    let limit = largest * depth as f64 * 128.0 / f64::from(1 << 30) + exact.abs() * 1e-6 + 1e-6;
                    prop_assert!((f64::from(*found) - exact).abs() <= limit, "{found} {exact} {instruction:?}");
                }
                prop_assert_eq!(first.get_or_insert_with(|| found.clone()), &found);
                // alone, and from another row on, the bits are the same
                for c in 0..count {
                    let alone = products(instruction, &a[rows / 2 * depth..], depth, &columns[c..][..1]);
                    let part: Vec<f32> = found.iter().skip(rows / 2 * count + c).step_by(count).copied().collect();
                    prop_assert_eq!(alone, part);
                }
            }
        }
    }

    #[test]
    fn extremes_do_not_overflow() {
        for instruction in Instruction::available() {
            let a = vec![-128i8; MOST_DEPTH];
            let x = vec![-1.0f32; MOST_DEPTH];
            let found = products(instruction, &a, MOST_DEPTH, &[StridedColumn { values: &x, step: 1 }]);
            assert_eq!(found, [128.0 * MOST_DEPTH as f32]);
        }
    }

    #[test]
    fn what_has_no_digits_is_known() {
        for value in [1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(StridedColumn { values: &[0.5, value, 0.0], step: 1 }.measured(3).is_some(), value == 1.0);
            assert!(StridedColumn { values: &[0.5, value, 0.0], step: 2 }.measured(2).is_some());
        }
        let long = vec![1.0; MOST_DEPTH + 1];
        assert!(StridedColumn { values: &long, step: 1 }.measured(long.len()).is_none());
        assert!(StridedColumn { values: &[], step: 1 }.measured(0).is_none());
    }
}
