//! What is done to weights before they are quantized. None of it changes what the model computes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Transforms of the weights that keep the function: what the model computes stays the same, its weights lie closer
/// together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Transforms {
    /// The family's recipe, where a projection is quantized with one scale for the whole tensor, or codes are chosen by
    /// error feedback and the family can be rotated; else none.
    #[default]
    Auto,
    /// None.
    None,
    /// These, as far as the family permits them; always in the order fold, rotate, gains, equalize.
    #[serde(untagged)]
    List(Vec<Transform>),
}

impl Transforms {
    pub(super) fn is_default(&self) -> bool {
        *self == Transforms::Auto
    }
}

/// A transform of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Transform {
    /// Gains of norms move into the projections that read them.
    Fold,
    /// The residual stream is rotated, with the options' defaults. Gains are folded first.
    Rotate,
    /// Gains are shared anew between a norm and the columns of the projections that read it.
    Gains,
    /// Channels between two projections get other units: up and down, value and output, query and key; and rows in front
    /// of depthwise convolutions.
    Equalize,
    /// The residual stream is rotated, with options.
    #[serde(untagged)]
    RotateBy(RotateBy),
}

impl Transform {
    /// The options of a rotation, if this is one.
    pub fn rotation(self) -> Option<RotationOptions> {
        match self {
            Transform::Rotate => Some(RotationOptions::default()),
            Transform::RotateBy(RotateBy { rotate }) => Some(rotate),
            _ => None,
        }
    }

    /// What manifests call it.
    pub fn name(self) -> &'static str {
        match self {
            Transform::Fold => "fold",
            Transform::Rotate | Transform::RotateBy(_) => "rotate",
            Transform::Gains => "gains",
            Transform::Equalize => "equalize",
        }
    }
}

/// A rotation with its options.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RotateBy {
    /// The options.
    pub rotate: RotationOptions,
}

/// The orthogonal matrix by which the residual stream is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RotationOptions {
    /// What its random numbers come from.
    pub seed: u64,
    /// It is turned further, in blocks of channels, so that the largest weights become smaller.
    pub learned: bool,
}

impl Default for RotationOptions {
    fn default() -> Self {
        RotationOptions { seed: 1, learned: false }
    }
}
