//! How products are computed: with activations of how many bits, and as exactly or as the Neural Engine is published to.

use std::sync::Arc;

use super::engine::{EngineEffect, EngineEffects, slices, tables};
use super::kernel::Kernel;
use super::ops::{Conv, Linear, Matmul, SliceByIndex};
use super::step::Step;
use anec_kernels::product::Activations;

/// How a product is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProductArithmetic {
    /// What activations are rounded to where they are multiplied with bytes.
    pub activations: Activations,
    /// How sums depart from exact ones.
    pub effects: EngineEffects,
}

/// A step with the kernel that computes in some way, if that concerns it.
pub(super) fn computed_by(step: Step, arithmetic: ProductArithmetic) -> Step {
    let ProductArithmetic { activations, effects } = arithmetic;
    let kernel: Option<Arc<dyn Kernel>> = match step.operator {
        "conv" | "linear" | "matmul" if effects.has_sums() || activations != Activations::F32 => {
            let kernel = &step.kernel;
            let conv = kernel.is::<Conv>().map(|op| Arc::new(Conv { arithmetic, ..op.clone() }) as Arc<dyn Kernel>);
            let linear = || kernel.is::<Linear>().map(|op| Arc::new(Linear { arithmetic, ..op.clone() }) as Arc<_>);
            let matmul = || kernel.is::<Matmul>().map(|op| Arc::new(Matmul { arithmetic, ..op.clone() }) as Arc<_>);
            conv.or_else(linear).or_else(matmul)
        }
        "slice_by_index" if effects.has(EngineEffect::SliceGain) => {
            let begins_later = step.kernel.is::<SliceByIndex>().is_some_and(|op| op.slicing.begins_within_last_axis());
            begins_later.then(|| slices::with_gain(step.kernel.clone()))
        }
        operator => tables::kernel(operator, effects),
    };
    match kernel {
        Some(kernel) => Step { kernel, ..step },
        None => step,
    }
}
