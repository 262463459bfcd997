//! Adapters that are merged into the weights.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A low-rank adapter in a folder, as PEFT saves it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AdapterEntry {
    /// The folder: adapter_config.json and adapter_model.safetensors.
    pub path: PathBuf,
    /// How strong it is, compared with how it was trained.
    #[serde(default = "whole")]
    pub scale: f64,
}

fn whole() -> f64 {
    1.0
}
