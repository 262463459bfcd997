//! Batched computation of several texts: each function of the bundle is called once for all of them, so that its
//! weights are read once.
//!
//! Texts can share a call if they are in the same context and take the same function: one for a range of tokens serves
//! all, one for a fixed number those with that many tokens. Longer inputs go through several calls. Other texts are
//! computed one after another, and so are experts in functions of their own, because each text needs different ones.

use std::ops::Range;
use std::sync::Arc;

use super::backend::BatchMember;
use super::call::{after, prepare};
use super::error::RuntimeError;
use super::forward::{ForwardOptions, ForwardOutput, Positions};
use super::head::HeadRows;
use super::hidden::{Columns, Flow};
use super::host::RopeChoice;
use super::inputs::InputBuilder;
use super::model::LoadedModel;
use super::plan::{self, Chunk, Route, Step};
use super::session::TokenSession;
use anec_base::{Error, Result};
use anec_exec::Tensor;

/// Tokens to append to a text.
pub struct NextTokens<'a> {
    /// Session of the text.
    pub session: &'a mut TokenSession,
    /// Token ids.
    pub tokens: &'a [u32],
    /// Positions whose logits are returned.
    pub logits: Positions,
    /// Whether the largest logits suffice, as in [`ForwardOptions`].
    pub largest: bool,
}

/// Computes the next tokens of several texts and returns the requested logits of each. They equal those of
/// [`TokenSession::forward`], bit for bit; a failure affects only its own text.
pub fn forward_together(texts: Vec<NextTokens<'_>>) -> Vec<Result<ForwardOutput>> {
    let mut texts: Vec<Pending<'_>> = texts.into_iter().map(Pending::new).collect();
    loop {
        let unfinished = texts.iter_mut().filter(|text| !text.finished);
        let mut next: Vec<NextCall<'_, '_>> = unfinished.map(NextCall::of).collect();
        if next.is_empty() {
            break;
        }
        while let Some(first) = next.first() {
            let place = first.place;
            let (same, others): (Vec<_>, Vec<_>) = next.into_iter().partition(|call| call.place == place);
            next = others;
            match place {
                Some(Place { route, .. }) if same.len() > 1 => share(route, same),
                _ => same.into_iter().for_each(|call| call.text.finish_alone()),
            }
        }
    }
    texts.into_iter().map(|text| text.failure.map_or(Ok(text.output), Err)).collect()
}

/// Text with its remaining tokens.
struct Pending<'a> {
    session: &'a mut TokenSession,
    /// Tokens that aren't computed yet.
    tokens: &'a [u32],
    wanted: Positions,
    largest: bool,
    output: ForwardOutput,
    failure: Option<Error>,
    finished: bool,
}

impl<'a> Pending<'a> {
    fn new(NextTokens { session, tokens, logits: wanted, largest }: NextTokens<'a>) -> Self {
        let output = ForwardOutput::default();
        Pending { session, tokens, wanted, largest, output, failure: None, finished: false }
    }

    /// Returns the rows of its results.
    fn rows(&mut self) -> Result<HeadRows<'_>, RuntimeError> {
        HeadRows::of(self.session.model(), self.largest, &mut self.output)
    }

    /// Computes the rest alone.
    fn finish_alone(&mut self) {
        let ask = ForwardOptions { logits: self.wanted, largest: self.largest, ..ForwardOptions::default() };
        match self.session.forward(self.tokens, &ask) {
            Ok(output) => {
                self.output.logits.extend(output.logits);
                self.output.tokens.extend(output.tokens);
            }
            Err(error) => self.failure = Some(error),
        }
        self.finished = true;
    }
}

/// Condition under which calls can be shared.
#[derive(Clone, Copy, PartialEq)]
struct Place {
    /// Address of the model.
    model: *const LoadedModel,
    route: usize,
}

/// Next call of a text.
struct NextCall<'t, 'a> {
    text: &'t mut Pending<'a>,
    chunk: Chunk,
    /// Condition of sharing; `None` if the text must be computed alone or fails.
    place: Option<Place>,
}

