//! Transforms of the weights that preserve the function. The logits stay the same, and the weights become easier to
//! quantize: large values are spread over many weights or moved to where they do no harm.
//!
//! Each transform rewrites the expressions of weights; nothing is read until the weights are.
//!
//! | module | contents |
//! |---|---|
//! | `permit` | transforms that a family permits, and its default recipe |
//! | `fold` | folding of norms' gains into their readers |
//! | `rotate` | rotation of the residual stream by an orthogonal matrix |
//! | `gains` | redistribution of gains between norms and their readers |
//! | `equalize` | rescaling of channels between two projections |
//! | `kernels` | rescaling of channels between projections and depthwise convolutions |
//! | `balance` | optimal scales of channels |
//! | `moments` | estimated magnitudes of activations |

mod balance;
mod equalize;
mod fold;
mod gains;
mod kernels;
mod moments;
pub mod permit;
mod rotate;
mod rows;

use super::FamilyModel;
use super::decoder::Decoder;
use anec_base::Result;
use anec_manifest::{RotateBy, Transform};
use anec_source::SourceWeight;

/// Transforms applied to a model.
#[derive(Clone, Debug, Default)]
pub struct Transformed {
    /// Applied transforms, in order.
    pub done: Vec<Transform>,
    /// Parts of transforms that don't apply to the model: one sentence each.
    pub left_out: Vec<String>,
    /// Vectors that weights depend on and that are slow to compute; each is computed on first read.
    pub deferred: Vec<SourceWeight>,
}

/// Elements of a vector in f64; zeros if there is none.
fn vector(weight: Option<&SourceWeight>, length: usize) -> anec_source::Result<Vec<f64>> {
    let Some(weight) = weight else { return Ok(vec![0.0; length]) };
    let mut values = vec![0f32; weight.elements() as usize];
    weight.read(0, &mut values)?;
    Ok(values.into_iter().map(f64::from).collect())
}

impl Decoder {
    /// Applies the requested transforms that the family permits.
    pub(super) fn apply_transforms(&mut self, asked: &[Transform]) -> Result<()> {
        let permitted = |name: &str| {
            let wanted = asked.iter().find(|transform| transform.name() == name).copied();
            wanted.filter(|transform| self.permits(*transform).is_ok())
        };
        let (fold, gains, equalize) = (permitted("fold"), permitted("gains"), permitted("equalize"));
        let rotation = permitted("rotate").and_then(Transform::rotation);
        let mut done = Vec::new();
        if fold.is_some() || rotation.is_some() {
            self.fold()?;
            done.push(Transform::Fold);
        }
        if let Some(rotate) = rotation {
            let rotate = self.rotate(rotate)?;
            done.push(Transform::RotateBy(RotateBy { rotate }));
        }
        if gains.is_some() {
            self.share_gains()?;
            done.push(Transform::Gains);
        }
        if equalize.is_some() {
            self.equalize()?;
            done.push(Transform::Equalize);
        }
        if done.contains(&Transform::Equalize) {
            self.transformed.left_out = permit::equalization_exceptions(&self.config);
        }
        self.transformed.done = done;
        Ok(())
    }
}
