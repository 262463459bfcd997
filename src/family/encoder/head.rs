//! Head of a sequence classifier: `W_out norm(act(W_dense x + b)) + b` of a pooled hidden state.

use std::ops::Range;

use crate::blocks::Graph;
use crate::blocks::activation::activate;
use crate::blocks::linear::{Linear, linear};
use crate::blocks::norm::{Norm, rms_norm};
use crate::decoder::Ports;
use crate::row::Activation;
use anec_base::Result;
use anec_bundle::PortRole;
use anec_mil::Constant;

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

/// Weights of the head.
pub(super) struct Head {
    /// Layer before the labels.
    pub(super) dense: Linear,
    /// Activation of the dense layer.
    pub(super) activation: HeadActivation,
    /// Norm of the dense layer's output.
    pub(super) norm: Option<Norm>,
    /// Output projection with a row for each label.
    pub(super) output: Linear,
}

impl Head {
    /// Builds the function that computes the logits of labels `rows`.
    pub(super) fn function(&self, g: &mut Graph<'_>, width: u64, rows: Range<u64>) -> Result<Ports> {
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(width));
        let dense = linear(g, hidden, &self.dense);
        let mut thought = match self.activation {
            HeadActivation::Tanh => g.ops.tanh(dense),
            HeadActivation::Relu => g.ops.maximum(dense, Constant::fp16(0.0)),
            HeadActivation::Hidden(activation) => activate(g, dense, activation),
        };
        if let Some(norm) = &self.norm {
            thought = rms_norm(g, thought, norm, 1);
        }
        let Linear { name, role, weight, bias } = &self.output;
        let bias = bias.as_ref().map(|bias| bias.slice(rows.clone())).transpose()?;
        let output = Linear { name, role: *role, weight: weight.slice(rows)?, bias };
        let logits = linear(g, thought, &output);
        ports.output(g, "logits", PortRole::Logits, logits);
        Ok(ports)
    }

    /// Adapts the head to hidden states multiplied by `factor`.
    pub(super) fn take_scaled(&mut self, factor: f64) {
        self.dense.weight = self.dense.weight.scale((1.0 / factor) as f32);
    }
}
