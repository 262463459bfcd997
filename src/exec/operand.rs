//! Where steps find their arguments.

use super::value::Value;
use anec_mil::ValueId;

/// Where a step finds an argument.
#[derive(Clone, Debug)]
pub(super) enum Operand {
    /// A constant.
    Constant(Value),
    /// A computed value; `last` when nothing later needs it.
    Slot { slot: usize, last: bool },
}

impl Operand {
    /// The slot, if it is one.
    pub fn slot(&self) -> Option<usize> {
        match self {
            Operand::Slot { slot, .. } => Some(*slot),
            Operand::Constant(_) => None,
        }
    }

    /// The computed value that it is.
    pub fn value(&self) -> Option<ValueId> {
        self.slot().map(|slot| ValueId(slot as u32))
    }
}
