//! Path of a request: validation before any work, tokens for the scheduler, and the answer from its events.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use futures_util::stream::{self, Stream};
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::Receiver;

use super::engine::{Ending, Event, Job, Scheduler, ServeLimits};
use super::error::ServeError;
use super::loading::{Loading, LoadingStage};
use super::metrics::Metrics;
use super::parameters::{Defaults, Parameters};
use super::tools::Tools;
use anec_base::Result;
use anec_runtime::chat::{Chat, ChatTemplate};
use anec_runtime::tools::{CallReader, CallSyntax};
use anec_runtime::{Constraint, EncodedText, GeneratedToken, Grammar, Grammars, LoadedModel, RuntimeError, Tokenizer};

/// Served model.
pub struct Service {
    /// Name under which clients know the model.
    pub name: String,
    /// Device that runs the model.
    pub device: String,
    /// Start time in seconds since 1970.
    pub created: u64,
    /// Metrics of the server.
    pub metrics: Arc<Metrics>,
    model: Arc<LoadedModel>,
    tokenizer: Arc<Tokenizer>,
    template: Result<ChatTemplate, RuntimeError>,
    /// Syntax of the model's function calls, if known.
    syntax: Option<&'static CallSyntax>,
    grammars: OnceLock<Result<Grammars, String>>,
    defaults: Defaults,
    engine: Scheduler,
    loading: Loading,
    limits: ServeLimits,
    /// Requests in preparation or waiting for it; further ones are refused.
    admitted: Semaphore,
    /// Requests in preparation.
    preparing: Arc<Semaphore>,
}

/// Parsed request.
pub struct Submission {
    /// Prompt to continue.
    pub prompt: RequestPrompt,
    /// Generation parameters.
    pub parameters: Parameters,
    /// Number of alternatives with log-probabilities; `None` for no log-probabilities.
    pub logprobs: Option<usize>,
    /// Functions that the texts may call.
    pub tools: Option<Tools>,
}

/// Prompt of a request.
pub enum RequestPrompt {
    /// Conversation.
    Chat(Chat),
    /// Text; `special` allows special tokens spelled out in it.
    Text {
        /// Text of the prompt.
        text: String,
        /// Whether special tokens spelled out in the text become those tokens.
        special: bool,
    },
    /// Token ids.
    Ids(Vec<u32>),
}

impl RequestPrompt {
    /// Returns the request's field that contains the prompt.
    fn field(&self) -> &'static str {
        match self {
            RequestPrompt::Chat(_) => "messages",
            RequestPrompt::Text { .. } | RequestPrompt::Ids(_) => "prompt",
        }
    }
}

/// Texts in progress.
pub struct Completion {
    /// Event channels, one per text.
    pub receivers: Vec<Receiver<Event>>,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// Time spent on tokenizing the prompt.
    pub tokenize: Duration,
    /// Parser of function calls, if functions were offered.
    pub calls: Option<CallReader>,
}

/// Finished text.
pub struct Text {
    /// Whole text.
    pub text: String,
    /// Tokens of the text.
    pub tokens: Vec<GeneratedToken>,
    /// End of the text.
    pub ending: Ending,
}

/// Timings of an answer, under names used by other runtimes for the Neural Engine.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Times {
    prompt_tokens: usize,
    cached_tokens: usize,
    gen_tokens: usize,
    prefill_tps: f64,
    decode_tps: f64,
    tokenize_ms: f64,
    queue_ms: f64,
    inference_ms: f64,
    detokenize_ms: f64,
    ttft_ms: f64,
    total_ms: f64,
    elapsed_s: f64,
    drafted_tokens: usize,
    accepted_tokens: usize,
}

