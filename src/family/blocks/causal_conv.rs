//! Causal depthwise convolution: channel c of a token is `sum_j w[c, j] x[c, t - (kernel - 1) + j]`, preceded by the
//! last inputs of the previous call.

use super::Graph;
use super::state::{Slot, StateKind, StateSpec};
use anec_manifest::{Layout, Role};
use anec_mil::ValueId;
use anec_source::SourceWeight;

/// Weights of the block.
#[derive(Clone, Debug)]
pub struct CausalConv {
    /// `[channels, kernel]`, oldest input first.
    pub weight: SourceWeight,
    /// `[channels]`
    pub bias: Option<SourceWeight>,
}

impl CausalConv {
    /// State: the last `kernel - 1` inputs.
    pub fn state(&self) -> StateSpec {
        let slots = self.weight.columns() - 1;
        StateSpec { kind: StateKind::Convolution, rows: 1, slots, width: self.weight.rows() }
    }
}

/// Convolves `[1, channels, T, 1]` (or `[1, channels, 1, T]`) along the tokens; the shape stays the same. `state` holds
/// the previous inputs.
pub fn causal_conv(g: &mut Graph<'_>, x: ValueId, weights: &CausalConv, state: Slot) -> ValueId {
    g.scope("conv", |g| {
        let inputs = with_past(g, x, state);
        depthwise(g, inputs, weights)
    })
}

/// Prepends the inputs in `state` to `[1, channels, T, 1]` (or `[1, channels, 1, T]`) and stores the last inputs there.
pub(super) fn with_past(g: &mut Graph<'_>, x: ValueId, state: Slot) -> ValueId {
    // the state has channels last, so that one of its rows is a token's
    let (to_rows, from_rows) = match g.form.layout {
        Layout::Bcs1 => ([0, 3, 2, 1], [0, 3, 2, 1]),
        Layout::Bc1s => ([0, 2, 3, 1], [0, 3, 1, 2]),
    };
    let new = g.ops.transpose(x, &to_rows);
    let before = state.read(g);
    let inputs = g.ops.concat(&[before, new], 2);
    let newest = g.ops.last(inputs, 2, state.spec().slots);
    state.write(g, newest);
    g.ops.transpose(inputs, &from_rows)
}

/// Convolves along the tokens without padding.
pub(super) fn depthwise(g: &mut Graph<'_>, inputs: ValueId, weights: &CausalConv) -> ValueId {
    let (channels, kernel) = (weights.weight.rows(), weights.weight.columns());
    let shape = kernel_shape(g, channels, 1, kernel);
    let weight = g.weight("weight", Role::Table, &weights.weight, &shape);
    let bias = weights.bias.as_ref().map(|bias| g.weight("bias", Role::Bias, bias, &[channels]));
    g.ops.depthwise_conv("depthwise", inputs, weight, bias)
}

/// Shape of a convolution's weight along the tokens: `group` input channels for each of `channels`.
pub(super) fn kernel_shape(g: &Graph<'_>, channels: u64, group: u64, kernel: u64) -> [u64; 4] {
    match g.form.layout {
        Layout::Bcs1 => [channels, group, kernel, 1],
        Layout::Bc1s => [channels, group, 1, kernel],
    }
}
