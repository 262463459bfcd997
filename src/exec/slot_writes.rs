//! Cache slots that a run writes through a mask.

use std::ops::Range;
use std::sync::Arc;

use super::pool::Pool;
use super::tensor::Tensor;
use anec_kernels::dispatch::{Vectorize, vectorized};

/// Slot that changes.
#[derive(Debug, PartialEq)]
pub(super) struct SlotWrite {
    /// Index of the slot.
    pub slot: usize,
    /// Factor of its previous content.
    pub keep: f32,
    /// Tokens that are added to it, from the first to the last.
    pub tokens: Range<usize>,
}

/// Slots that masks change. Each mask is scanned once for all caches of a run that use it.
#[derive(Default)]
pub(super) struct SlotWrites {
    found: Vec<ScannedMask>,
}

/// Slots of one mask of a run, or memory for reuse.
#[derive(Default)]
struct ScannedMask {
    masks: Option<[Arc<Tensor>; 2]>,
    slots: Vec<SlotWrite>,
}

impl SlotWrites {
    /// Slots that change, in order, for a mask `[…, S, T]` of `tokens` tokens and factors `keep` `[…, S, 1]`. A slot
    /// doesn't change if its `keep` is 1 and its row of the mask is zero. `None` if the tensors have another type or
    /// size.
    pub fn of(&mut self, mask: &Arc<Tensor>, keep: &Arc<Tensor>, tokens: usize) -> Option<&[SlotWrite]> {
        let same = |[m, k]: &[Arc<Tensor>; 2]| Arc::ptr_eq(m, mask) && Arc::ptr_eq(k, keep);
        let known = self.found.iter().position(|found| found.masks.as_ref().is_some_and(same));
        let at = match known {
            Some(at) => at,
            None => {
                let unused = self.found.iter().position(|found| found.masks.is_none());
                let at = unused.unwrap_or(self.found.len());
                if unused.is_none() {
                    self.found.push(ScannedMask::default());
                }
                let ScannedMask { masks, slots } = &mut self.found[at];
                find(mask.floats()?, keep.floats()?, tokens, slots)?;
                *masks = Some([mask.clone(), keep.clone()]);
                at
            }
        };
        Some(&self.found[at].slots)
    }

    /// Clears the slots at the end of a run.
    pub fn clear(&mut self, pool: &mut Pool) {
        for tensor in self.found.iter_mut().filter_map(|found| found.masks.take()).flatten() {
            pool.recycle(tensor);
        }
    }
}

/// Replaces `slots` by the slots that change.
fn find(mask: &[f32], keep: &[f32], tokens: usize, slots: &mut Vec<SlotWrite>) -> Option<()> {
    /// Slots that are checked at a time.
    const BLOCK: usize = 64;
    slots.clear();
    if mask.len() != keep.len() * tokens {
        return None;
    }
    for (i, keep) in keep.chunks(BLOCK).enumerate() {
        let rows = &mask[i * BLOCK * tokens..][..keep.len() * tokens];
        if vectorized(UnchangedCheck { keep, rows }) {
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

/// Checks whether slots stay unchanged.
struct UnchangedCheck<'a> {
    keep: &'a [f32],
    /// Rows of the mask.
    rows: &'a [f32],
}

impl Vectorize for UnchangedCheck<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        // no early exit, so that the loop is vectorized
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
        // two tokens with one between them, into a slot that keeps its content
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
        // another mask in the same run
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
