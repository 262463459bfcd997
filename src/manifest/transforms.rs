//! Weight transforms that keep the model's function.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Transforms applied to the weights before quantization. They keep the model's function and reduce the range of the
/// weights.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Transforms {
    /// The family's recipe if a projection has one scale for the whole tensor, or if codes are chosen by error feedback
    /// and the family can be rotated; otherwise none.
    #[default]
    Auto,
    /// No transforms.
    None,
    /// Given transforms, as far as the family permits them; always in the order fold, rotate, gains, equalize.
    #[serde(untagged)]
    List(Vec<Transform>),
}

impl Transforms {
    pub(super) fn is_default(&self) -> bool {
        *self == Transforms::Auto
    }
}

/// Weight transform.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Transform {
    /// Moves norm gains into the projections that read them.
    Fold,
    /// Rotates the residual stream with default options. Gains are folded first.
    Rotate,
    /// Redistributes gains between a norm and the columns of the projections that read it.
    Gains,
    /// Rescales channels between two projections (up and down, value and output, query and key) and rows in front of
    /// depthwise convolutions.
    Equalize,
    /// Rotates the residual stream with options.
    #[serde(untagged)]
    RotateBy(RotateBy),
}

impl Transform {
    /// Options of a rotation; `None` for other transforms.
    pub fn rotation(self) -> Option<RotationOptions> {
        match self {
            Transform::Rotate => Some(RotationOptions::default()),
            Transform::RotateBy(RotateBy { rotate }) => Some(rotate),
            _ => None,
        }
    }

    /// Name in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Transform::Fold => "fold",
            Transform::Rotate | Transform::RotateBy(_) => "rotate",
            Transform::Gains => "gains",
            Transform::Equalize => "equalize",
        }
    }
}

/// Rotation with its options.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RotateBy {
    /// Options of the rotation.
    pub rotate: RotationOptions,
}

/// Orthogonal matrix that rotates the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct RotationOptions {
    /// Seed of the random matrix.
    pub seed: u64,
    /// Whether the matrix is refined, in blocks of channels, to make the largest weights smaller.
    pub learned: bool,
}

impl RotationOptions {
    /// Returns options for a random matrix of a seed.
    pub fn seeded(seed: u64) -> Self {
        RotationOptions { seed, learned: false }
    }

    /// Sets whether the matrix is [`learned`](RotationOptions::learned).
    pub fn learned(self, learned: bool) -> Self {
        RotationOptions { learned, ..self }
    }
}

impl Default for RotationOptions {
    fn default() -> Self {
        RotationOptions::seeded(1)
    }
}
