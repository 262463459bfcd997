//! Turns what a call is about (which tokens, at which positions) into the tensors of a function's inputs.

use std::sync::Arc;

use super::error::RuntimeError;
use super::hidden::Columns;
use super::host::{HostTables, RopeChoice, RotaryPart};
use super::plan::Chunk;
use anec_bundle::{MASKED, Port, PortDim, PortRole};
use anec_exec::Tensor;

/// The inputs of all functions for one chunk of tokens. Equal inputs are made once.
pub struct InputBuilder<'a> {
    host: &'a HostTables,
    rope: &'a RopeChoice,
    /// Tokens of the call, unless hidden states are given in their place.
    tokens: &'a [u32],
    /// Position of the first token.
    position: u64,
    chunk: Chunk,
    context: u64,
    /// The hidden states before those of the call's tokens, `[channels, T]`, and whether a layer that drafts has given them.
    previous: Option<(&'a Columns, bool)>,
    made: Vec<(PortRole, Arc<Tensor>)>,
}

impl<'a> InputBuilder<'a> {
    /// The inputs for `chunk`, which holds `tokens`, at `position` of a cache of `context` slots.
    pub fn new(
        host: &'a HostTables,
        rope: &'a RopeChoice,
        tokens: &'a [u32],
        position: u64,
        chunk: Chunk,
        context: u64,
    ) -> Self {
        InputBuilder { host, rope, tokens, position, chunk, context, previous: None, made: Vec::new() }
    }

