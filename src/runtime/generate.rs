//! Continues a prompt token by token.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::ask::{Ask, Chunking, Hidden, Positions};
use super::constraint::Constraint;
use super::error::RuntimeError;
use super::logprobs::Logprobs;
use super::lookup::{Lookup, Speculation};
use super::model::Model;
use super::prefix::common;
use super::sampling::{Sampler, Sampling};
use super::session::Session;
use anec_base::Result;

/// What to continue, and how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Most tokens to add.
    pub max_tokens: usize,
    /// How they are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text; they aren't part of it.
    pub stops: Vec<u32>,
    /// Ends the text when its last tokens, this many, stood in it before; 0 for never.
    pub stop_repeat_ngram: usize,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// How likely each token was, with this many alternatives, is wanted.
    pub logprobs: Option<usize>,
    /// Most tokens that are guessed from the text's past and checked in one call; 0 for none. The text is the same either
    /// way.
    pub speculation: usize,
}

/// Least and most last tokens that guesses go by.
const NGRAM: (usize, usize) = (2, 8);

/// A token of a continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub id: u32,
    /// How likely it was, where wanted.
    pub logprobs: Option<Logprobs>,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// A stop token or string, or the end of a grammar.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The key-value cache is full.
    Context,
    /// Its last tokens stood in it before.
    Repetition,
    /// The receiver wanted no more.
    Interrupted,
}

/// A continuation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Generation {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// How long it took.
    #[serde(flatten)]
    pub timings: Timings,
    /// What guessing was worth.
    pub speculation: Speculation,
}

/// How long a continuation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Prompt tokens that an earlier text had computed.
    pub cached_tokens: usize,
    /// Prompt tokens per second, of those that had to be computed.
    pub prefill_tps: f64,
    /// Tokens per second after the first.
    pub decode_tps: f64,
    /// Milliseconds until the first token.
    pub ttft_ms: f64,
    /// Seconds in all.
    pub elapsed_s: f64,
}

impl Request {
    /// Tokens of prompt and continuation, as far as they fit.
    pub fn length(&self, model: &Model) -> u64 {
        let prompt = self.prompt.len() as u64;
        prompt.saturating_add(self.max_tokens as u64).min(model.context()).max(prompt)
    }

    /// Begins the session that this request needs: with room for the prompt and as much of the continuation as fits.
    ///
    /// # Errors
    /// When the prompt itself doesn't fit.
    pub fn session(&self, model: &Arc<Model>) -> Result<Session> {
        model.start(self.length(model))
    }
}

/// A continuation in the making. It doesn't hold its session, so that many can take turns.
pub struct Generator {
    request: Request,
    sampler: Sampler,
    constraint: Option<Constraint>,
    lookup: Option<Lookup>,
    speculation: Speculation,
    /// Prompt tokens that the session had already.
    cached: usize,
    ids: Vec<u32>,
    start: Instant,
    prefill: Duration,
    first_token: Option<Instant>,
}

impl Generator {
    /// Begins to continue the request's prompt in a session. Tokens that the session holds and the prompt begins with
    /// aren't computed again; others are forgotten.
    ///
    /// # Errors
    /// When the prompt is empty, or states can't be had.
    pub fn new(request: Request, constraint: Option<Constraint>, session: &mut Session) -> Result<Self> {
        if request.prompt.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        let start = Instant::now();
        // the last token has to be computed for its logits
        let cached = common(session.tokens(), &request.prompt).min(request.prompt.len() - 1);
        session.rewind(cached as u64)?;
        let lookup = (request.speculation > 0).then(|| Lookup::new(&request.prompt, NGRAM.0, NGRAM.1));
        Ok(Generator {
            sampler: Sampler::new(request.sampling, &request.prompt),
            request,
            constraint,
            lookup,
            speculation: Speculation::default(),
            cached,
            ids: Vec::new(),
            start,
            prefill: Duration::ZERO,
            first_token: None,
        })
    }

