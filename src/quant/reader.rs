//! Reader of a weight's rows that refuses values which no format can hold.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::fp16::{LARGEST, overflow};
use anec_base::Result;
use anec_kernels::quantize;
use anec_manifest::Overflow;
use anec_source::SourceWeight;

/// Weight and the treatment of values beyond fp16.
pub(crate) struct RowReader {
    pub(crate) weight: SourceWeight,
    overflow: Overflow,
    /// Values by their first row that a pass kept for the next. Only for weights that are slow to compute and keep no
    /// values themselves.
    kept: Option<Mutex<HashMap<u64, Vec<f32>>>>,
}

/// Maximum number of elements of a weight whose values are kept between two passes.
const MOST_KEPT: u64 = 1 << 26;

impl RowReader {
    pub(crate) fn new(weight: SourceWeight, overflow: Overflow) -> Self {
        let keeps = weight.has_product() && !weight.holds_product() && weight.elements() <= MOST_KEPT;
        RowReader { weight, overflow, kept: keeps.then(Mutex::default) }
    }

    /// Whether values of a pass are kept for the next one, here or by the weight.
    pub(crate) fn keeps(&self) -> bool {
        self.kept.is_some() || self.weight.holds_product()
    }

    /// Keeps rows that were read for the next [`load`](Self::load) of the same rows, if they are slow to compute.
    pub(crate) fn keep(&self, first_row: u64, values: &mut Vec<f32>) {
        if let Some(kept) = &self.kept {
            kept.lock().unwrap_or_else(PoisonError::into_inner).insert(first_row, std::mem::take(values));
        }
    }

    pub(crate) fn columns(&self) -> usize {
        self.weight.columns() as usize
    }

    pub(crate) fn load(&self, rows: Range<u64>, values: &mut Vec<f32>) -> Result<()> {
        let count = (rows.end - rows.start) as usize * self.columns();
        let kept = self.kept.as_ref().map(|kept| kept.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(kept) = kept.and_then(|mut kept| kept.remove(&rows.start)).filter(|kept| kept.len() == count) {
            *values = kept;
            return Ok(());
        }
        values.resize(count, 0.0);
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
