//! Weights whose integers are those of the source.
//!
//! A source's `scale * (integer - zero point)` is kept if its blocks are whole blocks of the format, and its integers
//! fit into the format's. Zero points are subtracted from the integers where the difference fits; else they become
//! offsets. Scales below the least normal fp16 are replaced by it, and the integers of their blocks rounded anew.

use std::sync::Arc;

use half::f16;
use rayon::prelude::*;

use super::layout::WeightLayout;
use super::measure::{BlockLoss, RoundingError};
use super::pack::pack;
use super::{Blocks, QuantError};
use anec_base::Result;
use anec_kernels::quantize;
use anec_manifest::{Granularity, Int8Op, NumberFormat, WeightFormat};
use anec_mil::{Content, DataType};
use anec_source::{SourceWeight, StoredIntegers};

/// Integers of a source in a number format that can hold them.
#[derive(Clone)]
pub struct KeptIntegers {
    integers: StoredIntegers,
    layout: WeightLayout,
    /// Number that is subtracted from integers and zero points, if zero points become offsets.
    shift: Option<i16>,
}

impl KeptIntegers {
    /// Returns the integers of a weight of shape `[rows, columns]`, if the format can hold those that its source can
    /// store. Neither integers nor scales are read.
    pub fn of(weight: &SourceWeight, format: NumberFormat) -> Option<Self> {
        if !matches!(format.weights, WeightFormat::Int8 | WeightFormat::Int4) {
            return None;
        }
        let layout = WeightLayout::of(format, weight.rows(), weight.columns());
        let [least, most] = range(layout.dtype);
        let block = match layout.granularity {
            Granularity::PerChannel => layout.columns,
            Granularity::Block(block) => block,
            Granularity::PerTensor | Granularity::Group(_) => return None,
        };
        let integers = weight.stored_integers()?;
        let ([low, high], [zero_low, zero_high]) = (integers.range(), integers.zeros());
        if !integers.block().is_multiple_of(block.max(1)) || high - low > most - least {
            return None;
        }
        let fits = low - zero_high >= least && high - zero_low <= most;
        let shift = (!fits).then_some(low - least);
        let layout = WeightLayout { offsets: shift.is_some(), ..layout };
        (fits || format.op != Int8Op::Affine).then_some(KeptIntegers { integers, layout, shift })
    }

    /// Parts of the weight and their sizes.
    pub fn layout(&self) -> WeightLayout {
        self.layout
    }
}

/// Scale and zero point of a block.
#[derive(Clone, Copy)]
struct Step {
    scale: f16,
    zero: i16,
    /// Scale of the source divided by a larger one that replaces it; else 1.
    ratio: f32,
}

/// Weight with its source's integers.
pub struct KeptWeight {
    weight: SourceWeight,
    kept: KeptIntegers,
    /// Steps of rows and blocks.
    steps: Vec<Step>,
    blocks: Blocks,
    measures: Arc<RoundingError>,
}

impl KeptWeight {
    /// Reads scales and zero points. `None` if a scale is too large for fp16 or a zero point isn't an integer of the
    /// format.
    pub fn new(weight: SourceWeight, kept: KeptIntegers) -> Option<Arc<Self>> {
        let [_, of_row] = kept.layout.scales?;
        // blocks of the source may be several of the format
        let times = kept.integers.block() * of_row / kept.layout.columns.max(1);
        let step = |index: u64| {
            let (scale, zero) = kept.integers.step(index / of_row, index % of_row / times.max(1))?;
            let [least, most] = range(kept.layout.dtype);
            let offset = kept.shift.map_or(0, |shift| zero - shift);
            if !f16::from_f32(scale).is_finite() || offset < least || offset > most {
                return None;
            }
            let smallest = f16::MIN_POSITIVE.to_f32();
            let tiny = scale.abs() < smallest;
            let (stored, ratio) = if tiny { (smallest, scale / smallest) } else { (scale, 1.0) };
            Some(Step { scale: f16::from_f32(stored), zero, ratio })
        };
        let steps: Option<Vec<Step>> = (0..kept.layout.rows * of_row).into_par_iter().map(step).collect();
        let blocks = Blocks::packed(&weight, kept.layout.dtype.bits(), 1);
        let measures = Arc::new(RoundingError::new(blocks.count()));
        Some(Arc::new(KeptWeight { weight, kept, steps: steps?, blocks, measures }))
    }

