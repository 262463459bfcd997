//! A layer: a mixer of tokens and a feed-forward network, each with its norms and a residual connection.
//!
//! ```text
//! x = x + r * mixer(norm(x))
//! x = x + r * feed_forward(norm(x))
//! ```
//!
//! Some families norm what the blocks give, instead or as well.

use super::PlannedWeight;
use super::blocks::Graph;
use super::blocks::attention::{Attention, AttentionInputs, attention};
use super::blocks::causal_conv::CausalConv;
use super::blocks::delta_net::{DeltaNet, TokenOrder, delta_net};
use super::blocks::linear::Linear;
use super::blocks::mlp::{Mlp, mlp};
use super::blocks::moe::{Moe, moe};
use super::blocks::norm::{Norm, rms_norm};
use super::blocks::short_conv::{ShortConv, short_conv};
use super::blocks::state::{Slot, StateSpec};
use crate::manifest::Role;
use crate::mil::{Constant, ValueId};
use crate::source::Weight;

/// The weights of one layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// What mixes the tokens.
    pub mixer: Mixer,
    /// Its norms.
    pub mixer_norms: Norms,
    /// What works on each token alone.
    pub feed_forward: FeedForward,
    /// Its norms.
    pub feed_forward_norms: Norms,
}

/// Norms around a block.
#[derive(Clone, Debug)]
pub struct Norms {
    /// Of what goes in.
    pub before: Option<Norm>,
    /// Of what comes out.
    pub after: Option<Norm>,
}

/// What mixes the tokens of a layer.
#[derive(Clone, Debug)]
pub enum Mixer {
    /// Softmax attention over a cache.
    Attention(Box<Attention>),
    /// Gated short convolution.
    ShortConv(Box<ShortConv>),
    /// Gated DeltaNet.
    DeltaNet(Box<DeltaNet>),
}

/// What works on each token of a layer alone.
#[derive(Clone, Debug)]
pub enum FeedForward {
    /// A gated network.
    Mlp(Box<Mlp>),
    /// A mixture of experts.
    Moe(Box<Moe>),
}

/// What the mixer of a layer works with, beside the hidden states.
#[derive(Clone, Copy, Debug)]
pub struct MixerInputs<'a> {
    /// For attention.
    pub attention: Option<AttentionInputs>,
    /// For DeltaNet in calls of more than one token.
    pub order: Option<&'a TokenOrder>,
    /// What the layer carries.
    pub states: &'a [Slot],
}

