//! Rotary position embedding (arXiv:2104.09864), half-split: dimension `i` of a head is rotated with dimension `i +
//! rope_dim/2`; dimensions from `rope_dim` on pass through. One form slices the halves. The other permutes dimensions
//! by a product, `x cos + (x P) sin`, with the same result, because every product has one addend.

use super::Graph;
use anec_manifest::RopeForm;
use anec_mil::{Constant, ValueId};

/// Cosines and sines of the call's tokens, both `[1, 1, T, rope_dim / 2]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Cosines.
    pub cos: ValueId,
    /// Sines.
    pub sin: ValueId,
}

/// Rotates heads `[1, heads, T, head_dim]`.
pub fn rotate(g: &mut Graph<'_>, x: ValueId, rotation: Rotation, rope_dim: u64, head_dim: u64) -> ValueId {
    g.scope("rope", |g| match g.form.rope {
        RopeForm::Halves => by_halves(g, x, rotation, rope_dim, head_dim),
        RopeForm::Product => by_product(g, x, rotation, rope_dim, head_dim),
    })
}

fn by_halves(g: &mut Graph<'_>, x: ValueId, rotation: Rotation, rope_dim: u64, head_dim: u64) -> ValueId {
    let half = rope_dim / 2;
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
}

fn by_product(g: &mut Graph<'_>, x: ValueId, rotation: Rotation, rope_dim: u64, head_dim: u64) -> ValueId {
    let half = rope_dim / 2;
    let wide = match g.wide.iter().find(|(of, width, _)| (*of, *width) == (rotation, head_dim)) {
        Some((_, _, wide)) => *wide,
        None => {
            let wide = widened(g, rotation, half, head_dim);
            g.wide.push((rotation, head_dim, wide));
            wide
        }
    };
    // dimensions that pass through have no partner
    let partners = matrix(head_dim, head_dim, |from, to| match to {
        to if to < half && from == to + half => -1.0,
        to if (half..rope_dim).contains(&to) && from + half == to => 1.0,
        _ => 0.0,
    });
    let partners = g.ops.constant("partners", partners);
    let partner = g.ops.matmul(x, partners, false, false);
    let own = g.ops.mul(x, wide.cos);
    let other = g.ops.mul(partner, wide.sin);
    g.ops.add(own, other)
}

/// Cosines and sines `[1, 1, T, head_dim]`: those of both halves side by side, then 1 and 0.
fn widened(g: &mut Graph<'_>, rotation: Rotation, half: u64, head_dim: u64) -> Rotation {
    let both = matrix(half, head_dim, |from, to| f32::from(u8::from(to < 2 * half && from == to % half)));
    let both = g.ops.constant("both", both);
    let mut cos = g.ops.matmul(rotation.cos, both, false, false);
    let sin = g.ops.matmul(rotation.sin, both, false, false);
    if 2 * half < head_dim {
        let passing = matrix(1, head_dim, |_, to| f32::from(u8::from(to >= 2 * half)));
        cos = g.ops.add(cos, passing);
    }
    Rotation { cos, sin }
}

/// A constant matrix `[1, 1, rows, columns]`.
fn matrix(rows: u64, columns: u64, entry: impl Fn(u64, u64) -> f32) -> Constant {
    let values = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    let values: Vec<f32> = values.map(|(row, column)| entry(row, column)).collect();
    Constant::fp16_tensor(&[1, 1, rows, columns], &values)
}
