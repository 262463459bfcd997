//! Scaling of the residual stream by a power of two; the logits don't change.
//!
//! Some models have single channels of the residual stream far beyond fp16's largest number, 65504. The stream is a
//! sum, so scaling its inputs by `s` scales the stream. Norms that read it cancel the factor if their epsilon is
//! scaled, too: `s x / sqrt(mean((s x)^2) + s^2 eps) = x / sqrt(mean(x^2) + eps)`. A power of two changes no digit of a
//! weight that stays in the normal range of its number format.

use super::decoder::Decoder;
use super::residual_block::ResidualBlock;

impl Decoder {
    /// Multiplies the residual stream by `factor`, a power of two, without changing the logits.
    pub(super) fn scale_hidden(&mut self, factor: f64) {
        if factor == 1.0 {
            return;
        }
        self.embedding = self.embedding.scale(factor as f32);
        self.positions = self.positions.as_ref().map(|positions| positions.scale(factor as f32));
        self.final_norm.eps *= factor * factor;
        if self.gives_hidden_states() {
            self.final_norm.scale_result(factor as f32);
        }
        if let Some(predictor) = self.draft.as_mut().and_then(|draft| draft.predictor.as_mut()) {
            predictor.scale_inputs(factor);
        }
        self.layers.iter_mut().flat_map(|layer| layer.blocks()).for_each(|block| scale_block(block, factor));
    }
}

/// Scales a block between the stream and itself. A norm that reads the stream gets a scaled epsilon; projections that
/// read it undo the factor. A norm's gain or a projection that writes to it applies the factor. Biases of the sum are
/// scaled.
pub(super) fn scale_block(block: ResidualBlock<'_>, factor: f64) {
    match block.before {
        Some(norm) => norm.eps *= factor * factor,
        // the bias is added after the product, which doesn't change
        None => block.readers.into_iter().for_each(|reader| reader.weight = reader.weight.scale((1.0 / factor) as f32)),
    }
    match block.after {
        Some(norm) => norm.scale_result(factor as f32),
        None => {
            for writer in block.writers {
                writer.weight = writer.weight.scale(factor as f32);
                writer.bias = writer.bias.as_ref().map(|bias| bias.scale(factor as f32));
            }
        }
    }
    if let Some(norm) = block.of_sum {
        norm.eps *= factor * factor;
        norm.scale_result(factor as f32);
    }
    for part in block.scaling.into_iter().flat_map(|scaling| [&mut scaling.block, &mut scaling.residual]) {
        part.bias = part.bias.scale(factor as f32);
    }
}
