//! Reader of a weight's rows that refuses values which no format can hold.

use std::ops::Range;

use super::fp16::{LARGEST, overflow};
use anec_base::Result;
use anec_kernels::quantize;
use anec_manifest::Overflow;
use anec_source::SourceWeight;

/// Weight and the treatment of values beyond fp16.
pub(crate) struct RowReader {
    pub(crate) weight: SourceWeight,
    overflow: Overflow,
}

impl RowReader {
    pub(crate) fn new(weight: SourceWeight, overflow: Overflow) -> Self {
        RowReader { weight, overflow }
    }

    pub(crate) fn columns(&self) -> usize {
        self.weight.columns() as usize
    }

    pub(crate) fn load(&self, rows: Range<u64>, values: &mut Vec<f32>) -> Result<()> {
        values.resize((rows.end - rows.start) as usize * self.columns(), 0.0);
        Ok(self.weight.read_rows(rows.start, values)?)
    }

    /// Returns the largest magnitude of rows that were read. NaN, infinity and, unless saturation is allowed, values
    /// beyond fp16 are errors.
    pub(crate) fn largest(&self, first_row: u64, values: &[f32]) -> Result<f32> {
        self.held(quantize::largest_magnitude(values), first_row, values)
    }

    /// Checks rows whose largest magnitude is known, as [`largest`](Self::largest) does.
    pub(crate) fn held(&self, largest: f32, first_row: u64, values: &[f32]) -> Result<f32> {
        if !largest.is_finite() {
            self.weight.check_finite(first_row, values)?;
        }
        if largest > LARGEST && self.overflow == Overflow::Error {
            return Err(overflow(&self.weight, first_row, values).into());
        }
        Ok(largest)
    }
}
