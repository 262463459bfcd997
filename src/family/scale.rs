//! The residual stream in another unit: every hidden state times a power of two, the logits unchanged.
//!
//! Some models carry single channels of the residual stream far beyond fp16's largest number, 65504. Scaling what enters
//! the stream by `s` scales the stream itself, for it is a sum; what reads it through a norm sees no difference but in
//! the norm's epsilon, which is scaled along: `s x / sqrt(mean((s x)^2) + s^2 eps) = x / sqrt(mean(x^2) + eps)`.
//! A power of two changes no digit of a weight that stays in the normal range of its number format.

use super::decoder::{Decoder, Layer};
use super::table::NormPlacement;
use crate::family::blocks::linear::Linear;

impl Decoder {
    /// Multiplies the residual stream by `factor`, a power of two, and leaves the logits as they are.
    pub fn scale_residual(&mut self, factor: f32) {
        self.embedding = self.embedding.scale(factor);
        let eps_factor = f64::from(factor) * f64::from(factor);
        self.final_norm.eps *= eps_factor;
        for layer in &mut self.layers {
            match self.config.norms {
                NormPlacement::Pre => {
                    layer.attention_norm.eps *= eps_factor;
                    layer.mlp_norm.eps *= eps_factor;
                    scale(&mut layer.attention.output, factor);
                    scale(&mut layer.mlp.down, factor);
                }
                NormPlacement::Post => scale_post_norm(layer, factor),
            }
        }
    }
}

/// Where the norms come after the blocks, their gains are what writes to the stream, and the projections read it as it
/// is: they undo the factor.
fn scale_post_norm(layer: &mut Layer, factor: f32) {
    for norm in [&mut layer.attention_norm, &mut layer.mlp_norm] {
        norm.weight = norm.weight.scale(factor);
    }
    let attention = &mut layer.attention;
    let readers =
        [&mut attention.query, &mut attention.key, &mut attention.value, &mut layer.mlp.gate, &mut layer.mlp.up];
    for reader in readers {
        // a bias is added after the product, which is what it was
        reader.weight = reader.weight.scale(1.0 / factor);
    }
}

fn scale(writer: &mut Linear, factor: f32) {
    writer.weight = writer.weight.scale(factor);
    writer.bias = writer.bias.as_ref().map(|bias| bias.scale(factor));
}
