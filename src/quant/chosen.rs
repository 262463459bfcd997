//! Codes chosen before a weight is written, by error feedback, which needs more than the weight's rows.

use std::sync::Arc;

use anec_base::{MappedFile, Result};
use half::f16;

use super::QuantError;
use super::rounding::{Grid, Rounding};

/// Codes of weights, by their keys.
pub trait ChosenCodes: Send + Sync {
    /// Returns the codes of the weight with this key and this number of output channels: one byte per element,
    /// row-major. `None` for a weight that is rounded to nearest.
    ///
    /// # Errors
    /// Returns an error if the codes can't be read.
    fn codes(&self, key: &str, channels: u64) -> Result<Option<Arc<MappedFile>>>;

    /// Returns the fp16 scales that belong to the codes, by rows and blocks. `None` if they are the weight's default
    /// scales.
    ///
    /// # Errors
    /// Returns an error if the scales can't be read.
    fn scales(&self, key: &str, channels: u64) -> Result<Option<Vec<f16>>>;

    /// Returns the second moments of the inputs that the codes were chosen by, one per input channel.
    fn moments(&self, key: &str, channels: u64) -> Option<&[f32]>;
}

/// Codes of one weight, read from a file.
pub struct ReadCodes {
    file: Arc<MappedFile>,
    columns: u64,
}

impl ReadCodes {
    /// Opens the codes of a weight from a file that holds one byte per element, row-major.
    ///
    /// # Errors
    /// Returns [`QuantError::Codes`], naming `weight`, if the file holds more or fewer codes than the weight has
    /// elements.
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
