//! Buffers of a text's calls, reused so that later calls allocate nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::inputs::InputTensors;
use anec_exec::Tensor;

/// Buffers of one text.
#[derive(Default)]
pub(super) struct CallBuffers {
    /// Tensors that inputs are made from.
    pub(super) tensors: InputTensors,
    /// Inputs of one call.
    pub(super) inputs: Vec<Arc<Tensor>>,
    /// Last outputs of each layer function.
    pub(super) outputs: BTreeMap<usize, Vec<Arc<Tensor>>>,
    /// Buffers of the LM head.
    pub(super) head: HeadBuffers,
}

/// Buffers of the LM head's calls, one element for each of its parts; the parts run together.
#[derive(Default)]
pub(super) struct HeadBuffers {
    /// Inputs of each part.
    pub(super) inputs: Vec<Vec<Arc<Tensor>>>,
    /// Last outputs of each part.
    pub(super) outputs: Vec<Vec<Arc<Tensor>>>,
}