impl<'t, 'a> NextCall<'t, 'a> {
    fn of(text: &'t mut Pending<'a>) -> Self {
        let chunk = text.rows().is_ok().then(|| Self::chunk(text.session, text.tokens.len() as u64)).flatten();
        let place = chunk.map(|_| Place { model: Arc::as_ptr(text.session.model()), route: text.session.route });
        NextCall { text, chunk: chunk.unwrap_or(Chunk { real: 0, size: 0 }), place }
    }

    /// Returns the next call when `count` tokens remain, after making room for it as [`TokenSession::forward`] does.
    fn chunk(session: &mut TokenSession, count: u64) -> Option<Chunk> {
        let end = session.position() + count;
        if count == 0 || end > session.limit() || session.poisoned || !session.model().bundle().model.has_head() {
            return None;
        }
        // a session that can't move reports its error when it is computed alone
        session.make_room(end).ok()?;
        let chunk = session.next_chunk(count, None).ok()?;
        session.make_room_for(chunk).ok()?;
        Some(chunk)
    }
}

/// Text within a shared call.
struct Member<'m, 'a> {
    text: &'m mut Pending<'a>,
    feed: InputBuilder<'m>,
    flow: Flow,
    chunk: Chunk,
    /// Tokens of the call whose logits are still due.
    wanted: Range<usize>,
    head: Option<HeadCall>,
}

/// Call of the LM head: its inputs, the columns that count, and the place of their results among the text's rows.
struct HeadCall {
    flow: Flow,
    count: usize,
    first: usize,
}

/// Makes the next calls of texts that can share them.
fn share(route: usize, calls: Vec<NextCall<'_, '_>>) {
    let Some(model) = calls.first().map(|call| call.text.session.model().clone()) else { return };
    let model = &*model;
    let route = &model.plan.routes[route];
    let ropes: Vec<RopeChoice> = calls.iter().map(|call| call.text.session.rope().clone()).collect();
    let calls = calls.into_iter().zip(&ropes);
    let mut members: Vec<Member<'_, '_>> = calls.map(|(call, rope)| Member::begin(model, route, call, rope)).collect();
    for step in &route.layers {
        layers(model, step, &mut members);
    }
    members.iter_mut().for_each(Member::leave_layers);
    head(model, route, &mut members);
    for Member { text, feed, .. } in members {
        text.session.buffers.tensors = feed.into_tensors();
        text.finished = text.tokens.is_empty() || text.failure.is_some();
    }
}

impl<'m, 'a> Member<'m, 'a> {
    fn begin(model: &'m LoadedModel, route: &Route, call: NextCall<'m, 'a>, rope: &'m RopeChoice) -> Self {
        let NextCall { text, chunk, .. } = call;
        let (tokens, _) = text.tokens.split_at(chunk.real as usize);
        let feed = InputBuilder::new(&model.host, rope, tokens, text.session.position(), chunk, route.context)
            .again(std::mem::take(&mut text.session.buffers.tensors));
        let mut member = Member { text, feed, flow: empty_flow(), chunk, wanted: 0..0, head: None };
        member.attempt(|member| {
            member.flow = member.feed.embedding(model.bundle.model.hidden_size as usize)?.into();
            // states written by position can be written again
            member.text.session.poisoned = !model.rewindable;
            Ok(())
        });
        member
    }

    /// Records the tokens as computed by all layers.
    fn leave_layers(&mut self) {
        let Member { text, chunk, wanted, .. } = self;
        if text.failure.is_some() {
            return;
        }
        let real = chunk.real as usize;
        let (now, later) = text.tokens.split_at(real);
        text.session.poisoned = false;
        text.session.tokens.extend(now);
        text.tokens = later;
        *wanted = text.wanted.of_call(real, later.is_empty());
    }

