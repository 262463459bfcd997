//! Per-layer embeddings (Gemma 3n): `W_out (act(W_gate x) * e)` with a narrow vector `e` for each token and layer,
//! which the host looks up.

use super::Graph;
use super::activation::activate;
use super::linear::{Linear, linear};
use crate::row::Activation;
use anec_mil::ValueId;

/// Weights of the block.
#[derive(Clone, Debug)]
pub struct PerLayerInput {
    /// Gate `[width, hidden]`.
    pub gate: Linear,
    /// Output projection `[hidden, width]`.
    pub projection: Linear,
    /// Activation of the gate.
    pub activation: Activation,
}

/// Applies the block to hidden states that aren't normed and embeddings `[1, width, T, 1]` (or `[1, width, 1, T]`).
pub fn per_layer_input(g: &mut Graph<'_>, x: ValueId, vectors: ValueId, weights: &PerLayerInput) -> ValueId {
    let gate = linear(g, x, &weights.gate);
    let gate = activate(g, gate, weights.activation);
    let gated = g.ops.mul(gate, vectors);
    linear(g, gated, &weights.projection)
}
