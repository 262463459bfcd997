//! Reading and writing states.

use std::sync::Arc;

use super::{Call, Results, Row, Value, moving};

/// The rows of this group.
pub(super) const ROWS: &[Row] = moving! {
    "read_state" => read_state,
    "write_state" => write_state,
};

fn name(call: &Call<'_>) -> Result<Arc<str>, String> {
    match call.value("input")? {
        Value::State(name) => Ok(name.clone()),
        _ => Err("parameter `input` is not a state".into()),
    }
}

/// The content of a state; its very buffer where the state is written before it is read again.
fn read_state(call: &mut Call<'_>) -> Results {
    let name = name(call)?;
    let tensor = if call.takes_state { call.state.take(&name) } else { call.state.share(&name) };
    Ok(vec![tensor.ok_or_else(|| format!("the state `{name}` was not given to the run"))?])
}

/// Replaces the content of a state.
fn write_state(call: &mut Call<'_>) -> Results {
    let name = name(call)?;
    let data = call.take("data")?;
    call.state.put(&name, data);
    Ok(Vec::new())
}