    /// Moves to the next call of the head, if any.
    fn next_head(&mut self, model: &LoadedModel, route: &Route) -> bool {
        self.head = None;
        if !self.wanted.is_empty() {
            self.head = self.attempt(|member| {
                let chunk = plan::chunk(&route.head, member.wanted.len() as u64, None, u64::MAX)?;
                let now = member.wanted.start..member.wanted.start + chunk.real as usize;
                member.wanted.start = now.end;
                let (count, first) = (now.len(), member.text.rows()?.grow(model, now.len()));
                let flow = member.flow.hidden.range(now, chunk.size as usize).into();
                Ok(HeadCall { flow, count, first })
            });
        }
        self.head.is_some()
    }

    /// Appends the results of the LM head that the function of the layers has returned.
    fn take_head(&mut self, model: &LoadedModel) {
        let wanted = std::mem::take(&mut self.wanted);
        if wanted.is_empty() {
            return;
        }
        self.attempt(|member| {
            let Some((function, outputs)) = &member.flow.head else { return Ok(()) };
            let mut rows = member.text.rows()?;
            let first = rows.grow(model, wanted.len());
            Ok(rows.take(model, (*function, &outputs[..]), member.flow.hidden.count, wanted, first)?)
        });
    }

    /// Runs `body` unless the text has failed.
    fn attempt<T>(&mut self, body: impl FnOnce(&mut Self) -> Result<T>) -> Option<T> {
        if self.text.failure.is_some() {
            return None;
        }
        body(self).map_err(|error| self.text.failure = Some(error)).ok()
    }

    fn take_flow(&mut self) -> Flow {
        std::mem::replace(&mut self.flow, empty_flow())
    }
}

/// Returns an empty flow.
fn empty_flow() -> Flow {
    Columns::zeros(0, 0).into()
}

/// Runs a step of the layers.
fn layers(model: &LoadedModel, step: &Step, members: &mut [Member<'_, '_>]) {
    layers_function(model, step, members);
    if let Some(network) = &step.feed_forward {
        layers_function(model, network, members);
    }
    for group in &step.experts {
        for member in members.iter_mut().filter(|member| member.flow.has_share(&group.part)) {
            member.attempt(|member| {
                let flow = member.take_flow();
                member.flow = member.text.session.call(model, group, flow, &mut member.feed, None)?;
                Ok(())
            });
        }
    }
}

/// Runs the function of a step for all texts.
fn layers_function(model: &LoadedModel, step: &Step, members: &mut [Member<'_, '_>]) {
    call_together(
        model,
        members,
        |member, inputs| {
            let text = Some((&mut member.feed, &member.text.session.states));
            prepare(model, step, &member.flow, text, inputs).map(Some).map_err(Error::from)
        },
        |member, function, mut outputs| {
            let entry = &model.bundle.functions[function];
            member.text.session.states.keep(entry, &mut outputs, member.feed.place());
            member.flow = after(model, function, &outputs, member.take_flow())?;
            Ok(())
        },
    );
}

/// Appends the requested results of the LM head.
fn head(model: &LoadedModel, route: &Route, members: &mut [Member<'_, '_>]) {
    if route.head.is_empty() {
        members.iter_mut().for_each(|member| member.take_head(model));
        return;
    }
    while members.iter_mut().fold(false, |any, member| member.next_head(model, route) | any) {
        for step in &route.head {
            call_together(
                model,
                members,
                |member, inputs| {
                    let call = member.head.as_ref();
                    Ok(call.map(|call| prepare(model, step, &call.flow, None, inputs)).transpose()?)
                },
                |member, function, outputs| {
                    let Some(HeadCall { flow, count, first }) = &member.head else { return Ok(()) };
                    let size = flow.hidden.count;
                    Ok(member.text.rows()?.take(model, (function, &outputs[..]), size, 0..*count, *first)?)
                },
            );
        }
    }
}

/// Function and inputs of a call.
type Prepared = (usize, Vec<Arc<Tensor>>);

