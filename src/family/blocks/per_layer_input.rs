//! What a layer knows of the tokens themselves (Gemma 3n's per-layer embeddings): `W_out (act(W_gate x) * e)`, with a narrow
//! vector `e` of each token for each layer, which the host looks up.

use super::Graph;
use super::activation::activate;
use super::linear::{Linear, linear};
use crate::row::Activation;
use anec_mil::ValueId;

/// Its weights.
#[derive(Clone, Debug)]
pub struct PerLayerInput {
    /// Gate, `[width, hidden]`.
    pub gate: Linear,
    /// The way back, `[hidden, width]`.
    pub projection: Linear,
    /// Activation of the gate.
    pub activation: Activation,
}

/// The block on hidden states, which nothing has normed, and the tokens' vectors `[1, width, T, 1]` (or `[1, width, 1, T]`).
pub fn per_layer_input(g: &mut Graph<'_>, x: ValueId, vectors: ValueId, weights: &PerLayerInput) -> ValueId {
    let gate = linear(g, x, &weights.gate);
    let gate = activate(g, gate, weights.activation);
    let gated = g.ops.mul(gate, vectors);
    linear(g, gated, &weights.projection)
}