impl Layer {
    /// What the layer carries from call to call; `slots` for keys and values.
    pub fn states(&self, slots: u64) -> Vec<StateSpec> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.states(slots),
            Mixer::ShortConv(conv) => conv.states(),
            Mixer::DeltaNet(delta) => delta.states(),
        }
    }

    /// The layer on hidden states; `residual_multiplier` is r.
    pub fn apply(&self, g: &mut Graph<'_>, x: ValueId, inputs: MixerInputs<'_>, residual_multiplier: f64) -> ValueId {
        let x = self.mixer_norms.residual(g, x, residual_multiplier, |g, x| match &self.mixer {
            Mixer::Attention(weights) => g.scope("attn", |g| match (inputs.attention, inputs.states) {
                (Some(shared), &[keys, values]) => attention(g, x, weights, [keys, values], shared),
                _ => g.missing("attention", "its inputs and two states", x),
            }),
            Mixer::ShortConv(weights) => g.scope("short_conv", |g| match inputs.states {
                &[state] => short_conv(g, x, weights, state),
                _ => g.missing("short_conv", "one state", x),
            }),
            Mixer::DeltaNet(weights) => g.scope("delta_net", |g| match inputs.states {
                &[conv, matrices] => delta_net(g, x, weights, [conv, matrices], inputs.order),
                _ => g.missing("delta_net", "two states", x),
            }),
        });
        let hidden = self.feed_forward_norms.residual(g, x, residual_multiplier, |g, x| match &self.feed_forward {
            FeedForward::Mlp(weights) => g.scope("mlp", |g| mlp(g, x, weights)),
            FeedForward::Moe(weights) => g.scope("moe", |g| moe(g, x, weights)),
        });
        g.ops.rename(hidden, "hidden")
    }

    /// Its weights, in the order in which its function holds them.
    pub fn weights(&self) -> Vec<PlannedWeight> {
        let mut planned = Planned::default();
        planned.norms([&self.mixer_norms, &self.feed_forward_norms].into_iter().flat_map(Norms::iter));
        match &self.mixer {
            Mixer::Attention(attention) => {
                let Attention { query, key, value, output, gate, qk_norm, .. } = &**attention;
                planned.norms(qk_norm.iter().flat_map(|(q, k)| [q, k]));
                planned.linears([query, key, value].into_iter().chain(gate).chain([output]));
            }
            Mixer::ShortConv(short) => {
                planned.linears([&short.input, &short.output]);
                planned.conv(&short.conv);
            }
            Mixer::DeltaNet(delta) => {
                let DeltaNet { query_key_value, gate, step, decay, output, conv, norm, .. } = &**delta;
                planned.norms([norm]);
                planned.linears([query_key_value, gate, step, decay, output]);
                planned.conv(conv);
                planned.add("decay_bias", Role::Bias, &delta.decay_bias);
                planned.add("decay_rate", Role::Table, &delta.decay_rate);
            }
        }
        match &self.feed_forward {
            FeedForward::Mlp(mlp) => planned.linears([&mlp.gate, &mlp.up, &mlp.down]),
            FeedForward::Moe(moe) => planned.moe(moe),
        }
        planned.0
    }
}

impl Norms {
    fn iter(&self) -> impl Iterator<Item = &Norm> {
        self.before.iter().chain(&self.after)
    }

    /// `x + r * norm(f(norm(x)))`
    fn residual(
        &self,
        g: &mut Graph<'_>,
        x: ValueId,
        multiplier: f64,
        block: impl FnOnce(&mut Graph<'_>, ValueId) -> ValueId,
    ) -> ValueId {
        let normal = self.before.as_ref().map_or(x, |norm| rms_norm(g, x, norm, 1));
        let out = block(g, normal);
        let mut added = self.after.as_ref().map_or(out, |norm| rms_norm(g, out, norm, 1));
        if multiplier != 1.0 {
            added = g.ops.mul(added, Constant::fp16(multiplier as f32));
        }
        g.ops.add(x, added)
    }
}

/// Weights being listed.
#[derive(Default)]
pub(super) struct Planned(pub(super) Vec<PlannedWeight>);

impl Planned {
    pub(super) fn add(&mut self, name: &str, role: Role, weight: &Weight) {
        self.0.push(PlannedWeight { name: name.into(), role, weight: weight.clone() });
    }

    pub(super) fn moe(&mut self, moe: &Moe) {
        self.linears([&moe.router, &moe.gate, &moe.up, &moe.down].into_iter().chain(&moe.down_bias));
        if let Some(bias) = &moe.selection_bias {
            self.add("selection_bias", Role::Router, bias);
        }
    }

    fn conv(&mut self, conv: &CausalConv) {
        self.add("conv_weight", Role::Table, &conv.weight);
        if let Some(bias) = &conv.bias {
            self.add("conv_bias", Role::Bias, bias);
        }
    }

    pub(super) fn norms<'a>(&mut self, norms: impl IntoIterator<Item = &'a Norm>) {
        for norm in norms {
            self.add(norm.name, Role::Norm, &norm.weight);
        }
    }

    pub(super) fn linears<'a>(&mut self, linears: impl IntoIterator<Item = &'a Linear>) {
        for linear in linears {
            self.add(linear.name, linear.role, &linear.weight);
            if let Some(bias) = &linear.bias {
                self.add(&format!("{}_bias", linear.name), Role::Bias, bias);
            }
        }
    }
}