impl Times {
    /// Returns the timings of a text whose prompt took `tokenize` to tokenize.
    pub fn of(ending: &Ending, tokenize: Duration) -> Self {
        let timings = ending.generation.timings;
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let before = tokenize + ending.queued;
        Times {
            prompt_tokens: ending.prompt_tokens,
            cached_tokens: timings.cached_tokens,
            gen_tokens: ending.generation.ids.len(),
            prefill_tps: timings.prefill_tps,
            decode_tps: timings.decode_tps,
            tokenize_ms: milliseconds(tokenize),
            queue_ms: milliseconds(ending.queued),
            inference_ms: timings.elapsed_s * 1e3,
            detokenize_ms: milliseconds(ending.detokenize),
            ttft_ms: timings.ttft_ms + milliseconds(before),
            total_ms: timings.elapsed_s * 1e3 + milliseconds(before),
            elapsed_s: timings.elapsed_s + before.as_secs_f64(),
            drafted_tokens: ending.generation.speculation.drafted,
            accepted_tokens: ending.generation.speculation.accepted,
        }
    }
}

impl Service {
    /// Creates a service and loads its model in the background. `speculation` tokens are drafted per call by default; a
    /// `draft` model may draft up to its number more.
    ///
    /// # Errors
    /// If the bundle has no tokenizer.
    pub fn new(
        model: Arc<LoadedModel>,
        name: String,
        device: String,
        limits: ServeLimits,
        speculation: usize,
        draft: Option<(Arc<LoadedModel>, usize)>,
    ) -> Result<Arc<Self>> {
        let tokenizer = Arc::new(Tokenizer::of(model.bundle(), model.folder())?);
        let metrics = Arc::new(Metrics::default());
        let template = ChatTemplate::of(model.bundle(), model.folder(), &tokenizer);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Ok(Arc::new(Service {
            name,
            device,
            created: now.map_or(0, |now| now.as_secs()),
            syntax: template.as_ref().ok().and_then(|template| CallSyntax::of(template.source(), &tokenizer)),
            template,
            grammars: OnceLock::new(),
            defaults: Defaults::of(model.bundle(), model.folder(), speculation),
            engine: Scheduler::start(model.clone(), tokenizer.clone(), limits, metrics.clone(), draft),
            loading: Loading::start(model.clone()),
            metrics,
            model,
            tokenizer,
            limits,
            admitted: Semaphore::new(limits.queue + limits.parallel),
            preparing: Arc::new(Semaphore::new(limits.parallel)),
        }))
    }

    /// Returns the size of the context in tokens.
    pub fn context(&self) -> u64 {
        self.model.context()
    }

    /// Returns the model.
    pub fn model(&self) -> &Arc<LoadedModel> {
        &self.model
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the loading stage. Earlier requests are answered once the model is loaded.
    pub fn stage(&self) -> LoadingStage {
        self.loading.stage()
    }

    /// Returns the scheduler.
    pub fn engine(&self) -> &Scheduler {
        &self.engine
    }

    /// Parses and validates a request and queues its texts. This runs on a blocking thread, because parsing, rendering,
    /// tokenizing and compiling grammars take time. At most `parallel` requests are prepared at a time. Dropping the
    /// future stops the preparation.
    ///
    /// # Errors
    /// If the request is wrong or exceeds the context, the queue is full, or the preparation exceeds the time limit.
    pub async fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        read: impl FnOnce(&Service) -> Result<(Submission, T), ServeError> + Send + 'static,
    ) -> Result<(Completion, T), ServeError> {
        let prepare = |service: &Service, client: &Weak<()>| {
            let (submission, rest) = read(service)?;
            Ok((service.submit(submission, client)?, rest))
        };
        self.compute(prepare).await
    }

