//! Activations as integers, for exact products with rows of bytes.
//!
//! Processors multiply bytes several times faster than f32 numbers, with sums in 32 bits. So each column becomes
//! integers: its elements divided by a power of two that depends on the largest one, and rounded. Each integer is split
//! into signed digits of a byte, and one sum of byte products per digit replaces the sum of f32 products. The sums of
//! digits are exact, and rounded to f32 only when they are joined.
//!
//! Four digits hold 31 bits. All 24 significant bits remain in elements that are at least a 64th of the largest; the
//! error of the others is at most a 2^30th of the largest. Three digits hold 23 bits and save a quarter of the
//! products. They suffice if no element is much larger than the others: the error of each is then at most a 2^19th of
//! the root mean square, mostly a few times less, as in f32 sums of this length. The choice depends on the column
//! alone.
//!
//! [`Activations::I16`] saves one more digit: two if no element is much larger than the others, with an error of at
//! most a 2^11th of the root mean square, and three otherwise. [`Activations::I8`] takes a single digit if no element
//! is larger than [`LARGEST_OF_ONE`] times the root mean square. Its unit is the 127th of the largest element, no power
//! of two, which would waste up to a bit. If some elements are larger, the unit is that of a column whose largest
//! element is just as large as one digit allows, and only those elements need the second digit: kernels skip the zeros.

/// Rounding of activations before a product that is summed in integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// Errors no larger than those of sums in f32.
    #[default]
    F32,
    /// 16-bit integers per token: an error of at most a 2^11th of the root mean square, as when rounding to fp16.
    /// Tokens with an element much larger than the others have 24 bits. Nothing is rounded where the processor sums in
    /// f32, or on 64-bit Arm, whose instructions take more bits at no cost.
    I16,
    /// 8-bit integers per token: an error of at most a 254th of the largest element, or of 4 times the root mean square
    /// if that is less; elements that don't fit take 16 bits. Tokens with an element more than about 60 times the
    /// root mean square are rounded as in [`I16`](Self::I16), and so are products with codes whose numbers take more
    /// than a byte, and all products where the processor doesn't sum products of bytes (`VPDPBUSD`).
    I8,
}

/// Maximum digits of an element.
pub(super) const DIGITS: usize = 4;
/// Digits of a column in which no element is much larger than the others.
pub(super) const FEW_DIGITS: usize = 3;
/// Digits of such a column with [`Activations::I16`].
pub(super) const TWO_DIGITS: usize = 2;
/// Digits of a column with [`Activations::I8`] whose elements are about equally large.
pub(super) const ONE_DIGIT: usize = 1;
/// Largest element of a column of one digit, in multiples of the root mean square.
const LARGEST_OF_ONE: f32 = 4.0;
/// Smallest such element: the unit's inverse is finite.
const SMALLEST_OF_ONE: f32 = 1e-30;
/// Maximum elements of a row: a sum of as many byte products fits into 32 bits.
pub(super) const MAX_DEPTH: usize = 1 << 16;

/// Unit of a column's integers: a power of two, or the 127th of the largest element with one digit.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub size: f32,
    /// Inverse of `size`.
    pub inverse: f32,
    /// Digits of the integers, up to [`DIGITS`].
    #[cfg_attr(all(target_arch = "aarch64", not(test)), expect(dead_code, reason = "its instructions take four"))]
    pub digits: usize,
    /// Whether few integers need more than the lowest digit.
    #[cfg_attr(all(target_arch = "aarch64", not(test)), expect(dead_code, reason = "its instructions take four"))]
    pub is_mostly_one: bool,
}

impl Unit {
    /// Unit of a column of `count` elements whose largest one has these bits, without its sign. `squares` is the sum of
    /// [`third_squared`] with [`of_few`](Unit::of_few): three digits (two for [`Activations::I16`]) suffice if the root
    /// mean square of the third digit is at least 4, and for zeros. `None` if the element isn't finite.
    pub fn of(activations: Activations, bits: u32, squares: u32, count: usize) -> Option<Unit> {
        let is_even = bits == 0 || squares as usize / 16 >= count;
        let of_i8 = if activations == Activations::I8 { Unit::of_i8(bits, squares, count) } else { None };
        of_i8.or_else(|| match (activations, is_even) {
            (Activations::F32, false) => Unit::of_four(bits),
            (Activations::F32, true) | (_, false) => Unit::of_few(bits),
            (Activations::I8 | Activations::I16, true) => Unit::of_two(bits),
        })
    }

