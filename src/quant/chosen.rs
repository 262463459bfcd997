//! Codes that were chosen before a weight is written: by error feedback, which needs more than the weight's rows.

use std::sync::Arc;

use anec_base::{MappedFile, Result};
use half::f16;

use super::QuantError;
use super::rounding::{Grid, Rounding};

/// Codes of weights, by their keys.
pub trait ChosenCodes: Send + Sync {
    /// The codes of the weight with this key, as so many output channels: a byte for each element, row-major. None for a
    /// weight that is rounded to the nearest.
    ///
    /// # Errors
    /// When they can't be read.
    fn codes(&self, key: &str, channels: u64) -> Result<Option<Arc<MappedFile>>>;

    /// The scales that go with them: fp16, by rows and blocks. None where they are those that the weight has anyway.
    ///
    /// # Errors
    /// When they can't be read.
    fn scales(&self, key: &str, channels: u64) -> Result<Option<Vec<f16>>>;

    /// The second moments of the inputs by which the codes were chosen, one for each input channel.
    fn moments(&self, key: &str, channels: u64) -> Option<&[f32]>;
}

/// The codes of one weight, as they were chosen.
pub struct ReadCodes {
    file: Arc<MappedFile>,
    columns: u64,
}

impl ReadCodes {
    /// A weight's codes out of a file that holds a byte for each element, row-major.
    ///
    /// # Errors
    /// When there are more or fewer; `weight` names it.
    pub fn new(file: Arc<MappedFile>, weight: &str, rows: u64, columns: u64) -> Result<Self, QuantError> {
        let (found, expected) = (file.bytes().len() as u64, rows * columns);
        if found != expected {
            return Err(QuantError::Codes { weight: weight.to_owned(), found, expected });
        }
        Ok(ReadCodes { file, columns })
    }
}

impl Rounding for ReadCodes {
    fn round(&self, first_row: u64, _: &[f32], _: &[Grid<'_>], codes: &mut [u8]) -> Result<()> {
        let first = (first_row * self.columns) as usize;
        codes.copy_from_slice(&self.file.bytes()[first..first + codes.len()]);
        Ok(())
    }
}
