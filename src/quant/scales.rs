//! Symmetric integers: `weight = scale * q` with `q` from -127 to 127 or from -8 to 7, and one fp16 scale for the
//! tensor, for each output channel, or for each block of input channels of an output channel.
//!
//! The scale is the largest magnitude divided by the largest `q`. It is rounded to fp16 *before* values are divided by
//! it, so that its rounding costs no accuracy. For 4-bit `q`, smaller scales are tried as well and the one of least
//! squared error is taken, because the many small values gain more than the few large ones lose. These scales carry a
//! sign that maps the largest magnitude to -8. For 8 bits, large values matter more than squared errors suggest, so
//! that values are clipped only if the magnitudes of their inputs are known (`clip`). A scale is never
//! zero or subnormal, because hardware may flush subnormals to zero:
//!
//! - if all values are zero, the scale is 1 (every q is 0);
//! - a largest magnitude below `most * 2^-14` gets the smallest normal fp16, 2^-14, and fewer steps.

use std::sync::atomic::{AtomicU16, Ordering};

use half::f16;
use rayon::prelude::*;

use super::Blocks;
use super::clip::{ColumnWeights, Inputs, Tail};
use super::fp16::LARGEST;
use super::layout::WeightLayout;
use super::reader::RowReader;
use super::rounding::Grid;
use super::tensor_pass::{TensorPass, TensorScale};
use anec_base::Result;
use anec_kernels::quantize;
use anec_manifest::Granularity;
use anec_mil::DataType;

/// Scales of a weight, computed as it is read.
pub(crate) struct BlockScales {
    /// Least and largest integer.
    pub(crate) range: [i8; 2],
    /// Number of columns that share a scale.
    pub(crate) block: usize,
    known: Known,
}

enum Known {
    /// One scale for the tensor.
    Tensor(TensorPass),
    /// fp16 bits by row and block; 0 (not a valid scale) marks a scale that isn't computed yet.
    Each(Vec<AtomicU16>),
    /// Scales chosen beforehand.
    Fixed(Vec<f16>),
}

impl BlockScales {
    /// Returns scales that are yet to be computed. `inputs` describes the inputs of the columns.
    pub(crate) fn new(layout: &WeightLayout, inputs: Inputs<'_>) -> Self {
        let range = if layout.dtype == DataType::Int4 { [-8, 7] } else { [-127, 127] };
        let columns = layout.columns as usize;
        let each = |count: u64| Known::Each((0..count).map(|_| AtomicU16::new(0)).collect());
        // clipping assumes a symmetric range, which 4-bit integers don't have
        let weights = |inputs| ColumnWeights::of(inputs, columns).filter(|_| range[0] == -range[1]);
        let (block, known) = match layout.granularity {
            Granularity::PerTensor | Granularity::Group(_) => {
                (columns, Known::Tensor(TensorPass::new(weights(inputs))))
            }
            Granularity::PerChannel => (columns, each(layout.rows)),
            Granularity::Block(block) => (block as usize, each(layout.rows * layout.columns / block)),
        };
        BlockScales { range, block: block.max(1), known }
    }

    /// Replaces the scales by given ones, by rows and blocks; their number must be the layout's.
    pub(crate) fn given(self, scales: Vec<f16>) -> Self {
        BlockScales { known: Known::Fixed(scales), ..self }
    }

    /// Whether all weights share one scale.
    pub(crate) fn is_one(&self) -> bool {
        matches!(self.known, Known::Tensor(..))
    }

