//! Feed-forward networks: gated (arXiv:2002.05202), `W_down (act(W_gate x) * W_up x)`, and plain, `W_down act(W_up x)`.

use super::Graph;
use super::activation::activate;
use super::linear::{Linear, linear};
use crate::row::Activation;
use anec_mil::ValueId;

/// Weights of a gated network.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// Gate projection.
    pub gate: Linear,
    /// Up projection.
    pub up: Linear,
    /// Down projection.
    pub down: Linear,
    /// Activation of the gate.
    pub activation: Activation,
}

/// Applies a gated network to normed hidden states; returns the addend for the residual stream.
pub fn mlp(g: &mut Graph<'_>, x: ValueId, weights: &Mlp) -> ValueId {
    let gate = linear(g, x, &weights.gate);
    let gate = activate(g, gate, weights.activation);
    let up = linear(g, x, &weights.up);
    let gated = g.ops.mul(gate, up);
    linear(g, gated, &weights.down)
}

/// Weights of a plain network.
#[derive(Clone, Debug)]
pub struct PlainMlp {
    /// Up projection.
    pub up: Linear,
    /// Down projection.
    pub down: Linear,
    /// Activation between the projections.
    pub activation: Activation,
}

/// Applies a plain network to normed hidden states; returns the addend for the residual stream.
pub fn plain_mlp(g: &mut Graph<'_>, x: ValueId, weights: &PlainMlp) -> ValueId {
    let up = linear(g, x, &weights.up);
    let up = activate(g, up, weights.activation);
    linear(g, up, &weights.down)
}
