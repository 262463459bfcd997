//! Mixture of experts (arXiv:1701.06538): a router assigns each token a few of many gated networks, and their outputs
//! are summed with the router's weights.
//!
//! The packed form computes every expert in three wide projections and multiplies each expert's part by its weight,
//! which is 0 for experts that weren't chosen. It is exact and needs no routing on the host, but reads all experts. In
//! the other form, groups of experts are functions of their own, which the host calls if one of them was chosen.
//!
//! A shared expert may be applied to every token (arXiv:2401.06066): `sigmoid(w x) mlp(x)`, or `mlp(x)`.

use std::ops::Range;

use super::Graph;
use super::activation::activate;
use super::linear::{Linear, linear};
use super::mlp::{Mlp, mlp};
use crate::row::{Activation, RouterScores};
use anec_base::Result;
use anec_manifest::{Layout, Role};
use anec_mil::{Constant, DataType, TensorType, ValueId};
use anec_source::SourceWeight;

/// Added to the sum that weights are divided by.
const SUM_EPS: f32 = 1e-6;

/// Offset that makes the exponential of a score vanish.
const UNCHOSEN_OFFSET: f32 = 1e4;

/// Weights of the block.
#[derive(Clone, Debug)]
pub struct Moe {
    /// Router `[num_experts, hidden]`.
    pub router: Linear,
    /// Function of the router's outputs.
    pub scores: RouterScores,
    /// Bias of the scores for the choice only, `[num_experts]`.
    pub selection_bias: Option<SourceWeight>,
    /// Experts.
    pub experts: Experts,
    /// Number of experts chosen for a token.
    pub num_experts_per_tok: u64,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Factor of the weights.
    pub routed_scaling_factor: f64,
    /// Factor of each expert's weight, `[num_experts]`.
    pub expert_scale: Option<SourceWeight>,
    /// Shared expert.
    pub shared: Option<SharedExpert>,
}

/// Shared expert, which every token uses.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    /// Network.
    pub mlp: Mlp,
    /// Weight for a token before the sigmoid, `[1, hidden]`; the weight is 1 if absent.
    pub gate: Option<Linear>,
}

/// Experts of a layer.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Concatenated gates of all experts, `[num_experts * width, hidden]`.
    pub gate: Linear,
    /// Concatenated ups of all experts, `[num_experts * width, hidden]`.
    pub up: Linear,
    /// Downs of all experts side by side, `[hidden, num_experts * width]`.
    pub down: Linear,
    /// Biases of the downs side by side, `[hidden, num_experts]`, each multiplied by its expert's weight.
    pub down_bias: Option<Linear>,
    /// Gating function.
    pub gating: Gating,
    /// Number of experts.
    pub num_experts: u64,
}

impl Experts {
    /// Gate, up, down and activation, if the gated value is proportional to the up.
    pub fn up_and_down(&mut self) -> Option<(&Linear, &mut Linear, &mut Linear, Activation)> {
        match self.gating {
            Gating::Activation(activation) => Some((&self.gate, &mut self.up, &mut self.down, activation)),
            Gating::ClampedSwiGlu { .. } => None,
        }
    }

    /// Slices the experts.
    ///
    /// # Errors
    /// Returns an error if there are fewer.
    pub fn part(&self, experts: Range<u64>) -> Result<Experts> {
        let width = self.gate.rows() / self.num_experts;
        let inner = experts.start * width..experts.end * width;
        let rows = |linear: &Linear| -> Result<Linear> {
            let bias = linear.bias.as_ref().map(|bias| bias.slice(inner.clone())).transpose()?;
            Ok(Linear { weight: linear.weight.slice(inner.clone())?, bias, ..linear.clone() })
        };
        let columns = |linear: &Linear, range: Range<u64>| -> Result<Linear> {
            Ok(Linear { weight: linear.weight.columns_range(range)?, ..linear.clone() })
        };
        Ok(Experts {
            gate: rows(&self.gate)?,
            up: rows(&self.up)?,
            down: columns(&self.down, inner.clone())?,
            down_bias: self.down_bias.as_ref().map(|biases| columns(biases, experts.clone())).transpose()?,
            gating: self.gating,
            num_experts: experts.end - experts.start,
        })
    }
}

/// Function of gates and ups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gating {
    /// `act(gate) * up`
    Activation(Activation),
    /// `gate * sigmoid(alpha * gate) * (up + 1)` with `gate <= limit` and `-limit <= up <= limit`.
    ClampedSwiGlu {
        /// Gain of the sigmoid.
        alpha: f64,
        /// Limit of gates and ups.
        limit: f64,
    },
}

/// Gated values of all experts, `[1, num_experts * width, T, 1]`.
fn gated(g: &mut Graph<'_>, x: ValueId, weights: &Experts) -> ValueId {
    let gate = linear(g, x, &weights.gate);
    match weights.gating {
        Gating::Activation(activation) => {
            let gate = activate(g, gate, activation);
            let up = linear(g, x, &weights.up);
            g.ops.mul(gate, up)
        }
        Gating::ClampedSwiGlu { alpha, limit } => {
            let limit = limit as f32;
            let gate = g.ops.minimum(gate, Constant::fp16(limit));
            let steep = g.ops.mul(gate, Constant::fp16(alpha as f32));
            let open = g.ops.sigmoid(steep);
            let gate = g.ops.mul(gate, open);
            let up = linear(g, x, &weights.up);
            let up = g.ops.minimum(up, Constant::fp16(limit));
            let up = g.ops.maximum(up, Constant::fp16(-limit));
            let up = g.ops.add(up, Constant::fp16(1.0));
            g.ops.mul(gate, up)
        }
    }
}

