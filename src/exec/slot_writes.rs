//! Which slots of a cache a run writes, of the caches that are written through a mask.

use std::ops::Range;
use std::sync::Arc;

use super::pool::Pool;
use super::tensor::Tensor;
use anec_kernels::dispatch::{Vectorize, vectorized};

/// A slot that changes.
#[derive(Debug, PartialEq)]
pub(super) struct SlotWrite {
    /// Which slot.
    pub slot: usize,
    /// What its content is multiplied with.
    pub keep: f32,
    /// From the first to the last token that is added to it.
    pub tokens: Range<usize>,
}

/// The slots that masks change, each found once for all caches of a run that are written through it.
#[derive(Default)]
pub(super) struct SlotWrites {
    found: Vec<Found>,
}

/// What was found of the masks of a run, or memory for it.
#[derive(Default)]
struct Found {
    masks: Option<[Arc<Tensor>; 2]>,
    slots: Vec<SlotWrite>,
}

impl SlotWrites {
    /// The slots that change, in order, by a mask `[…, S, T]` of T tokens and what is kept of each slot, `[…, S, 1]`. A slot
    /// whose `keep` is 1 and whose row of the mask is zero stays what it is. `None` if they aren't of this type and size.
    pub fn of(&mut self, mask: &Arc<Tensor>, keep: &Arc<Tensor>, tokens: usize) -> Option<&[SlotWrite]> {
        let same = |[m, k]: &[Arc<Tensor>; 2]| Arc::ptr_eq(m, mask) && Arc::ptr_eq(k, keep);
        let known = self.found.iter().position(|found| found.masks.as_ref().is_some_and(same));
        let at = match known {
            Some(at) => at,
            None => {
                let unused = self.found.iter().position(|found| found.masks.is_none());
                let at = unused.unwrap_or(self.found.len());
                if unused.is_none() {
                    self.found.push(Found::default());
                }
                let Found { masks, slots } = &mut self.found[at];
                find(mask.floats()?, keep.floats()?, tokens, slots)?;
                *masks = Some([mask.clone(), keep.clone()]);
                at
            }
        };
        Some(&self.found[at].slots)
    }

    /// Forgets all, when a run ends.
    pub fn clear(&mut self, pool: &mut Pool) {
        for tensor in self.found.iter_mut().filter_map(|found| found.masks.take()).flatten() {
            pool.recycle(tensor);
        }
    }
}

/// Puts the slots that change in place of others.
fn find(mask: &[f32], keep: &[f32], tokens: usize, slots: &mut Vec<SlotWrite>) -> Option<()> {
    /// Slots that are looked at together.
    const BLOCK: usize = 64;
    slots.clear();
    if mask.len() != keep.len() * tokens {
        return None;
    }
    for (i, keep) in keep.chunks(BLOCK).enumerate() {
        let rows = &mask[i * BLOCK * tokens..][..keep.len() * tokens];
        if vectorized(StaySame { keep, rows }) {
            continue;
        }
        for (r, keep) in keep.iter().enumerate() {
            let row = &rows[r * tokens..][..tokens];
            let first = row.iter().position(|factor| *factor != 0.0);
            let last = row.iter().rposition(|factor| *factor != 0.0);
            let tokens = first.zip(last).map_or(0..0, |(first, last)| first..last + 1);
            if *keep != 1.0 || !tokens.is_empty() {
                slots.push(SlotWrite { slot: i * BLOCK + r, keep: *keep, tokens });
            }
        }
    }
    Some(())
}

/// Whether some slots stay as they are.
struct StaySame<'a> {
    keep: &'a [f32],
    /// Of the mask.
    rows: &'a [f32],
}

impl Vectorize for StaySame<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        // without an early end, so that it is done by whole vectors
        let all = |values: &[f32], are: f32| values.iter().fold(true, |all, value| all & (*value == are));
        all(self.keep, 1.0) & all(self.rows, 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_change_are_found_once_for_a_run() {
        let (slots, tokens) = (150, 3);
        let mut mask = vec![0.0; slots * tokens];
        let mut keep = vec![1.0; slots];
        (mask[7 * tokens + 1], keep[7]) = (1.0, 0.0);
        // two tokens with one between them, into a slot that keeps what it has
        (mask[70 * tokens], mask[70 * tokens + 2]) = (0.5, 0.5);
        keep[149] = 0.25;
        let tensor = |values: &[f32], last| Arc::new(Tensor::new([1, 1, slots, last], values.to_vec()));
        let (mask, keep) = (tensor(&mask, tokens), tensor(&keep, 1));
        let mut writes = SlotWrites::default();
        let expected = [
            SlotWrite { slot: 7, keep: 0.0, tokens: 1..2 },
            SlotWrite { slot: 70, keep: 1.0, tokens: 0..3 },
            SlotWrite { slot: 149, keep: 0.25, tokens: 0..0 },
        ];
        assert_eq!(writes.of(&mask, &keep, tokens).unwrap(), expected);
        let place = writes.of(&mask, &keep, tokens).unwrap().as_ptr();
        assert_eq!(writes.found[0].slots.as_ptr(), place);
        // another mask of the same run
        let all = tensor(&vec![1.0; slots * tokens], tokens);
        assert_eq!(writes.of(&all, &keep, tokens).unwrap().len(), slots);
        assert_eq!(writes.of(&mask, &keep, tokens).unwrap(), expected);
        assert!(writes.of(&mask, &keep, tokens + 1).is_none_or(|known| known == expected));
        let mut pool = Pool::default();
        writes.clear(&mut pool);
        assert_eq!(Arc::strong_count(&mask), 1);
        assert!(writes.of(&keep, &mask, 1).is_none(), "what is kept has more elements than slots");
        assert_eq!(writes.of(&all, &keep, tokens).unwrap().len(), slots);
        assert_eq!(writes.found.len(), 2, "memory is used again");
    }
}
