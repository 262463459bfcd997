//! Weights in memory, in their stored form; kernels expand them a few rows at a time.

use std::sync::{Arc, OnceLock};

use half::{f16, slice::HalfFloatSliceExt};

use super::codes::{CodeTables, PackedCodes};
use super::memory::ArenaVec;
use super::pool;
use super::widen::scale_bytes;

/// Stored elements of a large constant.
#[derive(Debug)]
pub enum Elements {
    /// f32 values.
    F32(ArenaVec<f32>),
    /// fp16 values.
    F16(ArenaVec<f16>),
    /// Signed bytes with scales.
    Int8(ArenaVec<i8>),
    /// Codes that are looked up in a table.
    Codes(PackedCodes),
}

impl Elements {
    /// Number of elements.
    fn len(&self) -> usize {
        match self {
            Elements::F32(v) => v.len(),
            Elements::F16(v) => v.len(),
            Elements::Int8(v) => v.len(),
            Elements::Codes(v) => v.len(),
        }
    }
}

/// Factors of [`Elements::Int8`], or of the table values of codes, by row (first axis) and by block within a row.
#[derive(Debug)]
pub struct Scales {
    /// One for all, or `rows * blocks` of them.
    pub values: Vec<f32>,
    /// Number of equal blocks in each row.
    pub blocks: usize,
}

impl Scales {
    /// Scales of the blocks of a row.
    pub fn of_row(&self, row: usize) -> &[f32] {
        if self.values.len() == 1 { &self.values } else { &self.values[row * self.blocks..][..self.blocks] }
    }
}

/// Large constant as rows: the first axis by all others.
#[derive(Debug)]
pub struct StoredWeight {
    shape: Vec<usize>,
    elements: Arc<Elements>,
    scales: Scales,
    tables: Option<CodeTables>,
    row_sums: OnceLock<Vec<i32>>,
}

impl StoredWeight {
    /// Uncompressed weight.
    pub fn plain(shape: Vec<usize>, elements: Arc<Elements>) -> Self {
        StoredWeight::scaled(shape, elements, Scales { values: vec![1.0], blocks: 1 })
    }

    /// Weight of bytes and scales.
    ///
    /// # Panics
    /// If there are fewer elements or scales than the shape says, or the elements are codes.
    pub fn scaled(shape: Vec<usize>, elements: Arc<Elements>, scales: Scales) -> Self {
        assert!(!matches!(&*elements, Elements::Codes(_)), "codes need tables");
        StoredWeight::new(shape, elements, scales, None)
    }

    /// Weight of codes, tables for the same number of rows each, and scales.
    ///
    /// # Panics
    /// If there are fewer codes, tables or scales than the shape says, or the tables are for another number of bits.
    pub fn coded(shape: Vec<usize>, elements: Arc<Elements>, tables: CodeTables, scales: Scales) -> Self {
        let bits = if let Elements::Codes(codes) = &*elements { Some(codes.bits()) } else { None };
        let rows = shape.first().copied().unwrap_or(1);
        assert!(bits == Some(tables.bits()) && tables.rows() >= rows, "a weight lacks codes or tables");
        StoredWeight::new(shape, elements, scales, Some(tables))
    }