    /// The prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.request.prompt
    }

    /// Computes a part of the prompt, at most `most` tokens, but never the last one, after which comes the first token of
    /// the continuation. Gives whether more is to come: others can take a turn between the parts.
    ///
    /// # Errors
    /// When the prompt doesn't fit, or a function fails.
    pub fn prefill(&mut self, session: &mut Session, most: usize) -> Result<bool> {
        let (done, last) = (session.tokens().len(), self.request.prompt.len() - 1);
        if self.first_token.is_some() || done + most >= last {
            return Ok(false);
        }
        session.forward(&self.request.prompt[done..done + most], &Ask::none())?;
        Ok(true)
    }

    /// Goes on by one call: what is left of the prompt, or the last token with some guesses after it. `out` gets the tokens
    /// that follow; the result says why the text ended, if it did.
    ///
    /// # Errors
    /// When the prompt doesn't fit, or a function fails.
    pub fn step(&mut self, session: &mut Session, out: &mut Vec<Choice>) -> Result<Option<Finish>> {
        let before = session.position();
        if self.first_token.is_none() {
            let rest = &self.request.prompt[before as usize..];
            let mut logits = session.forward(rest, &Ask::last())?.logits;
            session.checkpoint()?;
            self.prefill = self.start.elapsed();
            if self.request.max_tokens == 0 {
                return Ok(Some(Finish::Length));
            }
            let end = self.choose(&mut logits, session.position() == session.limit(), out)?;
            self.first_token = Some(Instant::now());
            return Ok(end);
        }
        let Some(last) = self.ids.last() else { return Ok(Some(Finish::Length)) };
        let mut call = vec![*last];
        call.extend(self.draft(session)?);
        let ask = Ask { logits: Positions::All, hidden: Hidden::No, chunking: Chunking::Largest };
        let mut logits = session.forward(&call, &ask)?.logits;
        let width = logits.len() / call.len();
        let mut end = None;
        for (i, row) in logits.chunks_exact_mut(width).enumerate() {
            let position = before + i as u64 + 1;
            end = self.choose(row, position == session.limit(), out)?;
            // a guess that comes true has its logits in the next row; what was computed after a wrong one goes away
            let accepted = end.is_none() && call.get(i + 1).is_some_and(|guess| self.ids.last() == Some(guess));
            if !accepted {
                session.rewind(position)?;
                self.speculation.accepted += i;
                if let Some(lookup) = self.lookup.as_mut().filter(|_| call.len() > 1) {
                    lookup.judge(i);
                }
                break;
            }
        }
        Ok(end)
    }

    /// Guesses what comes next: as many tokens as fit into one call, the text and the context. Where going back would mean
    /// to compute the text again, nothing is guessed.
    fn draft(&mut self, session: &mut Session) -> Result<Vec<u32>> {
        let Some(lookup) = &mut self.lookup else { return Ok(Vec::new()) };
        let one_call = session.model().largest_call(session.limit(), self.request.speculation as u64 + 1)?;
        let wanted = self.request.max_tokens.saturating_sub(self.ids.len() + 1);
        let room = session.limit().saturating_sub(session.position() + 1);
        let most = (one_call as usize).saturating_sub(1).min(wanted).min(room as usize);
        let draft = if most > 0 { lookup.draft(most).to_vec() } else { Vec::new() };
        if draft.is_empty() || !session.checkpoint()? {
            return Ok(Vec::new());
        }
        self.speculation.drafted += draft.len();
        Ok(draft)
    }

    /// Adds the token that a row of logits leads to. `full` says that no further token can be computed.
    fn choose(&mut self, logits: &mut [f32], full: bool, out: &mut Vec<Choice>) -> Result<Option<Finish>> {
        let known = self.request.logprobs.map(|_| logits.to_vec());
        self.sampler.penalise(logits);
        for (token, bias) in &self.request.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.close(logits)?;
        }
        let id = self.sampler.next(logits);
        if self.request.stops.contains(&id) {
            return Ok(Some(Finish::Stop));
        }
        let logprobs = known.zip(self.request.logprobs).map(|(logits, count)| Logprobs::of(&logits, id, count));
        self.sampler.see(id);
        if let Some(lookup) = &mut self.lookup {
            lookup.see(id);
        }
        self.ids.push(id);
        out.push(Choice { id, logprobs });
        if let Some(constraint) = &mut self.constraint {
            constraint.see(id)?;
            if constraint.is_finished() {
                return Ok(Some(Finish::Stop));
            }
        }
        Ok(if repeats(&self.ids, self.request.stop_repeat_ngram) {
            Some(Finish::Repetition)
        } else if self.ids.len() >= self.request.max_tokens {
            Some(Finish::Length)
        } else if full {
            Some(Finish::Context)
        } else {
            None
        })
    }

    /// The tokens so far, and how long they took.
    pub fn finish(&self, finish: Finish) -> Generation {
        let now = Instant::now();
        let first_token = self.first_token.unwrap_or(now);
        let timings = Timings {
            cached_tokens: self.cached,
            prefill_tps: rate(self.request.prompt.len() - self.cached, self.prefill),
            decode_tps: rate(self.ids.len().saturating_sub(1), now - first_token),
            ttft_ms: (first_token - self.start).as_secs_f64() * 1e3,
            elapsed_s: (now - self.start).as_secs_f64(),
        };
        Generation { ids: self.ids.clone(), finish, timings, speculation: self.speculation }
    }
}

