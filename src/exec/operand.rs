//! Operands of steps.

use super::value::Value;
use anec_mil::ValueId;

/// Source of a step's argument.
#[derive(Clone, Debug)]
pub(super) enum Operand {
    /// A constant.
    Constant(Value),
    /// Computed value; `last` if nothing uses it afterwards.
    Slot { slot: usize, last: bool },
}

impl Operand {
    /// Slot of a computed value.
    pub fn slot(&self) -> Option<usize> {
        match self {
            Operand::Slot { slot, .. } => Some(*slot),
            Operand::Constant(_) => None,
        }
    }

    /// Computed value of the operand.
    pub fn value(&self) -> Option<ValueId> {
        self.slot().map(|slot| ValueId(slot as u32))
    }
}
