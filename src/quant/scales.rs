//! Symmetric integers: `weight = scale * q`, `q` from -127 to 127 or from -7 to 7, with one fp16 scale for the whole
//! tensor, for each output channel, or for each block of input channels of one output channel.
//!
//! The scale is the largest magnitude divided by the largest `q`, rounded to fp16 *before* values are divided by it, so
//! that its rounding costs no accuracy. It is never zero or subnormal, because hardware may flush subnormals to zero:
//!
//! - nothing but zeros gets the scale 1 (every q is 0);
//! - a largest magnitude below `most * 2^-14` gets the smallest normal fp16, 2^-14, and fewer steps.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

use half::f16;
use rayon::prelude::*;

use super::Blocks;
use super::fp16::LARGEST;
use super::layout::WeightLayout;
use super::reader::RowReader;
use super::rounding::Grid;
use anec_base::Result;
use anec_kernels::quantize;
use anec_manifest::Granularity;
use anec_mil::DataType;

/// The scales of a weight, which are found as it is read.
pub(crate) struct BlockScales {
    /// The largest integer.
    pub(crate) most: i8,
    /// Columns that share a scale.
    pub(crate) block: usize,
    known: Known,
}

enum Known {
    Tensor(OnceLock<TensorScale>),
    /// Bits of fp16 by row and block; 0, which is no scale, until it is found.
    Each(Vec<AtomicU16>),
}

#[derive(Clone, Copy)]
struct TensorScale {
    scale: f16,
    /// Largest magnitude of the tensor.
    largest: f32,
}

impl BlockScales {
    pub(crate) fn new(layout: &WeightLayout) -> Self {
        let most = if layout.dtype == DataType::Int4 { 7 } else { 127 };
        let columns = layout.columns as usize;
        let each = |count: u64| Known::Each((0..count).map(|_| AtomicU16::new(0)).collect());
        let (block, known) = match layout.granularity {
            Granularity::PerTensor | Granularity::Group(_) => (columns, Known::Tensor(OnceLock::new())),
            Granularity::PerChannel => (columns, each(layout.rows)),
            Granularity::Block(block) => (block as usize, each(layout.rows * layout.columns / block)),
        };
        BlockScales { most, block: block.max(1), known }
    }

    /// Whether all weights share one scale.
    pub(crate) fn is_one(&self) -> bool {
        matches!(self.known, Known::Tensor(_))
    }

    /// The grid of a row of those whose scales these are, as [`of_rows`](Self::of_rows) gave them.
    pub(crate) fn grid<'a>(&self, scales: &'a [f16], row: usize, columns: usize) -> Grid<'a> {
        let of_row = columns / self.block;
        let scales = if self.is_one() { scales } else { &scales[row * of_row..][..of_row] };
        Grid::Steps { scales, block: self.block, most: self.most }
    }

    /// Does what must precede all reading: finds the scale of the whole tensor, by a pass over all its values. Nothing
    /// waits for another thread here (a thread of the pool that waits could be waiting for work of its own), so two
    /// threads could both make the pass.
    pub(crate) fn prepare(&self, reader: &RowReader, blocks: Blocks) -> Result<()> {
        let Known::Tensor(known) = &self.known else { return Ok(()) };
        if known.get().is_some() {
            return Ok(());
        }
        let largest = largest(reader, blocks)?;
        known.get_or_init(|| TensorScale { scale: scale_for(largest, self.most), largest });
        Ok(())
    }

    /// The scales of rows that were read, and their largest magnitude, or that of the tensor whose scale they share.
    /// `prepare` came before.
    pub(crate) fn of_rows(
        &self,
        reader: &RowReader,
        first_row: u64,
        values: &[f32],
        scales: &mut Vec<f16>,
    ) -> Result<f32> {
        scales.clear();
        let known = match &self.known {
            Known::Tensor(known) => {
                let TensorScale { scale, largest } = known.get().copied().unwrap_or(TensorScale {
                    scale: scale_for(reader.largest(first_row, values)?, self.most),
                    largest: 0.0,
                });
                scales.push(scale);
                return Ok(largest);
            }
            Known::Each(known) => known,
        };
        let largest = reader.largest(first_row, values)?;
        let first = first_row as usize * (reader.columns() / self.block);
        for (values, place) in values.chunks(self.block).zip(&known[first..]) {
            let scale = scale_for(quantize::largest_magnitude(values), self.most);
            place.store(scale.to_bits(), Ordering::Relaxed);
            scales.push(scale);
        }
        Ok(largest)
    }

    /// Scales from `first` on into `out`; those that no reading of the integers has found yet are found now.
    pub(crate) fn read(&self, reader: &RowReader, blocks: Blocks, first: usize, out: &mut [u8]) -> Result<()> {
        self.prepare(reader, blocks)?;
        let known = match &self.known {
            Known::Tensor(known) => {
                if let (Some(known), [_, ..]) = (known.get(), &*out) {
                    out.copy_from_slice(&known.scale.to_le_bytes());
                }
                return Ok(());
            }
            Known::Each(known) => known,
        };
        let of_row = reader.columns() / self.block;
        let unknown = |block: &usize| {
            let rows = blocks.rows(*block);
            let scales = &known[rows.start as usize * of_row..rows.end as usize * of_row];
            scales.iter().any(|s| s.load(Ordering::Relaxed) == 0)
        };
        let missing: Vec<usize> = (0..blocks.count()).filter(unknown).collect();
        missing.par_iter().try_for_each_init(
            || (Vec::new(), Vec::new()),
            |(values, scales), block| {
                reader.load(blocks.rows(*block), values)?;
                self.of_rows(reader, blocks.rows(*block).start, values, scales).map(|_| ())
            },
        )?;
        for (scale, out) in known[first..].iter().zip(out.chunks_exact_mut(2)) {
            out.copy_from_slice(&scale.load(Ordering::Relaxed).to_le_bytes());
        }
        Ok(())
    }
}

/// The largest magnitude of a weight, which is released.
fn largest(reader: &RowReader, blocks: Blocks) -> Result<f32> {
    let largest = (0..blocks.count())
        .into_par_iter()
        .map_init(Vec::new, |values, block| {
            reader.load(blocks.rows(block), values)?;
            reader.largest(blocks.rows(block).start, values)
        })
        .try_reduce(|| 0.0, |a, b| Ok(a.max(b)))?;
    reader.weight.release(0..reader.weight.elements());
    Ok(largest)
}

/// The scale for a largest magnitude and a largest integer (see the module).
pub(crate) fn scale_for(largest: f32, most: i8) -> f16 {
    if largest == 0.0 {
        return f16::ONE;
    }
    f16::from_f32(largest.min(LARGEST) / f32::from(most)).max(f16::MIN_POSITIVE)
}
