//! Gated short convolution of LFM2: `W_out (C * conv(B * x))`, where `[B; C; x] = W_in h`.

use super::Graph;
use super::causal_conv::{CausalConv, causal_conv};
use super::linear::{Linear, linear};
use super::state::{Slot, StateSpec};
use anec_mil::ValueId;

/// Weights of the block.
#[derive(Clone, Debug)]
pub struct ShortConv {
    /// Input projection `[3 * width, width]`: rows of B, C and x.
    pub input: Linear,
    /// Convolution.
    pub conv: CausalConv,
    /// Output projection `[width, width]`.
    pub output: Linear,
}

impl ShortConv {
    /// States: the convolution's last inputs.
    pub fn states(&self) -> Vec<StateSpec> {
        vec![self.conv.state()]
    }
}

/// Applies the block to normed hidden states; returns the addend for the residual stream.
pub fn short_conv(g: &mut Graph<'_>, x: ValueId, weights: &ShortConv, state: Slot) -> ValueId {
    let width = weights.input.rows() / 3;
    let all = linear(g, x, &weights.input);
    let gate_in = g.ops.slice(all, 1, 0..width);
    let gate_out = g.ops.slice(all, 1, width..2 * width);
    let x = g.ops.slice(all, 1, 2 * width..3 * width);
    let x = g.ops.mul(gate_in, x);
    let x = causal_conv(g, x, &weights.conv, state);
    let x = g.ops.mul(gate_out, x);
    linear(g, x, &weights.output)
}
