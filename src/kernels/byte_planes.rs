//! Numbers of a palette as bytes, so that rows of codes can be multiplied as rows of bytes.
//!
//! A number is an integer times a power of two that depends on the table's largest number. Three bytes hold 24 bits: an
//! fp16 number is exact if it is at least a 4096th of the largest, and the error of others is at most a 2^23rd of the
//! largest, less than that of f32 sums of this length. One byte suffices if all numbers are small integers times a
//! power of two, as for int4.

/// Maximum bytes of a number.
pub(super) const PLANES: usize = 3;
/// Bytes that one register looks up: tables of shorter codes are repeated to this length.
const SHORTEST: usize = 64;

/// Tables with one plane per byte of their numbers: first the highest byte of each number, plus 128, then the next
/// lower one.
#[derive(Debug)]
pub(super) struct BytePlanes {
    bytes: Vec<u8>,
    units: Vec<f32>,
    count: usize,
    length: usize,
}

impl BytePlanes {
    /// Converts tables of `entries` numbers each. `None` if a number isn't finite, or a unit would be too small.
    pub fn new(values: &[f32], entries: usize) -> Option<Self> {
        let tables = || values.chunks_exact(entries.max(1));
        let largest = |table: &[f32]| table.iter().fold(0.0f32, |largest, v| v.abs().max(largest));
        if values.iter().any(|v| !v.is_finite())
            || tables().map(largest).any(|v| v > 0.0 && v < f32::MIN_POSITIVE * 2e9)
        {
            return None;
        }
        let unit = |table: &[f32], bits: i32| {
            // the largest number is less than two to this power
            let exponent = (largest(table).to_bits() >> 23) as i32 - 126;
            if exponent == -126 { 1.0 } else { f32::from_bits(((exponent - bits + 127) as u32) << 23) }
        };
        let is_byte = |table: &[f32]| {
            let unit = unit(table, 7);
            table.iter().all(|v| (v / unit).fract() == 0.0)
        };
        let count = if entries <= SHORTEST && tables().all(is_byte) { 1 } else { PLANES };
        let length = entries.max(SHORTEST);
        let mut bytes = Vec::with_capacity(values.len() / entries.max(1) * count * length);
        let mut units = Vec::new();
        for table in tables() {
            let unit = unit(table, 8 * count as i32 - 1);
            let most = (1 << (8 * count - 1)) - 1;
            let integer = |v: &f32| ((v / unit).round_ties_even() as i32).min(most);
            for plane in (0..count).rev() {
                let raised = if plane + 1 == count { 128 } else { 0 };
                let byte = |v: &f32| ((integer(v) >> (8 * plane)) as u8).wrapping_add(raised);
                bytes.extend(table.iter().map(byte).cycle().take(length));
            }
            units.push(unit * (1u32 << (8 * (count - 1))) as f32);
        }
        Some(BytePlanes { bytes, units, count, length })
    }

    /// Bytes of a number.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Planes of a table, one after another, and the value of one integer of the highest bytes.
    #[inline]
    pub fn of_table(&self, table: usize) -> (&[u8], f32) {
        let size = self.count * self.length;
        (&self.bytes[table * size..][..size], self.units[table])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number from a table's bytes.
    fn number(planes: &BytePlanes, table: usize, entry: usize) -> f64 {
        let (bytes, unit) = planes.of_table(table);
        let plane = |plane: usize| f64::from(bytes[plane * planes.length + entry]);
        let lower: f64 = (1..planes.count).map(|p| plane(p) / 256f64.powi(p as i32)).sum();
        (plane(0) - 128.0 + lower) * f64::from(unit)
    }

    #[test]
    fn bytes_make_up_the_numbers() {
        let integers: Vec<f32> = (-8..8).map(|v| v as f32).collect();
        let planes = BytePlanes::new(&integers, 16).unwrap();
        assert_eq!(planes.count, 1);
        for (i, v) in integers.iter().enumerate() {
            assert_eq!((number(&planes, 0, i), number(&planes, 0, i + 48)), (f64::from(*v), f64::from(*v)));
        }
        // two tables; fp16 numbers, the largest f32 numbers below a power of two, and zeros
        let mut values: Vec<f32> =
            (0..256).map(|i| half::f16::from_f32((i as f32 - 99.5) * 0.001_7).to_f32()).collect();
        values.extend((0..256).map(|i| 1.999_999_9 / (1.0 + i as f32)));
        values[7] = 0.0;
        let planes = BytePlanes::new(&values, 256).unwrap();
        assert_eq!(planes.count, PLANES);
        for (i, v) in values.iter().enumerate() {
            let (table, largest) = (i / 256, if i < 256 { 0.265 } else { 2.0 });
            let off = (number(&planes, table, i % 256) - f64::from(*v)).abs();
            assert!(off <= largest / f64::from(1 << 23), "{i} {v} {off}");
            assert!(i >= 256 || v.abs() < largest as f32 / 4096.0 || off == 0.0, "{i} {v} {off}");
        }
        assert_eq!(number(&BytePlanes::new(&[0.0; 4], 4).unwrap(), 0, 3), 0.0);
    }

    #[test]
    fn tables_without_a_byte_form_are_rejected() {
        for value in [f32::NAN, f32::INFINITY, 1e-38] {
            assert!(BytePlanes::new(&[value, value], 2).is_none());
        }
    }
}