/// Applies the block to normed hidden states; returns the addend for the residual stream.
pub fn moe(g: &mut Graph<'_>, x: ValueId, weights: &Moe) -> ValueId {
    let shares = shares(g, x, weights);
    let out = experts(g, x, shares, &weights.experts);
    match &weights.shared {
        None => out,
        Some(shared) => {
            let for_all = shared_expert(g, x, shared);
            g.ops.add(out, for_all)
        }
    }
}

/// Output of the shared expert.
pub fn shared_expert(g: &mut Graph<'_>, x: ValueId, weights: &SharedExpert) -> ValueId {
    g.scope("shared", |g| {
        let out = mlp(g, x, &weights.mlp);
        let Some(gate) = &weights.gate else { return out };
        let gate = linear(g, x, gate);
        let gate = g.ops.sigmoid(gate);
        g.ops.mul(out, gate)
    })
}

/// Weight of each expert for each token, 0 if not chosen: `[1, num_experts, T, 1]` (or `[1, num_experts, 1, T]`).
pub fn shares(g: &mut Graph<'_>, x: ValueId, weights: &Moe) -> ValueId {
    g.scope("router", |g| route(g, x, weights))
}

/// Sum of the experts' outputs for `x`, with weights `[1, num_experts, T, 1]` (or `[1, num_experts, 1, T]`).
pub fn experts(g: &mut Graph<'_>, x: ValueId, shares: ValueId, weights: &Experts) -> ValueId {
    let inner = gated(g, x, weights);
    // channels are experts by width, and both layouts have tokens innermost
    let (experts, all) = (weights.num_experts as i32, weights.gate.rows() as i32);
    let by_expert = g.ops.reshape(inner, &[1, experts, all / experts, -1]);
    let by_token = g.ops.reshape(shares, &[1, experts, 1, -1]);
    let shared = g.ops.mul(by_expert, by_token);
    let shape = match g.form.layout {
        Layout::Bcs1 => [1, all, -1, 1],
        Layout::Bc1s => [1, all, 1, -1],
    };
    let inner = g.ops.reshape(shared, &shape);
    let out = linear(g, inner, &weights.down);
    match &weights.down_bias {
        None => out,
        Some(biases) => {
            let bias = linear(g, shares, biases);
            g.ops.add(out, bias)
        }
    }
}

fn route(g: &mut Graph<'_>, x: ValueId, weights: &Moe) -> ValueId {
    let shares = chosen_shares(g, x, weights);
    let Some(scale) = &weights.expert_scale else { return shares };
    let scale = g.weight("expert_scale", Role::Table, scale, &[1, scale.elements(), 1, 1]);
    g.ops.mul(shares, scale)
}

fn chosen_shares(g: &mut Graph<'_>, x: ValueId, weights: &Moe) -> ValueId {
    let experts = weights.experts.num_experts;
    let mut scores = linear(g, x, &weights.router);
    if weights.scores == RouterScores::Sigmoid {
        scores = g.ops.sigmoid(scores);
    }
    let ranked = match &weights.selection_bias {
        None => scores,
        Some(bias) => {
            let bias = g.weight("selection_bias", Role::Router, bias, &[1, experts, 1, 1]);
            g.ops.add(scores, bias)
        }
    };
    let mask = chosen(g, ranked, experts, weights.num_experts_per_tok);
    if weights.scores == RouterScores::ChosenSoftmax {
        // the offset makes the others vanish; the largest score is among the chosen, so that the exponentials stay
        // within 0 and 1 for scores of any size
        let others = g.ops.sub(mask, Constant::fp16(1.0));
        let closed = g.ops.mul(others, Constant::fp16(UNCHOSEN_OFFSET));
        let scores = g.ops.add(scores, closed);
        return g.ops.softmax(scores, 1);
    }
    if weights.scores == RouterScores::Softmax {
        // after the choice: different scores can have equal exponentials
        scores = g.ops.softmax(scores, 1);
    }
    let mut shares = g.ops.mul(scores, mask);
    if weights.norm_topk_prob {
        let sum = g.ops.reduce_sum(shares, &[1], true);
        let sum = g.ops.add(sum, Constant::fp16(SUM_EPS));
        shares = g.ops.real_div(shares, sum);
    }
    if weights.routed_scaling_factor != 1.0 {
        shares = g.ops.mul(shares, Constant::fp16(weights.routed_scaling_factor as f32));
    }
    shares
}

/// 1 for the `count` largest of the first `experts` channels of each token, else 0.
pub(super) fn chosen(g: &mut Graph<'_>, ranked: ValueId, experts: u64, count: u64) -> ValueId {
    let chosen = g.ops.top_indices(ranked, count, 1);
    // by index, not by value: equal scores must not add experts
    let ids: Vec<i32> = (0..experts as i32).collect();
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let ids = Constant::literal(TensorType::new(DataType::Int32, [1, experts, 1, 1]), bytes);
    let ids = g.ops.constant("expert_ids", ids);
    let picks: Vec<ValueId> = (0..count)
        .map(|place| {
            let index = g.ops.slice(chosen, 1, place..place + 1);
            let same = g.ops.equal(ids, index);
            g.ops.to_fp16(same)
        })
        .collect();
    picks.into_iter().reduce(|sum, pick| g.ops.add(sum, pick)).unwrap_or(ranked)
}
