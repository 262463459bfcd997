//! Speculative decoding with a draft model (arXiv:2211.17192, arXiv:2302.01318): it drafts the next tokens, and the
//! model verifies them in one call.
//!
//! The text equals that of the model alone, token for token, sampled or greedy. The model draws each token from its own
//! distribution with its own random numbers; a draft counts only if it equals the drawn token. The draft model draws
//! with the same random numbers to make that likely: equal distributions give equal tokens.
//!
//! The draft model may be a layer of the model's own bundle (multi-token prediction). It reads the hidden state before
//! each token beside the token: the model's for verified tokens, its own for drafted ones.

use std::sync::Arc;

use super::forward::{ForwardOptions, ForwardOutput, Hidden};
use super::model::LoadedModel;
use super::prefix::common;
use super::request::GenerationRequest;
use super::sampling::Sampler;
use super::session::{PreviousHidden, TokenSession};
use anec_base::Result;

/// Draft model on the same text.
pub struct Drafter {
    session: TokenSession,
    most: usize,
    /// Hidden states received; `None` for a model that reads only tokens.
    told: Option<ReceivedStates>,
}

/// Hidden states of the main model, as passed to a draft layer.
struct ReceivedStates {
    /// Position of the first hidden state received.
    first: usize,
    /// Number of tokens computed from the model's hidden states.
    known: usize,
    /// Hidden states of the next tokens, one row each.
    rows: Vec<f32>,
}

impl Drafter {
    /// Creates a drafter of at most `most` tokens per draft with `model`, for texts of up to `length` tokens or its own
    /// context.
    ///
    /// # Errors
    /// If the model doesn't continue texts, or the backend can't allocate states.
    pub fn new(model: &Arc<LoadedModel>, length: u64, most: usize) -> Result<Self> {
        model.continues_texts()?;
        let told = model.reads_hidden().then(|| ReceivedStates { first: 0, known: 0, rows: Vec::new() });
        Ok(Drafter { session: model.start(length.min(model.context()))?, most, told })
    }

    /// Sets the position from which hidden states will be received.
    pub(super) fn receive_from(&mut self, position: usize) {
        if let Some(told) = &mut self.told {
            told.first = position;
        }
    }

    /// Returns whether it reads [hidden states](Drafter::tell).
    pub(super) fn reads_hidden(&self) -> bool {
        self.told.is_some()
    }

    /// Adds the output of the model's last layer for the next tokens, one row each.
    pub(super) fn tell(&mut self, rows: &[f32]) {
        if let Some(told) = &mut self.told {
            told.rows.extend(rows);
        }
    }

