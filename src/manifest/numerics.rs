//! Scaling that keeps a model in fp16's range.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Scaling that keeps the model in fp16's range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Numerics {
    /// Factor of the residual stream: `auto`, or a power of two from 2^-16 to 1; defaults to the family's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<ResidualScale>,
}

impl Numerics {
    pub(super) fn is_default(&self) -> bool {
        *self == Numerics::default()
    }
}

/// Power of two that scales the residual stream. The model's function is unchanged: the norms that read the stream
/// divide by it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResidualScale {
    /// Largest factor at which activations of an f32 run stay well below fp16's largest number.
    Auto,
    /// Given factor.
    #[serde(untagged)]
    Factor(f32),
}
