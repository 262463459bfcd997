//! A block between the residual stream and itself: its norms, its sum, and the projections that touch the stream.

use super::blocks::Graph;
use super::blocks::linear::Linear;
use super::blocks::norm::{Norm, rms_norm};
use super::blocks::residual::{ResidualScaling, scaled_sum};
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// What is around a block: norms, and the sum with the residual stream.
#[derive(Clone, Debug)]
pub struct Norms {
    /// Of what goes in.
    pub before: Option<Norm>,
    /// Of what comes out.
    pub after: Option<Norm>,
    /// Of the sum.
    pub of_sum: Option<Norm>,
    /// Scales of the sum.
    pub scaling: Option<ResidualScaling>,
}

/// A block between the residual stream and itself, by the projections that touch the stream.
#[derive(Debug)]
pub struct ResidualBlock<'a> {
    /// The norm before it, if there is one.
    pub before: Option<&'a mut Norm>,
    /// The norm of what it adds.
    pub after: Option<&'a mut Norm>,
    /// The norm of the sum.
    pub of_sum: Option<&'a mut Norm>,
    /// Scales of the sum.
    pub scaling: Option<&'a mut ResidualScaling>,
    /// What reads the stream, through the norm before, if there is one.
    pub readers: Vec<&'a mut Linear>,
    /// What writes to it, through the norm after, if there is one.
    pub writers: Vec<&'a mut Linear>,
}

impl<'a> ResidualBlock<'a> {
    /// What only reads the stream.
    pub(super) fn reading(before: &'a mut Norm, readers: Vec<&'a mut Linear>) -> Self {
        let (after, of_sum, scaling) = (None, None, None);
        ResidualBlock { before: Some(before), after, of_sum, scaling, readers, writers: Vec::new() }
    }
}

impl Norms {
    /// A block with these around it.
    pub(super) fn around<'a>(
        &'a mut self,
        readers: Vec<&'a mut Linear>,
        writers: Vec<&'a mut Linear>,
    ) -> ResidualBlock<'a> {
        let Norms { before, after, of_sum, scaling } = self;
        let (before, after, of_sum) = (before.as_mut(), after.as_mut(), of_sum.as_mut());
        ResidualBlock { before, after, of_sum, scaling: scaling.as_mut(), readers, writers }
    }

    /// The gain of the norm before, if there is one that has one.
    pub fn gain(&self) -> Option<SourceWeight> {
        self.before.as_ref()?.gain()
    }

    /// `norm(x)`, which the block reads.
    pub(super) fn enter(&self, g: &mut Graph<'_>, x: ValueId) -> ValueId {
        self.before.as_ref().map_or(x, |norm| rms_norm(g, x, norm, 1))
    }

    /// `x + r * norm(out)` of what the block gave, or the norm of the sum.
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
