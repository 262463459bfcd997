//! The states of a text: those that the backend keeps, and those that functions take as inputs and give as outputs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::backend::{Sequence, Watch};
use super::inputs::shape_of;
use super::prepared::Prepared;
use anec_base::Result;
use anec_bundle::FunctionEntry;
use anec_bundle::{Port, PortRole};
use anec_exec::{Tensor, TensorData};
use anec_mil::DataType;

/// Which tokens of a text a call has: `count` of them from position `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Position of the first.
    pub first: u64,
    /// How many count; others fill the call up.
    pub count: u64,
}

/// The cache of an id before the first call.
fn zeros_of(entry: &FunctionEntry, id: &str) -> Option<Arc<Tensor>> {
    let is_cache = |port: &&Port| matches!(&port.role, PortRole::Cache { id: own, .. } if own == id);
    let port = entry.inputs.iter().find(is_cache)?;
    Some(Arc::new(Tensor::zeros(DataType::Fp16, shape_of(port, 1))))
}

/// An output, of which the shape stays.
fn taken(output: &mut Tensor) -> Tensor {
    let emptied = Tensor::new(output.shape.clone(), Vec::<f32>::new());
    std::mem::replace(output, emptied)
}

/// Puts rows `[1, heads, T, width]` into the slots of their positions in a cache `[1, heads, S, width]`.
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

/// All that a text carries from call to call.
pub(super) struct States {
    /// What the backend keeps, and runs the functions on.
    pub(super) sequence: Box<dyn Sequence>,
    /// What functions gave last, by the id of the state. What isn't there is zero.
    given: BTreeMap<String, Arc<Tensor>>,
}

impl States {
    /// Those of a new text.
    pub(super) fn new(sequence: Box<dyn Sequence>) -> Self {
        States { sequence, given: BTreeMap::new() }
    }

    /// What the state of an input holds.
    pub(super) fn input(&self, id: &str, port: &Port) -> Arc<Tensor> {
        let zeros = || Arc::new(Tensor::zeros(DataType::Fp16, shape_of(port, 1)));
        self.given.get(id).cloned().unwrap_or_else(zeros)
    }

    /// Runs a function on tokens at `place` and keeps the states among its outputs, of which only the shapes stay where
    /// they were. Rows of caches are appended.
    pub(super) fn run(
        &mut self,
        entry: &FunctionEntry,
        prepared: Prepared,
        place: Place,
        watch: Option<Watch<'_>>,
    ) -> Result<Vec<Tensor>> {
        let outputs = self.sequence.run(prepared.function, &prepared.call().inputs, watch)?;
        // while the call holds the caches, they can't be written in place
        drop(prepared);
        Ok(self.keep(entry, outputs, place))
    }

    /// Keeps the states among the outputs of a function, as [`run`](States::run) does.
    pub(super) fn keep(&mut self, entry: &FunctionEntry, mut outputs: Vec<Tensor>, place: Place) -> Vec<Tensor> {
        for (port, output) in entry.outputs.iter().zip(&mut outputs) {
            match &port.role {
                PortRole::State { id, .. } => {
                    self.given.insert(id.clone(), Arc::new(taken(output)));
                }
                PortRole::CacheRows { id, .. } => {
                    let rows = taken(output);
                    // none where no call of the text has added to it
                    let cache = self.given.remove(id).or_else(|| zeros_of(entry, id));
                    let Some(mut cache) = cache else { continue };
                    append(Arc::make_mut(&mut cache), &rows, place);
                    self.given.insert(id.clone(), cache);
                }
                _ => {}
            }
        }
        outputs
    }

    /// All are zero again.
    pub(super) fn reset(&mut self) -> Result<()> {
        self.given.clear();
        self.sequence.reset()
    }

    /// Those of a text that begins likewise; nothing where the backend can't copy its own.
    pub(super) fn fork(&self) -> Result<Option<States>> {
        let given = self.given.clone();
        Ok(self.sequence.fork()?.map(|sequence| States { sequence, given }))
    }
}
