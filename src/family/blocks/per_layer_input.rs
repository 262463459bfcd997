//! Per-layer embeddings (Gemma 3n): `W_out (act(W_gate x) * e)` with a narrow vector `e` for each token and layer,
//! which the host looks up, or `e = norm(W v)` with the token embedding `v` (EmbeddingGemma 2).

use super::Graph;
use super::activation::activate;
use super::linear::{Linear, linear};
use super::norm::{Norm, rms_norm};
use crate::row::Activation;
use anec_mil::ValueId;

/// Weights of the block.
#[derive(Clone, Debug)]
pub struct PerLayerInput {
    /// Projection of token embeddings, if the vectors are made of them.
    pub source: Option<PerLayerSource>,
    /// Gate `[width, hidden]`.
    pub gate: Linear,
    /// Output projection `[hidden, width]`.
    pub projection: Linear,
    /// Activation of the gate.
    pub activation: Activation,
}

/// Weights that make a layer's vectors of token embeddings.
#[derive(Clone, Debug)]
pub struct PerLayerSource {
    /// Projection `[width, hidden]`.
    pub projection: Linear,
    /// Norm of its output.
    pub norm: Norm,
}

/// Applies the block to hidden states that aren't normed. `given` are the layer's vectors, `[1, width, T, 1]` (or `[1,
/// width, 1, T]`), or the token embeddings that they are made of.
pub fn per_layer_input(g: &mut Graph<'_>, x: ValueId, given: ValueId, weights: &PerLayerInput) -> ValueId {
    let gate = linear(g, x, &weights.gate);
    let gate = activate(g, gate, weights.activation);
    let vectors = weights.source.as_ref().map_or(given, |source| {
        let projected = linear(g, given, &source.projection);
        rms_norm(g, projected, &source.norm, 1)
    });
    let gated = g.ops.mul(gate, vectors);
    linear(g, gated, &weights.projection)
}
