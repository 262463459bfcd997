//! Codes of one to eight bits, packed least significant bit first, and their tables of numbers.

#[cfg(target_arch = "x86_64")]
use super::byte_planes::BytePlanes;
use super::dispatch::with_lanes;
use super::memory::ArenaVec;
use super::simd::{Kernel, Lanes};

/// Packed codes.
#[derive(Debug)]
pub struct PackedCodes {
    bits: usize,
    bytes: ArenaVec<u8>,
}

impl PackedCodes {
    /// Packs codes of `bits` bits, contiguous across byte boundaries.
    ///
    /// # Panics
    /// If `bits` isn't 1, 2, 3, 4, 6 or 8.
    pub fn new(bits: usize, bytes: ArenaVec<u8>) -> Self {
        assert!(matches!(bits, 1..=4 | 6 | 8), "codes of {bits} bits");
        PackedCodes { bits, bytes }
    }

    /// Bits of a code.
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// Stored bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of codes, including padding of the last byte.
    pub fn len(&self) -> usize {
        self.bytes.len() * 8 / self.bits
    }

    /// Returns whether there are no codes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes `table[code] * scale` for `out.len()` codes from `from` on.
    ///
    /// # Panics
    /// If there are fewer codes.
    pub fn expand(&self, from: usize, table: &CodeTable<'_>, scale: f32, out: &mut [f32]) {
        assert!(table.bits == self.bits && from <= self.len() && out.len() <= self.len() - from);
        with_lanes(Expand { codes: self, from, table, scale, out });
    }

    /// Does the work of [`expand`](Self::expand) within a kernel.
    ///
    /// # Safety
    /// The processor has the instruction set of `L`; there are `count` codes from `from` on, the table is for codes of
    /// as many bits, and `out` has room.
    #[inline(always)]
    pub(super) unsafe fn expand_at<L: Lanes>(
        &self,
        from: usize,
        table: &CodeTable<'_>,
        scale: f32,
        count: usize,
        out: *mut f32,
    ) {
        let (codes, table) = (self.bytes.as_ptr(), table.values.as_ptr());
        // SAFETY: as promised.
        unsafe {
            match self.bits {
                1 => expand::<L, 1>(codes, from, table, scale, count, out),
                2 => expand::<L, 2>(codes, from, table, scale, count, out),
                3 => expand::<L, 3>(codes, from, table, scale, count, out),
                4 => expand::<L, 4>(codes, from, table, scale, count, out),
                6 => expand::<L, 6>(codes, from, table, scale, count, out),
                _ => expand::<L, 8>(codes, from, table, scale, count, out),
            }
        }
    }
}

/// Table of the codes of some rows.
#[derive(Clone, Copy, Debug)]
pub struct CodeTable<'a> {
    bits: usize,
    values: &'a [f32],
}

/// Tables, each for the same number of rows.
#[derive(Debug)]
pub struct CodeTables {
    bits: usize,
    values: Vec<f32>,
    rows: usize,
    #[cfg(target_arch = "x86_64")]
    planes: Option<BytePlanes>,
}

/// Minimum length of a table: that of a vector.
const SHORTEST: usize = 16;

impl CodeTables {
    /// Tables for codes of `bits` bits, one after another, each for `rows` rows.
    ///
    /// # Panics
    /// If the numbers aren't whole tables of `entries`, or a table has more entries than there are codes.
    pub fn new(bits: usize, entries: usize, values: &[f32], rows: usize) -> Self {
        assert!(bits <= 8 && rows > 0 && (1..=1 << bits).contains(&entries) && values.len().is_multiple_of(entries));
        let with_stride = |stride: usize| {
            let mut padded = vec![0.0; values.len() / entries * stride];
            for (padded, values) in padded.chunks_exact_mut(stride).zip(values.chunks_exact(entries)) {
                padded[..entries].copy_from_slice(values);
            }
            padded
        };
        CodeTables {
            bits,
            values: with_stride(SHORTEST.max(1 << bits)),
            rows,
            #[cfg(target_arch = "x86_64")]
            planes: BytePlanes::new(&with_stride(1 << bits), 1 << bits),
        }
    }

