//! Head of a classifier: `W_out norm(act(W_dense x + b)) + b` of a pooled hidden state, or of each token's; classifiers
//! of tokens mostly have `W_out x + b` alone.

use std::ops::Range;

use crate::blocks::Graph;
use crate::blocks::activation::activate;
use crate::blocks::linear::{Linear, linear};
use crate::blocks::norm::{Norm, rms_norm};
use crate::decoder::Ports;
use crate::row::Activation;
use anec_base::Result;
use anec_bundle::PortRole;
use anec_mil::{Constant, ValueId};

/// Activation of a head's dense layer.
#[derive(Clone, Copy, Debug)]
pub(super) enum HeadActivation {
    /// Hyperbolic tangent.
    Tanh,
    /// `max(x, 0)`
    Relu,
    /// An activation of hidden states.
    Hidden(Activation),
}

/// Layer before the labels.
pub(super) struct HeadLayer {
    pub(super) dense: Linear,
    pub(super) activation: HeadActivation,
    /// Norm of the activation.
    pub(super) norm: Option<Norm>,
}

/// Weights of the head.
pub(super) struct Head {
    /// Layer before the labels.
    pub(super) layer: Option<HeadLayer>,
    /// Output projection with a row for each label.
    pub(super) output: Linear,
}

impl Head {
    /// Builds the function that computes the logits of labels `rows`.
    pub(super) fn function(&self, g: &mut Graph<'_>, width: u64, rows: Range<u64>) -> Result<Ports> {
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(width));
        let thought = self.layer.as_ref().map_or(hidden, |layer| layer.apply(g, hidden));
        let Linear { name, role, weight, bias } = &self.output;
        let bias = bias.as_ref().map(|bias| bias.slice(rows.clone())).transpose()?;
        let output = Linear { name, role: *role, weight: weight.slice(rows)?, bias };
        let logits = linear(g, thought, &output);
        ports.output(g, "logits", PortRole::Logits, logits);
        Ok(ports)
    }

    /// Adapts the head to hidden states multiplied by `factor`.
    pub(super) fn take_scaled(&mut self, factor: f64) {
        let first = self.layer.as_mut().map_or(&mut self.output, |layer| &mut layer.dense);
        first.weight = first.weight.scale((1.0 / factor) as f32);
    }
}

impl HeadLayer {
    fn apply(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        let dense = linear(g, hidden, &self.dense);
        let thought = match self.activation {
            HeadActivation::Tanh => g.ops.tanh(dense),
            HeadActivation::Relu => g.ops.maximum(dense, Constant::fp16(0.0)),
            HeadActivation::Hidden(activation) => activate(g, dense, activation),
        };
        self.norm.as_ref().map_or(thought, |norm| rms_norm(g, thought, norm, 1))
    }
}
