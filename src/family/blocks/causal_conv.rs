//! Causal depthwise convolution: channel c of a token is `sum_j w[c, j] x[c, t - (kernel - 1) + j]`, with the last inputs
//! of the call before as its beginning.

use super::Graph;
use super::state::{Slot, StateKind, StateSpec};
use anec_manifest::{Layout, Role};
use anec_mil::ValueId;
use anec_source::SourceWeight;

/// Its weights.
#[derive(Clone, Debug)]
pub struct CausalConv {
    /// `[channels, kernel]`, oldest input first.
    pub weight: SourceWeight,
    /// `[channels]`
    pub bias: Option<SourceWeight>,
}

impl CausalConv {
    /// The last `kernel - 1` inputs.
    pub fn state(&self) -> StateSpec {
        let slots = self.weight.columns() - 1;
        StateSpec { kind: StateKind::Convolution, rows: 1, slots, width: self.weight.rows() }
    }
}

/// Convolves `[1, channels, T, 1]` (or `[1, channels, 1, T]`) along the tokens; gives the same shape. `state` holds the
/// inputs before.
pub fn causal_conv(g: &mut Graph<'_>, x: ValueId, weights: &CausalConv, state: Slot) -> ValueId {
    g.scope("conv", |g| {
        let inputs = with_past(g, x, state);
        depthwise(g, inputs, weights)
    })
}

/// `[1, channels, T, 1]` (or likewise) after the inputs that `state` holds; the last of all are what it holds then.
pub(super) fn with_past(g: &mut Graph<'_>, x: ValueId, state: Slot) -> ValueId {
    // the state has channels last, so that a row of it is a token's
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

/// The convolution of what stands there, which gets shorter.
pub(super) fn depthwise(g: &mut Graph<'_>, inputs: ValueId, weights: &CausalConv) -> ValueId {
    let (channels, kernel) = (weights.weight.rows(), weights.weight.columns());
    let shape = kernel_shape(g, channels, 1, kernel);
    let weight = g.weight("weight", Role::Table, &weights.weight, &shape);
    let bias = weights.bias.as_ref().map(|bias| g.weight("bias", Role::Bias, bias, &[channels]));
    g.ops.depthwise_conv("depthwise", inputs, weight, bias)
}

/// The shape of a convolution's weight along the tokens: `group` input channels for each of `channels`.
pub(super) fn kernel_shape(g: &Graph<'_>, channels: u64, group: u64, kernel: u64) -> [u64; 4] {
    match g.form.layout {
        Layout::Bcs1 => [channels, group, kernel, 1],
        Layout::Bc1s => [channels, group, 1, kernel],
    }
}
