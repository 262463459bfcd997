//! Arithmetic of products: precision of activations, and exact sums or the simulated ones of the Neural Engine.

use std::sync::Arc;

use super::engine::{EngineEffect, EngineEffects, slices, tables};
use super::kernel::Kernel;
use super::ops::{Conv, Linear, Matmul, SliceByIndex};
use super::step::Step;
use anec_kernels::product::Activations;

/// Arithmetic of a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProductArithmetic {
    /// Rounding of activations in products that are summed in integers.
    pub activations: Activations,
    /// Departures of sums from exact arithmetic.
    pub effects: EngineEffects,
}

/// Replaces the kernel of a step whose products depend on the arithmetic.
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
