//! Slots that a mask opens.

use std::ops::Range;

use smallvec::SmallVec;

use anec_bundle::MASKED;
use anec_kernels::dispatch::{Vectorize, vectorized};

/// Alignment to which the first and last slot are rounded outwards, so that sums have the same parts.
const ALIGNMENT: usize = 16;

/// Range from the first to the last open slot of each token, among slots of earlier calls and those that this call
/// appends.
pub(super) struct OpenSlots {
    of_tokens: SmallVec<[[Range<usize>; 2]; 8]>,
    /// Number of slots of each kind.
    slots: [usize; 2],
}

/// Search for the first and last open slot in a token's row of the mask.
struct OpenSlotSearch<'a>(&'a [f32]);

impl Vectorize for OpenSlotSearch<'_> {
    type Output = Option<Range<usize>>;

    #[inline(always)]
    fn run(self) -> Option<Range<usize>> {
        /// Slots that are checked at a time.
        const BLOCK: usize = 64;
        let OpenSlotSearch(row) = self;
        // NaN counts as open: it has to be computed
        let is_open = |value: &f32| !(*value <= MASKED);
        let any = |part: &&[f32]| part.iter().fold(false, |any, value| any | is_open(value));
        let closed_before = row.chunks(BLOCK).take_while(|part| !any(part)).count() * BLOCK;
        let start = closed_before + row.get(closed_before..)?.iter().position(is_open)?;
        let closed_after = row.rchunks(BLOCK).take_while(|part| !any(part)).count() * BLOCK;
        let end = row[..row.len() - closed_after].iter().rposition(is_open)? + 1;
        Some(start..end)
    }
}

impl OpenSlots {
    /// Open slots of a mask with `slots` slots of each kind per token; `None` if a token sees none.
    pub fn of(mask: &[f32], slots: [usize; 2]) -> Option<Self> {
        let of_token = |row: &[f32]| {
            let (earlier, appended) = row.split_at(slots[0]);
            let open = [earlier, appended].map(|part| vectorized(OpenSlotSearch(part)));
            open.iter().any(Option::is_some).then(|| open.map(|open| open.unwrap_or(0..0)))
        };
        let of_tokens = mask.chunks_exact(slots.iter().sum::<usize>().max(1)).map(of_token).collect::<Option<_>>()?;
        Some(OpenSlots { of_tokens, slots })
    }

    /// Range of each kind from the first to the last slot that is open to one of some tokens, rounded outwards.
    pub fn to(&self, tokens: Range<usize>) -> [Range<usize>; 2] {
        [0, 1].map(|kind| {
            let of_tokens =
                self.of_tokens[tokens.clone()].iter().map(|open| &open[kind]).filter(|open| !open.is_empty());
            let start = of_tokens.clone().map(|open| open.start).min().unwrap_or(0);
            let end = of_tokens.map(|open| open.end).max().unwrap_or(0);
            start / ALIGNMENT * ALIGNMENT..end.next_multiple_of(ALIGNMENT).min(self.slots[kind])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_opens_to_each_token_what_lies_between_its_first_and_last_open_slot() {
        let slots = 200;
        let mask = |open: &[Range<usize>]| -> Vec<f32> {
            let of_token = |open: &Range<usize>| {
                let open = open.clone();
                (0..slots).map(move |slot| if open.contains(&slot) { 0.0 } else { MASKED })
            };
            open.iter().flat_map(of_token).collect()
        };
        // a window of 70, and slots at the ends of the blocks that are checked at a time
        let open = [0..1, 0..64, 0..65, 64..128, 130..200, 199..200];
        let found = OpenSlots::of(&mask(&open), [slots, 0]).unwrap();
        let earlier = |tokens| {
            let [earlier, appended] = found.to(tokens);
            assert!(appended.is_empty());
            earlier
        };
        assert_eq!([earlier(0..1), earlier(0..3), earlier(3..4), earlier(4..5)], [0..16, 0..80, 64..128, 128..200]);
        assert_eq!(earlier(0..open.len()), 0..slots);
        assert!(OpenSlots::of(&mask(&[0..1, 3..3]), [slots, 0]).is_none(), "a token that sees nothing");
        let holes: Vec<f32> = (0..slots).map(|slot| if [5, 190].contains(&slot) { 0.0 } else { MASKED }).collect();
        assert_eq!(OpenSlots::of(&holes, [slots, 0]).unwrap().of_tokens[..], [[5..191, 0..0]]);
        let no_number = OpenSlots::of(&[MASKED, f32::NAN, MASKED], [3, 0]).unwrap();
        assert_eq!(no_number.to(0..1)[0], 0..3, "what is no number counts");
    }

    #[test]
    fn slots_of_earlier_calls_and_those_that_are_appended_are_opened_by_themselves() {
        // the first token sees itself alone; the second sees 20 earlier slots and both of the call
        let (earlier, appended) = (64, 2);
        let row = |seen: usize, own: usize| {
            let open = move |slot: usize| slot < seen || (earlier..earlier + own).contains(&slot);
            (0..earlier + appended).map(move |slot| if open(slot) { 0.0 } else { MASKED })
        };
        let mask: Vec<f32> = row(0, 1).chain(row(20, 2)).collect();
        let found = OpenSlots::of(&mask, [earlier, appended]).unwrap();
        assert_eq!([found.to(0..1), found.to(1..2), found.to(0..2)], [[0..0, 0..2], [0..32, 0..2], [0..32, 0..2]]);
        assert!(OpenSlots::of(&[MASKED; 66], [earlier, appended]).is_none());
    }
}
