//! Continues a prompt token by token.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::error::RuntimeError;
use super::sampling::{Sampler, Sampling};
use super::session::{Ask, Model, Session};
use crate::error::Result;

/// What to continue, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Most tokens to add.
    pub max_tokens: usize,
    /// How they are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text; they aren't part of it.
    pub stops: Vec<u32>,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// A stop token.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The key-value cache is full.
    Context,
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
}

/// How long a continuation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Prompt tokens per second.
    pub prefill_tps: f64,
    /// Tokens per second after the first.
    pub decode_tps: f64,
    /// Milliseconds until the first token.
    pub ttft_ms: f64,
    /// Seconds in all.
    pub elapsed_s: f64,
}

impl Request {
    /// Begins the session that this request needs: with room for the prompt and as much of the continuation as fits.
    ///
    /// # Errors
    /// When the prompt itself doesn't fit.
    pub fn session(&self, model: &Arc<Model>) -> Result<Session> {
        let prompt = self.prompt.len() as u64;
        let whole = prompt.saturating_add(self.max_tokens as u64);
        model.start(whole.min(model.context()).max(prompt))
    }
}

/// Continues the request's prompt in a session, which may hold tokens before it. `each` gets every token as it comes.
///
/// # Errors
/// When the prompt is empty or doesn't fit, or a function fails.
pub fn generate(
    session: &mut Session,
    request: &Request,
    mut each: impl FnMut(u32) -> Result<ControlFlow<()>>,
) -> Result<Generation> {
    if request.prompt.is_empty() {
        return Err(RuntimeError::NoTokens.into());
    }
    let start = Instant::now();
    let mut sampler = Sampler::new(request.sampling);
    let mut logits = session.forward(&request.prompt, &Ask::last())?.logits;
    let prefill = start.elapsed();
    let mut first_token = prefill;
    let mut ids = Vec::new();
    let finish = loop {
        if ids.len() == request.max_tokens {
            break Finish::Length;
        }
        let id = sampler.next(&logits);
        if ids.is_empty() {
            first_token = start.elapsed();
        }
        if request.stops.contains(&id) {
            break Finish::Stop;
        }
        ids.push(id);
        if each(id)?.is_break() {
            break Finish::Interrupted;
        }
        if ids.len() == request.max_tokens {
            break Finish::Length;
        }
        if session.position() == session.limit() {
            break Finish::Context;
        }
        logits = session.forward(&[id], &Ask::last())?.logits;
    };
    let elapsed = start.elapsed();
    let steps = ids.len().saturating_sub(1);
    let timings = Timings {
        prefill_tps: rate(request.prompt.len(), prefill),
        decode_tps: rate(steps, elapsed.saturating_sub(first_token)),
        ttft_ms: first_token.as_secs_f64() * 1e3,
        elapsed_s: elapsed.as_secs_f64(),
    };
    Ok(Generation { ids, finish, timings })
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
        Request { prompt: prompt.to_vec(), max_tokens, sampling: Sampling::default(), stops: Vec::new() }
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
}
