//! States of a text: those that the backend keeps, and those that functions take as inputs and return as outputs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::backend::{FunctionCall, Sequence, Watch};
use super::error::RuntimeError;
use super::inputs::{Place, shape_of};
use super::model::LoadedModel;
use super::plan::Route;
use super::state_transfer::StateParts;
use anec_base::Result;
use anec_bundle::{FILE_NAME, FunctionEntry};
use anec_bundle::{Port, PortRole, StatePart, StateRole};
use anec_exec::{Tensor, TensorData};
use anec_mil::DataType;

/// Returns the initial cache of an id.
fn zeros_of(entry: &FunctionEntry, id: &str) -> Option<Arc<Tensor>> {
    let is_cache = |port: &&Port| matches!(&port.role, PortRole::Cache { id: own, .. } if own == id);
    let port = entry.inputs.iter().find(is_cache)?;
    Some(Arc::new(Tensor::zeros(DataType::Fp16, shape_of(port, 1))))
}

/// Writes rows `[1, heads, T, width]` into their slots of a cache `[1, heads, S, width]`.
fn append(cache: &mut Tensor, rows: &Tensor, place: Place) {
    let (&[_, _, slots, width], &[_, _, tokens, _]) = (&cache.shape[..], &rows.shape[..]) else { return };
    let (TensorData::F32(cache), TensorData::F32(rows)) = (&mut cache.data, &rows.data) else { return };
    let heads = cache.chunks_exact_mut((slots * width).max(1)).zip(rows.chunks_exact((tokens * width).max(1)));
    for (cache, rows) in heads {
        for (t, row) in rows.chunks_exact(width.max(1)).take(place.count as usize).enumerate() {
            let slot = (place.first as usize + t) % slots;
            cache[slot * width..][..width].copy_from_slice(row);
        }
    }
}

/// Returns one function of each part of the layers; functions for other numbers of tokens have the same states.
fn functions<'a>(model: &'a LoadedModel, route: &'a Route) -> impl Iterator<Item = (usize, &'a FunctionEntry)> {
    let first = route.layers.iter().filter_map(|step| step.functions().next());
    first.map(|function| (function, &model.bundle().functions[function]))
}

/// Returns the states that the host keeps for a function: ids, contents, and inputs.
fn host_states(entry: &FunctionEntry) -> impl Iterator<Item = (&str, &StateRole, &Port)> {
    entry.inputs.iter().filter_map(|port| match &port.role {
        PortRole::State { id, holds } | PortRole::Cache { id, holds } => Some((id.as_str(), holds, port)),
        _ => None,
    })
}

/// Returns the contents and layers of all states of a route.
fn kept(model: &LoadedModel, route: &Route) -> BTreeSet<(StatePart, usize)> {
    let parts = functions(model, route).flat_map(|(_, entry)| {
        let states = entry.states.iter().map(|state| &state.role);
        states.chain(host_states(entry).map(|(_, holds, _)| holds)).flat_map(StateRole::parts).collect::<Vec<_>>()
    });
    parts.collect()
}

/// States that a text carries from call to call.
pub(super) struct States {
    /// Backend sequence, which keeps states and runs functions.
    pub(super) sequence: Box<dyn Sequence>,
    /// Last outputs by state id; missing entries are zero.
    given: BTreeMap<String, Arc<Tensor>>,
}

impl States {
    /// Creates the states of a new text.
    pub(super) fn new(sequence: Box<dyn Sequence>) -> Self {
        States { sequence, given: BTreeMap::new() }
    }

    /// Returns the state for an input.
    pub(super) fn input(&self, id: &str, port: &Port) -> Arc<Tensor> {
        let zeros = || Arc::new(Tensor::zeros(DataType::Fp16, shape_of(port, 1)));
        self.given.get(id).cloned().unwrap_or_else(zeros)
    }

