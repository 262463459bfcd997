//! The thread that computes. Texts wait in a bounded queue; those that run take turns of one call each, so that a long
//! prompt holds up nobody for long, and the requests that have least get the next free place. Their calls are made together.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{Receiver, Sender, channel, error::TrySendError};

use super::error::ServeError;
use super::metrics::Metrics;
use anec_base::Result;
use anec_runtime::{
    Constraint, Generation, GenerationOutput, GenerationRequest, LoadedModel, PrefixCache, TextDelta, TextGeneration,
    Tokenizer,
};

/// How much an engine takes on.
#[derive(Clone, Copy, Debug)]
pub struct ServeLimits {
    /// Texts that are written at the same time; each has the memory of a context.
    pub parallel: usize,
    /// Texts that wait.
    pub queue: usize,
    /// Texts whose states are kept for the next request of their conversation.
    pub kept: usize,
    /// Time for a text, waiting included.
    pub timeout: Duration,
}

/// A text to write.
pub struct Job {
    /// Prompt and sampling.
    pub request: GenerationRequest,
    /// What the text keeps to.
    pub constraint: Option<Constraint>,
    /// Strings that end it.
    pub stops: Vec<String>,
    /// Special tokens that are to be seen in it.
    pub shown: Vec<u32>,
}

/// What happens to a text.
#[derive(Debug)]
pub enum Event {
    /// It goes on.
    Delta(TextDelta),
    /// It is finished; nothing follows.
    End(Box<Ending>),
    /// It can't go on; nothing follows.
    Failed(ServeError),
}

/// A finished text.
#[derive(Clone, Debug)]
pub struct Ending {
    /// Its tokens, and how long they took.
    pub generation: GenerationOutput,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time in the queue.
    pub queued: Duration,
    /// Time for turning tokens into text.
    pub detokenize: Duration,
}

/// Events that may wait for a client. A text pauses while half of them do: what one call of the model leads to has room in
/// the other half.
const EVENTS: usize = 256;
/// Prompt tokens of one turn.
const TURN: usize = 32;
/// How long the thread sleeps when all clients are slow.
const PAUSE: Duration = Duration::from_millis(5);
/// Time without progress after which a paused text gives its place to others.
const GIVES_WAY: Duration = Duration::from_secs(1);

/// A queue with the thread that empties it.
pub struct Scheduler {
    shared: Arc<Shared>,
    limits: ServeLimits,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    /// Something came into the queue, or the engine is to stop.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Waiting>,
    /// Texts being written.
    active: usize,
    /// Those of them that take a place: all but the texts whose clients don't read.
    places: usize,
    /// No new texts are taken.
    closed: bool,
    /// Nothing is to be finished, either.
    stopped: bool,
    /// Requests so far.
    groups: u64,
}

/// A text in the queue.
struct Waiting {
    job: Job,
    events: Sender<Event>,
    since: Instant,
    /// Which request it belongs to.
    group: u64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Scheduler {
    /// Starts the thread for a model; a `draft` model may guess up to so many tokens for each call.
    pub fn start(
        model: Arc<LoadedModel>,
        tokenizer: Arc<Tokenizer>,
        limits: ServeLimits,
        metrics: Arc<Metrics>,
        draft: Option<(Arc<LoadedModel>, usize)>,
    ) -> Self {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let worker = Worker {
            shared: shared.clone(),
            cache: PrefixCache::new(model, limits.kept),
            tokenizer,
            limits,
            metrics,
            draft,
            active: Vec::new(),
        };
        let thread = std::thread::spawn(move || worker.run());
        Scheduler { shared, limits, thread: Mutex::new(Some(thread)) }
    }

    /// Puts the texts of a request into the queue, all or none.
    ///
    /// # Errors
    /// When there isn't room for them, now or ever, or the engine stops.
    pub fn submit(&self, jobs: Vec<Job>) -> Result<Vec<Receiver<Event>>, ServeError> {
        let most = self.limits.parallel + self.limits.queue;
        if jobs.len() > most {
            let problem =
                format!("`n` is {}, but this server writes or keeps waiting {most} texts at most", jobs.len());
            return Err(ServeError::field("n", problem));
        }
        let mut state = self.shared.lock();
        if state.closed {
            return Err(ServeError::Stopping);
        }
        let free = self.limits.parallel.saturating_sub(state.places);
        if state.queue.len() + jobs.len() > self.limits.queue + free {
            return Err(ServeError::Busy { waiting: state.queue.len() });
        }
        state.groups += 1;
        let group = state.groups;
        let since = Instant::now();
        let mut receivers = Vec::with_capacity(jobs.len());
        for job in jobs {
            let (events, receiver) = channel(EVENTS);
            state.queue.push_back(Waiting { job, events, since, group });
            receivers.push(receiver);
        }
        self.shared.changed.notify_one();
        Ok(receivers)
    }

    /// Texts that wait, and texts being written.
    pub fn load(&self) -> (usize, usize) {
        let state = self.shared.lock();
        (state.queue.len(), state.active)
    }

    /// Takes no new texts. Those that are here are finished.
    pub fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_one();
    }

