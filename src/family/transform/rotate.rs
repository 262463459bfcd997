//! Rotation of the residual stream by an orthogonal matrix `Q` (QuaRot, arXiv:2404.00456): `x' = x Q`.
//!
//! ```text
//! embedding E -> E Q      readers W -> W Q      writers W -> Q^T W, b -> Q^T b      head W -> W Q
//! ```
//!
//! A norm without gain divides by the root mean square, which a rotation preserves: `norm(x Q) = norm(x) Q`.
//! So gains are folded first. Sums and scalar factors commute with `Q`.
//!
//! `Q` is a randomised [Hadamard](HadamardRotation) matrix. If it is [learned](LearnedRotation), it is multiplied by a
//! block-diagonal orthogonal matrix that reduces the largest weights.

use std::sync::Arc;

use crate::blocks::linear::Linear;
use crate::decoder::Decoder;
use anec_base::Result;
use anec_manifest::RotationOptions;
use anec_source::orthogonal::{HadamardRotation, LearnedRotation};
use anec_source::{SourceWeight, SquareMatrix};

impl Decoder {
    /// Rotates the residual stream, whose norms have no gains. Returns the options used: with few channels nothing is
    /// learned.
    pub(super) fn rotate(&mut self, options: RotationOptions) -> Result<RotationOptions> {
        let random = HadamardRotation::new(self.config.hidden_size, options.seed)?;
        let learned = options.learned.then(|| LearnedRotation::blocks(&random)).flatten();
        let q: Arc<dyn SquareMatrix> = match learned {
            None => Arc::new(random),
            Some(width) => {
                let quantized = |linears: Vec<&mut Linear>| -> Vec<SourceWeight> {
                    let quantized = linears.into_iter().filter(|linear| linear.role.is_projection());
                    quantized.map(|linear| linear.weight.clone()).collect()
                };
                let (mut readers, mut writers) = (vec![self.head.weight.clone()], Vec::new());
                for block in self.layers.iter_mut().flat_map(|layer| layer.blocks()) {
                    readers.extend(quantized(block.readers));
                    writers.extend(quantized(block.writers));
                }
                let learned = LearnedRotation::new(random, width, readers, writers);
                self.transformed.deferred.push(learned.deferred());
                Arc::new(learned)
            }
        };
        self.embedding = self.embedding.times(&q)?;
        self.head.weight = self.head.weight.times(&q)?;
        for block in self.layers.iter_mut().flat_map(|layer| layer.blocks()) {
            for reader in block.readers {
                reader.weight = reader.weight.times(&q)?;
            }
            for writer in block.writers {
                writer.weight = writer.weight.transposed_times(&q)?;
                writer.bias = writer.bias.as_ref().map(|bias| bias.times(&q)).transpose()?;
            }
        }
        self.rotation = Some(matrix(&q)?);
        Ok(options.learned(learned.is_some()))
    }
}

/// `Q` as a weight `[n, n]`: the rows of the identity times `Q`.
fn matrix(q: &Arc<dyn SquareMatrix>) -> Result<SourceWeight> {
    let n = q.size();
    let mut identity = vec![0.0; (n * n) as usize];
    identity.iter_mut().step_by(n as usize + 1).for_each(|value| *value = 1.0);
    Ok(SourceWeight::from_values("identity", &[n, n], identity)?.times(q)?)
}