    /// Runs a function on tokens at `place` and keeps the states among its outputs.
    pub(super) fn run(
        &mut self,
        entry: &FunctionEntry,
        call: (usize, &mut Vec<Arc<Tensor>>),
        outputs: &mut Vec<Arc<Tensor>>,
        place: Place,
        watch: Option<Watch<'_>>,
    ) -> Result<()> {
        let (function, inputs) = call;
        let call = FunctionCall { function, inputs };
        match watch {
            None => self.sequence.run_into(call, outputs)?,
            Some(_) => {
                *outputs = call.outputs_of(|function, inputs| self.sequence.run(function, inputs, watch))?;
            }
        }
        // the call must release the caches so that they can be written in place
        inputs.clear();
        self.keep(entry, outputs, place);
        Ok(())
    }

    /// Keeps the states among the outputs of a function and puts the previous ones in their place. Rows of caches are
    /// appended.
    pub(super) fn keep(&mut self, entry: &FunctionEntry, outputs: &mut [Arc<Tensor>], place: Place) {
        for (port, output) in entry.outputs.iter().zip(outputs) {
            match &port.role {
                PortRole::State { id, .. } => match self.given.get_mut(id) {
                    Some(held) => std::mem::swap(held, output),
                    None => _ = self.given.insert(id.clone(), output.clone()),
                },
                PortRole::CacheRows { id, .. } => {
                    // `None` where no call of the text has added to it
                    if !self.given.contains_key(id)
                        && let Some(zeros) = zeros_of(entry, id)
                    {
                        self.given.insert(id.clone(), zeros);
                    }
                    if let Some(cache) = self.given.get_mut(id) {
                        append(Arc::make_mut(cache), output, place);
                    }
                }
                _ => {}
            }
        }
    }

    /// Transfers the states to another context after the first `position` tokens: from the functions of one route to
    /// those of another.
    ///
    /// # Errors
    /// If the backend can't allocate states, or the contexts' functions keep different states.
    pub(super) fn moved(&self, model: &LoadedModel, from: &Route, to: &Route, position: usize) -> Result<States> {
        let wrong = |problem: String| {
            let problem = format!("context {} after {}: {problem}", to.context, from.context);
            RuntimeError::bundle(model.folder().join(FILE_NAME), problem)
        };
        if kept(model, from) != kept(model, to) {
            return Err(wrong("their functions don't keep the same of every layer".into()).into());
        }
        let mut parts = StateParts::default();
        for (function, entry) in functions(model, from) {
            if let Some(held) = self.sequence.states(function)? {
                entry.states.iter().zip(&held).for_each(|(state, tensor)| parts.add(&state.role, tensor));
            }
            for (id, holds, _) in host_states(entry) {
                if let Some(tensor) = self.given.get(id) {
                    parts.add(holds, tensor);
                }
            }
        }
        let mut moved = States::new(model.backend.sequence()?);
        if parts.is_empty() {
            return Ok(moved);
        }
        for (function, entry) in functions(model, to) {
            let states = entry.states.iter().map(|state| {
                let shape = state.shape.iter().map(|size| *size as usize).collect();
                parts.state(&state.role, shape, position).map_err(wrong)
            });
            let states = states.collect::<Result<Vec<_>, _>>()?;
            if !states.is_empty() {
                moved.sequence.set_states(function, states)?;
            }
            for (id, holds, port) in host_states(entry) {
                let state = parts.state(holds, shape_of(port, 1), position).map_err(wrong)?;
                moved.given.insert(id.to_owned(), Arc::new(state));
            }
        }
        Ok(moved)
    }

    /// Sets all states to zero.
    pub(super) fn reset(&mut self) -> Result<()> {
        self.given.clear();
        self.sequence.reset()
    }

    /// Copies the states; `None` if the backend can't copy its own.
    pub(super) fn fork(&self) -> Result<Option<States>> {
        let given = self.given.clone();
        Ok(self.sequence.fork()?.map(|sequence| States { sequence, given }))
    }
}