    /// Ends the thread after its current call, whatever is unfinished.
    pub fn stop(&self) {
        {
            let mut state = self.shared.lock();
            (state.closed, state.stopped) = (true, true);
        }
        self.shared.changed.notify_one();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // its panics were caught, text by text
            let _ = thread.join();
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the thread has.
struct Worker {
    shared: Arc<Shared>,
    cache: PrefixCache,
    tokenizer: Arc<Tokenizer>,
    limits: ServeLimits,
    metrics: Arc<Metrics>,
    /// A smaller model that drafts, and most tokens of a draft.
    draft: Option<(Arc<LoadedModel>, usize)>,
    active: Vec<Active>,
}

/// A text being written.
struct Active {
    text: TextGeneration,
    events: Sender<Event>,
    since: Instant,
    begun: Instant,
    group: u64,
    /// Since when the client hasn't read, and the room for events then.
    paused: Option<(Instant, usize)>,
}

/// What a turn led to.
enum Turn {
    /// It goes on.
    More,
    /// The client reads too slowly; nothing was done.
    Blocked,
    /// It is finished.
    Over,
}

impl Worker {
    fn run(mut self) {
        while self.admit() {
            self.compute_together();
            let mut worked = false;
            let mut i = 0;
            while i < self.active.len() {
                let text = &mut self.active[i];
                let turn = catch_unwind(AssertUnwindSafe(|| text.turn(&self.limits, &self.metrics)));
                match turn {
                    Ok(Ok(Turn::Blocked)) => i += 1,
                    Ok(Ok(Turn::More)) => {
                        worked = true;
                        i += 1;
                    }
                    Ok(Ok(Turn::Over)) => {
                        worked = true;
                        let text = self.active.remove(i);
                        self.cache.put(text.text.into_generation().into_session());
                    }
                    // what the session holds then is uncertain: it goes
                    Ok(Err(error)) => self.active.remove(i).fail(error),
                    Err(_) => self.active.remove(i).fail(ServeError::panicked()),
                }
            }
            self.count(&mut self.shared.lock());
            if !worked && !self.active.is_empty() {
                std::thread::sleep(PAUSE);
            }
        }
        for text in self.active.drain(..) {
            text.fail(ServeError::Stopping);
        }
        for waiting in std::mem::take(&mut self.shared.lock().queue) {
            let _ = waiting.events.try_send(Event::Failed(ServeError::Stopping));
        }
    }

    /// Makes the next calls of all texts, which share the model's weights. Each takes its turn then, and finds what was
    /// computed.
    fn compute_together(&mut self) {
        let limits = self.limits;
        let sharing = self.active.iter_mut().filter(|text| text.shares_calls(&limits));
        let generations = sharing.map(|text| text.text.generation_mut());
        if catch_unwind(AssertUnwindSafe(|| Generation::compute_together(generations))).is_err() {
            // which of them it was, nobody knows
            let all = std::mem::take(&mut self.active).into_iter();
            let (lost, rest): (Vec<Active>, Vec<Active>) = all.partition(|text| text.shares_calls(&limits));
            self.active = rest;
            lost.into_iter().for_each(|text| text.fail(ServeError::panicked()));
        }
    }

    /// Fills free places from the queue, and waits where there is nothing to do. Gives false at the end.
    fn admit(&mut self) -> bool {
        loop {
            let next = {
                let mut state = self.shared.lock();
                loop {
                    self.forget_abandoned(&mut state);
                    if state.stopped || (state.closed && state.queue.is_empty() && self.active.is_empty()) {
                        return false;
                    }
                    if !state.queue.is_empty() || !self.active.is_empty() {
                        break;
                    }
                    state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                let next = if self.places() < self.limits.parallel { self.next(&state.queue) } else { None };
                let next = next.and_then(|index| state.queue.remove(index));
                self.count(&mut state);
                state.active += usize::from(next.is_some());
                state.places += usize::from(next.is_some());
                next
            };
            let Some(waiting) = next else { return true };
            self.drop_longest_paused();
            let events = waiting.events.clone();
            match catch_unwind(AssertUnwindSafe(|| self.begin(waiting))) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => drop(events.try_send(Event::Failed(error))),
                Err(_) => drop(events.try_send(Event::Failed(ServeError::panicked()))),
            }
        }
    }

    /// Tells how many texts are being written.
    fn count(&self, state: &mut State) {
        (state.active, state.places) = (self.active.len(), self.places());
    }

    /// Texts that take a place.
    fn places(&self) -> usize {
        self.active.iter().filter(|text| !text.gives_way()).count()
    }

    /// Ends the texts that are paused longest until fewer are paused than there are places: each has the memory of a
    /// context, and another one is about to begin.
    fn drop_longest_paused(&mut self) {
        loop {
            let paused = self.active.iter().enumerate().filter(|(_, text)| text.gives_way());
            let paused: Vec<_> =
                paused.filter_map(|(index, text)| text.paused.map(|(since, _)| (since, index))).collect();
            let Some((_, longest)) = paused.iter().min().filter(|_| paused.len() >= self.limits.parallel) else {
                return;
            };
            self.metrics.cancelled();
            self.active.remove(*longest).fail(ServeError::Unread);
        }
    }

    /// Takes texts out of the queue that nobody waits for, or whose time is up.
    fn forget_abandoned(&self, state: &mut State) {
        let timeout = self.limits.timeout;
        state.queue.retain(|waiting| {
            let late = waiting.since.elapsed() > timeout;
            if late {
                let _ = waiting.events.try_send(Event::Failed(ServeError::Timeout { seconds: timeout.as_secs() }));
            }
            let gone = late || waiting.events.is_closed();
            if gone {
                self.metrics.cancelled();
            }
            !gone
        });
    }

    /// The text whose turn it is to begin: of the request with the fewest texts being written, the first. Texts of one
    /// request have the same prompt: while the first computes it, the others wait, to take it over.
    fn next(&self, queue: &VecDeque<Waiting>) -> Option<usize> {
        let of_group = |group: u64| self.active.iter().filter(move |text| text.group == group);
        let ready = |waiting: &Waiting| of_group(waiting.group).all(|text| text.text.generation().has_begun());
        let candidates = queue.iter().enumerate().filter(|(_, waiting)| ready(waiting));
        candidates.min_by_key(|(_, waiting)| of_group(waiting.group).count()).map(|(index, _)| index)
    }

    fn begin(&mut self, waiting: Waiting) -> Result<(), ServeError> {
        let Waiting { job, events, since, group } = waiting;
        let model = self.cache.model().clone();
        let length = job.request.length(&model);
        let of_group = self.active.iter().filter(|text| text.group == group);
        let sibling =
            of_group.map(|text| text.text.generation().session()).find(|session| session.is_compatible_with(length));
        let session = match sibling.map(|session| session.fork()).transpose()?.flatten() {
            Some(mut session) => {
                session.set_length(length)?;
                session
            }
            None => self.cache.take(&job.request.prompt, length)?,
        };
        let mut generation = session.generate(job.request)?.with_constraint(job.constraint).with_prompt_chunk(TURN);
        if let Some((draft, tokens)) = &self.draft {
            generation = generation.with_draft(draft, *tokens)?;
        }
        let text = TextGeneration::new(generation, &self.tokenizer, &job.stops, &job.shown)?;
        self.active.push(Active { text, events, since, begun: Instant::now(), group, paused: None });
        Ok(())
    }
}

impl Active {
    /// Whether its next call is made with those of others: its client is there and reads, and its time isn't up.
    fn shares_calls(&self, limits: &ServeLimits) -> bool {
        let wanted = !self.events.is_closed() && self.since.elapsed() <= limits.timeout;
        wanted && self.events.capacity() >= EVENTS / 2 && self.text.generation().is_unfinished()
    }

    /// One call of the model, at most.
    fn turn(&mut self, limits: &ServeLimits, metrics: &Metrics) -> Result<Turn, ServeError> {
        if self.events.is_closed() {
            metrics.cancelled();
            return Ok(Turn::Over);
        }
        if self.since.elapsed() > limits.timeout {
            metrics.cancelled();
            let _ = self.events.try_send(Event::Failed(ServeError::Timeout { seconds: limits.timeout.as_secs() }));
            return Ok(Turn::Over);
        }
        let room = self.events.capacity();
        if room < EVENTS / 2 {
            // a client that reads anything makes progress
            if self.paused.is_none_or(|(_, before)| room > before) {
                self.paused = Some((Instant::now(), room));
            }
            return Ok(Turn::Blocked);
        }
        self.paused = None;
        let finish = self.text.step()?;
        while let Some(delta) = self.text.ready() {
            if finish.is_some() || !delta.tokens.is_empty() || !delta.text.is_empty() {
                send(&self.events, Event::Delta(delta));
            }
        }
        if finish.is_none() {
            return Ok(Turn::More);
        }
        self.end(metrics);
        Ok(Turn::Over)
    }

    /// Whether its client hasn't read for so long that its place goes to others.
    fn gives_way(&self) -> bool {
        self.paused.is_some_and(|(since, _)| since.elapsed() > GIVES_WAY)
    }

    /// Tells the client that the text is finished.
    fn end(&mut self, metrics: &Metrics) {
        let generation = self.text.generation().output();
        let prompt_tokens = self.text.generation().request().prompt.len();
        let queued = self.begun - self.since;
        metrics.text(prompt_tokens, &generation, queued);
        let ending = Ending { generation, prompt_tokens, queued, detokenize: self.text.detokenizing() };
        send(&self.events, Event::End(Box::new(ending)));
    }

    fn fail(self, error: ServeError) {
        let _ = self.events.try_send(Event::Failed(error));
    }
}

/// There is room: a turn begins only then. That the client went away is seen at the next turn.
fn send(events: &Sender<Event>, event: Event) {
    let sent = events.try_send(event);
    debug_assert!(!matches!(sent, Err(TrySendError::Full(_))), "a turn gives few events");
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::service::whole;
    use anec_runtime::fake::{self, FakeOptions, Mishap};

    const LIMITS: ServeLimits = ServeLimits { parallel: 2, queue: 8, kept: 2, timeout: Duration::from_secs(60) };

    fn engine(form: &FakeOptions, limits: ServeLimits) -> (Scheduler, Arc<Metrics>) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model/tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::open(&path).unwrap());
        let metrics = Arc::new(Metrics::default());
        (Scheduler::start(fake::model(form).0, tokenizer, limits, metrics.clone(), None), metrics)
    }

