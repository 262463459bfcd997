//! A function call: its inputs are assembled from earlier outputs, its result is taken from its outputs.

use std::ops::Range;
use std::sync::Arc;

use super::error::RuntimeError;
use super::hidden::{Columns, Flow};
use super::inputs::{InputBuilder, fits, shape_of, shaped};
use super::model::LoadedModel;
use super::plan::Step;
use super::states::States;
use anec_bundle::FILE_NAME;
use anec_bundle::{Port, PortRole};
use anec_exec::Tensor;

/// Number of channels whose columns are copied at a time, small enough to stay in the CPU cache.
const CHANNELS_AT_A_TIME: usize = 256;

/// Returns whether functions pass on this value beside the hidden states.
fn is_carried(role: &PortRole) -> bool {
    role.is_carried() || matches!(role, PortRole::ExpertInput | PortRole::ExpertShares)
}

/// Fills `inputs` for a step's function and returns the function: values of earlier functions, including the hidden
/// states, and the text's own inputs. Functions of the head take no others.
pub(super) fn prepare(
    model: &LoadedModel,
    step: &Step,
    flow: &Flow,
    mut text: Option<(&mut InputBuilder<'_>, &States)>,
    inputs: &mut Vec<Arc<Tensor>>,
) -> Result<usize, RuntimeError> {
    let wrong = |problem: String| RuntimeError::bundle(model.folder.join(FILE_NAME), problem);
    let size = flow.hidden.count as u64;
    let function = step.function(size).ok_or_else(|| wrong(format!("no function takes {size} tokens")))?;
    let entry = &model.bundle.functions[function];
    inputs.clear();
    for port in &entry.inputs {
        inputs.push(match (&port.role, &mut text) {
            (PortRole::Hidden, _) => hidden_input(port, &flow.hidden)?,
            (role, _) if is_carried(role) => {
                let given = flow.carried.iter().find(|(of, _)| of == role).map(|(_, tensor)| tensor.clone());
                given.ok_or_else(|| {
                    wrong(format!("no function before `{}` gives its input `{}`", entry.function, port.name))
                })?
            }
            (PortRole::State { id, .. } | PortRole::Cache { id, .. }, Some((_, states))) => states.input(id, port),
            (_, Some((feed, _))) => feed.input(port)?,
            (role, None) => {
                let problem = format!("function `{}` of the LM head has an input of role {role:?}", entry.function);
                return Err(wrong(problem));
            }
        });
    }
    Ok(function)
}

/// Returns hidden states in the shape of a port.
fn hidden_input(port: &Port, hidden: &Columns) -> Result<Arc<Tensor>, RuntimeError> {
    let size = hidden.count as u64;
    match fits(port, &hidden.tensor().shape, size) {
        true => Ok(hidden.tensor().clone()),
        false => shaped(port, shape_of(port, size), hidden.values().to_vec()).map(Arc::new),
    }
}

/// Returns the values to pass on after a function that took the hidden states of `flow`.
pub(super) fn after(
    model: &LoadedModel,
    function: usize,
    outputs: &[Arc<Tensor>],
    mut flow: Flow,
) -> Result<Flow, RuntimeError> {
    let (channels, size) = (flow.hidden.channels, flow.hidden.count);
    let entry = &model.bundle.functions[function];
    flow.head = entry.stage.head_rows().map(|_| (function, outputs.to_vec()));
    for (port, tensor) in entry.outputs.iter().zip(outputs) {
        if is_carried(&port.role) {
            flow.carried.retain(|(role, _)| *role != port.role);
            flow.carried.push((port.role.clone(), tensor.clone()));
        }
    }
    flow.hidden = result(model, function, outputs, PortRole::Hidden, channels, size)?;
    Ok(flow)
}

/// Copies the logits of a head part to their places: one row of `width` for each of the first tokens.
pub(super) fn place_logits(piece: &Columns, rows: Range<usize>, logits: &mut [f32], width: usize) {
    for first in (0..rows.len()).step_by(CHANNELS_AT_A_TIME) {
        let channels = first..rows.len().min(first + CHANNELS_AT_A_TIME);
        for (t, row) in logits.chunks_exact_mut(width).enumerate() {
            let to = &mut row[rows.start..rows.end][channels.clone()];
            piece.copy_column(t, channels.clone(), to);
        }
    }
}

/// Returns the output of a role from a call of `size` tokens.
pub(super) fn result(
    model: &LoadedModel,
    function: usize,
    outputs: &[Arc<Tensor>],
    role: PortRole,
    channels: usize,
    size: usize,
) -> Result<Columns, RuntimeError> {
    let entry = &model.bundle.functions[function];
    let output = entry.outputs.iter().position(|port| port.role == role).and_then(|index| outputs.get(index));
    match output.and_then(|tensor| Columns::of_tensor(tensor.clone(), channels, size)) {
        Some(columns) => Ok(columns),
        None => {
            let found = output.map_or(0, |tensor| tensor.data.len());
            let problem = format!(
                "function `{}` of {} gave {found} numbers for {size} tokens, expected {channels} for each",
                entry.function, entry.package
            );
            Err(RuntimeError::bundle(model.folder.join(FILE_NAME), problem))
        }
    }
}
