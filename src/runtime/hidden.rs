//! Hidden states between calls: as functions have them, and as they are shown.

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
use ndarray::{Array2, ArrayView2};

/// How functions have hidden states: a row of the model's times an orthogonal matrix, if there is one, and a factor.
pub struct HiddenFrame {
    scale: f32,
    /// `[channels, channels]`
    rotation: Option<Array2<f32>>,
}

impl HiddenFrame {
    /// That of a bundle with these facts and tables.
    pub fn new(facts: &ModelFacts, host: &HostTables) -> Self {
        HiddenFrame { scale: facts.hidden_scale as f32, rotation: host.rotation() }
    }

    pub(super) fn of(model: &LoadedModel) -> Self {
        Self::new(&model.bundle.model, &model.host)
    }

    /// From the model's, a row for each token.
    pub fn enter(&self, rows: &[f32]) -> Vec<f32> {
        self.turned(rows, |rotation| rotation.view(), self.scale)
    }

    /// To the model's, a row for each token.
    pub fn leave(&self, rows: &[f32]) -> Vec<f32> {
        // the inverse of an orthogonal matrix is its transpose; the factor is a power of two
        self.turned(rows, |rotation| rotation.t(), 1.0 / self.scale)
    }

    fn turned<'a>(
        &'a self,
        rows: &[f32],
        matrix: impl Fn(&'a Array2<f32>) -> ArrayView2<'a, f32>,
        factor: f32,
    ) -> Vec<f32> {
        let turned = self.rotation.as_ref().and_then(|rotation| {
            let channels = rotation.nrows();
            let rows = ArrayView2::from_shape((rows.len() / channels, channels), rows).ok()?;
            Some(rows.dot(&matrix(rotation)).as_standard_layout().into_owned().into_raw_vec_and_offset().0)
        });
        let mut rows = turned.unwrap_or_else(|| rows.to_vec());
        rows.iter_mut().for_each(|value| *value *= factor);
        rows
    }
}

/// Columns of channels, one for each token: `[channels, count]`, the order in which functions have them.
#[derive(Clone)]
pub(super) struct Columns {
    pub(super) channels: usize,
    pub(super) count: usize,
    /// In whatever shape.
    tensor: Arc<Tensor>,
}

impl Columns {
    /// Those that a tensor holds, if it holds so many.
    pub(super) fn of_tensor(tensor: Arc<Tensor>, channels: usize, count: usize) -> Option<Self> {
        let fits = tensor.floats().is_some_and(|values| values.len() == channels * count);
        fits.then_some(Columns { channels, count, tensor })
    }

    /// From as many values.
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

    /// From one row of channels for each token.
    pub(super) fn of_rows(rows: &[f32], channels: usize) -> Self {
        let count = rows.len() / channels.max(1);
        let mut values = vec![0.0; channels * count];
        for (t, row) in rows.chunks_exact(channels.max(1)).enumerate() {
            row.iter().enumerate().for_each(|(channel, value)| values[channel * count + t] = *value);
        }
        Self::of_values(values, channels, count)
    }

    /// The channels of a token.
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

    /// Some columns, filled up with zeros to `count`.
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

/// What goes from function to function.
pub(super) struct Flow {
    pub(super) hidden: Columns,
    /// What else functions gave last, by role, for those that take it.
    pub(super) carried: Vec<(PortRole, Arc<Tensor>)>,
}

impl Flow {
    /// Whether any token has a share in any of these experts.
    pub(super) fn has_share(&self, experts: &Range<u64>) -> bool {
        let shares = self.carried.iter().find(|(role, _)| *role == PortRole::ExpertShares);
        let Some(values) = shares.and_then(|(_, tensor)| tensor.floats()) else { return true };
        let tokens = self.hidden.count;
        let own = values.get(experts.start as usize * tokens..experts.end as usize * tokens);
        // what isn't a number is a share, too
        own.is_none_or(|own| own.iter().any(|share| *share != 0.0))
    }
}

impl From<Columns> for Flow {
    fn from(hidden: Columns) -> Self {
        Flow { hidden, carried: Vec::new() }
    }
}

/// The hidden states that are wanted, as they come by.
pub(super) struct Record {
    hidden: Vec<Vec<f32>>,
    /// Which of them are wanted.
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

    /// Nothing is wanted but what the function of a step gives.
    pub(super) fn only(&mut self, step: &Step) {
        let own = step.part.start as usize + 1..step.part.end as usize + 1;
        self.wanted.iter_mut().enumerate().for_each(|(index, wanted)| *wanted &= own.contains(&index));
    }

    /// Whether something inside the function of a step is wanted.
    pub(super) fn wants_inside(&self, step: &Step) -> bool {
        self.wanted[step.part.start as usize + 1..step.part.end as usize].contains(&true)
    }

    /// Appends the columns that count.
    pub(super) fn add(&mut self, index: usize, columns: &Columns, counted: Range<usize>) {
        counted.for_each(|t| self.hidden[index].extend(columns.column(t)));
    }

    /// A value inside a function, which may be one of its `probes`.
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

    /// The matrices as the model has them, if all came by.
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
