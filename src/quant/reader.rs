//! Reading a weight's rows, refusing what no format holds.

use std::ops::Range;

use super::fp16::{LARGEST, overflow};
use anec_base::Result;
use anec_kernels::quantize;
use anec_manifest::Overflow;
use anec_source::SourceWeight;

/// A weight and what to do with numbers beyond fp16.
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

    /// Reads rows.
    pub(crate) fn load(&self, rows: Range<u64>, values: &mut Vec<f32>) -> Result<()> {
        values.resize((rows.end - rows.start) as usize * self.columns(), 0.0);
        Ok(self.weight.read_rows(rows.start, values)?)
    }

    /// The largest magnitude of rows that were read, which are refused if they can't be held.
    pub(crate) fn largest(&self, first_row: u64, values: &[f32]) -> Result<f32> {
        self.held(quantize::largest_magnitude(values), first_row, values)
    }

    /// The same, where the largest magnitude is known.
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
