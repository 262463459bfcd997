//! Residual scaling: what a block adds and what it is added to each have a learned bias and scale for every channel,
//! `(f + b_f) s_f + (x + b_x) s_x`.

use super::Graph;
use anec_base::Result;
use anec_manifest::Role;
use anec_mil::ValueId;
use anec_source::SourceWeight;

/// Its weights.
#[derive(Clone, Debug)]
pub struct ResidualScaling {
    /// Name within the layer.
    pub name: &'static str,
    /// Of what the block gives.
    pub block: BiasAndScale,
    /// Of the residual stream.
    pub residual: BiasAndScale,
}

/// A bias and a scale for every channel.
#[derive(Clone, Debug)]
pub struct BiasAndScale {
    /// Added first, `[hidden]`.
    pub bias: SourceWeight,
    /// Multiplied then, `[hidden]`.
    pub scale: SourceWeight,
}

/// The residual stream `x` with what a block gave.
pub fn scaled_sum(g: &mut Graph<'_>, x: ValueId, block: ValueId, weights: &ResidualScaling) -> ValueId {
    g.scope(weights.name, |g| {
        let block = g.scope("block", |g| apply(g, block, &weights.block));
        let x = g.scope("residual", |g| apply(g, x, &weights.residual));
        g.ops.add(x, block)
    })
}

/// The sum of `x` and a block that gave nothing yet: what [`scaled_addend`]s are added to.
///
/// # Errors
/// When the bias and the scale differ in length.
pub fn scaled_base(g: &mut Graph<'_>, x: ValueId, weights: &ResidualScaling) -> Result<ValueId> {
    let bias = weights.block.bias.multiply_rows(&weights.block.scale)?;
    Ok(g.scope(weights.name, |g| {
        let x = g.scope("residual", |g| apply(g, x, &weights.residual));
        let bias = g.weight("bias", Role::Bias, &bias, &[1, bias.elements(), 1, 1]);
        g.ops.add(x, bias)
    }))
}

/// What a part of a block adds to that.
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
