//! KV cache: states of `S` slots into which each call writes its tokens' keys and values.
//!
//! The token at position p has the slot p mod S: a layer with a window has a ring buffer with slots for the window and
//! the tokens of a call. Slots are written through a one-hot mask `[1, 1, S, T]` (`cache * (1 - any) + mask @ new`, for
//! any number of tokens; the whole cache is rewritten) or by `slice_update` at positions that are inputs: the graph
//! computes no integers. Reads always see the written tokens. A cache that the host stores is an input without writes.
//! A stacked cache is written once, after all layers: reads see the call's rows behind its slots.

use super::Graph;
use anec_mil::{Constant, ValueId};

/// Form of writes to every cache with a number of slots; computed once per function.
#[derive(Clone, Copy, Debug)]
pub enum Write {
    /// `mask` `[1, 1, S, T]` and `keep` `[1, 1, S, 1]`, which is 1 for slots that aren't written.
    Mask {
        /// One-hot rows.
        mask: ValueId,
        /// One minus the rows' sums.
        keep: ValueId,
    },
    /// No write: the host stores the cache and appends the rows of the call.
    Append,
    /// Slots from `begin` to `end`, int32 vectors of four elements of which the third is used.
    Slice {
        /// First slot.
        begin: ValueId,
        /// One past the last.
        end: ValueId,
    },
}

impl Write {
    /// Uses the input `kv_write_mask` `[1, 1, S, T]`.
    pub fn from_mask(g: &mut Graph<'_>, mask: ValueId) -> Write {
        let any = g.ops.reduce_sum(mask, &[3], true);
        Write::Mask { mask, keep: g.ops.sub(Constant::fp16(1.0), any) }
    }

    /// Writes `new` `[1, rows, T, head_dim]` to the slots of a cache `[1, rows, S, head_dim]`.
    pub fn into_cache(self, g: &mut Graph<'_>, old: ValueId, new: ValueId) -> ValueId {
        match self {
            Write::Mask { mask, keep } => {
                let kept = g.ops.mul(old, keep);
                let placed = g.ops.matmul(mask, new, false, false);
                g.ops.add(kept, placed)
            }
            Write::Slice { begin, end } => g.ops.slice_update_along(old, new, 2, begin, end),
            Write::Append => old,
        }
    }
}