    /// Runs a request's work on a blocking thread, as [`Service::ask`] does. The work can check whether its client is
    /// still connected.
    ///
    /// # Errors
    /// Returns the work's error; also if the queue is full or the time limit is exceeded.
    pub async fn compute<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Service, &Weak<()>) -> Result<T, ServeError> + Send + 'static,
    ) -> Result<T, ServeError> {
        let waiting = self.limits.queue;
        let _admitted = self.admitted.try_acquire().map_err(|_| ServeError::Busy { waiting })?;
        let (service, client) = (self.clone(), Arc::new(()));
        let wanted = Arc::downgrade(&client);
        let prepared = async move {
            let place = service.preparing.clone().acquire_owned().await.map_err(|_| ServeError::Stopping)?;
            let work = tokio::task::spawn_blocking(move || -> Result<T, ServeError> {
                // abandoned work keeps its place until it ends, so that it can't pile up
                let _place = place;
                work(&service, &wanted)
            });
            work.await.map_err(|_| ServeError::panicked())?
        };
        let late = |_| ServeError::Timeout { seconds: self.limits.timeout.as_secs() };
        let answer = tokio::time::timeout(self.limits.timeout, prepared).await.map_err(late)?;
        drop(client);
        answer
    }

    /// Queues the texts of a request while `client` is connected.
    fn submit(&self, submission: Submission, client: &Weak<()>) -> Result<Completion, ServeError> {
        let wanted = || if client.strong_count() > 0 { Ok(()) } else { Err(ServeError::Stopping) };
        let Submission { prompt, parameters, logprobs, tools } = submission;
        let tools = tools.as_ref();
        self.model.continues_texts()?;
        let start = Instant::now();
        let field = prompt.field();
        wanted()?;
        let prompt = self.tokens(prompt)?;
        let tokenize = start.elapsed();
        let room = self.room(&prompt, parameters.most_tokens(), field)?;
        let facts = &self.model.bundle().model;
        let ends = self.model.end_tokens();
        let mut request = parameters.request(prompt.clone(), room, ends, facts.vocab_size, &self.defaults)?;
        request.logprobs = logprobs;
        let mut grammar = parameters.grammar()?;
        let mut field = "response_format";
        let mut stops = parameters.stops()?;
        if let Some(tools) = tools {
            if !self.template.as_ref().is_ok_and(ChatTemplate::takes_tools) {
                let problem = "this model's chat template has no place for tools";
                return Err(ServeError::field("tools", problem));
            }
            if let Some(call) = tools.grammar(self.syntax, grammar.as_ref(), &self.tokenizer)? {
                (grammar, field) = (Some(call), "tools");
            }
            stops.extend(self.syntax.and_then(|syntax| tools.stop(syntax)).map(str::to_owned));
        }
        let syntax = self.syntax.filter(|_| tools.is_some());
        let shown = syntax.map(|syntax| syntax.marks(&self.tokenizer)).unwrap_or_default();
        wanted()?;
        let constraint = grammar.map(|grammar| self.constraint(&grammar, field)).transpose()?;
        wanted()?;
        let job = |index: usize| {
            let mut request = request.clone();
            // each of the n texts gets its own seed, derived from the request's
            request.sampling.seed = request.sampling.seed.wrapping_add(index as u64);
            Job { request, constraint: constraint.clone(), stops: stops.clone(), shown: shown.clone() }
        };
        let receivers = self.engine.submit((0..parameters.choices()?).map(job).collect())?;
        let calls = tools.zip(syntax).map(|(tools, syntax)| tools.reader(syntax));
        Ok(Completion { receivers, prompt, tokenize, calls })
    }

    /// Tokenizes an untrusted text, or a pair of texts, for a model that reads it whole.
    pub(super) fn whole(
        &self,
        text: &str,
        second: Option<&str>,
        field: &'static str,
    ) -> Result<EncodedText, ServeError> {
        let context = self.context();
        for text in [Some(text), second].into_iter().flatten() {
            self.tokenizer.check_length(text, context).map_err(|error| match error {
                RuntimeError::TextTooLong { bytes, .. } => ServeError::PromptBytes { context, bytes, field },
                error => error.into(),
            })?;
        }
        Ok(self.tokenizer.encode_whole(text, second, false)?)
    }

    /// Returns whether the model continues texts but can't answer conversations.
    pub(super) fn lacks_template(&self) -> bool {
        self.model.continues_texts().is_ok() && matches!(self.template, Err(RuntimeError::NoChatTemplate { .. }))
    }

    fn tokens(&self, prompt: RequestPrompt) -> Result<Vec<u32>, ServeError> {
        let (context, field) = (self.context(), prompt.field());
        let tokens = match prompt {
            RequestPrompt::Ids(ids) => Ok(ids),
            RequestPrompt::Text { text, special } => {
                self.tokenizer.check_length(&text, context).and_then(|()| match special {
                    false => self.tokenizer.encode_literal(&text),
                    true => self.tokenizer.encode(&text),
                })
            }
            RequestPrompt::Chat(chat) => match &self.template {
                Ok(template) => template.encode_within(&self.tokenizer, &chat, context),
                Err(RuntimeError::NoChatTemplate { .. }) => {
                    let problem =
                        "this model has no chat template: give a `prompt` without `system`, which is continued";
                    return Err(ServeError::field(field, problem));
                }
                Err(error) => return Err(ServeError::Model { problem: error.to_string() }),
            },
        };
        tokens.map_err(|error| match error {
            RuntimeError::TextTooLong { bytes, .. } => ServeError::PromptBytes { context, bytes, field },
            error => error.into(),
        })
    }

    /// Returns the number of tokens that can follow a prompt.
    fn room(&self, prompt: &[u32], wanted: Option<u64>, field: &'static str) -> Result<u64, ServeError> {
        if prompt.is_empty() {
            return Err(ServeError::field(field, "the prompt has no tokens"));
        }
        let vocab_size = self.model.bundle().model.vocab_size;
        if let Some(token) = prompt.iter().copied().find(|token| u64::from(*token) >= vocab_size) {
            return Err(RuntimeError::Token { token, vocab_size }.into());
        }
        if wanted == Some(0) {
            return Err(ServeError::field(
                "max_tokens",
                "`max_tokens` is 0, but at least one token has to be asked for",
            ));
        }
        let (context, prompt) = (self.model.context(), prompt.len() as u64);
        let more = wanted.unwrap_or(1);
        let tokens = prompt.saturating_add(more);
        if tokens > context {
            return Err(ServeError::ContextLength { context, tokens, prompt, more, field });
        }
        Ok(context - prompt)
    }

    fn constraint(&self, grammar: &Grammar, field: &'static str) -> Result<Constraint, ServeError> {
        let make = || {
            let vocab_size = self.model.bundle().model.vocab_size;
            Grammars::new(&self.tokenizer, vocab_size, &self.model.end_tokens()).map_err(|error| error.to_string())
        };
        let grammars = self.grammars.get_or_init(make);
        let problem = |problem: String| ServeError::field(field, problem);
        let grammars = grammars.as_ref().map_err(|error| problem(error.clone()))?;
        grammars.start(grammar).map_err(|error| problem(error.to_string()))
    }

    /// Returns a token's text and bytes; the bytes may be part of a character.
    pub fn spell(&self, token: u32) -> (String, Vec<u8>) {
        let bytes = self.tokenizer.token_bytes(token);
        (String::from_utf8_lossy(&bytes).into_owned(), bytes)
    }
}

