//! What functions carry from call to call.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A state of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatePort {
    /// Its name in the package.
    pub name: String,
    /// Which state of a text it is: functions with the same id have this state in common, and those of one context never
    /// have one with those of another. Functions that have one state in common are in one package and have all their
    /// states in common, under the same names.
    pub id: String,
    /// What it holds.
    #[serde(flatten)]
    pub role: StateRole,
    /// Its shape.
    pub shape: Vec<u64>,
}

/// The id of a state or of what the host keeps, of functions for a context.
pub fn state_id(name: &str, context: u64) -> String {
    format!("{name}@{context}")
}

/// What a state holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum StateRole {
    /// Rotated keys of a layer, `[1, num_key_value_heads, S, head_dim]`. S is the context, or less where the layer sees
    /// only a window: then the slots are a ring.
    KeyCache {
        /// The layer, counted over the whole model.
        layer: usize,
    },
    /// Values of a layer, `[1, num_key_value_heads, S, head_dim]`.
    ValueCache {
        /// The layer, counted over the whole model.
        layer: usize,
    },
    /// Keys and values of several layers in one state, `[1, 2 * layers * num_key_value_heads, S, head_dim]`: keys of the
    /// first layer, its values, keys of the second, …
    KeyValueCache {
        /// The layers, counted over the whole model.
        layers: Vec<usize>,
    },
    /// The last inputs of a layer's causal convolutions, oldest first, `[1, layers, slots, channels]`; as many slots as
    /// all kernels together reach back.
    ConvolutionState {
        /// The layers, counted over the whole model.
        layers: Vec<usize>,
    },
    /// What the next token's values take from the last token, `[1, layers, 1, channels]`.
    DelayState {
        /// The layers, counted over the whole model.
        layers: Vec<usize>,
    },
    /// The matrices of a layer's linear recurrence, `[1, layers * heads, key width, value width]`.
    RecurrentState {
        /// The layers, counted over the whole model.
        layers: Vec<usize>,
    },
}

impl StateRole {
    /// The layers that it belongs to, counted over the whole model.
    pub fn layers(&self) -> &[usize] {
        match self {
            StateRole::KeyCache { layer } | StateRole::ValueCache { layer } => std::slice::from_ref(layer),
            StateRole::KeyValueCache { layers }
            | StateRole::ConvolutionState { layers }
            | StateRole::DelayState { layers }
            | StateRole::RecurrentState { layers } => layers,
        }
    }

    /// Whether it has a slot for each position of a text, or of the window that the layer sees.
    pub fn is_cache(&self) -> bool {
        matches!(self, StateRole::KeyCache { .. } | StateRole::ValueCache { .. } | StateRole::KeyValueCache { .. })
    }

    /// The equal parts that the second axis of the state is divided into, in their order: what each holds, of which layer.
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

/// What a part of a state holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StatePart {
    /// Rotated keys.
    Keys,
    /// Values.
    Values,
    /// Inputs of causal convolutions.
    Convolution,
    /// What the next token's values take from the last token.
    Delay,
    /// Matrices of a linear recurrence.
    Recurrence,
}