/// Continues the request's prompt in a session, which may hold a beginning of it. `each` gets every token as it comes.
///
/// # Errors
/// When the prompt is empty or doesn't fit, or a function fails.
pub fn generate(
    session: &mut Session,
    request: &Request,
    mut each: impl FnMut(u32) -> Result<ControlFlow<()>>,
) -> Result<Generation> {
    let mut generator = Generator::new(request.clone(), None, session)?;
    let mut choices = Vec::new();
    loop {
        let end = generator.step(session, &mut choices)?;
        for choice in choices.drain(..) {
            if each(choice.id)?.is_break() {
                return Ok(generator.finish(Finish::Interrupted));
            }
        }
        if let Some(finish) = end {
            return Ok(generator.finish(finish));
        }
    }
}

/// Whether the last `length` tokens stood in the text before.
fn repeats(text: &[u32], length: usize) -> bool {
    if length == 0 || text.len() <= length {
        return false;
    }
    let (before, last) = (&text[..text.len() - 1], &text[text.len() - length..]);
    before.windows(length).any(|window| window == last)
}

/// Per second; zero where nothing was timed.
fn rate(count: usize, time: Duration) -> f64 {
    if count == 0 || time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::super::double::{self, Form};
    use super::super::sampling::argmax;
    use super::*;

    fn request(prompt: &[u32], max_tokens: usize) -> Request {
        Request { prompt: prompt.to_vec(), max_tokens, ..Request::default() }
    }

    /// Greedy choices over whole texts.
    fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
        let length = (prompt.len() + count) as u64;
        let mut text = prompt.to_vec();
        for _ in 0..count {
            let (_, logits) = double::reference(&text, length);
            text.push(argmax(&logits[logits.len() - double::VOCAB..]));
        }
        text.split_off(prompt.len())
    }

    #[test]
    fn a_greedy_continuation_is_that_of_whole_texts() {
        let (model, _) = double::model(&Form::default());
        let request = request(&[3, 1, 4, 1, 5], 8);
        let mut streamed = Vec::new();
        let each = |id| {
            streamed.push(id);
            Ok(ControlFlow::Continue(()))
        };
        let generation = generate(&mut request.session(&model).unwrap(), &request, each).unwrap();
        assert_eq!(generation.ids, expected(&request.prompt, 8));
        assert_eq!(generation.ids, streamed);
        assert_eq!(generation.finish, Finish::Length);
    }

    #[test]
    fn a_stop_token_ends_the_text_and_is_no_part_of_it() {
        let (model, _) = double::model(&Form::default());
        let whole = expected(&[3, 1, 4], 8);
        let mut request = request(&[3, 1, 4], 8);
        request.stops = vec![whole[2]];
        let generation =
            generate(&mut request.session(&model).unwrap(), &request, |_| Ok(ControlFlow::Continue(()))).unwrap();
        let end = whole.iter().position(|id| *id == whole[2]).unwrap();
        assert_eq!((generation.ids.as_slice(), generation.finish), (&whole[..end], Finish::Stop));
    }

    #[test]
    fn a_full_context_ends_the_text() {
        let (model, _) = double::model(&Form::default());
        let request = request(&[2; 14], 100);
        let generation =
            generate(&mut request.session(&model).unwrap(), &request, |_| Ok(ControlFlow::Continue(()))).unwrap();
        // slots 14 and 15 take two of the tokens; the third is known, but nothing can follow it
        assert_eq!((generation.ids.len(), generation.finish), (3, Finish::Context));
        assert!(self::request(&[2; 17], 1).session(&model).is_err());
    }

    #[test]
    fn the_receiver_can_stop() {
        let (model, _) = double::model(&Form::default());
        let request = request(&[2], 10);
        let generation =
            generate(&mut request.session(&model).unwrap(), &request, |_| Ok(ControlFlow::Break(()))).unwrap();
        assert_eq!((generation.ids.len(), generation.finish), (1, Finish::Interrupted));
    }

    fn run(model: &Arc<Model>, request: &Request) -> Generation {
        generate(&mut request.session(model).unwrap(), request, |_| Ok(ControlFlow::Continue(()))).unwrap()
    }

    #[test]
    fn guesses_change_calls_and_nothing_else() {
        for recurrent in [false, true] {
            for forks in [false, true] {
                let form = Form { contexts: vec![200], recurrent, forks, ..Form::default() };
                let (model, calls) = double::model(&form);
                let count = || std::mem::take(&mut *calls.lock().unwrap()).len();
                for (temperature, repetition_penalty) in [(0.0, 1.0), (0.3, 1.0), (0.0, 1.2)] {
                    let sampling = Sampling { temperature, repetition_penalty, seed: 3, ..Sampling::default() };
                    let plain = Request { sampling, logprobs: Some(2), ..request(&[3, 1, 4, 1, 5], 150) };
                    let expected = run(&model, &plain);
                    let calls_without = count();
                    let guessing = Request { speculation: 3, ..plain };
                    let found = run(&model, &guessing);
                    let calls_with = count();
                    assert_eq!((&found.ids, found.finish), (&expected.ids, expected.finish));
                    assert_eq!(expected.speculation, Speculation::default());
                    if recurrent && !forks {
                        assert_eq!(found.speculation.drafted, 0, "a wrong guess would cost too much");
                    } else if temperature == 0.0 && repetition_penalty == 1.0 {
                        assert!(found.speculation.accepted > 50, "{:?}", found.speculation);
                        assert!(calls_with < calls_without, "{calls_with} calls, {calls_without} without guesses");
                    }
                }
            }
        }
    }

    #[test]
    fn a_session_that_holds_a_beginning_of_the_prompt_goes_on_from_there() {
        for recurrent in [false, true] {
            let (model, calls) = double::model(&Form { recurrent, ..Form::default() });
            let mut session = model.start(16).unwrap();
            let ask = |session: &mut Session, prompt: &[u32]| {
                calls.lock().unwrap().clear();
                let generation = generate(session, &request(prompt, 3), |_| Ok(ControlFlow::Continue(()))).unwrap();
                let mut fresh = model.start(16).unwrap();
                let expected = generate(&mut fresh, &request(prompt, 3), |_| Ok(ControlFlow::Continue(()))).unwrap();
                assert_eq!(generation.ids, expected.ids);
                generation
            };
            let first = ask(&mut session, &[3, 1, 4, 1]);
            assert_eq!(first.timings.cached_tokens, 0);
            let next = [&[3, 1, 4, 1], first.ids.as_slice(), &[5, 5]].concat();
            assert_eq!(ask(&mut session, &next).timings.cached_tokens, 6, "all but the token that was chosen last");
            assert_eq!(ask(&mut session, &next).timings.cached_tokens, next.len() - 1, "the last is computed again");
            assert_eq!(ask(&mut session, &[3, 1, 7]).timings.cached_tokens, 2);
        }
    }

    #[test]
    fn parts_of_a_prompt_make_the_whole() {
        let (model, _) = double::model(&Form::default());
        let request = request(&[3, 1, 4, 1, 5, 2, 6], 4);
        let mut session = request.session(&model).unwrap();
        let mut generator = Generator::new(request.clone(), None, &mut session).unwrap();
        let mut parts = 0;
        while generator.prefill(&mut session, 2).unwrap() {
            parts += 1;
        }
        let mut choices = Vec::new();
        while generator.step(&mut session, &mut choices).unwrap().is_none() {}
        let ids: Vec<u32> = choices.iter().map(|choice| choice.id).collect();
        assert_eq!((parts, ids), (2, run(&model, &request).ids));
    }

    #[test]
    fn a_text_that_repeats_itself_ends() {
        assert!(repeats(&[1, 2, 3, 1, 2], 2) && repeats(&[1, 1], 1) && repeats(&[1, 1, 1], 2));
        assert!(!repeats(&[1, 2, 3, 2, 1], 2) && !repeats(&[1, 2], 2) && !repeats(&[1, 1, 1], 0));
        let (model, _) = double::model(&Form { contexts: vec![200], ..Form::default() });
        let whole = run(&model, &request(&[3, 1, 4], 150)).ids;
        let end = (1..=150).find(|end| repeats(&whole[..*end], 6)).expect("the double's texts go round in circles");
        let generation = run(&model, &Request { stop_repeat_ngram: 6, ..request(&[3, 1, 4], 150) });
        assert_eq!((generation.ids.as_slice(), generation.finish), (&whole[..end], Finish::Repetition));
    }

    #[test]
    fn biases_open_and_close_tokens() {
        let (model, _) = double::model(&Form::default());
        let forced = run(&model, &Request { logit_bias: vec![(6, 1e6)], ..request(&[3, 1], 4) });
        assert_eq!(forced.ids, [6; 4]);
        let closed = run(&model, &Request { logit_bias: vec![(forced.ids[0], -1e6)], ..request(&[3, 1], 8) });
        assert!(!closed.ids.contains(&6));
    }
}
