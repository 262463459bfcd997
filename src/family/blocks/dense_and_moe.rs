//! A dense network and a mixture of experts side by side (Gemma 4): `norm(mlp(norm(x))) + norm(moe(norm(x)))`. Both,
//! and the router, read the same hidden states through norms of their own.

use super::Graph;
use super::mlp::{Mlp, mlp};
use super::moe::{Moe, experts, shares};
use super::norm::{Norm, rms_norm};
use anec_mil::{Constant, ValueId};

/// Weights of the block.
#[derive(Clone, Debug)]
pub struct DenseAndMoe {
    /// Dense network; its input norm is that of the block.
    pub mlp: Mlp,
    /// Norm of the dense network's output.
    pub mlp_norm: Norm,
    /// Experts.
    pub moe: Moe,
    /// Norm of the router's input.
    pub router_norm: Norm,
    /// Norm of the experts' input.
    pub experts_norm: Norm,
    /// Norm of the experts' sum.
    pub moe_norm: Norm,
}

/// Applies the block to hidden states `x` and their norm.
pub fn dense_and_moe(g: &mut Graph<'_>, x: ValueId, normal: ValueId, weights: &DenseAndMoe) -> ValueId {
    let WithoutExperts { dense, shares, input } = without_experts(g, x, normal, weights);
    let mixed = g.scope("moe", |g| experts(g, input, shares, &weights.moe.experts));
    join(g, dense, mixed, weights)
}

/// Applies the block without its experts. Returns their input, `x` and the dense network's output concatenated, and the
/// weights of each expert for each token, with another one of 1 for [`join`].
pub fn expert_inputs(g: &mut Graph<'_>, x: ValueId, normal: ValueId, weights: &DenseAndMoe) -> [ValueId; 2] {
    let WithoutExperts { dense, shares, input } = without_experts(g, x, normal, weights);
    let first = g.ops.slice(shares, 1, 0..1);
    let zero = g.ops.sub(first, first);
    let one = g.ops.add(zero, Constant::fp16(1.0));
    [g.ops.concat(&[input, x, dense], 1), g.ops.concat(&[shares, one], 1)]
}

/// Joins the outputs of the dense network and of the experts, before the norm after the block.
pub fn join(g: &mut Graph<'_>, dense: ValueId, mixed: ValueId, weights: &DenseAndMoe) -> ValueId {
    let mixed = rms_norm(g, mixed, &weights.moe_norm, 1);
    g.ops.add(dense, mixed)
}

/// Results of the block without its experts.
struct WithoutExperts {
    /// Normed output of the dense network.
    dense: ValueId,
    /// Weights of the experts.
    shares: ValueId,
    /// Input of the experts.
    input: ValueId,
}

fn without_experts(g: &mut Graph<'_>, x: ValueId, normal: ValueId, weights: &DenseAndMoe) -> WithoutExperts {
    let dense = g.scope("mlp", |g| mlp(g, normal, &weights.mlp));
    let dense = rms_norm(g, dense, &weights.mlp_norm, 1);
    let routed = rms_norm(g, x, &weights.router_norm, 1);
    let input = rms_norm(g, x, &weights.experts_norm, 1);
    let shares = g.scope("moe", |g| shares(g, routed, &weights.moe));
    WithoutExperts { dense, shares, input }
}