    fn new(shape: Vec<usize>, elements: Arc<Elements>, scales: Scales, tables: Option<CodeTables>) -> Self {
        let count = shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size));
        assert!(count.is_some_and(|count| count <= elements.len()), "a weight has fewer elements than its shape says");
        let rows = shape.first().copied().unwrap_or(1);
        let enough = scales.values.len() == 1 && scales.blocks == 1
            || scales.blocks > 0 && scales.values.len() >= rows.saturating_mul(scales.blocks);
        assert!(enough, "a weight has fewer scales than rows and blocks");
        StoredWeight { shape, elements, scales, tables, row_sums: OnceLock::new() }
    }

    /// Shape; the first axis counts the rows.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Elements, row by row.
    pub fn elements(&self) -> &Elements {
        &self.elements
    }

    /// Tables of [`Elements::Codes`].
    pub(super) fn tables(&self) -> Option<&CodeTables> {
        self.tables.as_ref()
    }

    /// Factors of [`Elements::Int8`], or of the table values of codes.
    pub fn scales(&self) -> &Scales {
        &self.scales
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of one row.
    pub fn columns(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Sums of the bytes of each row, computed once; empty unless the elements are bytes.
    pub(super) fn row_sums(&self) -> &[i32] {
        /// Rows that a thread sums at a time.
        const PART: usize = 256;
        self.row_sums.get_or_init(|| {
            let Elements::Int8(values) = &*self.elements else { return Vec::new() };
            let columns = self.columns().max(1);
            let mut sums = vec![0; self.rows()];
            pool::for_each_chunk(&mut sums, PART, |part, sums| {
                for (sum, row) in sums.iter_mut().zip(values[part * PART * columns..].chunks(columns)) {
                    *sum = row.iter().map(|value| i32::from(*value)).sum();
                }
            });
            sums
        })
    }

    /// Writes the values of a row to `out`, which is as long as the row.
    pub fn expand_row(&self, row: usize, out: &mut [f32]) {
        let columns = self.columns();
        let range = row * columns..(row + 1) * columns;
        match &*self.elements {
            Elements::F32(v) => out.copy_from_slice(&v[range]),
            Elements::F16(v) => v[range].convert_to_f32_slice(out),
            Elements::Int8(v) => {
                let scales = self.scales.of_row(row);
                let block = (columns / scales.len()).max(1);
                for ((values, out), scale) in v[range].chunks(block).zip(out.chunks_mut(block)).zip(scales) {
                    scale_bytes(values, *scale, out);
                }
            }
            Elements::Codes(codes) => {
                let (Some(tables), scales) = (&self.tables, self.scales.of_row(row)) else { return };
                let block = (columns / scales.len()).max(1);
                for (i, (out, scale)) in out.chunks_mut(block).zip(scales).enumerate() {
                    codes.expand(range.start + i * block, &tables.of_row(row), *scale, out);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn codes_are_looked_up_in_the_table_of_their_row() {
        // rows of three four-bit codes: they begin within bytes
        let codes = PackedCodes::new(4, vec![0x10, 0x32, 0x54, 0x76, 0x98, 0xba].into());
        let values: Vec<f32> = (0..32).map(|i| i as f32).collect();
        let tables = CodeTables::new(4, 16, &values, 2);
        let scales = Scales { values: vec![1.0, 10.0, 100.0, 1000.0], blocks: 1 };
        let weight = StoredWeight::coded(vec![4, 3], Arc::new(Elements::Codes(codes)), tables, scales);
        let mut out = [0.0; 12];
        out.chunks_mut(3).enumerate().for_each(|(row, out)| weight.expand_row(row, out));
        assert_eq!(out, [0., 1., 2., 30., 40., 50., 2200., 2300., 2400., 25000., 26000., 27000.]);
    }

    #[test]
    fn a_weight_that_lacks_elements_or_scales_is_refused() {
        let weight = |shape: &[usize], scales: usize, blocks: usize| {
            let (shape, elements) = (shape.to_vec(), Arc::new(Elements::Int8(vec![1; 12].into())));
            let scales = Scales { values: vec![0.5; scales], blocks };
            catch_unwind(|| StoredWeight::scaled(shape, elements, scales)).is_ok()
        };
        assert!(weight(&[3, 4], 1, 1) && weight(&[3, 4], 3, 1) && weight(&[3, 4], 6, 2));
        // padding bits of the last byte may appear as further elements
        assert!(weight(&[11], 1, 1));
        assert!(!weight(&[13], 1, 1) && !weight(&[usize::MAX, 2], 1, 1));
        assert!(!weight(&[3, 4], 2, 1) && !weight(&[3, 4], 5, 2) && !weight(&[3, 4], 1, 0));
    }
}
