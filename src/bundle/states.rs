//! States that functions carry from call to call.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// State of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatePort {
    /// Name in the package.
    pub name: String,
    /// Id of the state within a text. Functions with the same id share the state; functions of different contexts never
    /// share one. Functions that share one state are in one package and share all their states, under the same names.
    pub id: String,
    /// Content.
    #[serde(flatten)]
    pub role: StateRole,
    /// Shape.
    pub shape: Vec<u64>,
}

/// Id of a state, or of a cache stored by the host, of functions for a context.
pub fn state_id(name: &str, context: u64) -> String {
    format!("{name}@{context}")
}

/// Content of a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum StateRole {
    /// Rotated keys of a layer, `[1, num_key_value_heads, S, head_dim]`. S is the context, or less for layers with a
    /// sliding window, whose slots form a ring buffer.
    KeyCache {
        /// Layer, counted over the whole model.
        layer: usize,
    },
    /// Values of a layer, `[1, num_key_value_heads, S, head_dim]`.
    ValueCache {
        /// Layer, counted over the whole model.
        layer: usize,
    },
    /// Keys and values of several layers in one state, `[1, 2 * layers * num_key_value_heads, S, head_dim]`: the first
    /// layer's keys, its values, the second layer's keys, …
    KeyValueCache {
        /// Layers, counted over the whole model.
        layers: Vec<usize>,
    },
    /// Last inputs of a layer's causal convolutions, oldest first, `[1, layers, slots, channels]`. The number of slots
    /// is the total reach of all kernels.
    ConvolutionState {
        /// Layers, counted over the whole model.
        layers: Vec<usize>,
    },
    /// Contribution of the last token to the next token's values, `[1, layers, 1, channels]`.
    DelayState {
        /// Layers, counted over the whole model.
        layers: Vec<usize>,
    },
    /// Matrices of a layer's linear recurrence, `[1, layers * heads, key width, value width]`.
    RecurrentState {
        /// Layers, counted over the whole model.
        layers: Vec<usize>,
    },
}

impl StateRole {
    /// Layers that the state belongs to, counted over the whole model.
    pub fn layers(&self) -> &[usize] {
        match self {
            StateRole::KeyCache { layer } | StateRole::ValueCache { layer } => std::slice::from_ref(layer),
            StateRole::KeyValueCache { layers }
            | StateRole::ConvolutionState { layers }
            | StateRole::DelayState { layers }
            | StateRole::RecurrentState { layers } => layers,
        }
    }

    /// Whether the state has a slot for each position of a text, or of the sliding window.
    pub fn is_cache(&self) -> bool {
        matches!(self, StateRole::KeyCache { .. } | StateRole::ValueCache { .. } | StateRole::KeyValueCache { .. })
    }

    /// Equal parts of the state's second axis, in order, with their layers.
    pub fn parts(&self) -> Vec<(StatePart, usize)> {
        let each = |part: StatePart, layers: &[usize]| layers.iter().map(|layer| (part, *layer)).collect();
        match self {
            StateRole::KeyCache { layer } => vec![(StatePart::Keys, *layer)],
            StateRole::ValueCache { layer } => vec![(StatePart::Values, *layer)],
            StateRole::KeyValueCache { layers } => {
                layers.iter().flat_map(|layer| [(StatePart::Keys, *layer), (StatePart::Values, *layer)]).collect()
            }
            StateRole::ConvolutionState { layers } => each(StatePart::Convolution, layers),
            StateRole::DelayState { layers } => each(StatePart::Delay, layers),
            StateRole::RecurrentState { layers } => each(StatePart::Recurrence, layers),
        }
    }
}

/// Content of a part of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StatePart {
    /// Rotated keys.
    Keys,
    /// Values.
    Values,
    /// Inputs of causal convolutions.
    Convolution,
    /// Contribution of the last token to the next token's values.
    Delay,
    /// Matrices of a linear recurrence.
    Recurrence,
}
