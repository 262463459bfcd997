//! Hidden states between calls: in the functions' frame and in the model's.

use std::ops::Range;
use std::sync::Arc;

use super::error::RuntimeError;
use super::forward::Hidden;
use super::host::HostTables;
use super::model::LoadedModel;
use super::plan::{Route, Step};
use anec_bundle::PortRole;
use anec_bundle::{Bundle, FILE_NAME, HiddenProbe, ModelFacts};
use anec_exec::Tensor;
use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product;
use anec_kernels::pool;
use ndarray::Array2;

/// Tokens whose hidden states a thread converts at a time.
const TOKENS: usize = 64;

/// Conversion between the model's and the functions' hidden states: an optional orthogonal matrix and a factor.
pub struct HiddenFrame {
    scale: f32,
    /// Matrix `[channels, channels]`.
    rotation: Option<Arc<Array2<f32>>>,
}

impl HiddenFrame {
    /// Returns the frame of a bundle with these facts and tables.
    pub fn new(facts: &ModelFacts, host: &HostTables) -> Self {
        HiddenFrame { scale: facts.hidden_scale as f32, rotation: host.rotation() }
    }

    pub(super) fn of(model: &LoadedModel) -> Self {
        Self::new(&model.bundle.model, &model.host)
    }

    /// Converts rows (one per token) from the model's frame to the functions'.
    pub fn enter(&self, rows: &[f32]) -> Vec<f32> {
        self.turned(rows, |size| MatrixLayout { row: size, column: 1 }, self.scale)
    }

    /// Converts rows (one per token) from the functions' frame to the model's.
    pub fn leave(&self, rows: &[f32]) -> Vec<f32> {
        // the inverse of an orthogonal matrix is its transpose; the factor is a power of two
        self.turned(rows, |size| MatrixLayout { row: 1, column: size }, 1.0 / self.scale)
    }

    /// Multiplies rows by the matrix, whose elements lie in the given layout, and by a factor.
    fn turned(&self, rows: &[f32], layout: impl Fn(usize) -> MatrixLayout, factor: f32) -> Vec<f32> {
        let turned = self.rotation.as_ref().and_then(|rotation| {
            let size = rotation.nrows();
            if size == 0 || !rows.len().is_multiple_of(size) {
                return None;
            }
            let matrix = (rotation.as_slice()?, layout(size));
            let mut turned = vec![0.0; rows.len()];
            pool::for_each_chunk(&mut turned, TOKENS * size, |part, turned| {
                let own = (&rows[part * TOKENS * size..], MatrixLayout { row: size, column: 1 });
                product((turned.len() / size, size, size), own, matrix, turned);
            });
            Some(turned)
        });
        let mut rows = turned.unwrap_or_else(|| rows.to_vec());
        rows.iter_mut().for_each(|value| *value *= factor);
        rows
    }
}

/// Columns of channels, one per token: `[channels, count]`, the functions' layout.
#[derive(Clone)]
pub(super) struct Columns {
    pub(super) channels: usize,
    pub(super) count: usize,
    /// Tensor of any shape.
    tensor: Arc<Tensor>,
}

impl Columns {
    /// Wraps a tensor if it holds this many columns.
    pub(super) fn of_tensor(tensor: Arc<Tensor>, channels: usize, count: usize) -> Option<Self> {
        let fits = tensor.floats().is_some_and(|values| values.len() == channels * count);
        fits.then_some(Columns { channels, count, tensor })
    }

    /// Wraps `channels * count` values.
    pub(super) fn of_values(values: Vec<f32>, channels: usize, count: usize) -> Self {
        Columns { channels, count, tensor: Arc::new(Tensor::new([1, channels, count, 1], values)) }
    }

    pub(super) fn zeros(channels: usize, count: usize) -> Self {
        Self::of_values(vec![0.0; channels * count], channels, count)
    }

    pub(super) fn tensor(&self) -> &Arc<Tensor> {
        &self.tensor
    }

    pub(super) fn values(&self) -> &[f32] {
        self.tensor.floats().unwrap_or_default()
    }

    /// Transposes rows of channels, one per token.
    pub(super) fn of_rows(rows: &[f32], channels: usize) -> Self {
        let count = rows.len() / channels.max(1);
        let mut values = vec![0.0; channels * count];
        for (t, row) in rows.chunks_exact(channels.max(1)).enumerate() {
            row.iter().enumerate().for_each(|(channel, value)| values[channel * count + t] = *value);
        }
        Self::of_values(values, channels, count)
    }

