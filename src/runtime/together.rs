//! Texts that are computed together: each function of the bundle is called once for all of them, so that a backend reads
//! its weights once.
//!
//! What is shared is a call, so the texts must be in the same context and have equally many tokens to compute, no more than
//! one call takes. Others are computed one after the other, and so are experts in functions of their own, of which each
//! text needs others.

use std::sync::Arc;

use super::backend::BatchMember;
use super::call::{after, place_logits, prepare, result};
use super::forward::ForwardOptions;
use super::hidden::{Columns, Flow};
use super::host::RopeChoice;
use super::inputs::InputBuilder;
use super::model::LoadedModel;
use super::plan::{self, Chunk, Route, Step};
use super::session::TokenSession;
use anec_base::{Error, Result};
use anec_bundle::PortRole;
use anec_exec::Tensor;

/// Tokens that follow those of a text.
pub struct NextTokens<'a> {
    /// The text.
    pub session: &'a mut TokenSession,
    /// The tokens.
    pub tokens: &'a [u32],
}

/// Computes the next tokens of several texts, and gives the logits of all of these tokens, text by text: those of
/// [`TokenSession::forward`], bit for bit. A text that fails leaves the others as they are.
pub fn forward_together(texts: &mut [NextTokens<'_>]) -> Vec<Result<Vec<f32>>> {
    let calls: Vec<Option<SharedCall>> = texts.iter_mut().map(SharedCall::of).collect();
    let mut results: Vec<Option<Result<Vec<f32>>>> = texts.iter().map(|_| None).collect();
    for first in 0..texts.len() {
        if results[first].is_some() {
            continue;
        }
        let shares = |other: &usize| *other == first || calls[first].is_some() && calls[*other] == calls[first];
        let members: Vec<usize> = (first..texts.len()).filter(shares).collect();
        match &calls[first] {
            Some(call) if members.len() > 1 => {
                let model = texts[first].session.model().clone();
                let own = texts.iter_mut().enumerate().filter(|(index, _)| members.contains(index));
                let found = call.run(&model, own.map(|(_, text)| text).collect());
                members.into_iter().zip(found).for_each(|(index, found)| results[index] = Some(found));
            }
            _ => {
                let NextTokens { session, tokens } = &mut texts[first];
                let found = session.forward(tokens, &ForwardOptions::all(Default::default()));
                results[first] = Some(found.map(|output| output.logits));
            }
        }
    }
    results.into_iter().flatten().collect()
}

/// A call that texts share.
#[derive(PartialEq)]
struct SharedCall {
    /// Where the model lies in memory.
    model: *const LoadedModel,
    route: usize,
    /// Of the layers.
    chunk: Chunk,
    /// Of the LM head, which takes the same tokens.
    head: Chunk,
}

/// A text on its way through the layers.
struct Member<'a> {
    session: &'a mut TokenSession,
    tokens: &'a [u32],
    feed: InputBuilder<'a>,
    flow: Flow,
    logits: Vec<f32>,
    failure: Option<Error>,
}

impl SharedCall {
    /// The call that computes a text's tokens, if one does and nothing has to be computed before it.
    fn of(text: &mut NextTokens<'_>) -> Option<SharedCall> {
        let (session, count) = (&mut *text.session, text.tokens.len() as u64);
        let fits = count > 0 && session.position() + count <= session.limit() && !session.poisoned;
        let chunk = session.next_chunk(count, None).ok();
        let chunk = chunk.filter(|chunk| fits && chunk.real == count && session.model().bundle().model.has_head())?;
        // one that can't move says so when it is computed alone
        session.make_room_for(chunk).ok()?;
        let model = session.model();
        let head = plan::chunk(&session.route().head, count, None, u64::MAX).ok()?;
        let model = Arc::as_ptr(model);
        (head.real == count).then_some(SharedCall { model, route: session.route, chunk, head })
    }

    /// The logits of each text.
    fn run(&self, model: &LoadedModel, texts: Vec<&mut NextTokens<'_>>) -> Vec<Result<Vec<f32>>> {
        let route = &model.plan.routes[self.route];
        let ropes: Vec<RopeChoice> = texts.iter().map(|text| text.session.rope().clone()).collect();
        let texts = texts.into_iter().zip(&ropes);
        let mut members: Vec<Member<'_>> = texts.map(|(text, rope)| self.begin(model, route, text, rope)).collect();
        for step in &route.layers {
            self.layers(model, step, &mut members);
        }
        for member in members.iter_mut().filter(|member| member.failure.is_none()) {
            member.session.poisoned = false;
            member.session.tokens.extend(member.tokens);
        }
        self.head(model, route, &mut members);
        let end = |member: Member<'_>| member.failure.map_or(Ok(member.logits), Err);
        members.into_iter().map(end).collect()
    }

