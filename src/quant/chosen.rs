//! Codes that were chosen before a weight is written: by error feedback, which needs more than the weight's rows.

use std::sync::Arc;

use anec_base::{MappedFile, Result};

/// Codes of weights, by their keys.
pub trait ChosenCodes: Send + Sync {
    /// The codes of the weight with this key, as so many output channels: a byte for each element, row-major. None for a
    /// weight that is rounded to the nearest.
    ///
    /// # Errors
    /// When they can't be read.
    fn codes(&self, key: &str, channels: u64) -> Result<Option<Arc<MappedFile>>>;
}
