//! Functions of packages.

use std::ops::Range;

use crate::{Port, StatePort, TokenCount};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Function of a package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FunctionEntry {
    /// Package that contains the function.
    pub package: String,
    /// Name within the package.
    pub function: String,
    /// Part of the model that the function computes.
    pub stage: Stage,
    /// Context length in tokens, prompt and continuation. Experts and the LM head don't depend on it: their functions
    /// have the largest context and serve all.
    pub context: u64,
    /// Numbers of tokens that one call may have.
    pub tokens: TokenCount,
    /// Inputs.
    pub inputs: Vec<Port>,
    /// Outputs.
    pub outputs: Vec<Port>,
    /// States.
    pub states: Vec<StatePort>,
    /// Hidden states between the function's layers. The last layer's are its output.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<HiddenProbe>,
    /// Value inside a function of the head that holds the logits where they are no output, in the shape of that output.
    /// Used for comparing models; a runtime doesn't need it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logits: Option<String>,
}

/// Value inside a function that holds a layer's output hidden states, in the shape of the function's output of role
/// `hidden`. Used for comparing models layer by layer; a runtime doesn't need it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HiddenProbe {
    /// Layer, counted over the whole model.
    pub layer: usize,
    /// Name of the value.
    pub value: String,
}

/// Part of the model that a function computes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Stage {
    /// Layers `first..end`: hidden states in, hidden states out.
    Layers {
        /// First layer.
        first: usize,
        /// One past the last layer.
        end: usize,
    },
    /// Feed-forward network of a layer whose function leaves it out, with everything that follows in the layer: hidden
    /// states in, hidden states out.
    FeedForward {
        /// Layer, counted over the whole model.
        layer: usize,
    },
    /// Experts `first..end` of a layer whose function leaves them out. Adds their results to the hidden states. If no
    /// token of a call has a share in them, the result equals the input and the call can be skipped.
    Experts {
        /// Layer, counted over the whole model.
        layer: usize,
        /// First expert.
        first: u64,
        /// One past the last expert.
        end: u64,
    },
    /// Final norm and rows `first..end` of the LM head: hidden states in, logits out. A classifier's head has a row for
    /// each label.
    Head {
        /// First row of the vocabulary, or first label.
        first: u64,
        /// One past the last row.
        end: u64,
    },
    /// All layers, final norm and all rows of the LM head in one call: hidden states in, those of the last layer and
    /// logits out.
    Model {
        /// Number of layers.
        layers: usize,
        /// Number of rows.
        rows: u64,
    },
}

impl Stage {
    /// Layers that the function computes, wholly or partly; empty for functions of the head alone.
    pub fn layers(&self) -> Range<usize> {
        match *self {
            Stage::Layers { first, end } => first..end,
            Stage::FeedForward { layer } | Stage::Experts { layer, .. } => layer..layer + 1,
            Stage::Head { .. } => 0..0,
            Stage::Model { layers, .. } => 0..layers,
        }
    }

    /// Rows of the LM head that the function computes; `None` for functions without the head.
    pub fn head_rows(&self) -> Option<Range<u64>> {
        match *self {
            Stage::Head { first, end } => Some(first..end),
            Stage::Model { rows, .. } => Some(0..rows),
            Stage::Layers { .. } | Stage::FeedForward { .. } | Stage::Experts { .. } => None,
        }
    }

    /// Whole layers that the function computes, which depend on the context; `None` for the other functions.
    pub fn whole_layers(&self) -> Option<Range<usize>> {
        matches!(self, Stage::Layers { .. } | Stage::Model { .. }).then(|| self.layers())
    }
}

const LAYER_PREFIX: &str = "layers_";

/// Prefix of the names of a layer's ops and values, followed by `_`.
pub fn layer_scope(layer: usize) -> String {
    format!("{LAYER_PREFIX}{layer}")
}

/// Layer of an op or value, by its name: 7 for `layers_7_attn_q_proj`.
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