    /// Parts of the weight and their sizes.
    pub fn layout(&self) -> WeightLayout {
        self.kept.layout
    }

    /// Returns the integers as the content of a constant of the weight's shape.
    pub fn data(self: &Arc<Self>) -> Arc<dyn Content> {
        Arc::new(Codes(self.clone()))
    }

    /// Returns the scales, by rows and blocks, as the content of an fp16 constant.
    pub fn scale(&self) -> Arc<dyn Content> {
        Arc::new(Bytes(self.steps.iter().flat_map(|step| step.scale.to_le_bytes()).collect()))
    }

    /// Returns the offsets as the content of a constant of the integers' type, if there are any.
    pub fn offset(&self) -> Option<Arc<dyn Content>> {
        let shift = self.kept.shift?;
        let offsets: Vec<u8> = self.steps.iter().map(|step| (step.zero - shift) as i8 as u8).collect();
        let bits = self.kept.layout.dtype.bits() as u32;
        let mut packed = vec![0; self.kept.layout.offset_bytes() as usize];
        pack(&offsets, bits, &mut packed);
        Some(Arc::new(Bytes(packed)))
    }

    /// Returns the conversion error; complete once all integers are read.
    pub fn measures(&self) -> Arc<RoundingError> {
        self.measures.clone()
    }

    fn convert(&self, block: usize, out: &mut [u8]) -> Result<()> {
        let (rows, columns) = (self.blocks.rows(block), self.weight.columns() as usize);
        let count = (rows.end - rows.start) as usize * columns;
        let (mut values, mut back, mut codes) = (vec![0.0; count], vec![0.0; count], vec![0u8; count]);
        self.weight.read_rows(rows.start, &mut values)?;
        let of_row = self.steps.len() / self.weight.rows().max(1) as usize;
        let size = (columns / of_row.max(1)).max(1);
        let mut integers = vec![0; columns];
        let [least, most] = range(self.kept.layout.dtype);
        for (row, (codes, back)) in rows.clone().zip(codes.chunks_mut(columns).zip(back.chunks_mut(columns))) {
            self.kept.integers.read_row(row, &mut integers);
            let steps = &self.steps[row as usize * of_row..];
            let parts = integers.chunks(size).zip(codes.chunks_mut(size)).zip(back.chunks_mut(size));
            for (step, ((integers, codes), back)) in steps.iter().zip(parts) {
                let (offset, scale) = (self.kept.shift.map_or(0, |shift| step.zero - shift), step.scale.to_f32());
                for ((integer, code), back) in integers.iter().zip(codes).zip(back) {
                    let exact = integer - step.zero;
                    let steps = if step.ratio == 1.0 { exact } else { (f32::from(exact) * step.ratio).round() as i16 };
                    let stored = (steps + offset).clamp(least, most);
                    *code = stored as i8 as u8;
                    *back = scale * f32::from(stored - offset);
                }
            }
        }
        let (squares, vanished) = quantize::compare(&values, &back);
        let largest = quantize::largest_magnitude(&values);
        self.measures.set(block, BlockLoss { squares, largest, saturated: 0, vanished });
        pack(&codes, self.kept.layout.dtype.bits() as u32, out);
        Ok(())
    }
}

/// Least and largest integer of a type.
fn range(dtype: DataType) -> [i16; 2] {
    if dtype == DataType::Int4 { [-8, 7] } else { [-128, 127] }
}

struct Codes(Arc<KeptWeight>);

impl Content for Codes {
    fn length(&self) -> u64 {
        self.0.kept.layout.data_bytes()
    }

    fn granule(&self) -> u64 {
        self.0.kept.layout.dtype.packed_bytes(self.0.blocks.elements())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let own = &self.0;
        own.blocks.read(
            &own.weight,
            own.kept.layout.dtype,
            (offset, out),
            || (),
            |(), block, out| own.convert(block, out),
        )
    }
}

/// Content that is in memory.
struct Bytes(Vec<u8>);

impl Content for Bytes {
    fn length(&self) -> u64 {
        self.0.len() as u64
    }

    fn granule(&self) -> u64 {
        1
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(out.len() as u64);
        let bytes = usize::try_from(offset).ok().and_then(|first| self.0.get(first..)?.get(..out.len()));
        let wrong = || QuantError::Granule { weight: "scales".into(), offset, end, granule: 1 };
        out.copy_from_slice(bytes.ok_or_else(wrong)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
