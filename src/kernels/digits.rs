//! Activations as integers whose products with rows of bytes are exact.
//!
//! Processors multiply bytes several times faster than f32 numbers, and add the products up in 32 bits. So each column
//! becomes integers: its elements, divided by a power of two that the largest gives, and rounded. Signed digits of a byte
//! make up such an integer, so a sum of products of bytes for each digit is one of f32 numbers. The sums of digits are
//! exact, and rounded to f32 only as they are put together.
//!
//! Four digits hold 31 bits. An element has 24 significant bits, which all remain in those that are no smaller than a 64th
//! of the largest; the others are off by at most a 2^30th of the largest. Three digits hold 23 bits, and a quarter fewer
//! products make them up. They are enough where no element is much larger than the others: what each is off by is then at
//! most a 2^19th of the elements' root mean square, mostly a few times less, as f32 sums of as many products are. Which
//! columns these are follows from the column alone.
//!
//! Activations that may be [`Activations::I16`] have one digit less: two where no element is much larger than the others, each
//! of which is off by at most a 2^11th of the root mean square, and three otherwise.

/// What activations are rounded to before a product that is summed in integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// So little that results are off by no more than sums in f32 are.
    #[default]
    F32,
    /// Integers of 16 bits for each token: its elements are off by at most a 2^11th of their root mean square, as they are when
    /// they are rounded to fp16. Where one is much larger than the others, they have 24 bits. Nothing is rounded where a
    /// processor sums in f32, and on 64-bit Arm, whose instructions take more bits at no cost.
    I16,
}

/// Digits of an element at most.
pub(super) const DIGITS: usize = 4;
/// Digits of the elements of a column of which none is much larger than the others.
pub(super) const FEW_DIGITS: usize = 3;
/// Digits of such a column's elements where [`Activations::I16`] are enough.
pub(super) const LEAST_DIGITS: usize = 2;
/// Most elements of a row: sums of as many products of two bytes fit 32 bits.
pub(super) const MOST_DEPTH: usize = 1 << 16;

/// What a column's integers count: a power of two.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// The power.
    pub size: f32,
    /// One divided by it.
    pub inverse: f32,
    /// Digits that an integer has at most, from [`LEAST_DIGITS`] to [`DIGITS`].
    #[cfg_attr(all(target_arch = "aarch64", not(test)), expect(dead_code, reason = "its instructions take four"))]
    pub digits: usize,
}

impl Unit {
    /// That of a column of so many elements, the largest of which has these bits, without its sign. The squares are the sum of
    /// its [`third_squared`] with [`of_few`](Unit::of_few): three digits, or two of [`Activations::I16`], are enough where the
    /// third's root mean square is at least 4, and for zeros. `None` if the element isn't finite.
    pub fn of(activations: Activations, bits: u32, squares: u32, count: usize) -> Option<Unit> {
        let is_even = bits == 0 || squares as usize / 16 >= count;
        match (activations, is_even) {
            (Activations::F32, false) => Unit::of_four(bits),
            (Activations::F32, true) | (Activations::I16, false) => Unit::of_few(bits),
            (Activations::I16, true) => Unit::of_two(bits),
        }
    }

    /// That in four digits.
    fn of_four(bits: u32) -> Option<Unit> {
        (bits < f32::INFINITY.to_bits()).then(|| Unit::with(bits, 30, DIGITS))
    }

    /// That in three digits, which may not be enough.
    pub fn of_few(bits: u32) -> Option<Unit> {
        Unit::within(bits, 23, FEW_DIGITS)
    }

    /// That in two.
    fn of_two(bits: u32) -> Option<Unit> {
        Unit::within(bits, 15, LEAST_DIGITS)
    }

    /// That in digits which hold so many bits, or one less if the element is larger than 127 of each digit. The highest digit
    /// is the same however many there are.
    fn within(bits: u32, most: i32, digits: usize) -> Option<Unit> {
        /// The first bits of the largest sum of 127 of each digit.
        const MOST: u32 = 0x7f7f;
        let significant = bits & 0x007f_ffff | 0x0080_0000;
        let most = if significant >> 9 < MOST { most } else { most - 1 };
        (bits < f32::INFINITY.to_bits()).then(|| Unit::with(bits, most, digits))
    }

    /// One in which the largest element has so many bits.
    fn with(bits: u32, most: i32, digits: usize) -> Unit {
        // the largest element is less than two to this
        let exponent = (bits >> 23) as i32 - 126;
        // a unit and its inverse are normal numbers; in a column this small it is the least of them
        let exponent = exponent.max(most - 126);
        let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
        Unit { size: power(exponent - most), inverse: power(most - exponent), digits }
    }
}

/// The digits of that column which has most.
#[cfg(target_arch = "x86_64")]
pub(super) fn most_digits<'a>(units: impl IntoIterator<Item = &'a Unit>) -> usize {
    units.into_iter().map(|unit| unit.digits).max().unwrap_or(LEAST_DIGITS)
}

/// The square of an element's third digit, with the inverse of its column's unit in three digits. As many as a row may have
/// fit 32 bits.
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

/// What makes digits of bytes: each, but the highest, is 128 less than a byte of the sum with this.
pub(super) const DIGITS_MIDDLE: u32 = 0x0080_8080;

/// The digits of an element, the lowest in the lowest byte; `inverse` is that of the column's unit.
///
/// # Safety
/// The element is finite and the unit is that of a column which has it.
#[inline(always)]
pub(super) unsafe fn digits_of(element: f32, inverse: f32) -> u32 {
    let rounded = (element * inverse).round_ties_even();
    // SAFETY: no larger than 2^30, as promised.
    let integer = unsafe { rounded.to_int_unchecked::<i32>() };
    (integer as u32).wrapping_add(DIGITS_MIDDLE) ^ DIGITS_MIDDLE
}

/// The sum of products whose sums by digits are these, the lowest first, in units of the column.
#[inline(always)]
pub(super) fn joined([lowest, low, high, highest]: [i32; DIGITS]) -> f32 {
    let upper = highest as f32 * 256.0 + high as f32;
    (upper * 256.0 + low as f32) * 256.0 + lowest as f32
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// How much the elements of a column are off at most.
    pub fn most_off(activations: Activations, column: &[f64]) -> f64 {
        let largest = column.iter().fold(0.0f64, |largest, x| x.abs().max(largest));
        let mean_square = column.iter().map(|x| x * x).sum::<f64>() / column.len().max(1) as f64;
        let fewer = if activations == Activations::I16 { 8 } else { 0 };
        (largest / f64::from(1 << (30 - fewer))).max(mean_square.sqrt() / f64::from(1 << (19 - fewer)))
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
            for activations in [Activations::F32, Activations::I16] {
                let unit = |squares| Unit::of(activations, bits, squares, 1);
                assert!(unit(0).is_none() && unit(1 << 20).is_none());
            }
        }
        for (activations, many, few) in
            [(Activations::F32, DIGITS, FEW_DIGITS), (Activations::I16, FEW_DIGITS, LEAST_DIGITS)]
        {
            let digits = |largest: f32, squares| Unit::of(activations, largest.to_bits(), squares, 10).unwrap().digits;
            assert_eq!([digits(1.0, 159), digits(1.0, 160), digits(0.0, 0)], [many, few, few]);
        }
    }
}
