//! Many columns: the bytes of a few rows' elements are looked up once and multiplied with all columns.

use std::arch::x86_64::*;

use super::row::RowBytes;
use super::{
    Bytes, DIGITS, EightBitCodes, FEW_DIGITS, Form, ONE_DIGIT, PLANES, ProductBlock, STEP, ShortCodes, StoredProducts,
    TWO_DIGITS,
};
use super::{StoredRows, across, add_products};
use crate::aligned_buf::AlignedBuf;
use crate::digits::max_digits;

/// Rows whose elements are looked up at a time.
const ROWS_AT_A_TIME: usize = 12;
/// Rows of a tile with columns of up to [`TWO_DIGITS`]: sums and bytes fill the registers. Columns with more digits are
/// rare.
const ROWS: usize = 4;
/// Rows of a tile with other columns.
const FEW_ROWS: usize = 2;
/// Columns of a tile.
const COLUMNS: usize = 2;

/// Looked-up bytes of rows: for each vector of a row's elements, one vector per byte.
struct LookedUp {
    bytes: AlignedBuf,
    /// Value of one integer of each row's highest bytes.
    units: [f32; ROWS_AT_A_TIME],
    rows: usize,
}

impl StoredRows<'_> {
    /// Calls `put(step, plane, bytes)` with the `planes` highest bytes of a row's elements, 64 elements at a time, the
    /// highest byte first with 128 added. Bytes behind the row's last element are unspecified. Returns the value of one
    /// integer of the highest bytes.
    ///
    /// # Panics
    /// If there is no such row.
    fn raised_row(&self, row: usize, planes: usize, mut put: impl FnMut(usize, usize, [i8; STEP])) -> f32 {
        let (rows, depth) = self.size();
        assert!(row < rows);
        let place = (row, depth);
        // SAFETY: rows exist only where the processor has the instructions, and the row was checked.
        unsafe {
            match &self.form {
                Form::Bytes(values) => raised_row::<Bytes, 1, 1>(values, place, &mut put),
                Form::Codes(codes) if codes.bits() == 8 => match planes {
                    1 => raised_row::<EightBitCodes, PLANES, 1>(codes, place, &mut put),
                    2 => raised_row::<EightBitCodes, PLANES, 2>(codes, place, &mut put),
                    _ => raised_row::<EightBitCodes, PLANES, PLANES>(codes, place, &mut put),
                },
                Form::Codes(codes) if codes.planes() == 1 => raised_row::<ShortCodes<1>, 1, 1>(codes, place, &mut put),
                Form::Codes(codes) => match planes {
                    1 => raised_row::<ShortCodes<PLANES>, PLANES, 1>(codes, place, &mut put),
                    2 => raised_row::<ShortCodes<PLANES>, PLANES, 2>(codes, place, &mut put),
                    _ => raised_row::<ShortCodes<PLANES>, PLANES, PLANES>(codes, place, &mut put),
                },
            }
        }
    }
}

/// Passes the `N` highest bytes of a row's elements to `put`; lower ones aren't looked up. Returns the value of one
/// integer of the highest bytes.
///
/// # Safety
/// The processor has the instructions, and the row exists.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
unsafe fn raised_row<R: RowBytes<P>, const P: usize, const N: usize>(
    of: &R::Of<'_>,
    (row, depth): (usize, usize),
    put: &mut impl FnMut(usize, usize, [i8; STEP]),
) -> f32 {
    // SAFETY: as promised.
    let (bytes, unit) = unsafe { R::of_row(of, depth, row) };
    for step in 0..depth.div_ceil(STEP) {
        // SAFETY: as promised.
        for (plane, vector) in unsafe { bytes.step(step) }.into_iter().enumerate().take(N) {
            let mut bytes = [0i8; STEP];
            // SAFETY: there is room for 64.
            unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), vector) };
            put(step, plane, bytes);
        }
    }
    unit
}

