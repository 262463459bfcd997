//! Errors of calibration.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault};
use anec_quant::QuantError;

/// Error of calibrating a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// Model that isn't causal.
    #[error("`quant.{0}`: a bidirectional model can't be calibrated")]
    Bidirectional(&'static str),
    /// Model without predictions, such as an embedding model.
    #[error("`quant.plan`: losses are measured on next-token predictions, and the model makes none")]
    NoPredictions,
    /// Model whose layers exchange more than hidden states.
    #[error("`quant.{0}`: a model whose routers pass state between layers can't be calibrated")]
    Router(&'static str),
    /// Budget that no choice of formats keeps.
    #[error("`quant.plan.{key}`: {asked} is below the minimum of the formats, expected at least {least}")]
    Budget {
        /// Key of the budget.
        key: &'static str,
        /// Requested budget.
        asked: f64,
        /// Least budget that the formats allow.
        least: f64,
    },
    /// Manifest that names a format for every projection.
    #[error("`quant.plan`: `quant.overrides` and `quant.layers` already set the format of every projection")]
    NothingToChoose,
    /// Calibration text without tokens.
    #[error("calibration text {}: no tokens found", .0.display())]
    NoTokens(PathBuf),
    /// Inputs that aren't finite.
    #[error("calibration, {package}: inputs `{value}`: {error}")]
    Moments {
        /// Name of the package.
        package: String,
        /// Name of the value.
        value: String,
        /// Cause.
        error: QuantError,
    },
}

impl Diagnostic for CalibrateError {
    fn fault(&self) -> Fault {
        match self {
            CalibrateError::Bidirectional(_)
            | CalibrateError::NoPredictions
            | CalibrateError::Router(_)
            | CalibrateError::NoTokens(_)
            | CalibrateError::Budget { .. }
            | CalibrateError::NothingToChoose => Fault::Usage,
            CalibrateError::Moments { .. } => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            CalibrateError::Bidirectional(key) | CalibrateError::Router(key) => {
                let key = key.split(':').next().unwrap_or(key);
                Some(format!("remove `quant.{key}`"))
            }
            CalibrateError::NoPredictions => {
                Some("remove it and set formats in `quant.overrides` or `quant.layers`".into())
            }
            CalibrateError::Budget { .. } => Some("raise the budget to that".into()),
            CalibrateError::NothingToChoose => Some("remove some of them, or the plan".into()),
            CalibrateError::NoTokens(_) => Some("set another `calibration.text`, or `builtin`".into()),
            CalibrateError::Moments { error, .. } => error.help(),
        }
    }
}