    /// Returns the grid of a row, from the scales that [`of_rows`](Self::of_rows) returned.
    pub(crate) fn grid<'a>(&self, scales: &'a [f16], row: usize, columns: usize) -> Grid<'a> {
        let of_row = columns / self.block;
        let scales = if self.is_one() { scales } else { &scales[row * of_row..][..of_row] };
        Grid::Steps { scales, block: self.block, range: self.range }
    }

    /// Computes the scale of the whole tensor, in a pass over all its values; must precede all reads. `keep` keeps
    /// values that are slow to compute for the next pass.
    pub(crate) fn prepare(&self, reader: &RowReader, blocks: Blocks, keep: bool) -> Result<()> {
        let Known::Tensor(pass) = &self.known else { return Ok(()) };
        let scale = |largest, tail: Option<&Tail>| {
            let end = tail.map_or(largest, |tail| tail.end(largest, self.range[1]));
            scale_for(end, self.range[1])
        };
        pass.make(reader, blocks, keep, scale)
    }

    /// Computes the scales of rows that were read. Returns the largest magnitude of the rows, or of the tensor if the
    /// scale is shared. `prepare` must have been called.
    pub(crate) fn of_rows(
        &self,
        reader: &RowReader,
        first_row: u64,
        values: &[f32],
        scales: &mut Vec<f16>,
    ) -> Result<f32> {
        scales.clear();
        let known = match &self.known {
            Known::Tensor(pass) => {
                let TensorScale { scale, largest } = pass.scale().unwrap_or(TensorScale {
                    scale: scale_for(reader.largest(first_row, values)?, self.range[1]),
                    largest: 0.0,
                });
                scales.push(scale);
                return Ok(largest);
            }
            Known::Fixed(given) => {
                let of_row = reader.columns() / self.block;
                let first = first_row as usize * of_row;
                scales.extend_from_slice(&given[first..first + values.len() / self.block]);
                return reader.largest(first_row, values);
            }
            Known::Each(known) => known,
        };
        let blocks = values.chunks(self.block);
        let largest = if let [_, most @ 127] = self.range {
            // one pass gives the scales and the overall maximum; magnitudes are ordered like their bits
            let mut largest = 0;
            scales.extend(blocks.map(|values| {
                let own = quantize::largest_magnitude(values);
                largest = own.to_bits().max(largest);
                scale_for(own, most)
            }));
            reader.held(f32::from_bits(largest), first_row, values)?
        } else {
            let largest = reader.largest(first_row, values)?;
            let mut codes = vec![0; self.block];
            scales.extend(blocks.map(|values| scale_of_least_error(values, self.range, &mut codes[..values.len()])));
            largest
        };
        let first = first_row as usize * (reader.columns() / self.block);
        for (scale, place) in scales.iter().zip(&known[first..]) {
            place.store(scale.to_bits(), Ordering::Relaxed);
        }
        Ok(largest)
    }

    /// Writes scales from `first` on to `out`, computing those that no read of the integers has computed yet.
    pub(crate) fn read(&self, reader: &RowReader, blocks: Blocks, first: usize, out: &mut [u8]) -> Result<()> {
        self.prepare(reader, blocks, true)?;
        let known = match &self.known {
            Known::Tensor(pass) => {
                if let (Some(known), [_, ..]) = (pass.scale(), &*out) {
                    out.copy_from_slice(&known.scale.to_le_bytes());
                }
                return Ok(());
            }
            Known::Fixed(given) => {
                let bytes = given[first..].iter().flat_map(|scale| scale.to_le_bytes());
                out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte);
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

/// Returns the scale of least squared error among those that map the largest magnitude to `most` to `most` + 3 steps.
/// The scale is negative if the largest magnitude is positive, so that it becomes a negative integer, of which there is
/// one more.
fn scale_of_least_error(values: &[f32], range: [i8; 2], codes: &mut [u8]) -> f16 {
    let largest = quantize::largest_magnitude(values);
    if largest == 0.0 {
        return f16::ONE;
    }
    let sign = if values.contains(&largest) { -f16::ONE } else { f16::ONE };
    let mut best = (f64::INFINITY, sign);
    for quarters in 0..=12u8 {
        let steps = f32::from(range[1]) + f32::from(quarters) / 4.0;
        let scale = sign * f16::from_f32(largest.min(LARGEST) / steps).max(f16::MIN_POSITIVE);
        let own = quantize::quantize(values, scale.to_f32(), range, codes).0.error;
        if own < best.0 {
            best = (own, scale);
        }
    }
    best.1
}

/// Returns the scale for a largest magnitude and a largest integer (see the module).
pub(crate) fn scale_for(largest: f32, most: i8) -> f16 {
    if largest == 0.0 {
        return f16::ONE;
    }
    f16::from_f32(largest.min(LARGEST) / f32::from(most)).max(f16::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bits_take_the_scale_of_the_least_error() {
        let mut codes = vec![0; 32];
        let error = |values: &[f32], scale: f16| {
            let mut codes = vec![0; 32];
            quantize::quantize(values, scale.to_f32(), [-8, 7], &mut codes).0.error
        };
        // a lone large value, which costs more to keep than to clip
        let mut values: Vec<f32> = (0..32).map(|i| (i as f32 * 0.37).sin() * 0.9).collect();
        values[3] = 1.3;
        let chosen = scale_of_least_error(&values, [-8, 7], &mut codes);
        let plain = scale_for(1.3, 7);
        assert!(-chosen < plain && error(&values, chosen) < 0.9 * error(&values, plain));
        // multiples of a scale, the largest -8 times it: lossless
        let exact: Vec<f32> = (0..32).map(|i| 0.25 * (i % 16 - 8) as f32).collect();
        assert_eq!(scale_of_least_error(&exact, [-8, 7], &mut codes), f16::from_f32(0.25));
        assert_eq!(error(&exact, f16::from_f32(0.25)), 0.0);
        assert_eq!(scale_of_least_error(&[0.0; 32], [-8, 7], &mut codes), f16::ONE);
        assert_eq!(scale_of_least_error(&[1e-7; 32], [-8, 7], &mut codes), -f16::MIN_POSITIVE);
        assert_eq!(scale_of_least_error(&[-1e-7; 32], [-8, 7], &mut codes), f16::MIN_POSITIVE);
    }

    /// Eight steps are negative and seven positive: the largest magnitude gets the eight, whatever its sign.
    #[test]
    fn the_largest_magnitude_of_four_bits_is_a_negative_integer() {
        let mut codes = vec![0; 32];
        for sign in [0.25, -0.25] {
            let values: Vec<f32> = (0..32).map(|i| sign * (i % 16 - 8) as f32).collect();
            let scale = scale_of_least_error(&values, [-8, 7], &mut codes);
            assert_eq!(scale.to_f32(), sign);
            assert_eq!(quantize::quantize(&values, scale.to_f32(), [-8, 7], &mut codes).0.error, 0.0);
            assert_eq!(codes[0] as i8, -8);
        }
    }
}
