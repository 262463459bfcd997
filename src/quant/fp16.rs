//! Weights as fp16: the format of everything that isn't quantized.

use std::sync::Arc;

use super::measure::{BlockLoss, RoundingError};
use super::{Blocks, QuantError};
use anec_base::Result;
use anec_kernels::quantize;
use anec_manifest::Overflow;
use anec_mil::{Content, DataType};
use anec_source::SourceWeight;

/// Largest finite number of fp16.
pub const LARGEST: f32 = 65504.0;

/// Weight converted to fp16 as it is read, rounded to nearest even.
pub struct Fp16 {
    weight: SourceWeight,
    blocks: Blocks,
    overflow: Overflow,
    measures: Arc<RoundingError>,
}

impl Fp16 {
    /// Returns the fp16 form of a weight.
    pub fn new(weight: SourceWeight, overflow: Overflow) -> Self {
        let blocks = Blocks::of(&weight);
        Fp16 { weight, blocks, overflow, measures: Arc::new(RoundingError::new(blocks.count())) }
    }

    /// Returns the fp16 form of a weight that is read `rows` rows at a time, for weights whose rows are computed faster
    /// together.
    pub fn by_rows(weight: SourceWeight, overflow: Overflow, rows: u64) -> Self {
        let blocks = Blocks::of_rows(&weight, rows);
        Fp16 { weight, blocks, overflow, measures: Arc::new(RoundingError::new(blocks.count())) }
    }

    /// Returns the conversion error; complete once all of the weight is read.
    pub fn measures(&self) -> Arc<RoundingError> {
        self.measures.clone()
    }

    fn convert(&self, block: usize, values: &mut [f32], out: &mut [u8]) -> Result<()> {
        let rows = self.blocks.rows(block);
        // little-endian, as on every platform that Core ML or this crate supports
        let (halves, _) = out.as_chunks_mut::<2>();
        let values = &mut values[..halves.len()];
        self.weight.read_rows(rows.start, values)?;
        let largest = quantize::largest_magnitude(values);
        if !largest.is_finite() {
            self.weight.check_finite(rows.start, values)?;
        }
        let mut saturated = 0;
        if largest > LARGEST {
            if self.overflow == Overflow::Error {
                return Err(overflow(&self.weight, rows.start, values).into());
            }
            saturated = quantize::count_above(values, LARGEST);
            values.iter_mut().for_each(|v| *v = v.clamp(-LARGEST, LARGEST));
        }
        let (squares, vanished) = quantize::round_to_halves(values, halves);
        let loss = BlockLoss { squares, largest, saturated, vanished };
        self.measures.set(block, loss);
        Ok(())
    }
}

impl Content for Fp16 {
    fn length(&self) -> u64 {
        2 * self.weight.elements()
    }

    fn granule(&self) -> u64 {
        2 * self.blocks.elements()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let values = || vec![0.0; self.blocks.elements() as usize];
        let convert = |values: &mut Vec<f32>, block, out: &mut [u8]| self.convert(block, values, out);
        self.blocks.read(&self.weight, DataType::Fp16, (offset, out), values, convert)
    }
}

/// Returns the error for the first value that fp16 can't hold.
pub(super) fn overflow(weight: &SourceWeight, first_row: u64, values: &[f32]) -> QuantError {
    let index = values.iter().position(|v| v.abs() > LARGEST).unwrap_or(0);
    let columns = weight.columns().max(1);
    let names = weight.names();
    QuantError::Overflow {
        tensor: names.join("`, `"),
        row: first_row + index as u64 / columns,
        column: index as u64 % columns,
        value: values.get(index).copied().unwrap_or(f32::NAN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_mil::Content;
    use half::f16;

    fn weight(values: Vec<f32>, columns: u64) -> SourceWeight {
        let rows = values.len() as u64 / columns;
        SourceWeight::from_values("w", &[rows, columns], values).unwrap()
    }

    fn bytes(content: &dyn Content) -> Result<Vec<u8>> {
        let mut out = vec![0; content.length() as usize];
        content.prepare()?;
        content.read(0, &mut out)?;
        Ok(out)
    }

    #[test]
    fn values_are_rounded_to_the_nearest_half() {
        let values: Vec<f32> = (0..70_000).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        let content = Fp16::new(weight(values.clone(), 7), Overflow::Error);
        let expected: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        assert_eq!(bytes(&content).unwrap(), expected);
        let loss = content.measures().total().unwrap();
        assert!(loss.relative_rms_error < 3e-4 && loss.relative_rms_error > 1e-5, "{loss:?}");
        assert_eq!((loss.saturated, loss.vanished), (0, 0));
    }

    #[test]
    fn parts_read_in_any_order_are_the_whole() {
        let content = Fp16::new(weight((0..100_000).map(|i| i as f32 * 0.01).collect(), 10), Overflow::Error);
        let whole = bytes(&content).unwrap();
        let granule = content.granule() as usize;
        let mut parts = vec![0; whole.len()];
        for (i, part) in parts.chunks_mut(granule).enumerate().rev() {
            content.read((i * granule) as u64, part).unwrap();
        }
        assert_eq!(parts, whole);
        assert!(content.read(1, &mut [0; 2]).is_err());
    }

    #[test]
    fn values_beyond_fp16_are_errors_or_saturate_by_choice() {
        let values = vec![0.0, 1.0, -7e4, 1e-9, 1.0, 1.0];
        let error = bytes(&Fp16::new(weight(values.clone(), 2), Overflow::Error)).unwrap_err();
        let expected = "row 1, column 0: -70000 doesn't fit into fp16, whose largest number is 65504";
        assert!(error.to_string().ends_with(expected), "{error}");
        assert!(error.help().unwrap().contains("quant.overflow: saturate"));
        let content = Fp16::new(weight(values, 2), Overflow::Saturate);
        let out = bytes(&content).unwrap();
        assert_eq!(f16::from_le_bytes([out[4], out[5]]), f16::MIN);
        let loss = content.measures().total().unwrap();
        assert_eq!((loss.saturated, loss.vanished), (1, 1));
    }

    #[test]
    fn nan_is_reported_with_its_place() {
        let mut values = vec![0.5; 100_000];
        values[77_777] = f32::NAN;
        let error = bytes(&Fp16::new(weight(values, 10), Overflow::Saturate)).unwrap_err();
        assert_eq!(error.fault().exit_code(), 4);
        assert!(error.to_string().contains("`w`, row 7777, column 7"), "{error}");
    }
}