    fn job(prompt: &[u32], max_tokens: usize) -> Job {
        let request = GenerationRequest { prompt: prompt.to_vec(), max_tokens, ..GenerationRequest::default() };
        Job { request, constraint: None, stops: Vec::new(), shown: Vec::new() }
    }

    /// Waits until so many texts wait, and so many are written: that a text has ended is told before its place is free.
    fn settles(engine: &Scheduler, load: (usize, usize)) {
        for _ in 0..1000 {
            if engine.load() == load {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{:?} wait and run, expected {load:?}", engine.load());
    }

    /// Writes one text to its end.
    fn write(engine: &Scheduler, prompt: &[u32], max_tokens: usize) -> Result<Vec<u32>, ServeError> {
        let mut receivers = engine.submit(vec![job(prompt, max_tokens)])?;
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(whole(receivers.remove(0))).map(|text| text.ending.generation.ids)
    }

    #[test]
    fn a_backend_that_fails_or_panics_costs_one_text() {
        let expected = write(&engine(&FakeOptions::default(), LIMITS).0, &[3, 1, 4], 5).unwrap();
        for mishap in [Mishap::Error, Mishap::Panic, Mishap::Short] {
            let (engine, _) = engine(&FakeOptions { script: vec![(6, mishap)], ..FakeOptions::default() }, LIMITS);
            let error = write(&engine, &[3, 1, 4], 5).unwrap_err();
            assert!(matches!(error, ServeError::Model { .. }), "{mishap:?}: {error}");
            assert_eq!(write(&engine, &[3, 1, 4], 5).unwrap(), expected, "the next text is right: {mishap:?}");
            settles(&engine, (0, 0));
        }
    }

    #[test]
    fn a_client_that_doesnt_read_stops_its_own_text_only() {
        let form = FakeOptions { contexts: vec![1000], ..FakeOptions::default() };
        let (engine, _) = engine(&form, LIMITS);
        let mut unread = engine.submit(vec![job(&[3, 1], 900)]).unwrap();
        for _ in 0..5 {
            assert_eq!(write(&engine, &[1, 2], 100).unwrap().len(), 100);
        }
        // the unread one waits for its reader
        settles(&engine, (0, 1));
        assert!(unread[0].len() < EVENTS, "what waits has an end: {}", unread[0].len());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(whole(unread.remove(0))).unwrap().ending.generation.ids.len(), 900);
    }

    #[test]
    fn clients_that_dont_read_give_their_places_away() {
        let form = FakeOptions { contexts: vec![1000], ..FakeOptions::default() };
        let (engine, metrics) = engine(&form, LIMITS);
        // twice as many as there are places, and then some
        let mut unread = engine.submit((0..6).map(|_| job(&[3, 1], 900)).collect()).unwrap();
        for _ in 0..3 {
            assert_eq!(write(&engine, &[1, 2], 100).unwrap().len(), 100);
        }
        assert!(engine.load().1 <= 2 * LIMITS.parallel, "memory has an end: {:?}", engine.load());
        // those that were paused longest were ended, the last ones still wait for their readers
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let last = runtime.block_on(whole(unread.pop().unwrap()));
        assert_eq!(last.unwrap().ending.generation.ids.len(), 900);
        let first = runtime.block_on(whole(unread.remove(0)));
        assert!(matches!(first, Err(ServeError::Unread)), "{:?}", first.map(|text| text.text));
        assert!(metrics.render(0, 0).contains("anec_cancelled_total"));
    }

    #[test]
    fn a_request_with_many_texts_leaves_room_for_others() {
        let form = FakeOptions { contexts: vec![400], ..FakeOptions::default() };
        let (engine, metrics) = engine(&form, LIMITS);
        let mut many = engine.submit((0..6).map(|_| job(&[5, 1, 2], 40)).collect()).unwrap();
        let mut short = engine.submit(vec![job(&[1, 2], 5)]).unwrap().remove(0);
        // the six get on only as far as they are read, however fast the engine is
        let mut turns = (0..6).cycle();
        loop {
            match short.try_recv() {
                Ok(Event::End(_)) => break,
                Ok(Event::Failed(error)) => panic!("{error}"),
                Ok(Event::Delta(_)) => {}
                Err(_) => {
                    let _ = many[turns.next().unwrap()].try_recv();
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        let (waiting, active) = engine.load();
        assert!(waiting + active >= 4, "the short text needn't wait for all six: {waiting} wait, {active} run");
        drop(many);
        settles(&engine, (0, 0));
        assert!(metrics.render(0, 0).contains("anec_cancelled_total"));
    }

    #[test]
    fn what_stops_says_so() {
        let (engine, _) = engine(&FakeOptions::default(), ServeLimits { queue: 0, ..LIMITS });
        let submit = |texts: usize| engine.submit((0..texts).map(|_| job(&[1], 900)).collect());
        let never = submit(3).unwrap_err().to_string();
        assert!(never.contains("`n` is 3") && never.contains("2 texts at most"), "who waits waits in vain: {never}");
        let writing = submit(2).unwrap();
        assert!(matches!(submit(1), Err(ServeError::Busy { waiting: 0 | 2 })));
        drop(writing);
        engine.close();
        assert!(matches!(write(&engine, &[1], 1), Err(ServeError::Stopping)));
        engine.stop();
    }
}
