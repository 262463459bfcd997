//! Scheduler thread. Texts wait in a bounded queue; running texts take turns of one call each, so that a long prompt
//! delays others little. The request with the fewest running texts gets the next free place. Calls are batched.

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

/// Limits of the scheduler.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ServeLimits {
    /// Maximum number of running texts; each has the memory of a context.
    pub parallel: usize,
    /// Maximum number of waiting texts.
    pub queue: usize,
    /// Maximum number of cached sessions for later requests of a conversation.
    pub kept: usize,
    /// Time limit of a text, including its time in the queue.
    pub timeout: Duration,
}

impl Default for ServeLimits {
    fn default() -> Self {
        ServeLimits { parallel: 4, queue: 64, kept: 4, timeout: Duration::from_secs(600) }
    }
}

/// Text to generate.
pub struct Job {
    /// Prompt and sampling.
    pub request: GenerationRequest,
    /// Constraint of the text.
    pub constraint: Option<Constraint>,
    /// Strings that end the text.
    pub stops: Vec<String>,
    /// Special tokens that give text.
    pub shown: Vec<u32>,
}

/// Event of a text.
#[derive(Debug)]
pub enum Event {
    /// More text.
    Delta(TextDelta),
    /// End of the text; nothing follows.
    End(Box<Ending>),
    /// Failure; nothing follows.
    Failed(ServeError),
}

/// Result of a finished text.
#[derive(Clone, Debug)]
pub struct Ending {
    /// Tokens and timings.
    pub generation: GenerationOutput,
    /// Number of prompt tokens.
    pub prompt_tokens: usize,
    /// Time in the queue.
    pub queued: Duration,
    /// Time spent on detokenizing.
    pub detokenize: Duration,
}

/// Capacity of a client's event channel. A text pauses while half of it is used, so that the events of one call always
/// fit.
const EVENT_CAPACITY: usize = 256;
/// Number of prompt tokens per turn.
const PROMPT_CHUNK: usize = 32;
/// Sleep time while all clients are slow.
const STALL_SLEEP: Duration = Duration::from_millis(5);
/// Time without progress after which a paused text releases its place.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Queue with the thread that empties it.
pub struct Scheduler {
    shared: Arc<Shared>,
    limits: ServeLimits,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    /// Signals a new text or the end.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Waiting>,
    /// Number of running texts.
    active: usize,
    /// Number of running texts that occupy a place: all except those whose clients don't read.
    places: usize,
    /// Whether new texts are refused.
    closed: bool,
    /// Whether running texts are dropped.
    stopped: bool,
    /// Number of requests so far.
    groups: u64,
}

struct Waiting {
    job: Job,
    events: Sender<Event>,
    since: Instant,
    /// Number of the request.
    group: u64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Scheduler {
    /// Starts the thread for a model; a `draft` model may draft up to the given number of tokens per call.
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

    /// Queues the texts of a request, all or none.
    ///
    /// # Errors
    /// If there is no room for them, or the scheduler is stopping.
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
            let (events, receiver) = channel(EVENT_CAPACITY);
            state.queue.push_back(Waiting { job, events, since, group });
            receivers.push(receiver);
        }
        self.shared.changed.notify_one();
        Ok(receivers)
    }

    /// Returns the numbers of waiting and of running texts.
    pub fn load(&self) -> (usize, usize) {
        let state = self.shared.lock();
        (state.queue.len(), state.active)
    }

    /// Refuses new texts; present ones are finished.
    pub fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_one();
    }

    /// Ends the thread after its current call.
    pub fn stop(&self) {
        {
            let mut state = self.shared.lock();
            (state.closed, state.stopped) = (true, true);
        }
        self.shared.changed.notify_one();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // panics were caught per text
            let _ = thread.join();
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.stop();
    }
}

/// State of the thread.
struct Worker {
    shared: Arc<Shared>,
    cache: PrefixCache,
    tokenizer: Arc<Tokenizer>,
    limits: ServeLimits,
    metrics: Arc<Metrics>,
    /// Draft model and its maximum number of tokens per draft.
    draft: Option<(Arc<LoadedModel>, usize)>,
    active: Vec<Active>,
}

