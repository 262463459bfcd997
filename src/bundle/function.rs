//! The functions of the packages.

use std::ops::Range;

use crate::{Port, StatePort, TokenCount};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One function of a package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FunctionEntry {
    /// Package that holds it.
    pub package: String,
    /// Name within the package.
    pub function: String,
    /// What it does.
    pub stage: Stage,
    /// The context that it is for: tokens of the longest text, prompt and continuation. Experts and the LM head see none:
    /// their functions carry the largest context and serve all.
    pub context: u64,
    /// Numbers of tokens that one call may have.
    pub tokens: TokenCount,
    /// Inputs.
    pub inputs: Vec<Port>,
    /// Outputs.
    pub outputs: Vec<Port>,
    /// States.
    pub states: Vec<StatePort>,
    /// Where the hidden states between its layers can be seen. What leaves its last layer is its output.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<HiddenProbe>,
}

/// A value inside a function that holds the hidden states that leave a layer, in the shape of the function's output of
/// role `hidden`. A runtime needs none; who compares a model with another layer by layer does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HiddenProbe {
    /// The layer, counted over the whole model.
    pub layer: usize,
    /// Name of the value.
    pub value: String,
}

/// What a function does in the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Stage {
    /// Layers `first..end` of the stack; hidden states in, hidden states out.
    Layers {
        /// First layer.
        first: usize,
        /// One past the last layer.
        end: usize,
    },
    /// The feed-forward network of a layer whose function leaves it out: hidden states in, and out with what it adds, and
    /// with whatever else the layer does behind it.
    FeedForward {
        /// The layer, counted over the whole model.
        layer: usize,
    },
    /// Experts `first..end` of a layer whose function leaves them out: hidden states in, and out with what these experts
    /// add. Where no token of a call has a share in them, the hidden states are what they were, and the call can be left
    /// out.
    Experts {
        /// The layer, counted over the whole model.
        layer: usize,
        /// First expert.
        first: u64,
        /// One past the last expert.
        end: u64,
    },
    /// Rows `first..end` of the LM head, with the final norm; hidden states in, logits out. A classifier's head has a row
    /// for each label.
    Head {
        /// First row of the vocabulary, or label.
        first: u64,
        /// One past the last row.
        end: u64,
    },
}

impl Stage {
    /// The layers that it computes, or computes a part of; none of the head's.
    pub fn layers(&self) -> Range<usize> {
        match *self {
            Stage::Layers { first, end } => first..end,
            Stage::FeedForward { layer } | Stage::Experts { layer, .. } => layer..layer + 1,
            Stage::Head { .. } => 0..0,
        }
    }
}

const LAYER_PREFIX: &str = "layers_";

/// What the names of a layer's ops and values begin with, before another `_`.
pub fn layer_scope(layer: usize) -> String {
    format!("{LAYER_PREFIX}{layer}")
}

/// The layer that an op or value belongs to, by its name: `layers_7_attn_q_proj` to 7.
pub fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix(LAYER_PREFIX)?.split('_').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_which_layer_they_belong_to() {
        for layer in [0, 3, 12] {
            assert_eq!(layer_of(&format!("{}_attn_q_proj", layer_scope(layer))), Some(layer));
        }
        assert_eq!(layer_of("hidden_out"), None);
        assert_eq!(layer_of("layers_x_hidden"), None);
    }
}