    /// Returns the maximum number of tokens per draft.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Drafts up to `most` tokens that may follow `prompt` and the generated `ids`. `sampler` is the model's, before it
    /// draws them. The draft is empty where the text exceeds the draft model's context or vocabulary.
    ///
    /// # Errors
    /// If a function fails.
    pub fn draft(
        &mut self,
        request: &GenerationRequest,
        ids: &[u32],
        sampler: &Sampler,
        most: usize,
    ) -> Result<Vec<u32>> {
        let mut text = [&request.prompt, ids].concat();
        let session = &mut self.session;
        let width = session.model().bundle().model.hidden_size as usize;
        if let Some(told) = &self.told {
            // its first token belongs to the first hidden state
            text.drain(..(told.first + 1).min(text.len()));
            if text.len() <= told.known || (text.len() - told.known) * width != told.rows.len() {
                return Ok(Vec::new());
            }
        }
        let vocabulary = session.model().bundle().model.vocab_size;
        let room = session.limit().saturating_sub(text.len() as u64 - 1);
        let most = most.min(self.most).min(room as usize);
        if most == 0 || text.iter().any(|token| u64::from(*token) >= vocabulary) {
            return Ok(Vec::new());
        }
        // the last token is computed for its logits; rejected drafts are forgotten
        let known = match &mut self.told {
            None => common(session.tokens(), &text).min(text.len() - 1),
            Some(told) => std::mem::replace(&mut told.known, text.len()),
        };
        session.rewind(known as u64)?;
        let hidden = if self.told.is_some() { Hidden::BetweenFunctions } else { Hidden::No };
        let model = session.model();
        let enough = |k| !model.gives_logits() || request.needs_logits(k).is_none();
        let largest = model.largest_logits().is_some_and(enough);
        let ask = ForwardOptions::last().recording(hidden).largest(largest);
        let mut given = match &mut self.told {
            None => session.forward(&text[known..], &ask)?,
            Some(told) => {
                let rows = std::mem::take(&mut told.rows);
                session.forward_behind(PreviousHidden { rows: &rows, drafted: false }, &text[known..], &ask)?
            }
        };
        session.checkpoint()?;
        let (mut sampler, mut draft) = (sampler.clone(), Vec::new());
        loop {
            let ForwardOutput { mut logits, tokens, hidden } = given;
            if tokens.is_empty() {
                sampler.penalise(&mut logits);
                request.add_biases(&mut logits);
            }
            let token = sampler.next_of(&tokens, &logits);
            if request.stops.contains(&token) {
                return Ok(draft);
            }
            sampler.accept_token(token);
            draft.push(token);
            if draft.len() == most {
                return Ok(draft);
            }
            given = match hidden.last().filter(|_| self.told.is_some()) {
                None => session.forward(&[token], &ask)?,
                Some(own) => {
                    let rows = &own[own.len().saturating_sub(width)..];
                    session.forward_behind(PreviousHidden { rows, drafted: true }, &[token], &ask)?
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeOptions};
    use super::super::lookup::Speculation;
    use super::super::sampling::Sampling;
    use super::*;

    const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];

    fn long(form: FakeOptions) -> Arc<LoadedModel> {
        fake::model(&FakeOptions { contexts: vec![200], ..form }).0
    }

    fn request(sampling: Sampling, max_tokens: usize) -> GenerationRequest {
        GenerationRequest { prompt: PROMPT.to_vec(), max_tokens, sampling, ..GenerationRequest::default() }
    }

    fn write(
        model: &Arc<LoadedModel>,
        request: &GenerationRequest,
        draft: Option<&Arc<LoadedModel>>,
    ) -> (Vec<u32>, Speculation) {
        let mut generation = request.clone().start(model).unwrap();
        if let Some(draft) = draft {
            generation = generation.with_draft(draft, 3).unwrap();
        }
        let output = generation.run().unwrap();
        (output.ids, output.speculation)
    }

    #[test]
    fn drafts_change_calls_and_nothing_else() {
        let model = long(FakeOptions::default());
        // a twin; one with another rotary table for long texts that ends early; one that can't rewind
        let drafts = [
            long(FakeOptions::default()),
            fake::model(&FakeOptions { contexts: vec![40], ..FakeOptions::default() }).0,
            fake::model(&FakeOptions { contexts: vec![12], ..FakeOptions::default() }).0,
            long(FakeOptions { recurrent: true, ..FakeOptions::default() }),
            long(FakeOptions { recurrent: true, forks: false, ..FakeOptions::default() }),
        ];
        for (temperature, repetition_penalty) in [(0.0, 1.0), (0.7, 1.0), (0.7, 1.3)] {
            for seed in 0..2 {
                let plain = request(Sampling { temperature, repetition_penalty, seed, ..Sampling::default() }, 30);
                let (expected, none) = write(&model, &plain, None);
                assert_eq!(none, Speculation::default());
                for (number, draft) in drafts.iter().enumerate() {
                    for speculation in [0, 2] {
                        let plain = GenerationRequest { speculation, ..plain.clone() };
                        let (found, counts) = write(&model, &plain, Some(draft));
                        assert_eq!(found, expected, "draft {number}, seed {seed}");
                        assert!(counts.accepted <= counts.drafted);
                        // a twin draws the same tokens
                        if number == 0 && speculation == 0 {
                            assert_eq!(counts.accepted, counts.drafted);
                            assert!(counts.accepted >= 21, "{counts:?}: three of four of 29 tokens");
                        }
                    }
                }
            }
        }
    }

    /// Over many seeds, the frequency of every two-token text equals its probability: chi-squared with 63 degrees of
    /// freedom is below 103.4 in 999 of 1000 cases.
    #[test]
    fn the_distribution_is_the_models() {
        const TEXTS: u64 = 4_000;
        let model = long(FakeOptions::default());
        let draft = long(FakeOptions { recurrent: true, ..FakeOptions::default() });
        let distribution = |text: &[u32], length: u64| -> Vec<f64> {
            let (_, logits) = fake::reference(text, length);
            let row = &logits[logits.len() - fake::VOCAB..];
            let weights: Vec<f64> = row.iter().map(|logit| f64::from(*logit).exp()).collect();
            let total: f64 = weights.iter().sum();
            weights.iter().map(|weight| weight / total).collect()
        };
        let mut session = Some(model.start(PROMPT.len() as u64 + 2).unwrap());
        let mut counts = [[0u64; fake::VOCAB]; fake::VOCAB];
        let mut accepted = 0;
        for seed in 0..TEXTS {
            let request = request(Sampling { temperature: 1.0, seed, ..Sampling::default() }, 2);
            let generation = session.take().unwrap().generate(request).unwrap();
            let mut generation = generation.with_draft(&draft, 3).unwrap();
            let output = generation.run().unwrap();
            counts[output.ids[0] as usize][output.ids[1] as usize] += 1;
            accepted += output.speculation.accepted;
            session = Some(generation.into_session());
        }
        let length = PROMPT.len() as u64 + 2;
        let first = distribution(&PROMPT, length);
        let mut statistic = 0.0;
        for (a, of_first) in first.iter().enumerate() {
            let second = distribution(&[&PROMPT[..], &[a as u32]].concat(), length);
            for (b, of_second) in second.iter().enumerate() {
                let expected = TEXTS as f64 * of_first * of_second;
                statistic += (counts[a][b] as f64 - expected).powi(2) / expected;
            }
        }
        assert!(statistic < 103.4, "{statistic}, {accepted} accepted");
    }
}
