//! Conversion error. Sums are kept per block and added in order at the end, so that totals don't depend on the order or
//! number of threads.

use std::sync::OnceLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use anec_kernels::quantize::Squares;

/// Conversion error of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockLoss {
    /// Sums of squares.
    pub squares: Squares,
    /// Largest magnitude among the source's values, in the block or in all blocks that share its scale.
    pub largest: f32,
    /// Number of values clamped to the format's largest number.
    pub saturated: u64,
    /// Number of non-zero values that became zero.
    pub vanished: u64,
}

/// Conversion errors of a weight, collected while its blocks are converted.
#[derive(Debug)]
pub struct RoundingError {
    blocks: Vec<OnceLock<BlockLoss>>,
}

impl RoundingError {
    /// Returns measures of `blocks` blocks, none of them measured yet.
    pub fn new(blocks: usize) -> Self {
        RoundingError { blocks: (0..blocks).map(|_| OnceLock::new()).collect() }
    }

    /// Records the error of a block. A block that is converted again has the same error.
    pub fn set(&self, block: usize, loss: BlockLoss) {
        let _ = self.blocks[block].set(loss);
    }

    /// Returns the error of the whole weight, or `None` until every block is converted.
    pub fn total(&self) -> Option<Loss> {
        let mut sum = BlockLoss::default();
        for block in &self.blocks {
            let loss = block.get()?;
            sum.squares += loss.squares;
            sum.largest = sum.largest.max(loss.largest);
            sum.saturated += loss.saturated;
            sum.vanished += loss.vanished;
        }
        let Squares { source, result, error } = sum.squares;
        // for equal sums of squares this is 1 - error / (2 source), free of cancellation
        let cosine = if source == 0.0 && result == 0.0 {
            1.0
        } else if source == 0.0 || result == 0.0 {
            0.0
        } else {
            ((source + result - error) / (2.0 * (source * result).sqrt())).clamp(-1.0, 1.0)
        };
        let relative_rms_error = if source > 0.0 { (error / source).sqrt() } else { 0.0 };
        let largest = sum.largest;
        Some(Loss { relative_rms_error, cosine, largest, saturated: sum.saturated, vanished: sum.vanished })
    }
}

/// Conversion error of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Loss {
    /// Root of the mean squared difference, divided by the root of the mean square of the source's values.
    pub relative_rms_error: f64,
    /// Cosine of the angle between source values and converted values.
    pub cosine: f64,
    /// Largest magnitude among the source's values.
    pub largest: f32,
    /// Number of values clamped to the format's largest number (`quant.overflow: saturate`).
    pub saturated: u64,
    /// Number of non-zero values that became zero.
    pub vanished: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_total_needs_every_block_and_is_independent_of_their_order() {
        let loss = |n: f64| BlockLoss {
            squares: Squares { source: n, result: n * 0.9, error: n * 0.01 },
            largest: n as f32,
            saturated: 1,
            vanished: 2,
        };
        let (a, b) = (RoundingError::new(3), RoundingError::new(3));
        for block in 0..3 {
            assert_eq!(a.total(), None);
            a.set(block, loss(block as f64 + 0.1));
            b.set(2 - block, loss(2.1 - block as f64));
        }
        let total = a.total().unwrap();
        assert_eq!(Some(total), b.total());
        assert!((total.relative_rms_error - 0.1).abs() < 1e-12);
        assert_eq!((total.largest, total.saturated, total.vanished), (2.1, 3, 6));
        a.set(0, loss(100.0));
        assert_eq!(a.total(), Some(total));
    }

    #[test]
    fn zeros_lose_nothing() {
        let measures = RoundingError::new(1);
        measures.set(0, BlockLoss::default());
        let total = measures.total().unwrap();
        assert_eq!((total.cosine, total.relative_rms_error), (1.0, 0.0));
    }
}
