//! Reading and writing states.

use std::sync::Arc;

use super::{Row, moving};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;

/// The rows of this group.
pub(super) const ROWS: &[Row] = moving! {
    "read_state" => |op| Ok(Arc::new(ReadState { name: op.state("input")? })),
    "write_state" => |op| Ok(Arc::new(WriteState { name: op.state("input")?, data: op.input("data")? })),
};

/// The content of a state; its very buffer where the state is written before it is read again, and holds what is computed with.
pub(crate) struct ReadState {
    pub name: Arc<str>,
}

impl Kernel for ReadState {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let tensor = match call.takes_state {
            true => call.state.read_to_write(&self.name, pool),
            false => call.state.read(&self.name, pool),
        };
        let tensor = tensor.ok_or_else(|| format!("the state `{}` was not given to the run", self.name))?;
        call.give(tensor)
    }
}

/// Replaces the content of a state.
pub(crate) struct WriteState {
    pub name: Arc<str>,
    pub data: Input,
}

impl Kernel for WriteState {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let data = call.take(self.data)?;
        if let Some(replaced) = call.state.put(&self.name, data) {
            pool.recycle(replaced);
        }
        Ok(())
    }
}
