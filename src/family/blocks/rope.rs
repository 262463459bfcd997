//! Rotary position embedding (arXiv:2104.09864), half-split: dimension `i` of a head is rotated with dimension
//! `i + rope_dim/2`; dimensions from `rope_dim` on pass through.

use super::Graph;
use anec_mil::ValueId;

/// Cosines and sines of the tokens of the call, both `[1, 1, T, rope_dim / 2]`.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// Cosines.
    pub cos: ValueId,
    /// Sines.
    pub sin: ValueId,
}

/// Rotates heads `[1, heads, T, head_dim]`.
pub fn rotate(g: &mut Graph<'_>, x: ValueId, rotation: Rotation, rope_dim: u64, head_dim: u64) -> ValueId {
    let half = rope_dim / 2;
    g.scope("rope", |g| {
        let first = g.ops.slice(x, 3, 0..half);
        let second = g.ops.slice(x, 3, half..rope_dim);
        let first_cos = g.ops.mul(first, rotation.cos);
        let second_sin = g.ops.mul(second, rotation.sin);
        let second_cos = g.ops.mul(second, rotation.cos);
        let first_sin = g.ops.mul(first, rotation.sin);
        let mut parts = vec![g.ops.sub(first_cos, second_sin), g.ops.add(second_cos, first_sin)];
        if rope_dim < head_dim {
            parts.push(g.ops.slice(x, 3, rope_dim..head_dim));
        }
        g.ops.concat(&parts, 3)
    })
}
