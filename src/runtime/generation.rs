//! Generation loop: continues a prompt token by token. Sampling, penalties, grammars, drafts, log-probabilities, stop
//! rules and timings are implemented here for all callers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::backend::Phase;
use super::constraint::Constraint;
use super::draft::Drafter;
use super::error::RuntimeError;
use super::forward::{ForwardOptions, ForwardOutput, Hidden, Positions};
use super::logprobs::Logprobs;
use super::lookup::{PromptLookup, Speculation};
use super::model::LoadedModel;
use super::prefix::common;
use super::request::GenerationRequest;
use super::sampling::Sampler;
use super::session::TokenSession;
use super::together::{NextTokens, forward_together};
use anec_base::Result;

/// Minimum and maximum n-gram length for prompt lookup.
const NGRAM: (usize, usize) = (2, 8);

/// Generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct GeneratedToken {
    /// Token id.
    pub id: u32,
    /// Log-probability and alternatives, if requested.
    pub logprobs: Option<Logprobs>,
}

/// Reason why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// Stop token, stop string, or end of the grammar.
    Stop,
    /// Maximum number of tokens.
    Length,
    /// Full KV cache.
    Context,
    /// Repeated n-gram.
    Repetition,
    /// Interruption by the receiver.
    Interrupted,
}

/// Result of a generation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GenerationOutput {
    /// Generated token ids.
    pub ids: Vec<u32>,
    /// Reason why the text ended.
    pub finish: Finish,
    /// Timings of the generation.
    #[serde(flatten)]
    pub timings: Timings,
    /// Numbers of drafted and accepted tokens.
    pub speculation: Speculation,
}

/// Timings of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Number of prompt tokens that the session already held.
    pub cached_tokens: usize,
    /// Prefill throughput in tokens per second, of computed tokens.
    pub prefill_tps: f64,
    /// Decode throughput in tokens per second, after the first token.
    pub decode_tps: f64,
    /// Time to first token in milliseconds.
    pub ttft_ms: f64,
    /// Total time in seconds.
    pub elapsed_s: f64,
}

impl GenerationRequest {
    /// Starts the generation in a new session with room for the prompt and as much of the continuation as fits.
    ///
    /// # Errors
    /// If the prompt doesn't fit; any error of [`TokenSession::generate`].
    pub fn start(self, model: &Arc<LoadedModel>) -> Result<Generation> {
        model.start(self.length(model))?.generate(self)
    }
}

impl TokenSession {
    /// Continues a prompt; returns an iterator over the generated tokens. The longest common prefix of prompt and
    /// session isn't computed again; other tokens of the session are dropped.
    ///
    /// # Errors
    /// If the prompt is empty, a sampling parameter is out of range, or states can't be allocated.
    pub fn generate(self, request: GenerationRequest) -> Result<Generation> {
        self.model().continues_texts()?;
        Generation::new(self, request)
    }
}

/// Text being generated: an iterator over its tokens that owns the session. [`Generation::step`] makes one model call
/// at a time, so that generations can be interleaved.
pub struct Generation {
    session: TokenSession,
    request: GenerationRequest,
    sampler: Sampler,
    constraint: Option<Constraint>,
    lookup: Option<PromptLookup>,
    /// Whether the last draft came from prompt lookup.
    looked_up: bool,
    drafter: Option<Drafter>,
    speculation: Speculation,
    /// Maximum number of prompt tokens per step.
    prompt_chunk: usize,
    /// Number of prompt tokens that the session already held.
    cached: usize,
    ids: Vec<u32>,
    /// Reused buffers of a call's tokens and output.
    call: Vec<u32>,
    output: ForwardOutput,
    /// Tokens and output of a call made together with other texts.
    computed: Option<Result<(Vec<u32>, ForwardOutput)>>,
    /// Tokens that [`Iterator::next`] hasn't returned yet.
    ready: VecDeque<GeneratedToken>,
    finish: Option<Finish>,
    /// Whether a step failed; nothing follows.
    failed: bool,
    start: Instant,
    prefill: Duration,
    first_token: Option<Instant>,
    end: Option<Instant>,
}

