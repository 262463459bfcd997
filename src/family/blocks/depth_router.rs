//! Router of ZAYA1 (arXiv:2511.17127): a small network on a state that passes through the layers of the model
//! (exponential depth averaging). It assigns a token one expert or none.
//!
//! ```text
//! s = W_down x + a * s of the layer before
//! p = softmax(W_3 gelu(W_2 gelu(W_1 norm(s))))      over the experts and the skip
//! e = argmax(p + b)
//! ```
//!
//! The expert's output is multiplied by `p_e`; a token whose `e` is the skip gets nothing. Softmax subtracts the
//! largest score, the norm scales its input, and the choice is by index: all values stay in fp16's range.

use super::Graph;
use super::activation::activate;
use super::linear::{Linear, linear};
use super::moe::{Experts, chosen, experts};
use super::norm::{Norm, rms_norm};
use crate::row::Activation;
use anec_manifest::Role;
use anec_mil::ValueId;
use anec_source::SourceWeight;

/// Weights of the router.
#[derive(Clone, Debug)]
pub struct DepthRouter {
    /// `[router_hidden_size, hidden]`
    pub down: Linear,
    /// Factor of the previous layer's state, `[router_hidden_size]`; the first layer has none.
    pub state_scale: Option<SourceWeight>,
    /// Norm of the state.
    pub norm: Norm,
    /// Hidden projections, both `[router_hidden_size, router_hidden_size]`.
    pub hidden: [Linear; 2],
    /// Output projection `[num_experts + 1, router_hidden_size]`; the last row is the skip.
    pub output: Linear,
    /// Bias of the probabilities for the choice only, `[num_experts + 1]`.
    pub balancing_bias: SourceWeight,
}

/// A mixture of experts with this router.
#[derive(Clone, Debug)]
pub struct DepthMoe {
    /// Router.
    pub router: DepthRouter,
    /// Experts.
    pub experts: Experts,
}

/// Applies the block to normed hidden states with the previous layer's router state. Returns the addend for the
/// residual stream and the state for the next layer, `[1, router_hidden_size, T, 1]` (or `[1, router_hidden_size, 1,
/// T]`).
pub fn depth_moe(g: &mut Graph<'_>, x: ValueId, weights: &DepthMoe, before: Option<ValueId>) -> (ValueId, ValueId) {
    let (shares, state) = depth_shares(g, x, weights, before);
    (experts(g, x, shares, &weights.experts), state)
}

/// Weight of each expert for each token, `[1, num_experts, T, 1]` (or `[1, num_experts, 1, T]`), and the state.
pub fn depth_shares(g: &mut Graph<'_>, x: ValueId, weights: &DepthMoe, before: Option<ValueId>) -> (ValueId, ValueId) {
    g.scope("router", |g| route(g, x, weights, before))
}

fn route(g: &mut Graph<'_>, x: ValueId, weights: &DepthMoe, before: Option<ValueId>) -> (ValueId, ValueId) {
    let (router, count) = (&weights.router, weights.experts.num_experts);
    let mut state = linear(g, x, &router.down);
    if let (Some(scale), Some(before)) = (&router.state_scale, before) {
        let scale = g.weight("state_scale", Role::Router, scale, &[1, state_width(router), 1, 1]);
        let carried = g.ops.mul(before, scale);
        state = g.ops.add(state, carried);
    }
    let mut x = rms_norm(g, state, &router.norm, 1);
    for layer in &router.hidden {
        x = linear(g, x, layer);
        x = activate(g, x, Activation::Gelu);
    }
    let scores = linear(g, x, &router.output);
    let all = g.ops.softmax(scores, 1);
    let bias = g.weight("balancing_bias", Role::Router, &router.balancing_bias, &[1, count + 1, 1, 1]);
    let ranked = g.ops.add(all, bias);
    let mask = chosen(g, ranked, count, 1);
    // without the skip: if it is chosen, no expert is
    let probabilities = g.ops.slice(all, 1, 0..count);
    (g.ops.mul(probabilities, mask), state)
}

fn state_width(router: &DepthRouter) -> u64 {
    router.down.rows()
}