/// Running text.
struct Active {
    text: TextGeneration,
    events: Sender<Event>,
    since: Instant,
    begun: Instant,
    group: u64,
    /// Begin of the pause and the channel's capacity then, while the client doesn't read.
    paused: Option<(Instant, usize)>,
}

/// Result of a turn.
enum Turn {
    /// The text continues.
    More,
    /// The client reads too slowly; nothing was done.
    Blocked,
    /// The text has ended.
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
                    // the session's contents are uncertain, so it is dropped
                    Ok(Err(error)) => self.active.remove(i).fail(error),
                    Err(_) => self.active.remove(i).fail(ServeError::panicked()),
                }
            }
            self.count(&mut self.shared.lock());
            if !worked && !self.active.is_empty() {
                std::thread::sleep(STALL_SLEEP);
            }
        }
        for text in self.active.drain(..) {
            text.fail(ServeError::Stopping);
        }
        for waiting in std::mem::take(&mut self.shared.lock().queue) {
            let _ = waiting.events.try_send(Event::Failed(ServeError::Stopping));
        }
    }

    /// Makes the next calls of all texts in a batch; the following turns use the results.
    fn compute_together(&mut self) {
        let limits = self.limits;
        let sharing = self.active.iter_mut().filter(|text| text.shares_calls(&limits));
        let generations = sharing.map(|text| text.text.generation_mut());
        if catch_unwind(AssertUnwindSafe(|| Generation::compute_together(generations))).is_err() {
            // it is unknown which text panicked
            let all = std::mem::take(&mut self.active).into_iter();
            let (lost, rest): (Vec<Active>, Vec<Active>) = all.partition(|text| text.shares_calls(&limits));
            self.active = rest;
            lost.into_iter().for_each(|text| text.fail(ServeError::panicked()));
        }
    }

    /// Fills free places from the queue and waits while there is nothing to do; returns false at the end.
    fn admit(&mut self) -> bool {
        loop {
            let next = {
                let mut state = self.shared.lock();
                loop {
                    self.drop_abandoned(&mut state);
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

    /// Publishes the number of running texts.
    fn count(&self, state: &mut State) {
        (state.active, state.places) = (self.active.len(), self.places());
    }

    /// Returns the number of occupied places.
    fn places(&self) -> usize {
        self.active.iter().filter(|text| !text.is_stalled()).count()
    }

    /// Ends the longest paused texts until fewer are paused than there are places, because each has the memory of a
    /// context and another text is about to begin.
    fn drop_longest_paused(&mut self) {
        loop {
            let paused = self.active.iter().enumerate().filter(|(_, text)| text.is_stalled());
            let paused: Vec<_> =
                paused.filter_map(|(index, text)| text.paused.map(|(since, _)| (since, index))).collect();
            let Some((_, longest)) = paused.iter().min().filter(|_| paused.len() >= self.limits.parallel) else {
                return;
            };
            self.metrics.cancelled();
            self.active.remove(*longest).fail(ServeError::Unread);
        }
    }

    /// Removes abandoned and expired texts from the queue.
    fn drop_abandoned(&self, state: &mut State) {
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

    /// Returns the next text to begin: the first of the request with the fewest running texts. Further texts of a
    /// request wait until its first has computed the common prompt.
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
        let mut generation =
            session.generate(job.request)?.with_constraint(job.constraint).with_prompt_chunk(PROMPT_CHUNK);
        if let Some((draft, tokens)) = &self.draft {
            generation = generation.with_draft(draft, *tokens)?;
        }
        let text = TextGeneration::new(generation, &self.tokenizer, &job.stops, &job.shown)?;
        self.active.push(Active { text, events, since, begun: Instant::now(), group, paused: None });
        Ok(())
    }
}

impl Active {
    /// Returns whether its next call can be batched: its client is connected and reads, and time is left.
    fn shares_calls(&self, limits: &ServeLimits) -> bool {
        let wanted = !self.events.is_closed() && self.since.elapsed() <= limits.timeout;
        wanted && self.events.capacity() >= EVENT_CAPACITY / 2 && self.text.generation().is_unfinished()
    }

    /// Makes at most one call of the model.
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
        if room < EVENT_CAPACITY / 2 {
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

    /// Returns whether its client hasn't read for so long that its place is free for others.
    fn is_stalled(&self) -> bool {
        self.paused.is_some_and(|(since, _)| since.elapsed() > STALL_TIMEOUT)
    }

    /// Sends the end of the text.
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

/// Sends an event. The channel has room, because turns begin only then; a closed channel is detected at the next turn.
fn send(events: &Sender<Event>, event: Event) {
    let sent = events.try_send(event);
    debug_assert!(!matches!(sent, Err(TrySendError::Full(_))), "a turn gives few events");
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::service::whole;
    use anec_runtime::fake::{self, FakeFailure, FakeOptions};

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

    /// Waits for these numbers of waiting and running texts, because a place is freed after the end is sent.
    fn settles(engine: &Scheduler, load: (usize, usize)) {
        for _ in 0..1000 {
            if engine.load() == load {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{:?} wait and run, expected {load:?}", engine.load());
    }

    /// Generates one text to its end.
    fn write(engine: &Scheduler, prompt: &[u32], max_tokens: usize) -> Result<Vec<u32>, ServeError> {
        let mut receivers = engine.submit(vec![job(prompt, max_tokens)])?;
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(whole(receivers.remove(0))).map(|text| text.ending.generation.ids)
    }

    #[test]
    fn a_backend_that_fails_or_panics_costs_one_text() {
        let expected = write(&engine(&FakeOptions::default(), LIMITS).0, &[3, 1, 4], 5).unwrap();
        for failure in [FakeFailure::Error, FakeFailure::Panic, FakeFailure::Short] {
            let (engine, _) = engine(&FakeOptions { script: vec![(6, failure)], ..FakeOptions::default() }, LIMITS);
            let error = write(&engine, &[3, 1, 4], 5).unwrap_err();
            assert!(matches!(error, ServeError::Model { .. }), "{failure:?}: {error}");
            assert_eq!(write(&engine, &[3, 1, 4], 5).unwrap(), expected, "the next text is right: {failure:?}");
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
        // the unread text waits for its reader
        settles(&engine, (0, 1));
        assert!(unread[0].len() < EVENT_CAPACITY, "what waits has an end: {}", unread[0].len());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(whole(unread.remove(0))).unwrap().ending.generation.ids.len(), 900);
    }

    #[test]
    fn clients_that_dont_read_give_their_places_away() {
        let form = FakeOptions { contexts: vec![1000], ..FakeOptions::default() };
        let (engine, metrics) = engine(&form, LIMITS);
        // more than twice the number of places
        let mut unread = engine.submit((0..6).map(|_| job(&[3, 1], 900)).collect()).unwrap();
        for _ in 0..3 {
            assert_eq!(write(&engine, &[1, 2], 100).unwrap().len(), 100);
        }
        assert!(engine.load().1 <= 2 * LIMITS.parallel, "memory has an end: {:?}", engine.load());
        // the longest paused texts were ended, the last ones still wait for their readers
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
        let mut many = engine.submit((0..6).map(|_| job(&[5, 1, 2], 300)).collect()).unwrap();
        let mut short = engine.submit(vec![job(&[1, 2], 5)]).unwrap().remove(0);
        // the six are longer than their channels, so they end only as they are read, however fast the engine is
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
    fn a_stopping_scheduler_refuses_texts() {
        let form = FakeOptions { contexts: vec![1000], ..FakeOptions::default() };
        let (engine, _) = engine(&form, ServeLimits { queue: 0, ..LIMITS });
        let submit = |texts: usize| engine.submit((0..texts).map(|_| job(&[1], 900)).collect());
        let never = submit(3).unwrap_err().to_string();
        assert!(never.contains("`n` is 3") && never.contains("2 texts at most"), "who waits waits in vain: {never}");
        // longer than their channels, so they don't end unread
        let writing = submit(2).unwrap();
        assert!(matches!(submit(1), Err(ServeError::Busy { .. })));
        drop(writing);
        engine.close();
        assert!(matches!(write(&engine, &[1], 1), Err(ServeError::Stopping)));
        engine.stop();
    }
}
