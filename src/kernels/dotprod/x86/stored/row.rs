//! Sources of a row's bytes: memory, or tables in registers.

use std::arch::x86_64::*;

use super::super::{STEP, raised, raised_part};
use crate::byte_planes::{BytePlanes, PLANES};
use crate::codes::{CodeTables, PackedCodes};
use crate::dot::PREFETCH_DISTANCE;

/// Elements of a row as `P` bytes each, the highest first, with 128 added to it.
pub(super) trait RowBytes<const P: usize>: Sized {
    /// Rows.
    type Of<'a>: ?Sized;

    /// Row of `depth` elements, and the value of one integer of the highest bytes.
    ///
    /// # Safety
    /// The processor has the instructions, and the row exists.
    unsafe fn of_row(of: &Self::Of<'_>, depth: usize, row: usize) -> (Self, f32);

    /// Bytes of a vector of elements; elements behind the end of the row are unspecified.
    ///
    /// # Safety
    /// The processor has the instructions, and the vector begins within the row.
    unsafe fn step(&self, step: usize) -> [__m512i; P];
}

/// Row of signed bytes.
pub(super) struct Bytes {
    row: *const i8,
    depth: usize,
}

impl RowBytes<1> for Bytes {
    type Of<'a> = [i8];

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn of_row(of: &[i8], depth: usize, row: usize) -> (Self, f32) {
        // SAFETY: as promised.
        (Bytes { row: unsafe { of.as_ptr().add(row * depth) }, depth }, 1.0)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn step(&self, step: usize) -> [__m512i; 1] {
        // SAFETY: as promised.
        unsafe {
            let (at, left) = (self.row.add(step * STEP), self.depth - step * STEP);
            [if left >= STEP { raised(at) } else { raised_part(at, left) }]
        }
    }
}

/// Rows of codes.
#[derive(Clone, Copy)]
pub(super) struct CodeRows<'a> {
    bytes: &'a [u8],
    tables: &'a CodeTables,
    planes: &'a BytePlanes,
    layout: &'static CodeLayout,
}

impl<'a> CodeRows<'a> {
    /// Returns `None` if the tables' numbers can't be written as bytes.
    pub fn new(codes: &'a PackedCodes, tables: &'a CodeTables) -> Option<Self> {
        let layout = CodeLayout::of(codes.bits());
        Some(CodeRows { bytes: codes.bytes(), tables, planes: tables.planes()?, layout })
    }

    /// Bits of a code.
    pub fn bits(&self) -> usize {
        self.layout.bits
    }

    /// Bytes of a number.
    pub fn planes(&self) -> usize {
        self.planes.count()
    }

    /// Bytes of a row's table, 64 at a time, and the value of one integer of the highest bytes.
    #[inline]
    fn table_of(&self, row: usize) -> (&'a [[u8; STEP]], f32) {
        let (planes, unit) = self.planes.of_table(self.tables.of(row));
        (planes.as_chunks().0, unit)
    }
}

/// Layout of packed codes.
#[derive(Clone, Copy)]
struct CodeLayout {
    bits: usize,
    /// Indices of the bytes that hold each eight codes of a vector.
    spread: [u8; STEP],
    /// Bit position of each of the eight codes in these bytes.
    shifts: [u8; STEP],
}

impl CodeLayout {
    const fn new(bits: usize) -> Self {
        let mut layout = CodeLayout { bits, spread: [0; STEP], shifts: [0; STEP] };
        let mut i = 0;
        while i < STEP {
            layout.spread[i] = (i / 8 * bits + i % 8) as u8;
            layout.shifts[i] = (i % 8 * bits) as u8;
            i += 1;
        }
        layout
    }

    /// Layout of codes with up to eight bits.
    fn of(bits: usize) -> &'static CodeLayout {
        const fn all() -> [CodeLayout; 9] {
            let mut all = [CodeLayout::new(0); 9];
            let mut bits = 1;
            while bits < all.len() {
                all[bits] = CodeLayout::new(bits);
                bits += 1;
            }
            all
        }
        static ALL: [CodeLayout; 9] = all();
        &ALL[bits]
    }
}