impl Generation {
    fn new(mut session: TokenSession, request: GenerationRequest) -> Result<Self> {
        if request.prompt.is_empty() {
            return Err(RuntimeError::NoTokens.into());
        }
        request.sampling.check()?;
        request.check(session.model(), false)?;
        let start = Instant::now();
        // the last token has to be computed for its logits
        let cached = common(session.tokens(), &request.prompt).min(request.prompt.len() - 1);
        let cached = cached - cached % session.written_at_least() as usize;
        session.rewind(cached as u64)?;
        session.enter(Phase::Prompt);
        if request.prompt.len() as u64 <= session.limit() {
            // a prompt computed in parts doesn't move between contexts
            session.make_room(request.prompt.len() as u64)?;
        }
        let most_written = (request.length(session.model()) as usize + 1).saturating_sub(request.prompt.len());
        let lookup = (request.speculation > 0).then(|| PromptLookup::new(&request.prompt, NGRAM.0, NGRAM.1));
        Ok(Generation {
            session,
            sampler: Sampler::new(request.sampling, &request.prompt),
            request,
            constraint: None,
            lookup,
            looked_up: false,
            drafter: None,
            speculation: Speculation::default(),
            prompt_chunk: usize::MAX,
            cached,
            ids: Vec::with_capacity(most_written),
            call: Vec::new(),
            output: ForwardOutput::default(),
            computed: None,
            ready: VecDeque::new(),
            finish: None,
            failed: false,
            start,
            prefill: Duration::ZERO,
            first_token: None,
            end: None,
        })
    }

    /// Constrains the text by a grammar.
    #[must_use]
    pub fn with_constraint(mut self, constraint: Option<Constraint>) -> Self {
        self.constraint = constraint.map(Constraint::independent);
        self
    }

    /// Drafts up to `tokens` tokens per call with a smaller model or the bundle's own [draft
    /// layer](LoadedModel::draft_layer), where the text's past gives no draft
    /// ([`speculation`](GenerationRequest::speculation)). The text stays the same, to the last token.
    ///
    /// # Errors
    /// Returns any error of [`Drafter::new`].
    pub fn with_draft(mut self, model: &Arc<LoadedModel>, tokens: usize) -> Result<Self> {
        let length = self.request.length(self.session.model());
        let mut drafter = Drafter::new(model, length, tokens)?;
        drafter.receive_from(self.session.tokens().len());
        self.drafter = Some(drafter);
        Ok(self)
    }

    /// Limits the prompt tokens per step; without a limit, prefill is one step.
    #[must_use]
    pub fn with_prompt_chunk(mut self, tokens: usize) -> Self {
        self.prompt_chunk = tokens.max(1).next_multiple_of(self.session.written_at_least() as usize);
        self
    }

    /// Returns the request.
    pub fn request(&self) -> &GenerationRequest {
        &self.request
    }

    /// Returns the session.
    pub fn session(&self) -> &TokenSession {
        &self.session
    }

    /// Returns the session for the next text.
    pub fn into_session(self) -> TokenSession {
        self.session
    }

    /// Returns whether the prompt is computed and the first token chosen.
    pub fn has_begun(&self) -> bool {
        self.first_token.is_some()
    }

    /// Makes one model call: a part of the prompt, or the last token with drafted ones after it. The resulting tokens
    /// are ready for the iterator afterwards. Returns the reason if the text ended.
    ///
    /// # Errors
    /// If the prompt doesn't fit, or a function fails.
    pub fn step(&mut self) -> Result<Option<Finish>> {
        if self.finish.is_none() {
            let stepped = if self.has_begun() { self.decode() } else { self.prefill() };
            match stepped {
                Ok(Some(finish)) => self.stop(finish),
                Ok(None) => {}
                Err(error) => {
                    self.failed = true;
                    return Err(error);
                }
            }
        }
        Ok(self.finish)
    }

    /// Returns whether another step follows: the text has neither ended nor failed.
    pub fn is_unfinished(&self) -> bool {
        self.finish.is_none() && !self.failed
    }

