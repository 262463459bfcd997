//! What the calls of a text have worked with, kept so that the next ones allocate nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::inputs::InputTensors;
use anec_exec::Tensor;

/// Of a text's calls.
#[derive(Default)]
pub(super) struct CallBuffers {
    /// What inputs were made of.
    pub(super) tensors: InputTensors,
    /// Room for the inputs of one call.
    pub(super) inputs: Vec<Arc<Tensor>>,
    /// What each function of the layers has given last.
    pub(super) outputs: BTreeMap<usize, Vec<Arc<Tensor>>>,
    /// Of the LM head.
    pub(super) head: HeadBuffers,
}

/// Of the calls of the LM head, which are made together: for each of its parts.
#[derive(Default)]
pub(super) struct HeadBuffers {
    /// Room for inputs.
    pub(super) inputs: Vec<Vec<Arc<Tensor>>>,
    /// What was given last.
    pub(super) outputs: Vec<Vec<Arc<Tensor>>>,
}
