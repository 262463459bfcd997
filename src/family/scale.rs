//! The residual stream in another unit: every hidden state times a power of two, the logits unchanged.
//!
//! Some models carry single channels of the residual stream far beyond fp16's largest number, 65504. Scaling what enters
//! the stream by `s` scales the stream itself, for it is a sum; what reads it through a norm sees no difference but in
//! the norm's epsilon, which is scaled along: `s x / sqrt(mean((s x)^2) + s^2 eps) = x / sqrt(mean(x^2) + eps)`.
//! A power of two changes no digit of a weight that stays in the normal range of its number format.

use super::blocks::linear::Linear;
use super::decoder::Decoder;
use super::layer::{FeedForward, Mixer, Norms};

impl Decoder {
    /// Multiplies the residual stream by `factor`, a power of two, and leaves the logits as they are.
    pub fn scale_residual(&mut self, factor: f32) {
        self.embedding = self.embedding.scale(factor);
        self.final_norm.eps *= square(factor);
        for layer in &mut self.layers {
            match &mut layer.mixer {
                Mixer::Attention(attention) => {
                    let readers = [&mut attention.query, &mut attention.key, &mut attention.value];
                    scale_block(&mut layer.mixer_norms, readers, &mut attention.output, factor);
                }
            }
            match &mut layer.feed_forward {
                FeedForward::Mlp(mlp) => {
                    let readers = [&mut mlp.gate, &mut mlp.up];
                    scale_block(&mut layer.feed_forward_norms, readers, &mut mlp.down, factor);
                }
            }
        }
    }
}

/// A block between the stream and itself. What reads the stream is a norm, whose epsilon goes along, or projections,
/// which undo the factor; what writes to it is a norm's gain or a projection, which brings it in.
fn scale_block<'a>(
    norms: &mut Norms,
    readers: impl IntoIterator<Item = &'a mut Linear>,
    writer: &mut Linear,
    factor: f32,
) {
    match &mut norms.before {
        Some(norm) => norm.eps *= square(factor),
        // a bias is added after the product, which is what it was
        None => readers.into_iter().for_each(|reader| reader.weight = reader.weight.scale(1.0 / factor)),
    }
    match &mut norms.after {
        Some(norm) => norm.weight = norm.weight.scale(factor),
        None => {
            writer.weight = writer.weight.scale(factor);
            writer.bias = writer.bias.as_ref().map(|bias| bias.scale(factor));
        }
    }
}

fn square(factor: f32) -> f64 {
    f64::from(factor) * f64::from(factor)
}
