//! Kernels that compute as the Neural Engine is published to, in the place of exact ones.

use std::sync::Arc;

use super::engine::{EngineEffect, EngineEffects, slices, tables};
use super::kernel::Kernel;
use super::ops::{Conv, Linear, Matmul, SliceByIndex};
use super::step::Step;

/// A step with the kernel that computes as the engine does, if an effect concerns it.
pub(super) fn simulated(step: Step, effects: EngineEffects) -> Step {
    let kernel: Option<Arc<dyn Kernel>> = match step.operator {
        "conv" | "linear" | "matmul" if effects.has_sums() => {
            let conv = step.kernel.is::<Conv>().map(|op| Arc::new(Conv { effects, ..op.clone() }) as Arc<dyn Kernel>);
            let linear = || step.kernel.is::<Linear>().map(|op| Arc::new(Linear { effects, ..op.clone() }) as Arc<_>);
            let matmul = || step.kernel.is::<Matmul>().map(|op| Arc::new(Matmul { effects, ..op.clone() }) as Arc<_>);
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
