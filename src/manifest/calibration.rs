//! The text that a model is calibrated on.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The text by which codes are chosen, where `quant.feedback` asks for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Calibration {
    /// The text: `builtin`, which is prose, code and data in several languages, or a file.
    pub text: CalibrationText,
    /// Most tokens of it.
    pub tokens: u64,
}

impl Default for Calibration {
    fn default() -> Self {
        Calibration { text: CalibrationText::Builtin, tokens: 4096 }
    }
}

impl Calibration {
    pub(super) fn is_default(&self) -> bool {
        *self == Calibration::default()
    }
}

/// Where the text is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", expecting = "expected `builtin` or the path of a text file")]
pub enum CalibrationText {
    /// The text that anec has.
    #[default]
    Builtin,
    /// A file.
    #[serde(untagged)]
    File(PathBuf),
}