    /// Makes the next calls of several texts, prefill included, by [`forward_together`]. The following steps use the
    /// results, which equal those of separate calls, bit for bit.
    pub fn compute_together<'a>(generations: impl IntoIterator<Item = &'a mut Generation>) {
        // hidden states for a draft layer aren't available from shared calls
        let shares = |own: &&mut Generation| own.is_unfinished() && own.computed.is_none() && !own.needs_hidden();
        let sharing: Vec<&mut Generation> = generations.into_iter().filter(shares).collect();
        if sharing.len() < 2 {
            return;
        }
        let mut asking = Vec::with_capacity(sharing.len());
        for generation in sharing {
            match generation.next_call() {
                Ok(call) => asking.push((generation, call)),
                Err(error) => generation.computed = Some(Err(error)),
            }
        }
        let texts = asking.iter_mut().map(|(generation, (tokens, logits))| NextTokens {
            largest: generation.chooses_of_largest(),
            session: &mut generation.session,
            tokens,
            logits: *logits,
        });
        let found = forward_together(texts.collect());
        for ((generation, (call, _)), output) in asking.into_iter().zip(found) {
            generation.computed = Some(output.map(|output| (call, output)));
        }
    }

    /// Returns the next ready token.
    pub fn ready(&mut self) -> Option<GeneratedToken> {
        self.ready.pop_front()
    }

    /// Ends the text; no further token is computed. A text that has ended stays unchanged.
    pub fn stop(&mut self, finish: Finish) {
        if self.finish.is_none() {
            self.finish = Some(finish);
            self.end = Some(Instant::now());
        }
    }

    /// Ends the text at a stop string, overriding any earlier reason.
    pub(super) fn end_at_stop_string(&mut self) {
        self.finish = Some(Finish::Stop);
        self.end.get_or_insert_with(Instant::now);
    }

    /// Generates to the end.
    ///
    /// # Errors
    /// If the prompt doesn't fit, or a function fails.
    pub fn run(&mut self) -> Result<GenerationOutput> {
        while self.step()?.is_none() {}
        Ok(self.output())
    }

    /// Returns the tokens and timings so far. A text that hasn't ended counts as interrupted.
    pub fn output(&self) -> GenerationOutput {
        let end = self.end.unwrap_or_else(Instant::now);
        let first_token = self.first_token.unwrap_or(end);
        let timings = Timings {
            cached_tokens: self.cached,
            prefill_tps: rate(self.request.prompt.len() - self.cached, self.prefill),
            decode_tps: rate(self.ids.len().saturating_sub(1), end - first_token),
            ttft_ms: (first_token - self.start).as_secs_f64() * 1e3,
            elapsed_s: (end - self.start).as_secs_f64(),
        };
        let finish = self.finish.unwrap_or(Finish::Interrupted);
        GenerationOutput { ids: self.ids.clone(), finish, timings, speculation: self.speculation }
    }

    /// Prefills the next part of the prompt; the last part yields the first token.
    fn prefill(&mut self) -> Result<Option<Finish>> {
        let (call, mut output) = self.compute()?;
        self.tell(&output.hidden, call.len());
        self.call = call;
        if self.session.tokens().len() < self.request.prompt.len() {
            self.output = output;
            return Ok(None);
        }
        // checkpoints copy states, so they are made only where another text may share the prompt
        if self.session.kept {
            self.session.checkpoint()?;
        }
        self.session.enter(Phase::Writing);
        self.prefill = self.start.elapsed();
        if self.request.max_tokens == 0 {
            return Ok(Some(Finish::Length));
        }
        let full = !self.session.holds_another(self.session.position());
        let ForwardOutput { logits, tokens, .. } = &mut output;
        let end = self.choose(logits, tokens, full)?;
        self.output = output;
        self.first_token = Some(Instant::now());
        Ok(end)
    }

    /// Computes the last token and verifies drafted ones after it.
    fn decode(&mut self) -> Result<Option<Finish>> {
        let (call, mut output) = self.compute()?;
        let ForwardOutput { logits, tokens, hidden } = &mut output;
        let before = self.session.position() - call.len() as u64;
        let width = logits.len() / call.len();
        let mut end = None;
        for (i, row) in logits.chunks_exact_mut(width).enumerate() {
            let position = before + i as u64 + 1;
            let tokens = tokens.get(i * width..(i + 1) * width).unwrap_or_default();
            end = self.choose(row, tokens, !self.session.holds_another(position))?;
            // the next row follows a correct draft; results after a wrong one are dropped
            let accepted = end.is_none() && call.get(i + 1).is_some_and(|draft| self.ids.last() == Some(draft));
            if !accepted {
                self.session.rewind(position)?;
                self.tell(hidden, i + 1);
                self.speculation.accepted += i;
                if let Some(lookup) = self.lookup.as_mut().filter(|_| call.len() > 1 && self.looked_up) {
                    lookup.record(i);
                }
                break;
            }
        }
        (self.call, self.output) = (call, output);
        Ok(end)
    }

    /// Returns whether tokens are chosen from the largest logits, so that the others needn't be known.
    fn chooses_of_largest(&self) -> bool {
        let enough = |k| self.request.needs_logits(k).is_none();
        self.constraint.is_none() && self.session.model().largest_logits().is_some_and(enough)
    }

    /// Returns whether the drafter reads the model's hidden states.
    fn needs_hidden(&self) -> bool {
        self.drafter.as_ref().is_some_and(Drafter::reads_hidden)
    }

    /// Runs the model and records hidden states if the drafter reads them.
    fn forward(&mut self, tokens: &[u32], ask: ForwardOptions, output: &mut ForwardOutput) -> Result<()> {
        let hidden = if self.needs_hidden() { Hidden::BetweenFunctions } else { ask.hidden };
        self.session.forward_into(tokens, &ForwardOptions { hidden, ..ask }, output)
    }

    /// Passes the last layer's output for the first `tokens` tokens of a call to the drafter.
    fn tell(&mut self, hidden: &[Vec<f32>], tokens: usize) {
        let width = self.session.model().bundle().model.hidden_size as usize;
        if let (Some(drafter), Some(last)) = (&mut self.drafter, hidden.last()) {
            drafter.tell(&last[..last.len().min(tokens * width)]);
        }
    }

    /// Returns the tokens and output of the next call, unless a shared call computed them already.
    fn compute(&mut self) -> Result<(Vec<u32>, ForwardOutput)> {
        if let Some(computed) = self.computed.take() {
            return computed;
        }
        let (call, logits) = self.next_call()?;
        let mut output = std::mem::take(&mut self.output);
        let ask = ForwardOptions { logits, largest: self.chooses_of_largest(), ..ForwardOptions::default() };
        self.forward(&call, ask, &mut output)?;
        Ok((call, output))
    }

    /// Returns the tokens of the next call and the positions with logits: a part of the prompt, or the last token and
    /// drafted ones after it.
    fn next_call(&mut self) -> Result<(Vec<u32>, Positions)> {
        self.request.check(self.session.model(), self.constraint.is_some())?;
        let mut call = std::mem::take(&mut self.call);
        call.clear();
        if self.has_begun() {
            call.extend(self.ids.last());
            call.extend(self.draft()?);
            return Ok((call, Positions::All));
        }
        let rest = &self.request.prompt[self.session.tokens().len()..];
        // a single remaining token joins the previous part
        let (part, logits) = match self.prompt_chunk < rest.len() - 1 {
            true => (&rest[..self.prompt_chunk], Positions::None),
            false => (rest, Positions::Last),
        };
        call.extend(part);
        Ok((call, logits))
    }

    /// Drafts the next tokens, as far as one call, the text and the context have room. Drafts nothing where rewinding
    /// would recompute the text.
    fn draft(&mut self) -> Result<Vec<u32>> {
        let looked_up = match &mut self.lookup {
            None => Vec::new(),
            Some(lookup) => {
                let most = max_drafted(&self.session, &self.request, self.ids.len(), self.request.speculation)?;
                if most > 0 { lookup.draft(most).to_vec() } else { Vec::new() }
            }
        };
        self.looked_up = !looked_up.is_empty();
        let draft = match &mut self.drafter {
            Some(drafter) if !self.looked_up => {
                let most = max_drafted(&self.session, &self.request, self.ids.len(), drafter.most())?;
                drafter.draft(&self.request, &self.ids, &self.sampler, most)?
            }
            _ => looked_up,
        };
        if draft.is_empty() || !self.session.checkpoint()? {
            return Ok(Vec::new());
        }
        self.speculation.drafted += draft.len();
        Ok(draft)
    }

    /// Chooses the next token from a row of logits, those of `tokens` or of all. `full` means that no further token can
    /// be computed.
    fn choose(&mut self, logits: &mut [f32], tokens: &[u32], full: bool) -> Result<Option<Finish>> {
        let known = self.request.logprobs.map(|_| logits.to_vec());
        // with only some of the logits, there are no penalties, biases and constraints
        self.sampler.penalise(logits);
        self.request.add_biases(logits);
        if let Some(constraint) = &mut self.constraint {
            constraint.mask_logits(logits)?;
        }
        let id = self.sampler.next_of(tokens, logits);
        if self.request.stops.contains(&id) {
            return Ok(Some(Finish::Stop));
        }
        let logprobs = known.zip(self.request.logprobs).map(|(logits, count)| Logprobs::of(&logits, id, count));
        self.sampler.accept_token(id);
        if let Some(lookup) = &mut self.lookup {
            lookup.accept_token(id);
        }
        self.ids.push(id);
        self.ready.push_back(GeneratedToken { id, logprobs });
        if let Some(constraint) = &mut self.constraint {
            constraint.accept_token(id)?;
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
}

impl Iterator for Generation {
    type Item = Result<GeneratedToken>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(token) = self.ready() {
                return Some(Ok(token));
            }
            if self.failed || self.finish.is_some() {
                return None;
            }
            if let Err(error) = self.step() {
                return Some(Err(error));
            }
        }
    }
}

