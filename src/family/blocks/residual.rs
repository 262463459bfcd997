//! Residual scaling: learned biases and scales of every channel for both addends, `(f + b_f) s_f + (x + b_x) s_x`.

use super::Graph;
use anec_base::Result;
use anec_manifest::Role;
use anec_mil::ValueId;
use anec_source::SourceWeight;

/// Weights of a scaled sum.
#[derive(Clone, Debug)]
pub struct ResidualScaling {
    /// Name within the layer.
    pub name: &'static str,
    /// Bias and scale of the block's output.
    pub block: BiasAndScale,
    /// Bias and scale of the residual stream.
    pub residual: BiasAndScale,
}

/// A bias and a scale for every channel.
#[derive(Clone, Debug)]
pub struct BiasAndScale {
    /// Bias, added first, `[hidden]`.
    pub bias: SourceWeight,
    /// Scale, `[hidden]`.
    pub scale: SourceWeight,
}

/// Sum of the residual stream `x` and a block's output.
pub fn scaled_sum(g: &mut Graph<'_>, x: ValueId, block: ValueId, weights: &ResidualScaling) -> ValueId {
    g.scope(weights.name, |g| {
        let block = g.scope("block", |g| apply(g, block, &weights.block));
        let x = g.scope("residual", |g| apply(g, x, &weights.residual));
        g.ops.add(x, block)
    })
}

/// Sum of `x` and a block without output, to which [`scaled_addend`]s are added.
///
/// # Errors
/// Returns an error if bias and scale differ in length.
pub fn scaled_base(g: &mut Graph<'_>, x: ValueId, weights: &ResidualScaling) -> Result<ValueId> {
    let bias = weights.block.bias.multiply_rows(&weights.block.scale)?;
    Ok(g.scope(weights.name, |g| {
        let x = g.scope("residual", |g| apply(g, x, &weights.residual));
        let bias = g.weight("bias", Role::Bias, &bias, &[1, bias.elements(), 1, 1]);
        g.ops.add(x, bias)
    }))
}

/// Addend of a part of a block's output to [`scaled_base`].
pub fn scaled_addend(g: &mut Graph<'_>, part: ValueId, weights: &ResidualScaling) -> ValueId {
    let scale = &weights.block.scale;
    g.scope(weights.name, |g| {
        let scale = g.weight("scale", Role::Table, scale, &[1, scale.elements(), 1, 1]);
        g.ops.mul(part, scale)
    })
}

fn apply(g: &mut Graph<'_>, x: ValueId, weights: &BiasAndScale) -> ValueId {
    let shape = [1, weights.bias.elements(), 1, 1];
    let bias = g.weight("bias", Role::Bias, &weights.bias, &shape);
    let x = g.ops.add(x, bias);
    let scale = g.weight("scale", Role::Table, &weights.scale, &shape);
    g.ops.mul(x, scale)
}