/// Returns the events of a text up to its end.
pub(super) fn events(receiver: Receiver<Event>) -> impl Stream<Item = Event> + Send {
    stream::unfold(Some(receiver), async |receiver| {
        let mut receiver = receiver?;
        let event = next_event(&mut receiver).await;
        let rest = matches!(event, Event::Delta(_)).then_some(receiver);
        Some((event, rest))
    })
}

/// Collects a text from its events.
#[derive(Default)]
pub struct TextCollector {
    text: String,
    tokens: Vec<GeneratedToken>,
}

impl TextCollector {
    /// Adds an event; returns the text at its end, or its error.
    pub fn push(&mut self, event: Event) -> Option<Result<Text, ServeError>> {
        match event {
            Event::Delta(delta) => {
                self.text.push_str(&delta.text);
                self.tokens.extend(delta.tokens);
                None
            }
            Event::End(ending) => {
                let (text, tokens) = (std::mem::take(&mut self.text), std::mem::take(&mut self.tokens));
                Some(Ok(Text { text, tokens, ending: *ending }))
            }
            Event::Failed(error) => Some(Err(error)),
        }
    }
}

/// Returns the next event of a text. A closed channel means that the server is stopping.
pub(super) async fn next_event(receiver: &mut Receiver<Event>) -> Event {
    receiver.recv().await.unwrap_or(Event::Failed(ServeError::Stopping))
}

/// Waits for a whole text.
///
/// # Errors
/// If it fails.
pub async fn whole(mut receiver: Receiver<Event>) -> Result<Text, ServeError> {
    let mut collector = TextCollector::default();
    loop {
        if let Some(text) = collector.push(next_event(&mut receiver).await) {
            return text;
        }
    }
}
