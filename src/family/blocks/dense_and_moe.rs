//! A dense network and a mixture of experts side by side (Gemma 4): `norm(mlp(norm(x))) + norm(moe(norm(x)))`. Both read the
//! same hidden states through norms of their own, and so does the router.

use super::Graph;
use super::mlp::{Mlp, mlp};
use super::moe::{Moe, experts, shares};
use super::norm::{Norm, rms_norm};
use anec_mil::{Constant, ValueId};

/// Its weights.
#[derive(Clone, Debug)]
pub struct DenseAndMoe {
    /// The dense network, whose norm before is that of the block.
    pub mlp: Mlp,
    /// Norm of what it gives.
    pub mlp_norm: Norm,
    /// The experts.
    pub moe: Moe,
    /// Norm of what the router reads.
    pub router_norm: Norm,
    /// Norm of what the experts read.
    pub experts_norm: Norm,
    /// Norm of what they give together.
    pub moe_norm: Norm,
}

/// The block on hidden states `x`, and on what the norm before it makes of them.
pub fn dense_and_moe(g: &mut Graph<'_>, x: ValueId, normal: ValueId, weights: &DenseAndMoe) -> ValueId {
    let Beside { dense, shares, input } = beside(g, x, normal, weights);
    let mixed = g.scope("moe", |g| experts(g, input, shares, &weights.moe.experts));
    join(g, dense, mixed, weights)
}

/// The block without its experts: what they work on, `x` and what the dense network gives, side by side, and the share of each
/// in each token, with one more of 1: that of what [joins](join) them.
pub fn ask_experts(g: &mut Graph<'_>, x: ValueId, normal: ValueId, weights: &DenseAndMoe) -> [ValueId; 2] {
    let Beside { dense, shares, input } = beside(g, x, normal, weights);
    let first = g.ops.slice(shares, 1, 0..1);
    let zero = g.ops.sub(first, first);
    let one = g.ops.add(zero, Constant::fp16(1.0));
    [g.ops.concat(&[input, x, dense], 1), g.ops.concat(&[shares, one], 1)]
}

/// What the dense network gives with what the experts give together, before the norm after the block.
pub fn join(g: &mut Graph<'_>, dense: ValueId, mixed: ValueId, weights: &DenseAndMoe) -> ValueId {
    let mixed = rms_norm(g, mixed, &weights.moe_norm, 1);
    g.ops.add(dense, mixed)
}

/// The block without its experts.
struct Beside {
    /// What the dense network gives, normed.
    dense: ValueId,
    /// The experts' shares.
    shares: ValueId,
    /// What they work on.
    input: ValueId,
}

fn beside(g: &mut Graph<'_>, x: ValueId, normal: ValueId, weights: &DenseAndMoe) -> Beside {
    let dense = g.scope("mlp", |g| mlp(g, normal, &weights.mlp));
    let dense = rms_norm(g, dense, &weights.mlp_norm, 1);
    let routed = rms_norm(g, x, &weights.router_norm, 1);
    let input = rms_norm(g, x, &weights.experts_norm, 1);
    let shares = g.scope("moe", |g| shares(g, routed, &weights.moe));
    Beside { dense, shares, input }
}
