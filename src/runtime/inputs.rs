//! Builds the input tensors of a function from the tokens and positions of a call.

use std::sync::Arc;

use super::error::RuntimeError;
use super::hidden::Columns;
use super::host::{HostTables, RopeChoice, RotaryPart, TokenRun};
use super::plan::Chunk;
use anec_bundle::{MASKED, Port, PortDim, PortRole};
use anec_exec::{Tensor, TensorData};
use ndarray::Array2;

/// Builder of the inputs of all functions for one chunk of tokens. Equal inputs are built once.
pub struct InputBuilder<'a> {
    host: &'a HostTables,
    rope: &'a RopeChoice,
    /// Tokens of the call, unless hidden states are given instead.
    tokens: &'a [u32],
    /// Position of the first token.
    position: u64,
    chunk: Chunk,
    context: u64,
    /// Hidden states before those of the call's tokens, `[channels, T]`, and whether a draft layer produced them.
    previous: Option<(&'a Columns, bool)>,
    tensors: InputTensors,
}

/// Input tensors of this call and of the previous one, whose memory is reused.
#[derive(Default)]
pub(super) struct InputTensors {
    made: Vec<(PortRole, Arc<Tensor>)>,
    before: Vec<(PortRole, Arc<Tensor>)>,
}

impl InputTensors {
    /// Begins another call.
    fn begin(&mut self) {
        self.before.clear();
        std::mem::swap(&mut self.made, &mut self.before);
    }

    /// Takes a tensor of the previous call.
    fn before(&mut self, role: &PortRole, fits: impl Fn(&[usize]) -> bool) -> Option<(PortRole, Arc<Tensor>)> {
        let found = self.before.iter().position(|(own, tensor)| own == role && fits(&tensor.shape))?;
        Some(self.before.swap_remove(found))
    }
}

impl<'a> InputBuilder<'a> {
    /// Creates a builder for `chunk`, which holds `tokens`, at `position` of a cache of `context` slots.
    pub fn new(
        host: &'a HostTables,
        rope: &'a RopeChoice,
        tokens: &'a [u32],
        position: u64,
        chunk: Chunk,
        context: u64,
    ) -> Self {
        InputBuilder { host, rope, tokens, position, chunk, context, previous: None, tensors: InputTensors::default() }
    }