/// Calls a function once for all texts that take the same one. `ready` returns the inputs of a participating text;
/// `take` receives its outputs.
fn call_together(
    model: &LoadedModel,
    members: &mut [Member<'_, '_>],
    ready: impl Fn(&mut Member<'_, '_>, &mut Vec<Arc<Tensor>>) -> Result<Option<usize>>,
    take: impl Fn(&mut Member<'_, '_>, usize, Vec<Arc<Tensor>>) -> Result<()>,
) {
    let prepare = |member: &mut Member<'_, '_>| {
        let mut inputs = Vec::new();
        let function = member.attempt(|member| ready(member, &mut inputs))??;
        Some((function, inputs))
    };
    let mut prepared: Vec<Option<Prepared>> = members.iter_mut().map(prepare).collect();
    while let Some(function) = prepared.iter().flatten().map(|(function, _)| *function).next() {
        let takes = |prepared: &Option<Prepared>| prepared.as_ref().is_some_and(|(own, _)| *own == function);
        let which: Vec<usize> = (0..members.len()).filter(|index| takes(&prepared[*index])).collect();
        let called = members.iter_mut().zip(&prepared).filter_map(|(member, prepared)| {
            let (_, inputs) = prepared.as_ref().filter(|(own, _)| *own == function)?;
            Some(BatchMember { sequence: &mut *member.text.session.states.sequence, inputs })
        });
        let mut results = model.backend.run_batch(function, called.collect()).into_iter();
        for index in which {
            // the call must release the caches so that they can be written in place
            prepared[index] = None;
            let Some(outputs) = results.next() else { continue };
            members[index].attempt(|member| take(member, function, outputs?.into_iter().map(Arc::new).collect()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeFailure, FakeOptions};
    use super::*;
    use anec_bundle::TokenCount;

    const TEXTS: [&[u32]; 4] = [&[3, 1, 4, 1, 5, 2], &[2, 6, 5], &[3, 0, 7, 7, 1], &[1, 2]];

    /// Returns sessions that have computed all but the last token of each text.
    fn sessions(model: &std::sync::Arc<LoadedModel>) -> Vec<TokenSession> {
        let session = |text: &&[u32]| {
            let mut session = model.start(16).unwrap();
            session.forward(&text[..text.len() - 1], &ForwardOptions::none()).unwrap();
            session
        };
        TEXTS.iter().map(session).collect()
    }

    fn last(sessions: &mut [TokenSession]) -> Vec<Result<Vec<f32>>> {
        let texts = sessions.iter_mut().zip(TEXTS);
        let texts = texts.map(|(session, text)| {
            let tokens = &text[text.len() - 1..];
            NextTokens { session, tokens, logits: Positions::All, largest: false }
        });
        logits(texts.collect())
    }

    fn logits(texts: Vec<NextTokens<'_>>) -> Vec<Result<Vec<f32>>> {
        forward_together(texts).into_iter().map(|output| Ok(output?.logits)).collect()
    }

    fn alone(model: &std::sync::Arc<LoadedModel>, text: &[u32]) -> Vec<f32> {
        model.start(16).unwrap().forward(text, &ForwardOptions::last()).unwrap().logits
    }

    #[test]
    fn texts_that_are_computed_together_go_on_as_if_alone() {
        for (slice, recurrent) in [(false, false), (true, false), (false, true)] {
            let (model, calls) = fake::model(&FakeOptions { slice, recurrent, ..FakeOptions::default() });
            let mut sessions = sessions(&model);
            calls.lock().unwrap().clear();
            let found = last(&mut sessions);
            let functions: Vec<String> = calls.lock().unwrap().iter().map(|call| call.0.clone()).collect();
            assert!(functions[..TEXTS.len()].iter().all(|name| *name == functions[0]), "one function after the other");
            for ((found, session), text) in found.into_iter().zip(&mut sessions).zip(TEXTS) {
                assert_eq!(found.unwrap(), alone(&model, text));
                assert_eq!(session.tokens(), text);
                let next = session.forward(&[6], &ForwardOptions::last()).unwrap().logits;
                assert_eq!(next, alone(&model, &[text, &[6]].concat()));
            }
        }
    }

    #[test]
    fn prompts_share_calls_with_each_other_and_with_texts_that_are_written() {
        let fixed = vec![TokenCount::Fixed(1), TokenCount::Fixed(4)];
        for (layer_tokens, functions) in [(vec![TokenCount::Range(1, 4)], 1), (fixed, 2)] {
            for recurrent in [false, true] {
                let layer_tokens = layer_tokens.clone();
                let (model, calls) = fake::model(&FakeOptions { layer_tokens, recurrent, ..FakeOptions::default() });
                let mut written = model.start(16).unwrap();
                written.forward(&TEXTS[0][..5], &ForwardOptions::none()).unwrap();
                let [mut first, mut part, mut whole] = [(); 3].map(|()| model.start(16).unwrap());
                let long = [5, 1, 2, 7, 3, 6, 0, 4, 1, 1];
                calls.lock().unwrap().clear();
                let texts = [
                    (&mut written, &TEXTS[0][5..], Positions::All),
                    (&mut first, &TEXTS[1][..1], Positions::Last),
                    (&mut part, &long[..9], Positions::None),
                    (&mut whole, &long[..], Positions::Last),
                ];
                let texts =
                    texts.map(|(session, tokens, logits)| NextTokens { session, tokens, logits, largest: false });
                let found: Vec<_> = logits(texts.into()).into_iter().map(Result::unwrap).collect();
                let names: Vec<String> = calls.lock().unwrap().iter().map(|call| call.0.clone()).collect();
                let mut distinct = names[..4].to_vec();
                distinct.dedup();
                assert_eq!(distinct.len(), functions, "texts with the same function take turns in it: {names:?}");
                assert_eq!(found[0], alone(&model, TEXTS[0]));
                assert_eq!(found[1], alone(&model, &TEXTS[1][..1]));
                assert!(found[2].is_empty());
                assert_eq!(found[3], alone(&model, &long));
                assert_eq!((part.tokens(), whole.tokens()), (&long[..9], &long[..]));
                assert_eq!(part.forward(&long[9..], &ForwardOptions::last()).unwrap().logits, found[3]);
            }
        }
    }

    #[test]
    fn a_text_that_fails_leaves_the_others_as_they_are() {
        for (recurrent, forks) in [(false, true), (true, true), (true, false)] {
            let before = {
                let (model, calls) = fake::model(&FakeOptions { recurrent, forks, ..FakeOptions::default() });
                sessions(&model);
                calls.lock().unwrap().len()
            };
            // the second text's call of the first part of the layers, then of the second part, then of the head
            for at in [1, 5, 9] {
                let script = vec![(before + at, FakeFailure::Error)];
                let (model, _) = fake::model(&FakeOptions { recurrent, forks, script, ..FakeOptions::default() });
                let mut sessions = sessions(&model);
                let found = last(&mut sessions);
                for (index, ((found, session), text)) in found.into_iter().zip(&mut sessions).zip(TEXTS).enumerate() {
                    assert_eq!(found.is_err(), index == 1, "{at}");
                    session.rewind(text.len() as u64 - 1).unwrap();
                    let again = session.forward(&text[text.len() - 1..], &ForwardOptions::last()).unwrap().logits;
                    assert_eq!(again, alone(&model, text));
                }
            }
        }
    }

    #[test]
    fn a_text_that_cannot_take_part_is_computed_alone() {
        let (model, _) = fake::model(&FakeOptions::default());
        let mut sessions = sessions(&model);
        // as many tokens as fit, more than one call takes, none, and one that doesn't exist
        let tokens: [&[u32]; 4] = [&[1], &[1, 2, 3, 4, 5, 6, 7], &[], &[99]];
        let texts = sessions.iter_mut().zip(tokens);
        let texts =
            texts.map(|(session, tokens)| NextTokens { session, tokens, logits: Positions::All, largest: false });
        let found = logits(texts.collect());
        assert_eq!(found[0].as_ref().unwrap(), &alone(&model, &[&TEXTS[0][..5], &[1]].concat()));
        assert_eq!(found[1].as_ref().unwrap().len(), 7 * fake::VOCAB);
        assert!(found[2].as_ref().unwrap_err().to_string().contains("no tokens"));
        assert!(found[3].as_ref().unwrap_err().to_string().contains("token 99"));
    }
}