    /// Unit with one digit, or with one for most elements; `squares` as in [`of`](Unit::of). `None` if the root mean
    /// square of the third digit is less than 2: it would be too inexact, and the larger elements too many.
    fn of_i8(bits: u32, squares: u32, count: usize) -> Option<Unit> {
        let largest = f32::from_bits(bits);
        // of an element that is 1 in its third digit
        let third = Unit::of_few(bits)?.size * 65536.0;
        let limit = LARGEST_OF_ONE * (squares as f32 / count as f32).sqrt() * third;
        let is_known = largest >= SMALLEST_OF_ONE && squares as usize / 4 >= count;
        let (most, is_mostly_one) = (largest.min(limit), largest > limit);
        let digits = if is_mostly_one { TWO_DIGITS } else { ONE_DIGIT };
        is_known.then_some(Unit { size: most / 127.0, inverse: 127.0 / most, digits, is_mostly_one })
    }

    /// Unit with four digits.
    fn of_four(bits: u32) -> Option<Unit> {
        (bits < f32::INFINITY.to_bits()).then(|| Unit::with(bits, 30, DIGITS))
    }

    /// Unit with three digits, which may not suffice.
    pub fn of_few(bits: u32) -> Option<Unit> {
        Unit::within(bits, 23, FEW_DIGITS)
    }

    /// Unit with two digits.
    fn of_two(bits: u32) -> Option<Unit> {
        Unit::within(bits, 15, TWO_DIGITS)
    }

    /// Unit with digits that hold `most` bits, or one less if the element exceeds 127 in each digit. The highest digit
    /// doesn't depend on the number of digits.
    fn within(bits: u32, most: i32, digits: usize) -> Option<Unit> {
        /// First bits of the largest number: 127 in each digit.
        const MOST: u32 = 0x7f7f;
        let significant = bits & 0x007f_ffff | 0x0080_0000;
        let most = if significant >> 9 < MOST { most } else { most - 1 };
        (bits < f32::INFINITY.to_bits()).then(|| Unit::with(bits, most, digits))
    }

    /// Unit in which the largest element has `most` bits.
    fn with(bits: u32, most: i32, digits: usize) -> Unit {
        // the largest element is less than two to this power
        let exponent = (bits >> 23) as i32 - 126;
        // a unit and its inverse are normal numbers; tiny columns get the smallest such unit
        let exponent = exponent.max(most - 126);
        let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
        Unit { size: power(exponent - most), inverse: power(most - exponent), digits, is_mostly_one: false }
    }
}

/// Digits of the column with the most digits.
#[cfg(target_arch = "x86_64")]
pub(super) fn max_digits<'a>(units: impl IntoIterator<Item = &'a Unit>) -> usize {
    units.into_iter().map(|unit| unit.digits).max().unwrap_or(ONE_DIGIT)
}

/// Square of an element's third digit, with the inverse of its column's unit in three digits. A row's sum of squares
/// fits into 32 bits.
///
/// # Safety
/// As [`digits_of`].
#[inline(always)]
pub(super) unsafe fn third_squared(element: f32, inverse: f32) -> u32 {
    // SAFETY: as promised.
    let digits = unsafe { digits_of(element, inverse) };
    let third = i32::from((digits >> (8 * (FEW_DIGITS - 1))) as i8);
    (third * third).cast_unsigned()
}

/// Offset that separates digits: each digit but the highest is a byte of the sum with this, minus 128.
pub(super) const DIGITS_MIDDLE: u32 = 0x0080_8080;

/// Digits of an element, the lowest in the lowest byte; `inverse` is that of the column's unit.
///
/// # Safety
/// The element is finite and the unit is that of its column.
#[inline(always)]
pub(super) unsafe fn digits_of(element: f32, inverse: f32) -> u32 {
    let rounded = (element * inverse).round_ties_even();
    // SAFETY: no larger than 2^30, as promised.
    let integer = unsafe { rounded.to_int_unchecked::<i32>() };
    (integer as u32).wrapping_add(DIGITS_MIDDLE) ^ DIGITS_MIDDLE
}