/// Returns the maximum number of drafted tokens after `written` generated ones: `wish`, limited by one call, the text
/// and the context.
fn max_drafted(session: &TokenSession, request: &GenerationRequest, written: usize, wish: usize) -> Result<usize> {
    let one_call = session.largest_call(wish as u64 + 1)?;
    let wanted = request.max_tokens.saturating_sub(written + 1);
    let room = session.limit().saturating_sub(session.position() + 1);
    Ok((one_call as usize).saturating_sub(1).min(wanted).min(room as usize))
}

/// Returns whether the last `length` tokens occurred in the text before.
fn repeats(text: &[u32], length: usize) -> bool {
    if length == 0 || text.len() <= length {
        return false;
    }
    let (before, last) = (&text[..text.len() - 1], &text[text.len() - length..]);
    before.windows(length).any(|window| window == last)
}

/// Returns a rate per second; zero if nothing was timed.
fn rate(count: usize, time: Duration) -> f64 {
    if count == 0 || time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeOptions};
    use super::super::sampling::{Sampling, argmax};
    use super::*;

    fn request(prompt: &[u32], max_tokens: usize) -> GenerationRequest {
        GenerationRequest { prompt: prompt.to_vec(), max_tokens, ..GenerationRequest::default() }
    }

    /// Returns greedy choices computed over whole texts.
    fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
        let length = (prompt.len() + count) as u64;
        let mut text = prompt.to_vec();
        for _ in 0..count {
            let (_, logits) = fake::reference(&text, length);
            text.push(argmax(&logits[logits.len() - fake::VOCAB..]));
        }
        text.split_off(prompt.len())
    }

    #[test]
    fn a_greedy_continuation_is_that_of_whole_texts() {
        let (model, _) = fake::model(&FakeOptions::default());
        let request = request(&[3, 1, 4, 1, 5], 8);
        let mut generation = request.clone().start(&model).unwrap();
        let streamed: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
        let generation = generation.output();
        assert_eq!(generation.ids, expected(&request.prompt, 8));
        assert_eq!(generation.ids, streamed);
        assert_eq!(generation.finish, Finish::Length);
    }

    #[test]
    fn a_stop_token_ends_the_text_and_is_no_part_of_it() {
        let (model, _) = fake::model(&FakeOptions::default());
        let whole = expected(&[3, 1, 4], 8);
        let mut request = request(&[3, 1, 4], 8);
        request.stops = vec![whole[2]];
        let generation = run(&model, &request);
        let end = whole.iter().position(|id| *id == whole[2]).unwrap();
        assert_eq!((generation.ids.as_slice(), generation.finish), (&whole[..end], Finish::Stop));
    }

    #[test]
    fn a_full_context_ends_the_text() {
        let (model, _) = fake::model(&FakeOptions::default());
        let request = request(&[2; 14], 100);
        let generation = run(&model, &request);
        // slots 14 and 15 take two of the tokens; the third is known, but nothing can follow it
        assert_eq!((generation.ids.len(), generation.finish), (3, Finish::Context));
        assert!(self::request(&[2; 17], 1).start(&model).is_err());
    }

    #[test]
    fn the_receiver_can_stop() {
        let (model, _) = fake::model(&FakeOptions::default());
        let request = request(&[2], 10);
        let mut generation = request.start(&model).unwrap();
        assert!(generation.next().is_some());
        let output = generation.output();
        assert_eq!((output.ids.len(), output.finish), (1, Finish::Interrupted));
        generation.stop(Finish::Stop);
        assert!(generation.next().is_none(), "a text that was ended stays so");
        assert_eq!(generation.run().unwrap().finish, Finish::Stop);
    }

    fn run(model: &Arc<LoadedModel>, request: &GenerationRequest) -> GenerationOutput {
        request.clone().start(model).unwrap().run().unwrap()
    }

    #[test]
    fn drafts_only_change_the_calls() {
        for recurrent in [false, true] {
            for forks in [false, true] {
                let form = FakeOptions { contexts: vec![200], recurrent, forks, ..FakeOptions::default() };
                let (model, calls) = fake::model(&form);
                let count = || std::mem::take(&mut *calls.lock().unwrap()).len();
                for (temperature, repetition_penalty) in [(0.0, 1.0), (0.3, 1.0), (0.0, 1.2)] {
                    let sampling = Sampling { temperature, repetition_penalty, seed: 3, ..Sampling::default() };
                    let plain = GenerationRequest { sampling, logprobs: Some(2), ..request(&[3, 1, 4, 1, 5], 150) };
                    let expected = run(&model, &plain);
                    let calls_without = count();
                    let guessing = GenerationRequest { speculation: 3, ..plain };
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
            let (model, calls) = fake::model(&FakeOptions { recurrent, ..FakeOptions::default() });
            let mut kept = Some(model.start(16).unwrap());
            let mut ask = |prompt: &[u32]| {
                calls.lock().unwrap().clear();
                let mut generation = kept.take().unwrap().generate(request(prompt, 3)).unwrap();
                let output = generation.run().unwrap();
                kept = Some(generation.into_session());
                let expected = model.start(16).unwrap().generate(request(prompt, 3)).unwrap().run().unwrap();
                assert_eq!(output.ids, expected.ids);
                output
            };
            let first = ask(&[3, 1, 4, 1]);
            assert_eq!(first.timings.cached_tokens, 0);
            let next = [&[3, 1, 4, 1], first.ids.as_slice(), &[5, 5]].concat();
            assert_eq!(ask(&next).timings.cached_tokens, 6, "all but the token that was chosen last");
            assert_eq!(ask(&next).timings.cached_tokens, next.len() - 1, "the last is computed again");
            assert_eq!(ask(&[3, 1, 7]).timings.cached_tokens, 2);
        }
    }

    #[test]
    fn parts_of_a_prompt_make_the_whole() {
        let (model, _) = fake::model(&FakeOptions::default());
        let request = request(&[3, 1, 4, 1, 5, 2, 6], 4);
        let mut generation = request.clone().start(&model).unwrap().with_prompt_chunk(2);
        let mut parts = 0;
        while !generation.has_begun() {
            assert_eq!((generation.step().unwrap(), generation.ready().is_some()), (None, parts == 2));
            parts += 1;
        }
        assert_eq!((parts, generation.run().unwrap().ids), (3, run(&model, &request).ids));
    }

    #[test]
    fn a_failure_ends_the_tokens() {
        let script = vec![(20, fake::FakeFailure::Error)];
        let (model, _) = fake::model(&FakeOptions { script, ..FakeOptions::default() });
        let tokens: Vec<_> = request(&[3, 1, 4], 8).start(&model).unwrap().collect();
        let (last, before) = tokens.split_last().unwrap();
        assert!(last.is_err() && !before.is_empty() && before.iter().all(Result::is_ok));
    }

    #[test]
    fn sampling_parameters_are_checked() {
        let (model, _) = fake::model(&FakeOptions::default());
        let sampling = Sampling { min_p: 2.0, ..Sampling::default() };
        let refused = GenerationRequest { sampling, ..request(&[3], 8) }.start(&model).err().unwrap();
        assert_eq!(refused.to_string(), "`min_p` is 2, but has to be from 0 to 1");
    }

    #[test]
    fn a_text_that_repeats_itself_ends() {
        assert!(repeats(&[1, 2, 3, 1, 2], 2) && repeats(&[1, 1], 1) && repeats(&[1, 1, 1], 2));
        assert!(!repeats(&[1, 2, 3, 2, 1], 2) && !repeats(&[1, 2], 2) && !repeats(&[1, 1, 1], 0));
        let (model, _) = fake::model(&FakeOptions { contexts: vec![200], ..FakeOptions::default() });
        let whole = run(&model, &request(&[3, 1, 4], 150)).ids;
        let end = (1..=150).find(|end| repeats(&whole[..*end], 6)).expect("the double's texts go round in circles");
        let generation = run(&model, &GenerationRequest { stop_repeat_ngram: 6, ..request(&[3, 1, 4], 150) });
        assert_eq!((generation.ids.as_slice(), generation.finish), (&whole[..end], Finish::Repetition));
    }

    #[test]
    fn biases_open_and_close_tokens() {
        let (model, _) = fake::model(&FakeOptions::default());
        let forced = run(&model, &GenerationRequest { logit_bias: vec![(6, 1e6)], ..request(&[3, 1], 4) });
        assert_eq!(forced.ids, [6; 4]);
        let closed = run(&model, &GenerationRequest { logit_bias: vec![(forced.ids[0], -1e6)], ..request(&[3, 1], 8) });
        assert!(!closed.ids.contains(&6));
    }
}