impl StoredProducts<'_> {
    /// Does the work of [`multiply`](StoredProducts::multiply) for rows without blocks.
    ///
    /// # Panics
    /// As there, and if blocks have scales.
    pub fn multiply_many(&self, first: usize, count: usize, mut put: impl FnMut(ProductBlock<'_>)) {
        assert!(first <= self.rows.weight.rows() && count <= self.rows.weight.rows() - first && self.starts.is_none());
        // SAFETY: columns and rows exist only where the processor has the instructions; they are equally long, and
        // elements have as many bytes.
        unsafe {
            // lower bytes are multiplied with higher digits only
            match self.rows.planes().min(max_digits(self.columns.columns.iter().map(|column| &column.unit))) {
                1 => self.many::<1>((first, count), &mut put),
                2 => self.many::<2>((first, count), &mut put),
                _ => self.many::<PLANES>((first, count), &mut put),
            }
        }
    }

    /// Products with the `P` highest bytes of rows' elements.
    ///
    /// # Safety
    /// The processor has the instructions, rows are as long as columns, and elements have as many bytes.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn many<const P: usize>(&self, (first, count): (usize, usize), put: &mut impl FnMut(ProductBlock<'_>)) {
        let steps = self.columns.depth.div_ceil(STEP);
        let [one, two, few, others] = self.columns.by_digits();
        let bytes = AlignedBuf::new(ROWS_AT_A_TIME * steps * P * STEP / size_of::<f32>());
        let mut near = LookedUp { bytes, units: [0.0; ROWS_AT_A_TIME], rows: 0 };
        for from in (0..count).step_by(ROWS_AT_A_TIME) {
            near.rows = ROWS_AT_A_TIME.min(count - from);
            let vectors = bytemuck::cast_slice_mut::<u32, i8>(near.bytes.words()).as_chunks_mut().0;
            for (i, unit) in near.units.iter_mut().enumerate().take(near.rows) {
                *unit = self.rows.raised_row(first + from + i, P, |step, plane, bytes| {
                    vectors[(i * steps + step) * P + plane] = bytes;
                });
            }
            let mut put = |block: ProductBlock<'_>| put(block.offset_by(from));
            // SAFETY: as promised.
            unsafe {
                self.in_tiles::<ROWS, P, ONE_DIGIT>(&near, &one, &mut put);
                self.in_tiles::<ROWS, P, TWO_DIGITS>(&near, &two, &mut put);
                self.in_tiles::<FEW_ROWS, P, FEW_DIGITS>(&near, &few, &mut put);
                self.in_tiles::<FEW_ROWS, P, DIGITS>(&near, &others, &mut put);
            }
        }
    }

    /// Products of looked-up rows with columns of `D` digits.
    ///
    /// # Safety
    /// As [`many`](Self::many).
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
    unsafe fn in_tiles<const R: usize, const P: usize, const D: usize>(
        &self,
        near: &LookedUp,
        columns: &[usize],
        put: &mut impl FnMut(ProductBlock<'_>),
    ) {
        let (all, of_row) = (self.columns, self.columns.depth.div_ceil(STEP) * P * STEP);
        let place: *const i8 = near.bytes.pointer().cast();
        for columns in columns.chunks(COLUMNS) {
            // the last column stands for a missing one
            let pair: [usize; COLUMNS] = std::array::from_fn(|c| columns[c.min(columns.len() - 1)]);
            let mut products = [[0.0; ROWS_AT_A_TIME]; COLUMNS];
            for row in (0..near.rows).step_by(R) {
                // SAFETY: as promised; there is room for whole tiles, and what isn't a row's is left.
                let sums = unsafe {
                    let rows = std::array::from_fn(|r| place.add((row + r) * of_row));
                    of_tile::<R, P, D>(rows, pair.map(|column| all.of(column)), all.depth)
                };
                for ((products, sums), column) in products.iter_mut().zip(sums).zip(pair) {
                    for ((product, sums), unit) in products[row..].iter_mut().zip(sums).zip(&near.units[row..]) {
                        *product = all.columns[column].product(sums) * unit;
                    }
                }
            }
            for (column, products) in columns.iter().zip(&products) {
                put(ProductBlock::of_column(0, column, &products[..near.rows]));
            }
        }
    }
}

/// Sums by digit of looked-up rows.
///
/// # Safety
/// The processor has the instructions; the bytes and digits exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
unsafe fn of_tile<const R: usize, const P: usize, const D: usize>(
    rows: [*const i8; R],
    columns: [*const i8; COLUMNS],
    depth: usize,
) -> [[[i32; DIGITS]; R]; COLUMNS] {
    let mut sums = [[[_mm512_setzero_si512(); D]; COLUMNS]; R];
    for step in 0..depth.div_ceil(STEP) {
        for (sums, row) in sums.iter_mut().zip(rows) {
            // SAFETY: as promised.
            unsafe {
                let bytes = |plane: usize| _mm512_load_si512(row.add((step * P + plane) * STEP).cast());
                add_products(sums, std::array::from_fn::<_, P, _>(bytes), columns, step);
            }
        }
    }
    std::array::from_fn(|c| std::array::from_fn(|r| across::<D>(sums[r][c])))
}