/// Joins sums by digit, the lowest first, to the sum of products in units of the column.
#[inline(always)]
pub(super) fn joined([lowest, low, high, highest]: [i32; DIGITS]) -> f32 {
    let upper = highest as f32 * 256.0 + high as f32;
    (upper * 256.0 + low as f32) * 256.0 + lowest as f32
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Maximum error of a column's elements.
    pub fn max_error(activations: Activations, column: &[f64]) -> f64 {
        let largest = column.iter().fold(0.0f64, |largest, x| x.abs().max(largest));
        let mean_square = column.iter().map(|x| x * x).sum::<f64>() / column.len().max(1) as f64;
        let fewer = if activations == Activations::F32 { 0 } else { 8 };
        let off = (largest / f64::from(1 << (30 - fewer))).max(mean_square.sqrt() / f64::from(1 << (19 - fewer)));
        // the root mean square is known to a third at least
        let of_one = largest.min(f64::from(LARGEST_OF_ONE) * 1.34 * mean_square.sqrt());
        if activations == Activations::I8 { off.max(of_one / 253.9) } else { off }
    }

    #[test]
    fn digits_make_up_an_element() {
        for largest in [1.0f32, 3.0e-38, 1.0e-30, 0.75, 12345.678, 3.0e38, 1.9921715, 1.9921718, 1.9999999] {
            let few = Unit::of_few(largest.to_bits()).unwrap();
            assert_eq!(few.size * few.inverse, 1.0);
            for element in [largest, -largest, largest / 3.0, largest / 1e6] {
                // SAFETY: the unit is that of a column with this element.
                let digits = unsafe { digits_of(element, few.inverse) }.to_le_bytes().map(|byte| byte as i8);
                assert_eq!(digits[3], 0, "{element} of {largest}");
                let [lowest, low, high, _] = digits.map(i32::from);
                let off =
                    (f64::from((high * 256 + low) * 256 + lowest) * f64::from(few.size) - f64::from(element)).abs();
                assert!(off <= f64::from(few.size) / 2.0, "{element} of {largest}");
                assert!(largest < 1e-30 || f64::from(few.size) * f64::from(1 << 22) <= f64::from(largest) * 1.005);
                let two = Unit::of_two(largest.to_bits()).unwrap();
                // SAFETY: the unit is that of a column with this element.
                let digits = unsafe { digits_of(element, two.inverse) }.to_le_bytes().map(|byte| byte as i8);
                assert_eq!(digits[2..], [0, 0], "{element} of {largest}");
                let off = (f64::from(i32::from(digits[1]) * 256 + i32::from(digits[0])) * f64::from(two.size)
                    - f64::from(element))
                .abs();
                assert!(off <= f64::from(two.size) / 2.0, "{element} of {largest}");
                assert!(largest < 1e-30 || f64::from(two.size) * f64::from(1 << 14) <= f64::from(largest) * 1.005);
            }
            let unit = Unit::of_four(largest.to_bits()).unwrap();
            assert_eq!(unit.size * unit.inverse, 1.0);
            for part in [1.0f32, -1.0, 0.5, -0.3, 1.0 / 64.0, 1.0 / 300.0, 0.0] {
                let element = largest * part;
                // SAFETY: the unit is that of a column with this element.
                let digits =
                    unsafe { digits_of(element, unit.inverse) }.to_le_bytes().map(|byte| i32::from(byte as i8));
                let whole: i64 = digits.iter().rev().fold(0, |sum, digit| sum * 256 + i64::from(*digit));
                let off = (whole as f64 * f64::from(unit.size) - f64::from(element)).abs();
                assert!(off <= f64::from(unit.size) / 2.0, "{element} of {largest}");
                assert!(part.abs() < 1.0 / 64.0 || largest < 1.0e-28 || off == 0.0);
                assert_eq!(joined(digits), whole as f32);
            }
        }
        for bits in [f32::INFINITY, f32::NAN].map(f32::to_bits) {
            for activations in [Activations::F32, Activations::I16, Activations::I8] {
                let unit = |squares| Unit::of(activations, bits, squares, 1);
                assert!(unit(0).is_none() && unit(1 << 20).is_none());
            }
        }
        for (activations, least, many, few) in [
            (Activations::F32, 160, DIGITS, FEW_DIGITS),
            (Activations::I16, 160, FEW_DIGITS, TWO_DIGITS),
            (Activations::I8, 40, FEW_DIGITS, TWO_DIGITS),
        ] {
            let digits = |largest: f32, squares| Unit::of(activations, largest.to_bits(), squares, 10).unwrap().digits;
            assert_eq!([digits(1.0, least - 1), digits(1.0, least), digits(0.0, 0)], [many, few, few]);
        }
        // the third digit of 1 is 64: a root mean square of a quarter is 16
        let unit = |largest: f32, squares| Unit::of(Activations::I8, largest.to_bits(), squares, 10).unwrap();
        let digits = |largest, squares| unit(largest, squares).digits;
        assert_eq!([digits(1.0, 2559), digits(1.0, 2560), digits(1e-31, 2560)], [TWO_DIGITS, ONE_DIGIT, TWO_DIGITS]);
        assert!(unit(1.0, 2559).is_mostly_one && !unit(1.0, 2560).is_mostly_one && !unit(1e-31, 2560).is_mostly_one);
        // a root mean square of a 32nd: larger elements than an eighth take two digits
        for (unit, first) in [(unit(1.0, 2560), 2.0), (unit(1.0, 40), 0.125)] {
            for element in [1.0, -0.3, 0.7381, 1e-4, 0.1249, 0.126, -0.1249, -0.127] {
                // SAFETY: the unit is that of a column with this element.
                let digits = unsafe { digits_of(element, unit.inverse) }.to_le_bytes().map(|byte| byte as i8);
                assert_eq!((digits[1] != 0, &digits[2..]), (element.abs() > first, &[0; 2][..]), "{element}");
                let whole = f32::from(digits[1]) * 256.0 + f32::from(digits[0]);
                assert!((whole * unit.size - element).abs() <= first.min(1.0) / 253.9, "{element}");
            }
        }
    }
}
