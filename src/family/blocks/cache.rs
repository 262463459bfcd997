//! The key-value cache: states of `S` slots into which each call writes its tokens' keys and values.
//!
//! Slots are written through a one-hot mask `[1, 1, S, T]` (`cache * (1 - any) + mask @ new`, any number of tokens,
//! the whole cache is rewritten) or by `slice_update` at a position. Readers always see what was just written.

use super::Graph;
use crate::manifest::StateForm;
use crate::mil::{Constant, DataType, TensorType, ValueId};

/// How the tokens of this call enter every cache of the function; computed once per function.
#[derive(Clone, Copy, Debug)]
pub enum Write {
    /// `mask` `[1, 1, S, T]` and `keep` `[1, 1, S, 1]`, which is 1 for slots that aren't written.
    Mask {
        /// One-hot rows.
        mask: ValueId,
        /// Complement of the rows' sums.
        keep: ValueId,
    },
    /// Slots `begin..end`, int32 scalars in vectors of one element.
    Slice {
        /// First slot.
        begin: ValueId,
        /// One past the last.
        end: ValueId,
    },
}

impl Write {
    /// From the input `kv_write_mask` `[1, 1, S, T]`.
    pub fn from_mask(g: &mut Graph<'_>, mask: ValueId) -> Write {
        let any = g.ops.reduce_sum(mask, &[3], true);
        Write::Mask { mask, keep: g.ops.sub(Constant::fp16(1.0), any) }
    }

    /// From the input `position`, int32 `[1]`, for calls of `tokens` tokens.
    pub fn from_position(g: &mut Graph<'_>, position: ValueId, tokens: u64) -> Write {
        Write::Slice { begin: position, end: g.ops.add(position, Constant::int32s(&[tokens as i32])) }
    }
}

/// The states of the layers of a function.
pub struct Caches {
    form: StateForm,
    first_layer: usize,
    heads: u64,
    slots: u64,
    head_dim: u64,
    per_layer: Vec<(ValueId, ValueId)>,
    unified: Option<ValueId>,
}

impl Caches {
    /// Declares the states for layers `first..end`.
    pub fn declare(g: &mut Graph<'_>, layers: std::ops::Range<usize>, heads: u64, slots: u64, head_dim: u64) -> Caches {
        let form = g.form.state;
        let state = |heads: u64| TensorType::new(DataType::Fp16, [1, heads, slots, head_dim]);
        let mut caches =
            Caches { form, first_layer: layers.start, heads, slots, head_dim, per_layer: Vec::new(), unified: None };
        match form {
            StateForm::PerLayer => {
                for layer in layers {
                    let k = g.ops.state(&format!("k_cache_{layer}"), state(heads));
                    let v = g.ops.state(&format!("v_cache_{layer}"), state(heads));
                    caches.per_layer.push((k, v));
                }
            }
            StateForm::Unified => {
                let name = format!("kv_cache_{}_{}", layers.start, layers.end);
                caches.unified = Some(g.ops.state(&name, state(2 * heads * layers.len() as u64)));
            }
        }
        caches
    }

    /// Writes keys and values `[1, heads, T, head_dim]` of a layer and gives its whole caches
    /// `[1, heads, S, head_dim]` after the write.
    pub fn update(
        &self,
        g: &mut Graph<'_>,
        layer: usize,
        write: Write,
        keys: ValueId,
        values: ValueId,
    ) -> (ValueId, ValueId) {
        let index = layer - self.first_layer;
        g.scope("cache", |g| match (self.form, self.unified) {
            (StateForm::Unified, Some(state)) => {
                let row = 2 * self.heads * index as u64;
                let keys = self.update_rows(g, state, row, write, keys);
                let values = self.update_rows(g, state, row + self.heads, write, values);
                (keys, values)
            }
            _ => {
                let (k, v) = self.per_layer[index];
                let keys = self.update_state(g, k, write, keys);
                let values = self.update_state(g, v, write, values);
                (keys, values)
            }
        })
    }

    fn update_state(&self, g: &mut Graph<'_>, state: ValueId, write: Write, new: ValueId) -> ValueId {
        let old = g.ops.read_state(state);
        let updated = match write {
            Write::Mask { mask, keep } => scatter(g, old, mask, keep, new),
            Write::Slice { begin, end } => self.slice_update(g, old, 0, self.heads, begin, end, new),
        };
        g.ops.write_state(state, updated);
        g.ops.read_state(state)
    }

    fn update_rows(&self, g: &mut Graph<'_>, state: ValueId, row: u64, write: Write, new: ValueId) -> ValueId {
        let whole = g.ops.read_state(state);
        let rows = row..row + self.heads;
        let updated = match write {
            Write::Mask { mask, keep } => {
                let old = g.ops.slice(whole, 1, rows.clone());
                let merged = scatter(g, old, mask, keep, new);
                let (begin, end) = (row as i32, (row + self.heads) as i32);
                let begin = g.ops.integers("begin", &[0, begin, 0, 0]);
                let end = g.ops.integers("end", &[1, end, self.slots as i32, self.head_dim as i32]);
                g.ops.slice_update(whole, merged, begin, end)
            }
            Write::Slice { begin, end } => self.slice_update(g, whole, row, row + self.heads, begin, end, new),
        };
        g.ops.write_state(state, updated);
        let whole = g.ops.read_state(state);
        g.ops.slice(whole, 1, rows)
    }

    #[allow(clippy::too_many_arguments)] // the corners of a box
    fn slice_update(
        &self,
        g: &mut Graph<'_>,
        old: ValueId,
        first_row: u64,
        end_row: u64,
        begin: ValueId,
        end: ValueId,
        new: ValueId,
    ) -> ValueId {
        let low = g.ops.integers("low", &[0, first_row as i32]);
        let zero = g.ops.integers("zero", &[0]);
        let begin = g.ops.concat(&[low, begin, zero], 0);
        let high = g.ops.integers("high", &[1, end_row as i32]);
        let width = g.ops.integers("width", &[self.head_dim as i32]);
        let end = g.ops.concat(&[high, end, width], 0);
        g.ops.slice_update(old, new, begin, end)
    }
}

fn scatter(g: &mut Graph<'_>, old: ValueId, mask: ValueId, keep: ValueId, new: ValueId) -> ValueId {
    let kept = g.ops.mul(old, keep);
    let placed = g.ops.matmul(mask, new, false, false);
    g.ops.add(kept, placed)
}
