//! Why a model can't be calibrated.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault};
use anec_quant::QuantError;

/// Why a model can't be calibrated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// It isn't a model that a text runs through from left to right.
    #[error("`quant.feedback: gptq`: a token classifier can't be calibrated")]
    LabelsTokens,
    /// Layers pass more to each other than hidden states.
    #[error("`quant.feedback: gptq`: a model whose routers pass on what they gather can't be calibrated")]
    Router,
    /// The text has no tokens.
    #[error("calibration text {}: it has no tokens", .0.display())]
    NoTokens(PathBuf),
    /// Inputs that aren't finite.
    #[error("calibration, {package}: inputs `{value}`: {error}")]
    Moments {
        /// The package.
        package: String,
        /// The value.
        value: String,
        /// What is wrong.
        error: QuantError,
    },
}

impl Diagnostic for CalibrateError {
    fn fault(&self) -> Fault {
        match self {
            CalibrateError::LabelsTokens | CalibrateError::Router | CalibrateError::NoTokens(_) => Fault::Usage,
            CalibrateError::Moments { .. } => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            CalibrateError::LabelsTokens | CalibrateError::Router => Some("use `quant.feedback: none`".into()),
            CalibrateError::NoTokens(_) => Some("name another text, or leave `calibration.text` at builtin".into()),
            CalibrateError::Moments { error, .. } => error.help(),
        }
    }
}
