//! Adapters that are merged into the weights.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Low-rank adapter in PEFT's format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AdapterEntry {
    /// Folder with adapter_config.json and adapter_model.safetensors.
    pub path: PathBuf,
    /// Factor applied to the adapter; 1 is the strength it was trained with.
    #[serde(default = "default_scale")]
    pub scale: f64,
}

fn default_scale() -> f64 {
    1.0
}
