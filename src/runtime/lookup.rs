//! Prompt lookup (Saxena 2023): drafts repeat the tokens that followed the same tokens earlier in the text. Drafting
//! needs no model; the model verifies several draft tokens in one call.

/// Drafts tokens from a text's own past.
#[derive(Clone, Debug)]
pub struct PromptLookup {
    /// Minimum n-gram length: the last tokens that must have occurred together before.
    min: usize,
    /// Maximum n-gram length; a longer match makes a better draft.
    max: usize,
    text: Vec<u32>,
    /// Consecutive drafts of which no token was accepted.
    misses: u32,
    /// Steps left without a draft.
    pause: u32,
}

/// How many draft tokens were proposed and accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Speculation {
    /// Draft tokens proposed.
    pub drafted: usize,
    /// Draft tokens accepted.
    pub accepted: usize,
}

/// Steps without a draft after a rejected one: doubled each time, up to this.
const LONGEST_PAUSE: u32 = 16;

impl PromptLookup {
    /// Drafts for the continuation of `prompt`, by matches of `min` to `max` tokens.
    pub fn new(prompt: &[u32], min: usize, max: usize) -> Self {
        PromptLookup { min: min.max(1), max: max.max(1), text: prompt.to_vec(), misses: 0, pause: 0 }
    }

    /// Appends an accepted token to the text.
    pub fn accept_token(&mut self, token: u32) {
        self.text.push(token);
    }

    /// Returns up to `most` tokens that may come next: those after the latest of the longest matches.
    pub fn draft(&mut self, most: usize) -> &[u32] {
        if self.pause > 0 {
            self.pause -= 1;
            return &[];
        }
        let end = self.text.len();
        let mut best = (self.min.saturating_sub(1), end);
        for before in (1..end).rev() {
            let same = self.text[..before].iter().rev().zip(self.text.iter().rev());
            let length = same.take(self.max).take_while(|(a, b)| a == b).count();
            if length > best.0 {
                best = (length, before);
                if length == self.max {
                    break;
                }
            }
        }
        let start = best.1;
        &self.text[start..end.min(start.saturating_add(most))]
    }

    /// Records how many tokens of the last draft were accepted. After a rejected draft, drafting pauses, because a
    /// wrong draft makes a call longer.
    pub fn record(&mut self, accepted: usize) {
        self.misses = if accepted > 0 { 0 } else { (self.misses + 1).min(LONGEST_PAUSE.ilog2()) };
        self.pause = if accepted > 0 { 0 } else { 1 << self.misses };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_the_longest_matches_is_continued() {
        let text = [1, 2, 3, 10, 2, 3, 11, 9, 2, 3, 12, 1, 2, 3];
        assert_eq!(PromptLookup::new(&text, 2, 8).draft(3), [10, 2, 3], "three tokens agree with the beginning");
        assert_eq!(PromptLookup::new(&text, 2, 2).draft(2), [12, 1], "of two, the latest place counts");
        assert!(PromptLookup::new(&text, 4, 8).draft(3).is_empty(), "four never agreed");
    }

    #[test]
    fn the_last_token_is_not_guessed_twice() {
        // a text that repeats one token continues with it, no further than its past reaches
        assert_eq!(PromptLookup::new(&[5, 5, 5], 2, 8).draft(4), [5]);
        assert!(PromptLookup::new(&[5], 1, 8).draft(4).is_empty());
        assert!(PromptLookup::new(&[], 1, 8).draft(4).is_empty());
    }

    #[test]
    fn wrong_drafts_pause_drafting() {
        let mut lookup = PromptLookup::new(&[1, 2, 1, 2, 1], 1, 8);
        let turns_until_a_guess =
            |lookup: &mut PromptLookup| (0..100).take_while(|_| lookup.draft(1).is_empty()).count();
        let mut pauses = Vec::new();
        for _ in 0..6 {
            lookup.record(0);
            pauses.push(turns_until_a_guess(&mut lookup));
        }
        assert_eq!(pauses, [2, 4, 8, 16, 16, 16]);
        lookup.record(1);
        assert_eq!(turns_until_a_guess(&mut lookup), 0);
    }
}
