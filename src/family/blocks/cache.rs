//! The key-value cache: states of `S` slots into which each call writes its tokens' keys and values.
//!
//! The token at position p has the slot p mod S: a layer that sees only a window keeps a ring of as many slots as the
//! window and a call's tokens need. Slots are written through a one-hot mask `[1, 1, S, T]` (`cache * (1 - any) +
//! mask @ new`, any number of tokens, the whole cache is rewritten) or by `slice_update` from and to places that are inputs: no
//! integer is computed in the graph. Readers always see what was just written. A cache that the host keeps is an input that nothing writes, and one that several layers have in common is written once,
//! after all of them: readers see the call's rows behind its slots.

use super::Graph;
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
    /// The slots from `begin` to `end`, int32 vectors of four elements of which the third counts.
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

    /// A cache `[1, rows, S, head_dim]` with `new` `[1, rows, T, head_dim]` in its slots.
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
