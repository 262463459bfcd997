//! Where the bytes of a row's elements come from: memory, or tables in registers.

use std::arch::x86_64::*;

use super::super::{STEP, raised, raised_part};
use crate::codes::{CodeTables, PackedCodes};
use crate::dot::AHEAD;
use crate::planes::{BytePlanes, PLANES};

/// Elements of a row as `P` bytes each, the highest first, which is 128 more than it stands for.
pub(super) trait RowBytes<const P: usize>: Sized {
    /// Rows.
    type Of<'a>: ?Sized;

    /// One of rows of `depth` elements, and what an integer of the highest bytes counts.
    ///
    /// # Safety
    /// The processor has the instructions, and the row is there.
    unsafe fn of_row(of: &Self::Of<'_>, depth: usize, row: usize) -> (Self, f32);

    /// The elements of a vector; what follows the row's last may be anything.
    ///
    /// # Safety
    /// The processor has the instructions, and the row so many vectors.
    unsafe fn step(&self, step: usize) -> [__m512i; P];
}

/// Signed bytes.
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
    /// `None` if the tables' numbers can't be written as bytes.
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

    /// The bytes of a row's table, 64 at a time, and what an integer of the highest counts.
    #[inline]
    fn table_of(&self, row: usize) -> (&'a [[u8; STEP]], f32) {
        let (planes, unit) = self.planes.of_table(self.tables.of(row));
        (planes.as_chunks().0, unit)
    }
}

/// How codes are packed.
#[derive(Clone, Copy)]
struct CodeLayout {
    bits: usize,
    /// Which bytes of a vector's codes hold eight of them.
    spread: [u8; STEP],
    /// Where each of the eight begins there.
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

    /// That of codes of so many bits, eight at most.
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

/// A vector of bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
fn loaded(bytes: &[u8; STEP]) -> __m512i {
    // SAFETY: there are 64.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Where a row's codes are, and how many bytes those of a vector and of the row have.
struct PackedRow {
    row: *const u8,
    step: usize,
    length: usize,
}

impl PackedRow {
    /// # Safety
    /// The row is there.
    #[inline]
    unsafe fn new(of: &CodeRows<'_>, depth: usize, row: usize) -> Self {
        // rows begin with a byte
        let length = depth * of.layout.bits / 8;
        // SAFETY: as promised.
        PackedRow { row: unsafe { of.bytes.as_ptr().add(row * length) }, step: 8 * of.layout.bits, length }
    }

    /// The bytes of a vector's codes. Asks for what comes later.
    ///
    /// # Safety
    /// The row has so many vectors.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn bytes(&self, step: usize) -> __m512i {
        let from = step * self.step;
        let at = self.row.wrapping_add(from);
        // SAFETY: as promised; what is asked for need not be there.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(AHEAD).cast());
            _mm512_maskz_loadu_epi8(u64::MAX >> (64 - self.step.min(self.length - from)), at.cast())
        }
    }
}

/// Codes of at most six bits; tables of 64 bytes.
pub(super) struct Short<const P: usize> {
    codes: PackedRow,
    tables: [__m512i; P],
    /// As in a [`CodeLayout`].
    spread: __m512i,
    shifts: __m512i,
}

impl<const P: usize> RowBytes<P> for Short<P> {
    type Of<'a> = CodeRows<'a>;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn of_row(of: &CodeRows<'_>, depth: usize, row: usize) -> (Self, f32) {
        let (table, unit) = of.table_of(row);
        let short = Short {
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
        // the bits above a code's make no difference where a table has its numbers again and again
        let codes = _mm512_multishift_epi64_epi8(self.shifts, eights);
        self.tables.map(|table| _mm512_permutexvar_epi8(codes, table))
    }
}

/// Codes of eight bits; tables of 256 bytes.
pub(super) struct Long {
    codes: PackedRow,
    tables: [[__m512i; 4]; PLANES],
}

impl RowBytes<PLANES> for Long {
    type Of<'a> = CodeRows<'a>;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn of_row(of: &CodeRows<'_>, depth: usize, row: usize) -> (Self, f32) {
        let (table, unit) = of.table_of(row);
        let tables = std::array::from_fn(|plane| std::array::from_fn(|i| loaded(&table[4 * plane + i])));
        // SAFETY: as promised.
        (Long { codes: unsafe { PackedRow::new(of, depth, row) }, tables }, unit)
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