    /// Numbers as bytes, if they have that form.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn planes(&self) -> Option<&BytePlanes> {
        self.planes.as_ref()
    }

    /// Index of a row's table.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(super) fn of(&self, row: usize) -> usize {
        row / self.rows
    }

    /// Number of rows with tables.
    pub fn rows(&self) -> usize {
        self.values.len() / SHORTEST.max(1 << self.bits) * self.rows
    }

    /// Bits of a code.
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// Table of a row.
    #[inline(always)]
    pub fn of_row(&self, row: usize) -> CodeTable<'_> {
        let stride = SHORTEST.max(1 << self.bits);
        CodeTable { bits: self.bits, values: &self.values[row / self.rows * stride..][..stride] }
    }
}

struct Expand<'a> {
    codes: &'a PackedCodes,
    from: usize,
    table: &'a CodeTable<'a>,
    scale: f32,
    out: &'a mut [f32],
}

impl Kernel for Expand<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Expand { codes, from, table, scale, out } = self;
        // SAFETY: as promised; `PackedCodes::expand` has checked the numbers.
        unsafe { codes.expand_at::<L>(from, table, scale, out.len(), out.as_mut_ptr()) }
    }
}

/// Code at a position.
///
/// # Safety
/// The code exists.
#[inline(always)]
unsafe fn code<const BITS: usize>(codes: *const u8, place: usize) -> usize {
    let (byte, shift) = (place * BITS / 8, place * BITS % 8);
    // SAFETY: as promised; the second byte is read only where the code reaches into it.
    let word = unsafe {
        let low = u16::from(*codes.add(byte));
        if shift + BITS > 8 { low | u16::from(*codes.add(byte + 1)) << 8 } else { low }
    };
    usize::from(word >> shift) & ((1 << BITS) - 1)
}

/// `out = table[code] * scale` for `count` codes from `from` on.
///
/// # Safety
/// The processor has the instruction set of `L`; the codes exist, the table has a number for each and at least
/// [`SHORTEST`], and `out` has room.
#[inline(always)]
unsafe fn expand<L: Lanes, const BITS: usize>(
    codes: *const u8,
    from: usize,
    table: *const f32,
    scale: f32,
    count: usize,
    out: *mut f32,
) {
    // eight codes are whole bytes
    let head = (from.next_multiple_of(8) - from).min(count);
    let mut i = 0;
    // SAFETY: as promised.
    unsafe {
        while i < head {
            *out.add(i) = *table.add(code::<BITS>(codes, from + i)) * scale;
            i += 1;
        }
        let (factor, zero) = (L::splat(scale), L::splat(0.0));
        while i + L::COUNT <= count {
            let found = L::look_up::<BITS>(codes.add((from + i) / 8 * BITS), table);
            found.mul_add(factor, zero).store(out.add(i));
            i += L::COUNT;
        }
        while i < count {
            *out.add(i) = *table.add(code::<BITS>(codes, from + i)) * scale;
            i += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::InstructionSet;

    #[test]
    fn every_instruction_set_looks_up_the_same_numbers() {
        for bits in [1, 2, 3, 4, 6, 8] {
            let count = 331usize;
            let bytes: Vec<u8> = (0..(count * bits).div_ceil(8)).map(|i| (i * 197 + i / 7 * 31) as u8).collect();
            let bit = |i: usize| usize::from(bytes[i / 8] >> (i % 8)) & 1;
            let code = |i: usize| (0..bits).map(|b| bit(i * bits + b) << b).sum::<usize>();
            let entries = 1 << bits;
            let values: Vec<f32> = (0..2 * entries).map(|i| i as f32 - 3.5).collect();
            let tables = CodeTables::new(bits, entries, &values, 3);
            assert_eq!((tables.rows(), tables.bits()), (6, bits));
            let codes = PackedCodes::new(bits, bytes.clone().into());
            assert!(codes.len() >= count && !codes.is_empty());
            for (row, from, length) in [(0, 0, 331), (5, 8, 64), (2, 3, 100), (3, 17, 1), (4, 330, 1), (1, 331, 0)] {
                let table = tables.of_row(row);
                let expected: Vec<f32> =
                    (from..from + length).map(|i| values[row / 3 * entries + code(i)] * 0.5).collect();
                InstructionSet::available().for_each(|set| {
                    let mut out = vec![f32::NAN; length];
                    set.run_lanes(Expand { codes: &codes, from, table: &table, scale: 0.5, out: &mut out });
                    assert_eq!(out, expected, "{bits} {row} {from} {set:?}");
                });
            }
        }
    }
}
