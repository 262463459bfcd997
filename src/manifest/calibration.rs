//! Calibration text.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Text used for choosing codes if `quant.feedback` is set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Calibration {
    /// `builtin` (prose, code and data in several languages), or a file.
    pub text: CalibrationText,
    /// Maximum number of tokens to use.
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

/// Source of the calibration text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", expecting = "expected `builtin` or the path of a text file")]
pub enum CalibrationText {
    /// Text that ships with anec.
    #[default]
    Builtin,
    /// Path of a text file.
    #[serde(untagged)]
    File(PathBuf),
}
