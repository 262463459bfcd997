//! A block of the residual stream: norms, sum, and the projections that read and write the stream.

use super::blocks::Graph;
use super::blocks::linear::Linear;
use super::blocks::norm::{Norm, rms_norm};
use super::blocks::residual::{ResidualScaling, scaled_sum};
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// Norms and sum around a block.
#[derive(Clone, Debug)]
pub struct Norms {
    /// Norm of the block's input.
    pub before: Option<Norm>,
    /// Norm of the block's output.
    pub after: Option<Norm>,
    /// Norm of the sum.
    pub of_sum: Option<Norm>,
    /// Scales of the sum.
    pub scaling: Option<ResidualScaling>,
}

/// A block of the residual stream with the projections that read and write the stream.
#[derive(Debug)]
pub struct ResidualBlock<'a> {
    /// Norm before the block.
    pub before: Option<&'a mut Norm>,
    /// Norm of the block's output.
    pub after: Option<&'a mut Norm>,
    /// Norm of the sum.
    pub of_sum: Option<&'a mut Norm>,
    /// Scales of the sum.
    pub scaling: Option<&'a mut ResidualScaling>,
    /// Projections that read the stream, through the norm before if there is one.
    pub readers: Vec<&'a mut Linear>,
    /// Projections that write to the stream, through the norm after if there is one.
    pub writers: Vec<&'a mut Linear>,
}

impl<'a> ResidualBlock<'a> {
    /// Creates a block that only reads the stream.
    pub(super) fn reading(before: &'a mut Norm, readers: Vec<&'a mut Linear>) -> Self {
        ResidualBlock { before: Some(before), ..ResidualBlock::plain(readers) }
    }

    /// Creates a block that only reads the stream, without a norm before it.
    pub(super) fn plain(readers: Vec<&'a mut Linear>) -> Self {
        ResidualBlock { before: None, after: None, of_sum: None, scaling: None, readers, writers: Vec::new() }
    }
}

impl Norms {
    /// Creates a block with norms and a sum.
    pub(super) fn around<'a>(
        &'a mut self,
        readers: Vec<&'a mut Linear>,
        writers: Vec<&'a mut Linear>,
    ) -> ResidualBlock<'a> {
        let Norms { before, after, of_sum, scaling } = self;
        let (before, after, of_sum) = (before.as_mut(), after.as_mut(), of_sum.as_mut());
        ResidualBlock { before, after, of_sum, scaling: scaling.as_mut(), readers, writers }
    }

    /// Gain of the norm before the block, if there is one.
    pub fn gain(&self) -> Option<SourceWeight> {
        self.before.as_ref()?.gain()
    }

    /// `norm(x)`, the block's input.
    pub(super) fn enter(&self, g: &mut Graph<'_>, x: ValueId) -> ValueId {
        self.before.as_ref().map_or(x, |norm| rms_norm(g, x, norm, 1))
    }

    /// `x + r * norm(out)`, or the norm of the sum.
    pub(super) fn leave(&self, g: &mut Graph<'_>, x: ValueId, out: ValueId, multiplier: f64) -> ValueId {
        let mut added = self.after.as_ref().map_or(out, |norm| rms_norm(g, out, norm, 1));
        if let Some(scaling) = &self.scaling {
            return scaled_sum(g, x, added, scaling);
        }
        if multiplier != 1.0 {
            added = g.ops.mul(added, Constant::fp16(multiplier as f32));
        }
        let sum = g.ops.add(x, added);
        self.of_sum.as_ref().map_or(sum, |norm| rms_norm(g, sum, norm, 1))
    }
}
