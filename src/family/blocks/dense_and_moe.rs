//! A dense network and a mixture of experts side by side (Gemma 4): `norm(mlp(norm(x))) + norm(moe(norm(x)))`. Both read the
//! same hidden states through norms of their own, and so does the router.

use super::Graph;
use super::mlp::{Mlp, mlp};
use super::moe::{Moe, experts, shares};
use super::norm::{Norm, rms_norm};
use anec_mil::ValueId;

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
    let dense = g.scope("mlp", |g| mlp(g, normal, &weights.mlp));
    let dense = rms_norm(g, dense, &weights.mlp_norm, 1);
    let routed = rms_norm(g, x, &weights.router_norm, 1);
    let input = rms_norm(g, x, &weights.experts_norm, 1);
    let mixed = g.scope("moe", |g| {
        let shares = shares(g, routed, &weights.moe);
        experts(g, input, shares, &weights.moe.experts)
    });
    let mixed = rms_norm(g, mixed, &weights.moe_norm, 1);
    g.ops.add(dense, mixed)
}
