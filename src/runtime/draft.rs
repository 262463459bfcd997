//! Drafts of a smaller model (speculative decoding, arXiv:2211.17192, arXiv:2302.01318): it writes the next few tokens, and the
//! model verifies them in one call.
//!
//! The text stays what the model alone would write, token for token, sampled or not. The model draws each token from its own
//! distribution, by its own random numbers; a draft counts only if it is the token that was drawn. So that it often is, the smaller
//! model draws with the same random numbers: where both have the same distribution they draw the same token.

use std::sync::Arc;

use super::forward::ForwardOptions;
use super::generation::GenerationRequest;
use super::model::LoadedModel;
use super::prefix::common;
use super::sampling::Sampler;
use super::session::TokenSession;
use anec_base::Result;

/// A smaller model on the same text.
pub struct Drafter {
    session: TokenSession,
    most: usize,
}

impl Drafter {
    /// Drafts of at most `most` tokens by `model`, for texts of up to `length` tokens or as many as fit.
    ///
    /// # Errors
    /// When the model doesn't continue texts, or the backend has no room.
    pub fn new(model: &Arc<LoadedModel>, length: u64, most: usize) -> Result<Self> {
        model.continues_texts()?;
        Ok(Drafter { session: model.start(length.min(model.context()))?, most })
    }

    /// Tokens of a draft, at most.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Up to `most` tokens that may follow `prompt` and the text `ids` after it; `sampler` is the model's, before it draws
    /// them. None where the text is beyond the smaller model's context or vocabulary.
    ///
    /// # Errors
    /// When a function fails.
    pub fn draft(
        &mut self,
        request: &GenerationRequest,
        ids: &[u32],
        sampler: &Sampler,
        most: usize,
    ) -> Result<Vec<u32>> {
        let text = [&request.prompt, ids].concat();
        let session = &mut self.session;
        let vocabulary = session.model().bundle().model.vocab_size;
        let room = session.limit().saturating_sub(text.len() as u64 - 1);
        let most = most.min(self.most).min(room as usize);
        if most == 0 || text.iter().any(|token| u64::from(*token) >= vocabulary) {
            return Ok(Vec::new());
        }
        // the last token is computed for its logits; what was drafted and not taken is forgotten
        let known = common(session.tokens(), &text).min(text.len() - 1);
        session.rewind(known as u64)?;
        let mut logits = session.forward(&text[known..], &ForwardOptions::last())?.logits;
        session.checkpoint()?;
        let (mut sampler, mut draft) = (sampler.clone(), Vec::new());
        loop {
            sampler.penalise(&mut logits);
            request.add_biases(&mut logits);
            let token = sampler.next(&logits);
            if request.stops.contains(&token) {
                return Ok(draft);
            }
            sampler.accept_token(token);
            draft.push(token);
            if draft.len() == most {
                return Ok(draft);
            }
            logits = session.forward(&[token], &ForwardOptions::last())?.logits;
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
        // a twin; one that has another table for long texts, and ends early; one that can't go back
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
                        // a twin draws the same, whatever is random
                        if number == 0 && speculation == 0 {
                            assert_eq!(counts.accepted, counts.drafted);
                            assert!(counts.accepted >= 21, "{counts:?}: three of four of 29 tokens");
                        }
                    }
                }
            }
        }
    }

    /// The share of every text of two tokens, over many seeds, is its probability: chi-squared with 63 degrees of freedom is below
    /// 103.4 in 999 of 1000 cases.
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