/// Loads a vector of bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
fn loaded(bytes: &[u8; STEP]) -> __m512i {
    // SAFETY: there are 64.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Packed codes of a row: address, and bytes of a vector's codes and of the row.
struct PackedRow {
    row: *const u8,
    step: usize,
    length: usize,
}

impl PackedRow {
    /// # Safety
    /// The row exists.
    #[inline]
    unsafe fn new(of: &CodeRows<'_>, depth: usize, row: usize) -> Self {
        // rows begin at a byte
        let length = depth * of.layout.bits / 8;
        // SAFETY: as promised.
        PackedRow { row: unsafe { of.bytes.as_ptr().add(row * length) }, step: 8 * of.layout.bits, length }
    }

    /// Bytes of a vector's codes. Prefetches later ones.
    ///
    /// # Safety
    /// The vector begins within the row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn bytes(&self, step: usize) -> __m512i {
        let from = step * self.step;
        let at = self.row.wrapping_add(from);
        // SAFETY: as promised; what is asked for need not be there.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(PREFETCH_DISTANCE).cast());
            _mm512_maskz_loadu_epi8(u64::MAX >> (64 - self.step.min(self.length - from)), at.cast())
        }
    }
}

/// Row of codes with up to six bits; tables have 64 bytes.
pub(super) struct ShortCodes<const P: usize> {
    codes: PackedRow,
    tables: [__m512i; P],
    /// As in [`CodeLayout`].
    spread: __m512i,
    shifts: __m512i,
}

impl<const P: usize> RowBytes<P> for ShortCodes<P> {
    type Of<'a> = CodeRows<'a>;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn of_row(of: &CodeRows<'_>, depth: usize, row: usize) -> (Self, f32) {
        let (table, unit) = of.table_of(row);
        let short = ShortCodes {
            // SAFETY: as promised.
            codes: unsafe { PackedRow::new(of, depth, row) },
            tables: std::array::from_fn(|plane| loaded(&table[plane])),
            spread: loaded(&of.layout.spread),
            shifts: loaded(&of.layout.shifts),
        };
        (short, unit)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn step(&self, step: usize) -> [__m512i; P] {
        // SAFETY: as promised.
        let bytes = unsafe { self.codes.bytes(step) };
        let eights = _mm512_permutexvar_epi8(self.spread, bytes);
        // bits above the code don't matter because the table repeats its numbers
        let codes = _mm512_multishift_epi64_epi8(self.shifts, eights);
        self.tables.map(|table| _mm512_permutexvar_epi8(codes, table))
    }
}

/// Row of eight-bit codes; tables have 256 bytes.
pub(super) struct EightBitCodes {
    codes: PackedRow,
    tables: [[__m512i; 4]; PLANES],
}

impl RowBytes<PLANES> for EightBitCodes {
    type Of<'a> = CodeRows<'a>;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn of_row(of: &CodeRows<'_>, depth: usize, row: usize) -> (Self, f32) {
        let (table, unit) = of.table_of(row);
        let tables = std::array::from_fn(|plane| std::array::from_fn(|i| loaded(&table[4 * plane + i])));
        // SAFETY: as promised.
        (EightBitCodes { codes: unsafe { PackedRow::new(of, depth, row) }, tables }, unit)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn step(&self, step: usize) -> [__m512i; PLANES] {
        // SAFETY: as promised.
        let codes = unsafe { self.codes.bytes(step) };
        let upper = _mm512_movepi8_mask(codes);
        self.tables.map(|[a, b, c, d]| {
            let low = _mm512_permutex2var_epi8(a, codes, b);
            _mm512_mask_blend_epi8(upper, low, _mm512_permutex2var_epi8(c, codes, d))
        })
    }
}
