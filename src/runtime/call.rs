//! A call of a function: its inputs out of what came before, its result out of its outputs.

use std::ops::Range;
use std::sync::Arc;

use super::error::RuntimeError;
use super::hidden::{Columns, Flow};
use super::inputs::{InputBuilder, shape_of, shaped};
use super::model::LoadedModel;
use super::plan::Step;
use super::prepared::Prepared;
use super::states::States;
use anec_bundle::FILE_NAME;
use anec_bundle::{Port, PortRole};
use anec_exec::{Tensor, TensorData};

/// What goes from function to function beside the hidden states.
fn is_carried(role: &PortRole) -> bool {
    role.is_carried() || matches!(role, PortRole::ExpertInput | PortRole::ExpertShares)
}

/// The call of a step's function on what comes from those before, whose hidden states it takes. What else it takes comes
/// from the text; functions of the head take nothing else.
pub(super) fn prepare(
    model: &LoadedModel,
    step: &Step,
    flow: &mut Flow,
    mut text: Option<(&mut InputBuilder<'_>, &States)>,
) -> Result<Prepared, RuntimeError> {
    let wrong = |problem: String| RuntimeError::bundle(model.folder.join(FILE_NAME), problem);
    let size = flow.hidden.count;
    let function = step.function(size as u64).ok_or_else(|| wrong(format!("no function takes {size} tokens")))?;
    let entry = &model.bundle.functions[function];
    let mut values = Some(std::mem::take(&mut flow.hidden.values));
    let mut input = |port: &Port| match (&port.role, &mut text) {
        (PortRole::Hidden, _) => {
            shaped(port, shape_of(port, size as u64), values.take().unwrap_or_default()).map(Arc::new)
        }
        (role, _) if is_carried(role) => {
            let given = flow.carried.iter().find(|(of, _)| of == role).map(|(_, tensor)| tensor.clone());
            given.ok_or_else(|| {
                wrong(format!("no function before `{}` gives its input `{}`", entry.function, port.name))
            })
        }
        (PortRole::State { id, .. } | PortRole::Cache { id, .. }, Some((_, states))) => Ok(states.input(id, port)),
        (_, Some((feed, _))) => feed.input(port),
        (role, None) => {
            Err(wrong(format!("function `{}` of the LM head has an input of role {role:?}", entry.function)))
        }
    };
    let inputs = entry.inputs.iter().map(&mut input).collect::<Result<Vec<_>, _>>()?;
    Ok(Prepared { function, inputs })
}

/// What goes on from a function that took the hidden states of `flow`.
pub(super) fn after(
    model: &LoadedModel,
    function: usize,
    outputs: Vec<Tensor>,
    mut flow: Flow,
) -> Result<Flow, RuntimeError> {
    let (channels, size) = (flow.hidden.channels, flow.hidden.count);
    for (port, tensor) in model.bundle.functions[function].outputs.iter().zip(&outputs) {
        if is_carried(&port.role) {
            flow.carried.retain(|(role, _)| *role != port.role);
            flow.carried.push((port.role.clone(), Arc::new(tensor.clone())));
        }
    }
    flow.hidden = result(model, function, outputs, PortRole::Hidden, channels, size)?;
    Ok(flow)
}

/// Copies the logits of a piece of the head to their places among all: a row of `width` for each of the first tokens.
pub(super) fn place_logits(piece: &Columns, rows: Range<usize>, logits: &mut [f32], width: usize) {
    for (t, row) in logits.chunks_exact_mut(width).enumerate() {
        piece.copy_column(t, &mut row[rows.clone()]);
    }
}

/// The output of a role, of a call of `size` tokens.
pub(super) fn result(
    model: &LoadedModel,
    function: usize,
    outputs: Vec<Tensor>,
    role: PortRole,
    channels: usize,
    size: usize,
) -> Result<Columns, RuntimeError> {
    let entry = &model.bundle.functions[function];
    let output = entry.outputs.iter().position(|port| port.role == role).and_then(|i| outputs.into_iter().nth(i));
    match output.map(|tensor| tensor.data) {
        Some(TensorData::F32(values)) if values.len() == channels * size => {
            Ok(Columns { channels, count: size, values })
        }
        found => {
            let found = found.map_or(0, |data| data.len());
            let problem = format!(
                "function `{}` of {} gave {found} numbers for {size} tokens, expected {channels} for each",
                entry.function, entry.package
            );
            Err(RuntimeError::bundle(model.folder.join(FILE_NAME), problem))
        }
    }
}
