//! Reading and writing states.

use std::sync::Arc;

use super::{Row, moving};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;

/// Rows of the table.
pub(super) const ROWS: &[Row] = moving! {
    "read_state" => |op| Ok(Arc::new(ReadState { name: op.state("input")? })),
    "write_state" => |op| Ok(Arc::new(WriteState { name: op.state("input")?, data: op.input("data")? })),
};

/// Content of a state: the buffer itself if the state is written before its next read and isn't in half precision.
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
        call.push(tensor)
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
