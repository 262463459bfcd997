//! Steps over value slots.

use std::sync::Arc;

use super::kernel::{Input, Kernel, Matrix};
use super::operand::Operand;
use super::ops::{Conv, Linear, Matmul, ReadState, WriteState};
use super::value::Value;
use anec_mil::{DataType, TensorType};

/// Compiled op.
#[derive(Clone)]
pub(super) struct Step {
    /// Position of the op in the function.
    pub place: usize,
    pub operator: &'static str,
    pub name: String,
    pub kernel: Arc<dyn Kernel>,
    /// Arguments of the kernel, by position.
    pub operands: Vec<Operand>,
    pub types: Vec<TensorType>,
    pub outputs: Vec<Output>,
    /// Whether results only hold elements of the arguments.
    pub moves: bool,
    pub takes_state: bool,
}

impl Step {
    /// Operand of an input of the kernel.
    pub fn operand(&self, input: Input) -> &Operand {
        &self.operands[input.place]
    }

    /// State that it reads or writes.
    pub fn state(&self) -> Option<&Arc<str>> {
        let read = self.kernel.is::<ReadState>().map(|read| &read.name);
        read.or_else(|| self.kernel.is::<WriteState>().map(|write| &write.name))
    }

    /// Returns whether it multiplies with a large constant.
    pub fn multiplies_weight(&self) -> bool {
        let constant = |operand: &Operand| matches!(operand, Operand::Constant(Value::Weight(_)));
        let matmul = || self.kernel.is::<Matmul>().is_some() && self.operands.iter().any(constant);
        let linear = || self.kernel.is::<Linear>().is_some_and(|op| matches!(op.weight, Matrix::Constant(_)));
        self.kernel.is::<Conv>().is_some_and(Conv::mixes_channels) || linear() || matmul()
    }

    /// Declared type of the first result.
    pub fn dtype(&self) -> DataType {
        self.types.first().map_or(DataType::Fp32, |ty| ty.dtype)
    }
}

/// Destination of a result.
#[derive(Clone)]
pub(super) struct Output {
    pub name: String,
    pub slot: usize,
    /// Whether anything reads it.
    pub read: bool,
}
