//! Transforms of the weights that keep the function: the model's logits stay as they are, and its weights become easier
//! to quantize, because what would take a scale for itself is spread over many weights or moved to where it does no harm.
//!
//! Each transform rewrites the expressions of weights; nothing is read until the weights are.
//!
//! | module | holds |
//! |---|---|
//! | `permit` | what a family permits, and what it is given by default |
//! | `fold` | gains of norms into their readers |
//! | `rotate` | the residual stream by an orthogonal matrix |
//! | `gains` | gains shared anew between norms and their readers |
//! | `equalize` | channels between two projections in other units |
//! | `kernels` | the same between projections and depthwise convolutions |
//! | `balance` | which units are best |
//! | `moments` | how large activations are |

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

/// Transforms of a model.
#[derive(Clone, Debug, Default)]
pub struct Transformed {
    /// Those that were done, in their order.
    pub done: Vec<Transform>,
    /// Parts of them that the model has no place for: one sentence each.
    pub left_out: Vec<String>,
    /// Vectors that weights depend on and that take long to compute; each is computed when it is first read.
    pub deferred: Vec<SourceWeight>,
}

/// The elements of a vector, in f64; zeros where there is none.
fn vector(weight: Option<&SourceWeight>, length: usize) -> anec_source::Result<Vec<f64>> {
    let Some(weight) = weight else { return Ok(vec![0.0; length]) };
    let mut values = vec![0f32; weight.elements() as usize];
    weight.read(0, &mut values)?;
    Ok(values.into_iter().map(f64::from).collect())
}

impl Decoder {
    /// Applies what the family permits of `asked`.
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
            self.transformed.left_out = permit::not_equalized(&self.config);
        }
        self.transformed.done = done;
        Ok(())
    }
}