    /// Returns the channels of a token.
    pub(super) fn column(&self, t: usize) -> impl Iterator<Item = f32> + '_ {
        self.values().iter().skip(t).step_by(self.count).copied()
    }

    /// Copies some channels of a token.
    pub(super) fn copy_column(&self, t: usize, channels: Range<usize>, to: &mut [f32]) {
        let values = &self.values()[channels.start * self.count..channels.end * self.count];
        if self.count == 1 {
            to.copy_from_slice(values);
        } else {
            to.iter_mut().zip(values.chunks_exact(self.count)).for_each(|(to, tokens)| *to = tokens[t]);
        }
    }

    /// Returns a range of columns, padded with zeros to `count`.
    pub(super) fn range(&self, range: Range<usize>, count: usize) -> Columns {
        if range == (0..self.count) && count == self.count {
            return self.clone();
        }
        let mut out = vec![0.0; self.channels * count];
        for (from, to) in self.values().chunks_exact(self.count).zip(out.chunks_exact_mut(count)) {
            to[..range.len()].copy_from_slice(&from[range.clone()]);
        }
        Self::of_values(out, self.channels, count)
    }
}

/// Values passed from function to function.
pub(super) struct Flow {
    pub(super) hidden: Columns,
    /// Other values of the previous function, by role.
    pub(super) carried: Vec<(PortRole, Arc<Tensor>)>,
    /// Outputs of the previous function, with its index, if it has the LM head, too.
    pub(super) head: Option<(usize, Vec<Arc<Tensor>>)>,
}

impl Flow {
    /// Returns whether any token is routed to one of these experts.
    pub(super) fn has_share(&self, experts: &Range<u64>) -> bool {
        let shares = self.carried.iter().find(|(role, _)| *role == PortRole::ExpertShares);
        let Some(values) = shares.and_then(|(_, tensor)| tensor.floats()) else { return true };
        let tokens = self.hidden.count;
        let own = values.get(experts.start as usize * tokens..experts.end as usize * tokens);
        // NaN counts as routed
        own.is_none_or(|own| own.iter().any(|share| *share != 0.0))
    }
}

impl From<Columns> for Flow {
    fn from(hidden: Columns) -> Self {
        Flow { hidden, carried: Vec::new(), head: None }
    }
}

/// Recorder of the requested hidden states.
pub(super) struct Record {
    hidden: Vec<Vec<f32>>,
    /// Whether each hidden state is requested.
    wanted: Vec<bool>,
}

impl Record {
    pub(super) fn new(bundle: &Bundle, route: &Route, what: Hidden) -> Self {
        let count = bundle.model.num_layers + 1;
        let mut wanted = vec![what == Hidden::BetweenLayers; count];
        for between in route.layers.iter().flat_map(|step| [step.part.start, step.part.end]) {
            wanted[between as usize] = true;
        }
        Record { hidden: vec![Vec::new(); count], wanted }
    }

    /// Restricts the recording to the outputs of one step.
    pub(super) fn only(&mut self, step: &Step) {
        let own = step.part.start as usize + 1..step.part.end as usize + 1;
        self.wanted.iter_mut().enumerate().for_each(|(index, wanted)| *wanted &= own.contains(&index));
    }

    /// Returns whether a value inside the step's function is requested.
    pub(super) fn wants_inside(&self, step: &Step) -> bool {
        self.wanted[step.part.start as usize + 1..step.part.end as usize].contains(&true)
    }

    /// Appends the columns of the counted tokens.
    pub(super) fn add(&mut self, index: usize, columns: &Columns, counted: Range<usize>) {
        counted.for_each(|t| self.hidden[index].extend(columns.column(t)));
    }

    /// Records a value inside a function if it is one of its `probes`.
    pub(super) fn record(
        &mut self,
        name: &str,
        tensor: &Tensor,
        channels: usize,
        counted: Range<usize>,
        probes: &[HiddenProbe],
    ) {
        let Some(probe) = probes.iter().find(|probe| probe.value == name) else { return };
        let Some(values) = tensor.floats() else { return };
        let count = values.len() / channels.max(1);
        if counted.end <= count && values.len() == channels * count {
            self.add(probe.layer + 1, &Columns::of_values(values.to_vec(), channels, count), counted);
        }
    }

    /// Returns the matrices in the model's frame if all were recorded.
    pub(super) fn finish(
        self,
        tokens: usize,
        facts: &ModelFacts,
        frame: &HiddenFrame,
    ) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let expected = tokens * facts.hidden_size as usize;
        let missing = |(values, wanted): (&Vec<f32>, &bool)| *wanted && values.len() != expected;
        match self.hidden.iter().zip(&self.wanted).position(missing) {
            None => Ok(self.hidden.iter().map(|rows| frame.leave(rows)).collect()),
            Some(index) => {
                let problem = format!("the functions don't show the hidden states `hidden.{index}`");
                Err(RuntimeError::bundle(FILE_NAME, problem))
            }
        }
    }
}