    /// Adds hidden states before those of the call's tokens; `drafted` if a draft layer produced them.
    #[must_use]
    pub(super) fn after(mut self, previous: Option<(&'a Columns, bool)>) -> Self {
        self.previous = previous;
        self
    }

    /// Adds the tensors of the previous call, whose memory is reused.
    #[must_use]
    pub(super) fn again(mut self, tensors: InputTensors) -> Self {
        self.tensors = tensors;
        self.tensors.begin();
        self
    }

    /// Returns the built tensors for the next call.
    pub(super) fn into_tensors(self) -> InputTensors {
        self.tensors
    }

    /// Returns the embedding of the tokens, with as many columns as the call takes.
    pub(super) fn embedding(&mut self, channels: usize) -> Result<Columns, RuntimeError> {
        let size = self.chunk.size as usize;
        let shape = [1, channels, size, 1];
        let text = TokenRun { tokens: self.tokens, types: &[], position: self.position };
        let before = self.tensors.before(&PortRole::Hidden, |own| own == shape);
        let (role, mut tensor) =
            before.unwrap_or_else(|| (PortRole::Hidden, Arc::new(Tensor::new(shape, Vec::<f32>::new()))));
        if let TensorData::F32(values) = &mut Arc::make_mut(&mut tensor).data {
            values.clear();
            values.resize(channels * size, 0.0);
            self.host.embed(text, size, values)?;
        }
        self.tensors.made.push((role, tensor.clone()));
        Ok(Columns::of_tensor(tensor, channels, size).unwrap_or_else(|| Columns::zeros(channels, size)))
    }

    /// Returns the positions of the real tokens.
    pub(super) fn place(&self) -> Place {
        Place { first: self.position, count: self.chunk.real }
    }

    /// Returns the tensor of an input other than the hidden states.
    ///
    /// # Errors
    /// If the host lacks the values, or they don't have the port's shape.
    pub fn input(&mut self, port: &Port) -> Result<Arc<Tensor>, RuntimeError> {
        let size = self.chunk.size;
        let made =
            self.tensors.made.iter().find(|(role, tensor)| *role == port.role && fits(port, &tensor.shape, size));
        if let Some((_, tensor)) = made {
            return Ok(tensor.clone());
        }
        let (role, mut tensor) =
            self.tensors.before(&port.role, |shape| fits(port, shape, size)).unwrap_or_else(|| {
                let data = match port.role {
                    PortRole::SliceBegin | PortRole::SliceEnd => TensorData::I32(Vec::new()),
                    _ => TensorData::F32(Vec::new()),
                };
                (port.role.clone(), Arc::new(Tensor { shape: shape_of(port, size), data }))
            });
        let tensor_mut = Arc::make_mut(&mut tensor);
        self.write(port, &mut tensor_mut.data)?;
        if !tensor_mut.is_consistent() {
            return Err(misfit(port, &tensor_mut.shape, tensor_mut.data.len()));
        }
        self.tensors.made.push((role, tensor.clone()));
        Ok(tensor)
    }

    /// Overwrites the elements of an input.
    fn write(&self, port: &Port, data: &mut TensorData) -> Result<(), RuntimeError> {
        let unexpected = || {
            let problem = format!("a function has an input `{}` of an unexpected role", port.name);
            RuntimeError::bundle(anec_bundle::FILE_NAME, problem)
        };
        let size = self.chunk.size as usize;
        let values = match data {
            TensorData::F32(values) => values,
            TensorData::I32(values) => {
                let filled = if port.role == PortRole::SliceEnd { size as i32 } else { 0 };
                values.clear();
                values.extend([0, 0, self.first_slot()? + filled, 0]);
                return Ok(());
            }
            TensorData::Bool(_) => return Err(unexpected()),
        };
        values.clear();
        match &port.role {
            PortRole::RopeCos { table } => self.rope(table, RotaryPart::Cos, values)?,
            PortRole::RopeSin { table } => self.rope(table, RotaryPart::Sin, values)?,
            PortRole::Embedding => {
                values.resize(shape_of(port, self.chunk.size).iter().product(), 0.0);
                let text = TokenRun { tokens: self.tokens, types: &[], position: self.position };
                self.host.embed(text, size, values)?;
            }
            PortRole::PerLayerInput { first, end } => {
                *values = self.host.per_layer_input(self.tokens, *first..*end, size)?;
            }
            PortRole::AttentionMask { window } => self.attention_mask(slots(port, 3)?, *window, values),
            PortRole::PastMask { window } => self.past_mask(slots(port, 3)?, *window, values),
            PortRole::CallMask { window } => self.call_mask(*window, values),
            PortRole::BandMask { band, biased: false } => self.band_mask(*band, values),
            PortRole::BandMask { band, biased: true } => {
                let biases = self.host.attention_bias().ok_or_else(unexpected)?;
                if biases.ncols() as u64 != slots(port, 1)? {
                    return Err(misfit(port, &shape_of(port, self.chunk.size), biases.ncols() * size * size));
                }
                self.biased_mask(*band, &biases, values);
            }
            PortRole::KvWriteMask => self.kv_write_mask(slots(port, 2)?, values),
            PortRole::TokenOrder => values.extend(token_order(self.chunk.size, slots(port, 1)? - 1)),
            PortRole::PreviousHidden => {
                let (columns, _) = self.previous.ok_or_else(unexpected)?;
                values.extend_from_slice(columns.range(0..columns.count.min(size), size).values());
            }
            PortRole::PreviousDrafted => {
                let (_, drafted) = self.previous.ok_or_else(unexpected)?;
                values.resize(size, f32::from(u8::from(drafted)));
            }
            PortRole::Hidden
            | PortRole::RouterState
            | PortRole::FeedForwardInput
            | PortRole::SharedKeys { .. }
            | PortRole::SharedValues { .. }
            | PortRole::ExpertInput
            | PortRole::ExpertShares
            | PortRole::State { .. }
            | PortRole::Cache { .. }
            | PortRole::CacheRows { .. }
            | PortRole::SliceBegin
            | PortRole::SliceEnd
            | PortRole::Logits
            | PortRole::TopValues
            | PortRole::TopIndices => return Err(unexpected()),
        }
        Ok(())
    }

    fn rope(&self, table: &str, wave: RotaryPart, rows: &mut Vec<f32>) -> Result<(), RuntimeError> {
        let Chunk { real, size } = self.chunk;
        self.host.rope(self.rope, table, wave, self.position, [real as usize, size as usize], rows)
    }

    /// Attention mask `[T, S]`: a token sees the slots of positions up to its own, within its window; position p has
    /// slot p mod S. Padding tokens attend like the last real token; their outputs are discarded.
    fn attention_mask(&self, slots: u64, window: Option<u64>, mask: &mut Vec<f32>) {
        mask.resize((self.chunk.size * slots) as usize, MASKED);
        for (t, row) in mask.chunks_exact_mut(slots as usize).enumerate() {
            let position = self.position + (t as u64).min(self.chunk.real - 1);
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            (first..=position).for_each(|seen| row[(seen % slots) as usize] = 0.0);
        }
    }

    /// Mask `[T, S]`: a token sees the slots of the positions before the call's first, within its window.
    fn past_mask(&self, slots: u64, window: Option<u64>, mask: &mut Vec<f32>) {
        mask.resize((self.chunk.size * slots) as usize, MASKED);
        for (t, row) in mask.chunks_exact_mut(slots as usize).enumerate() {
            let position = self.position + (t as u64).min(self.chunk.real - 1);
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            (first..self.position).for_each(|seen| row[(seen % slots) as usize] = 0.0);
        }
    }

    /// Mask `[T, T]`: a token sees itself and earlier tokens of the call, within its window. Padding tokens attend like
    /// the last real one.
    fn call_mask(&self, window: Option<u64>, mask: &mut Vec<f32>) {
        let Chunk { real, size } = self.chunk;
        mask.resize((size * size) as usize, MASKED);
        for (t, row) in mask.chunks_exact_mut(size as usize).enumerate() {
            let t = (t as u64).min(real - 1);
            let first = window.map_or(0, |window| (t + 1).saturating_sub(window));
            row[first as usize..=t as usize].fill(0.0);
        }
    }

    /// Mask `[T, T]`: a token sees tokens at most `band` away on both sides. No real token attends to padding tokens,
    /// and their outputs are discarded.
    fn band_mask(&self, band: u64, mask: &mut Vec<f32>) {
        let Chunk { real, size } = self.chunk;
        mask.resize((size * size) as usize, MASKED);
        for (t, row) in mask.chunks_exact_mut(size as usize).enumerate() {
            let t = t as u64;
            row[t.saturating_sub(band).min(real) as usize..(t + band + 1).min(real) as usize].fill(0.0);
        }
    }

    /// Band mask `[heads, T, T]` with a bias for each head and distance.
    fn biased_mask(&self, band: u64, biases: &Array2<f32>, mask: &mut Vec<f32>) {
        let Chunk { real, size } = self.chunk;
        let reach = biases.nrows() as u64 / 2;
        mask.resize(biases.ncols() * (size * size) as usize, MASKED);
        for (plane, of_head) in mask.chunks_exact_mut((size * size) as usize).zip(biases.columns()) {
            for (t, row) in plane.chunks_exact_mut(size as usize).enumerate() {
                let t = t as u64;
                for seen in t.saturating_sub(band).min(real)..(t + band + 1).min(real) {
                    // rows of tokens before and after the token, up to `reach` apart
                    let distance = (seen + reach).saturating_sub(t).min(2 * reach);
                    row[seen as usize] = of_head[distance as usize];
                }
            }
        }
    }

    /// Write mask `[S, T]`: token t goes to the slot of its position. Padding tokens are not written.
    fn kv_write_mask(&self, slots: u64, mask: &mut Vec<f32>) {
        let size = self.chunk.size as usize;
        mask.resize(slots as usize * size, 0.0);
        for t in 0..self.chunk.real {
            mask[((self.position + t) % slots * self.chunk.size + t) as usize] = 1.0;
        }
    }

    /// Returns the slot of the first token. A function that writes at a position writes all its tokens, padding
    /// included. Padding is overwritten before a mask opens it, but it has to fit.
    fn first_slot(&self) -> Result<i32, RuntimeError> {
        let end = self.position + self.chunk.size;
        if end > self.context {
            return Err(RuntimeError::ContextFull { tokens: end, context: self.context });
        }
        Ok(self.position as i32)
    }
}

/// Order of tokens `[1 + levels, T, T]`; see [`PortRole::TokenOrder`].
fn token_order(size: u64, levels: u64) -> impl Iterator<Item = f32> {
    let after = |plane: u64, i: u64, j: u64| match plane.checked_sub(1) {
        None => j <= i,
        Some(level) => i >> (level + 1) == j >> (level + 1) && i >> level & 1 == 1 && j >> level & 1 == 0,
    };
    let planes = (0..=levels).flat_map(move |plane| (0..size * size).map(move |at| (plane, at / size, at % size)));
    planes.map(move |(plane, i, j)| f32::from(u8::from(after(plane, i, j))))
}

/// Returns the size of one of a port's dimensions, such as the slots of a mask's cache.
fn slots(port: &Port, axis: usize) -> Result<u64, RuntimeError> {
    match port.shape.get(axis) {
        Some(PortDim::Fixed(slots)) if *slots > 0 => Ok(*slots),
        _ => {
            let problem =
                format!("port `{}` has shape {:?}, expected a number in dimension {axis}", port.name, port.shape);
            Err(RuntimeError::bundle(anec_bundle::FILE_NAME, problem))
        }
    }
}

/// Returns the shape of a port for a call of `size` tokens.
pub fn shape_of(port: &Port, size: u64) -> Vec<usize> {
    port.shape_at(size).into_iter().map(|extent| extent as usize).collect()
}

/// Returns whether a port has this shape in a call of `size` tokens.
pub(super) fn fits(port: &Port, shape: &[usize], size: u64) -> bool {
    port.shape.iter().map(|extent| extent.at(size) as usize).eq(shape.iter().copied())
}

fn misfit(port: &Port, shape: &[usize], count: usize) -> RuntimeError {
    let problem = format!("port `{}` has shape {shape:?}, but {count} numbers go into it", port.name);
    RuntimeError::bundle(anec_bundle::FILE_NAME, problem)
}

/// Returns `values` as a tensor of `shape`.
///
/// # Errors
/// If the shape has another number of elements.
pub fn shaped(port: &Port, shape: Vec<usize>, values: Vec<f32>) -> Result<Tensor, RuntimeError> {
    if shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) != Some(values.len()) {
        return Err(misfit(port, &shape, values.len()));
    }
    Ok(Tensor::new(shape, values))
}

/// Positions of a call's tokens: `count` of them from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Position of the first token.
    pub first: u64,
    /// Number of real tokens; the others are padding.
    pub count: u64,
}
