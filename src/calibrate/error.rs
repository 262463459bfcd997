//! Why a model can't be calibrated.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault};
use anec_quant::QuantError;

/// Why a model can't be calibrated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// It isn't a model that a text runs through from left to right.
    #[error("`quant.{0}`: a model that looks at texts in both directions can't be calibrated")]
    Bidirectional(&'static str),
    /// It gives vectors.
    #[error("`quant.plan`: what formats cost is measured by predictions of the next token, and the model makes none")]
    NoPredictions,
    /// Layers pass more to each other than hidden states.
    #[error("`quant.{0}`: a model whose routers pass on what they gather can't be calibrated")]
    Router(&'static str),
    /// No formats of those that there are keep within the budget.
    #[error("`quant.plan.{key}`: {asked} is less than the formats allow, expected at least {least}")]
    Budget {
        /// The budget's key.
        key: &'static str,
        /// What was asked for.
        asked: f64,
        /// What the formats allow.
        least: f64,
    },
    /// Every projection has a format already.
    #[error(
        "`quant.plan`: `quant.overrides` and `quant.layers` name every projection, so that nothing is left to choose"
    )]
    NothingToChoose,
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
                Some(format!("leave `quant.{key}` out"))
            }
            CalibrateError::NoPredictions => {
                Some("leave it out, and say by `quant.overrides` or `quant.layers` which formats weights get".into())
            }
            CalibrateError::Budget { .. } => {
                Some("ask for that, or let `anec quant` show what each format costs".into())
            }
            CalibrateError::NothingToChoose => Some("remove overrides, or the plan".into()),
            CalibrateError::NoTokens(_) => Some("name another text, or leave `calibration.text` at builtin".into()),
            CalibrateError::Moments { error, .. } => error.help(),
        }
    }
}
