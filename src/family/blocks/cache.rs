//! The key-value cache: states of `S` slots into which each call writes its tokens' keys and values.
//!
//! The token at position p has the slot p mod S: a layer that sees only a window keeps a ring of as many slots as the
//! window and a call's tokens need. Slots are written through a one-hot mask `[1, 1, S, T]` (`cache * (1 - any) +
//! mask @ new`, any number of tokens, the whole cache is rewritten) or by `slice_update` at a position. Readers always
//! see what was just written. A cache that the host keeps is an input that nothing writes; readers see the call's rows
//! behind its slots.

use super::Graph;
use super::state::Slot;
use anec_mil::{Constant, ValueId};

/// How the tokens of this call enter every cache of a width; computed once per function.
#[derive(Clone, Copy, Debug)]
pub enum Write {
    /// `mask` `[1, 1, S, T]` and `keep` `[1, 1, S, 1]`, which is 1 for slots that aren't written.
    Mask {
        /// One-hot rows.
        mask: ValueId,
        /// Complement of the rows' sums.
        keep: ValueId,
    },
    /// Nothing is written: the host keeps the cache, takes the rows of the call and appends them.
    Append,
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

/// Writes keys (or values) `[1, heads, T, head_dim]` and gives the whole cache `[1, heads, S, head_dim]` after that; of a
/// cache that the host keeps, all slots and behind them the call's rows, `[1, heads, S + T, head_dim]`.
pub fn update(g: &mut Graph<'_>, cache: Slot, write: Write, new: ValueId) -> ValueId {
    match write {
        Write::Mask { mask, keep } => {
            let old = cache.read(g);
            let kept = g.ops.mul(old, keep);
            let placed = g.ops.matmul(mask, new, false, false);
            let updated = g.ops.add(kept, placed);
            cache.write(g, updated);
        }
        Write::Append => {
            let past = cache.read(g);
            cache.write(g, new);
            return g.ops.concat(&[past, new], 2);
        }
        Write::Slice { begin, end } => cache.write_slots(g, begin, end, new),
    }
    cache.read(g)
}