    /// With hidden states before those of the call's tokens; `drafted` if a layer that drafts has given them.
    #[must_use]
    pub(super) fn after(mut self, previous: Option<(&'a Columns, bool)>) -> Self {
        self.previous = previous;
        self
    }

    /// The tokens that count.
    pub(super) fn place(&self) -> Place {
        Place { first: self.position, count: self.chunk.real }
    }

    /// The tensor of an input other than the hidden states.
    ///
    /// # Errors
    /// When the host has no such thing, or not in the shape that the port asks for.
    pub fn input(&mut self, port: &Port) -> Result<Arc<Tensor>, RuntimeError> {
        let shape = shape_of(port, self.chunk.size);
        if let Some((_, tensor)) = self.made.iter().find(|(role, tensor)| *role == port.role && tensor.shape == shape) {
            return Ok(tensor.clone());
        }
        let unexpected = || {
            let problem = format!("a function has an input `{}` of an unexpected role", port.name);
            RuntimeError::bundle(anec_bundle::FILE_NAME, problem)
        };
        let tensor = match &port.role {
            PortRole::RopeCos { table } => shaped(port, shape, self.rope(table, RotaryPart::Cos)?)?,
            PortRole::RopeSin { table } => shaped(port, shape, self.rope(table, RotaryPart::Sin)?)?,
            PortRole::PerLayerInput { first, end } => {
                let vectors = self.host.per_layer_input(self.tokens, *first..*end, self.chunk.size as usize)?;
                shaped(port, shape, vectors)?
            }
            PortRole::AttentionMask { window } => {
                let mask = self.attention_mask(slots(port, 3)?, *window);
                shaped(port, shape, mask)?
            }
            PortRole::PastMask { window } => {
                let mask = self.past_mask(slots(port, 3)?, *window);
                shaped(port, shape, mask)?
            }
            PortRole::CallMask { window } => shaped(port, shape, self.call_mask(*window))?,
            PortRole::BandMask { band } => shaped(port, shape, self.band_mask(*band))?,
            PortRole::KvWriteMask => {
                let mask = self.kv_write_mask(slots(port, 2)?);
                shaped(port, shape, mask)?
            }
            PortRole::TokenOrder => {
                let levels = slots(port, 1)? - 1;
                shaped(port, shape, token_order(self.chunk.size, levels))?
            }
            PortRole::SliceBegin => Tensor::new(shape, vec![0, 0, self.first_slot()?, 0]),
            PortRole::SliceEnd => Tensor::new(shape, vec![0, 0, self.first_slot()? + self.chunk.size as i32, 0]),
            PortRole::PreviousHidden => {
                let (columns, _) = self.previous.ok_or_else(unexpected)?;
                let hidden = columns.range(0..columns.count.min(self.chunk.size as usize), self.chunk.size as usize);
                shaped(port, shape, hidden.values)?
            }
            PortRole::PreviousDrafted => {
                let (_, drafted) = self.previous.ok_or_else(unexpected)?;
                shaped(port, shape, vec![f32::from(u8::from(drafted)); self.chunk.size as usize])?
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
            | PortRole::Logits
            | PortRole::Argmax => return Err(unexpected()),
        };
        let tensor = Arc::new(tensor);
        self.made.push((port.role.clone(), tensor.clone()));
        Ok(tensor)
    }

    fn rope(&self, table: &str, wave: RotaryPart) -> Result<Vec<f32>, RuntimeError> {
        let Chunk { real, size } = self.chunk;
        self.host.rope(self.rope, table, wave, self.position, real as usize, size as usize)
    }

    /// `[T, S]`: a token sees the slots of the positions up to its own, within its window; position p has the slot p mod
    /// S. Padding tokens attend like the last real token; their outputs are discarded.
    fn attention_mask(&self, slots: u64, window: Option<u64>) -> Vec<f32> {
        let mut mask = vec![MASKED; (self.chunk.size * slots) as usize];
        for (t, row) in mask.chunks_exact_mut(slots as usize).enumerate() {
            let position = self.position + (t as u64).min(self.chunk.real - 1);
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            (first..=position).for_each(|seen| row[(seen % slots) as usize] = 0.0);
        }
        mask
    }

    /// `[T, S]`: a token sees the slots of the positions before the call's first, within its window.
    fn past_mask(&self, slots: u64, window: Option<u64>) -> Vec<f32> {
        let mut mask = vec![MASKED; (self.chunk.size * slots) as usize];
        for (t, row) in mask.chunks_exact_mut(slots as usize).enumerate() {
            let position = self.position + (t as u64).min(self.chunk.real - 1);
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            (first..self.position).for_each(|seen| row[(seen % slots) as usize] = 0.0);
        }
        mask
    }

    /// `[T, T]`: a token sees those before it and itself, within its window. Padding tokens attend like the last real one.
    fn call_mask(&self, window: Option<u64>) -> Vec<f32> {
        let Chunk { real, size } = self.chunk;
        let mut mask = vec![MASKED; (size * size) as usize];
        for (t, row) in mask.chunks_exact_mut(size as usize).enumerate() {
            let t = (t as u64).min(real - 1);
            let first = window.map_or(0, |window| (t + 1).saturating_sub(window));
            row[first as usize..=t as usize].fill(0.0);
        }
        mask
    }

    /// `[T, T]`: a token sees those at most `band` away on both sides. No real token attends to padding tokens, and
    /// their outputs are discarded.
    fn band_mask(&self, band: u64) -> Vec<f32> {
        let Chunk { real, size } = self.chunk;
        let mut mask = vec![MASKED; (size * size) as usize];
        for (t, row) in mask.chunks_exact_mut(size as usize).enumerate() {
            let t = t as u64;
            row[t.saturating_sub(band).min(real) as usize..(t + band + 1).min(real) as usize].fill(0.0);
        }
        mask
    }

    /// `[S, T]`: token t goes to the slot of its position. Padding tokens are written nowhere.
    fn kv_write_mask(&self, slots: u64) -> Vec<f32> {
        let size = self.chunk.size as usize;
        let mut mask = vec![0.0; slots as usize * size];
        for t in 0..self.chunk.real {
            mask[((self.position + t) % slots * self.chunk.size + t) as usize] = 1.0;
        }
        mask
    }

    /// The slot of the first token. A function that writes at a position writes all its tokens; what those that only
    /// fill the call leave behind is overwritten before a mask opens it, but it has to fit.
    fn first_slot(&self) -> Result<i32, RuntimeError> {
        let end = self.position + self.chunk.size;
        if end > self.context {
            return Err(RuntimeError::ContextFull { tokens: end, context: self.context });
        }
        Ok(self.position as i32)
    }
}

/// `[1 + levels, T, T]`: which token comes after which; see [`PortRole::TokenOrder`].
fn token_order(size: u64, levels: u64) -> Vec<f32> {
    let after = |plane: u64, i: u64, j: u64| match plane.checked_sub(1) {
        None => j <= i,
        Some(level) => i >> (level + 1) == j >> (level + 1) && i >> level & 1 == 1 && j >> level & 1 == 0,
    };
    let planes = (0..=levels).flat_map(|plane| (0..size * size).map(move |at| (plane, at / size, at % size)));
    planes.map(|(plane, i, j)| f32::from(u8::from(after(plane, i, j)))).collect()
}

/// The size of one of a port's dimensions, such as the slots of the cache that a mask is for.
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

/// The shape of a port for a call of `size` tokens.
pub fn shape_of(port: &Port, size: u64) -> Vec<usize> {
    port.shape_at(size).into_iter().map(|extent| extent as usize).collect()
}

/// `values` as a tensor of `shape`.
///
/// # Errors
/// When the shape has another number of elements.
pub fn shaped(port: &Port, shape: Vec<usize>, values: Vec<f32>) -> Result<Tensor, RuntimeError> {
    if shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) != Some(values.len()) {
        let problem = format!("port `{}` has shape {shape:?}, but {} numbers go into it", port.name, values.len());
        return Err(RuntimeError::bundle(anec_bundle::FILE_NAME, problem));
    }
    Ok(Tensor::new(shape, values))
}

/// Which tokens of a text a call has: `count` of them from position `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Position of the first.
    pub first: u64,
    /// How many count; others fill the call up.
    pub count: u64,
}