    fn begin<'a>(
        &self,
        model: &'a LoadedModel,
        route: &Route,
        text: &'a mut NextTokens<'_>,
        rope: &'a RopeChoice,
    ) -> Member<'a> {
        let (session, tokens) = (&mut *text.session, text.tokens);
        let feed = InputBuilder::new(&model.host, rope, tokens, session.position(), self.chunk, route.context);
        let mut member = Member { session, tokens, feed, flow: no_flow(), logits: Vec::new(), failure: None };
        member.attempt(|member| {
            member.flow = member.feed.embedding(model.bundle.model.hidden_size as usize)?.into();
            // what is written by position is written again
            member.session.poisoned = !model.rewindable;
            Ok(())
        });
        member
    }

    /// A part of the layers.
    fn layers(&self, model: &LoadedModel, step: &Step, members: &mut [Member<'_>]) {
        self.function(model, step, members);
        if let Some(network) = &step.feed_forward {
            self.function(model, network, members);
        }
        for group in &step.experts {
            for member in members.iter_mut().filter(|member| member.flow.has_share(&group.part)) {
                member.attempt(|member| {
                    let flow = member.take_flow();
                    member.flow = member.session.call(model, group, flow, &mut member.feed, None)?;
                    Ok(())
                });
            }
        }
    }

    /// The function of a step, for all texts at once.
    fn function(&self, model: &LoadedModel, step: &Step, members: &mut [Member<'_>]) {
        call_together(
            model,
            members,
            |member, inputs| {
                Ok(prepare(model, step, &member.flow, Some((&mut member.feed, &member.session.states)), inputs)?)
            },
            |member, function, mut outputs| {
                let entry = &model.bundle.functions[function];
                member.session.states.keep(entry, &mut outputs, member.feed.place());
                member.flow = after(model, function, &outputs, member.take_flow())?;
                Ok(())
            },
        );
    }

    /// The LM head: the logits of the tokens that count.
    fn head(&self, model: &LoadedModel, route: &Route, members: &mut [Member<'_>]) {
        let count = self.chunk.real as usize;
        let (width, size) = (model.bundle.model.head_rows() as usize, self.head.size as usize);
        for step in &route.head {
            call_together(
                model,
                members,
                |member, inputs| {
                    if member.logits.is_empty() {
                        member.logits = vec![0.0; count * width];
                    }
                    Ok(prepare(model, step, &member.flow.hidden.range(0..count, size).into(), None, inputs)?)
                },
                |member, function, outputs| {
                    let rows = step.part.start as usize..step.part.end as usize;
                    let part = result(model, function, &outputs, PortRole::Logits, rows.len(), size)?;
                    place_logits(&part, rows, &mut member.logits, width);
                    Ok(())
                },
            );
        }
    }
}

impl Member<'_> {
    /// Does something for the text, unless it has failed.
    fn attempt<T>(&mut self, body: impl FnOnce(&mut Self) -> Result<T>) -> Option<T> {
        if self.failure.is_some() {
            return None;
        }
        body(self).map_err(|error| self.failure = Some(error)).ok()
    }

    fn take_flow(&mut self) -> Flow {
        std::mem::replace(&mut self.flow, no_flow())
    }
}

/// Nothing, in the place of what a call has taken or couldn't be given.
fn no_flow() -> Flow {
    Columns::zeros(0, 0).into()
}

/// Calls one function for all texts that haven't failed, with what `ready` prepares of each; `take` is given its outputs.
fn call_together(
    model: &LoadedModel,
    members: &mut [Member<'_>],
    ready: impl Fn(&mut Member<'_>, &mut Vec<Arc<Tensor>>) -> Result<usize>,
    take: impl Fn(&mut Member<'_>, usize, Vec<Arc<Tensor>>) -> Result<()>,
) {
    let prepared = members.iter_mut().map(|member| {
        let mut inputs = Vec::new();
        let function = member.attempt(|member| ready(member, &mut inputs))?;
        Some((function, inputs))
    });
    let prepared: Vec<Option<(usize, Vec<Arc<Tensor>>)>> = prepared.collect();
    // all have equally many tokens
    let Some(function) = prepared.iter().flatten().map(|(function, _)| *function).next() else { return };
    let called = members.iter_mut().zip(&prepared).filter_map(|(member, prepared)| {
        let (_, inputs) = prepared.as_ref()?;
        let inputs = inputs.iter().map(Arc::as_ref).collect();
        Some(BatchMember { sequence: &mut *member.session.states.sequence, inputs })
    });
    let mut results = model.backend.run_batch(function, called.collect()).into_iter();
    // while the calls hold caches, they can't be written in place
    drop(prepared);
    for member in members.iter_mut().filter(|member| member.failure.is_none()) {
        let Some(outputs) = results.next() else { break };
        member.attempt(|member| take(member, function, outputs?.into_iter().map(Arc::new).collect()));
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeOptions, Mishap};
    use super::*;

    const TEXTS: [&[u32]; 4] = [&[3, 1, 4, 1, 5, 2], &[2, 6, 5], &[3, 0, 7, 7, 1], &[1, 2]];

    /// Sessions that have computed all but the last token of each text.
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
        let texts = texts.map(|(session, text)| NextTokens { session, tokens: &text[text.len() - 1..] });
        forward_together(&mut texts.collect::<Vec<_>>())
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
    fn a_text_that_fails_leaves_the_others_as_they_are() {
        for (recurrent, forks) in [(false, true), (true, true), (true, false)] {
            let before = {
                let (model, calls) = fake::model(&FakeOptions { recurrent, forks, ..FakeOptions::default() });
                sessions(&model);
                calls.lock().unwrap().len()
            };
            // the second text's call of the first part of the layers, then of the second part, then of the head
            for at in [1, 5, 9] {
                let script = vec![(before + at, Mishap::Error)];
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
        let texts = sessions.iter_mut().zip(tokens).map(|(session, tokens)| NextTokens { session, tokens });
        let found = forward_together(&mut texts.collect::<Vec<_>>());
        assert_eq!(found[0].as_ref().unwrap(), &alone(&model, &[&TEXTS[0][..5], &[1]].concat()));
        assert_eq!(found[1].as_ref().unwrap().len(), 7 * fake::VOCAB);
        assert!(found[2].as_ref().unwrap_err().to_string().contains("no tokens"));
        assert!(found[3].as_ref().unwrap_err().to_string().contains("token 99"));
    }
}
