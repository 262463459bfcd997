//! What keeps a model in half precision's range.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What keeps the model in half precision's range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Numerics {
    /// Factor of the residual stream: `auto`, or a power of two from 2^-16 to 1; the family's own if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<ResidualScale>,
}

impl Numerics {
    pub(super) fn is_default(&self) -> bool {
        *self == Numerics::default()
    }
}

/// A power of two that the whole residual stream is multiplied by. What the model computes stays the same: the norms
/// that read the stream divide it out again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResidualScale {
    /// The largest at which a run in f32 stays well below fp16's largest number.
    Auto,
    /// This one.
    #[serde(untagged)]
    Factor(f32),
}
