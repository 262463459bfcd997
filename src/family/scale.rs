//! The residual stream in another unit: every hidden state times a power of two, the logits unchanged.
//!
//! Some models carry single channels of the residual stream far beyond fp16's largest number, 65504. Scaling what enters
//! the stream by `s` scales the stream itself, for it is a sum; what reads it through a norm sees no difference but in
//! the norm's epsilon, which is scaled along: `s x / sqrt(mean((s x)^2) + s^2 eps) = x / sqrt(mean(x^2) + eps)`.
//! A power of two changes no digit of a weight that stays in the normal range of its number format.

use super::blocks::linear::Linear;
use super::blocks::moe::Experts;
use super::decoder::Decoder;
use super::layer::{FeedForward, Mixer, Norms};

impl Decoder {
    /// Multiplies the residual stream by `factor`, a power of two, and leaves the logits as they are.
    pub(super) fn scale_hidden(&mut self, factor: f64) {
        if factor == 1.0 {
            return;
        }
        self.embedding = self.embedding.scale(factor as f32);
        self.final_norm.eps *= factor * factor;
        for layer in &mut self.layers {
            let mixer = match &mut layer.mixer {
                Mixer::Attention(attention) => {
                    let gate = attention.gate.as_mut();
                    let readers = [&mut attention.query, &mut attention.key, &mut attention.value];
                    (readers.into_iter().chain(gate).collect::<Vec<_>>(), &mut attention.output)
                }
                Mixer::Cca(cca) => {
                    let attention = &mut cca.attention;
                    let readers =
                        vec![&mut attention.query, &mut attention.key, &mut attention.value, &mut cca.delayed_value];
                    (readers, &mut attention.output)
                }
                Mixer::ShortConv(conv) => (vec![&mut conv.input], &mut conv.output),
                Mixer::DeltaNet(net) => {
                    let readers = vec![&mut net.query_key_value, &mut net.gate, &mut net.step, &mut net.decay];
                    (readers, &mut net.output)
                }
            };
            scale_block(&mut layer.mixer_norms, mixer, factor);
            let feed_forward = match &mut layer.feed_forward {
                FeedForward::Mlp(mlp) => (vec![&mut mlp.gate, &mut mlp.up], &mut mlp.down),
                FeedForward::Moe(moe) => {
                    let Experts { gate, up, down, .. } = &mut moe.experts;
                    (vec![&mut moe.router, gate, up], down)
                }
                FeedForward::DepthMoe(moe) => {
                    let Experts { gate, up, down, .. } = &mut moe.experts;
                    (vec![&mut moe.router.down, gate, up], down)
                }
            };
            scale_block(&mut layer.feed_forward_norms, feed_forward, factor);
        }
    }
}

/// A block between the stream and itself. What reads the stream is a norm, whose epsilon goes along, or projections,
/// which undo the factor; what writes to it is a norm's gain or a projection, which brings it in. Biases of the sum go
/// along.
fn scale_block(norms: &mut Norms, (readers, writer): (Vec<&mut Linear>, &mut Linear), factor: f64) {
    match &mut norms.before {
        Some(norm) => norm.eps *= factor * factor,
        // a bias is added after the product, which is what it was
        None => readers.into_iter().for_each(|reader| reader.weight = reader.weight.scale((1.0 / factor) as f32)),
    }
    match &mut norms.after {
        Some(norm) => {
            norm.weight = norm.weight.scale(factor as f32);
            norm.offset *= factor as f32;
        }
        None => {
            writer.weight = writer.weight.scale(factor as f32);
            writer.bias = writer.bias.as_ref().map(|bias| bias.scale(factor as f32));
        }
    }
    for part in norms.scaling.iter_mut().flat_map(|scaling| [&mut scaling.block, &mut scaling.residual]) {
        part.bias = part.bias.scale(factor as f32);
    }
}
