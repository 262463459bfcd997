//! Layout of a weight in a number format, known before any of the weight is read.

use anec_manifest::{Granularity, NumberFormat, WeightFormat};
use anec_mil::DataType;

/// Parts of a weight in a number format and their sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightLayout {
    /// Number of output channels.
    pub rows: u64,
    /// Number of elements per output channel.
    pub columns: u64,
    /// Type of the elements.
    pub dtype: DataType,
    /// Weights that share one scale or one palette: the format's granularity, fitted to the shape.
    pub granularity: Granularity,
    /// Number of scales along rows and along columns.
    pub scales: Option<[u64; 2]>,
    /// Whether each scale has an offset, of the elements' type, that is subtracted from the elements.
    pub offsets: bool,
    /// Number of palettes; each serves an equal number of rows.
    pub palettes: Option<u64>,
    /// Whether each row has a scale that its product is multiplied by.
    pub row_scales: bool,
}

impl WeightLayout {
    /// Returns the layout of a weight of shape `[rows, columns]`.
    pub fn of(format: NumberFormat, rows: u64, columns: u64) -> Self {
        let granularity = match format.granularity {
            Granularity::Group(most) => Granularity::Group(divisor(rows, most)),
            Granularity::Block(most) => Granularity::Block(divisor(columns, most)),
            whole => whole,
        };
        let scales = match granularity {
            Granularity::PerTensor | Granularity::Group(_) => [1, 1],
            Granularity::PerChannel => [rows, 1],
            Granularity::Block(block) => [rows, columns / block],
        };
        let palettes = match granularity {
            Granularity::Group(group) => rows / group,
            _ => 1,
        };
        let dtype = match format.weights {
            WeightFormat::None => DataType::Fp16,
            WeightFormat::Int8 => DataType::Int8,
            WeightFormat::Int4 => DataType::Int4,
            WeightFormat::Palette8 => DataType::Uint8,
            WeightFormat::Palette6 => DataType::Uint6,
            WeightFormat::Palette4 => DataType::Uint4,
            WeightFormat::Palette3 => DataType::Uint3,
            WeightFormat::Palette2 => DataType::Uint2,
            WeightFormat::Palette1 => DataType::Uint1,
        };
        let (integers, palette) = (dtype == DataType::Int8 || dtype == DataType::Int4, format.weights.palette_bits());
        WeightLayout {
            rows,
            columns,
            dtype,
            granularity,
            scales: integers.then_some(scales),
            offsets: false,
            palettes: palette.map(|_| palettes),
            row_scales: palette.is_some() && format.row_scale,
        }
    }

    /// Size of the elements in bytes.
    pub fn data_bytes(&self) -> u64 {
        self.dtype.packed_bytes(self.rows * self.columns)
    }

    /// Size of the integers' scales in bytes.
    pub fn scale_bytes(&self) -> u64 {
        self.scales.map_or(0, |[rows, columns]| 2 * rows * columns)
    }

    /// Size of the offsets in bytes.
    pub fn offset_bytes(&self) -> u64 {
        let count = self.scales.filter(|_| self.offsets).map_or(0, |[rows, columns]| rows * columns);
        self.dtype.packed_bytes(count)
    }

    /// Number of entries in a palette.
    pub fn entries(&self) -> u64 {
        1 << self.dtype.bits()
    }

    /// Size of the palettes in bytes.
    pub fn palette_bytes(&self) -> u64 {
        self.palettes.map_or(0, |palettes| 2 * palettes * self.entries())
    }

    /// Size of the row scales in bytes.
    pub fn row_scale_bytes(&self) -> u64 {
        if self.row_scales { 2 * self.rows } else { 0 }
    }

    /// Total size in bytes.
    pub fn bytes(&self) -> u64 {
        self.data_bytes() + self.scale_bytes() + self.offset_bytes() + self.palette_bytes() + self.row_scale_bytes()
    }
}

/// Returns the largest number up to `most` that divides `all`.
fn divisor(all: u64, most: u64) -> u64 {
    (1..=most.min(all)).rev().find(|n| all.is_multiple_of(*n)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_manifest::Int8Op;

    #[test]
    fn groups_and_blocks_are_fitted_to_the_shape() {
        let format = |weights, granularity| NumberFormat { weights, granularity, row_scale: true, op: Int8Op::Auto };
        let layout = WeightLayout::of(format(WeightFormat::Int4, Granularity::Block(32)), 10, 48);
        assert_eq!((layout.granularity, layout.scales), (Granularity::Block(24), Some([10, 2])));
        assert_eq!((layout.bytes(), layout.row_scales), (240 + 40, false));
        let layout = WeightLayout::of(format(WeightFormat::Palette6, Granularity::Group(16)), 24, 3);
        assert_eq!((layout.granularity, layout.palettes), (Granularity::Group(12), Some(2)));
        assert_eq!(layout.bytes(), 54 + 2 * 2 * 64 + 48);
        let layout = WeightLayout::of(format(WeightFormat::Palette1, Granularity::PerTensor), 3, 3);
        assert_eq!((layout.palettes, layout.data_bytes(), layout.palette_bytes()), (Some(1), 2, 4));
    }
}
