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
use anec_runtime::chat::{Chat, ChatTemplate, Message};
use anec_runtime::encode::text_or_pair;
use anec_runtime::reasoning::{AnswerReader, AnswerSyntax};
use anec_runtime::tools::CallSyntax;
use anec_runtime::{Chunking, ForwardOptions};
use anec_runtime::{
    Constraint, EncodedText, GeneratedToken, GenerationRequest, Grammar, Grammars, LoadedModel, Logprobs, RuntimeError,
    Tokenizer,
};

/// Served model.
pub struct Service {
    /// Name under which clients know the model.
    pub name: String,
    /// Device that runs the model.
    pub device: String,
    /// Identifier of the model's files.
    pub fingerprint: String,
    /// Metrics of the server's texts.
    pub metrics: Arc<Metrics>,
    model: Arc<LoadedModel>,
    tokenizer: Arc<Tokenizer>,
    template: Result<ChatTemplate, RuntimeError>,
    /// Syntax of the model's function calls, if known.
    syntax: Option<&'static CallSyntax>,
    /// Way in which the model separates reasoning from text.
    answer: AnswerSyntax,
    thinking: OnceLock<Thinking>,
    grammars: OnceLock<Result<Grammars, String>>,
    defaults: Defaults,
    engine: Scheduler,
    /// Loading of the model, once begun.
    loading: OnceLock<Loading>,
    limits: ServeLimits,
    /// Requests in preparation or waiting for it; further ones are refused.
    admitted: Semaphore,
    /// Requests in preparation.
    preparing: Arc<Semaphore>,
    /// Requests whose grammar is compiled; they don't keep others from being prepared.
    compiling: Arc<Semaphore>,
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
    /// Whether the log-probabilities of the prompt are wanted.
    pub scored: bool,
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
    /// Text to insert between two others, for models with tokens for that.
    Middle {
        /// Text before the gap.
        prefix: String,
        /// Text after the gap.
        suffix: String,
    },
    /// Token ids.
    Ids(Vec<u32>),
}

impl RequestPrompt {
    /// Returns the request's field that contains the prompt.
    fn field(&self) -> &'static str {
        match self {
            RequestPrompt::Chat(_) => "messages",
            RequestPrompt::Text { .. } | RequestPrompt::Middle { .. } | RequestPrompt::Ids(_) => "prompt",
        }
    }
}

/// Whether a model reasons before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thinking {
    /// The model doesn't reason.
    Never,
    /// A variable of the chat template enables the reasoning.
    Optional,
    /// The chat template can't disable the reasoning.
    Always,
}

/// Names of the variables that enable reasoning in chat templates: Qwen3 and others, Granite and DeepSeek-V3.1.
pub(super) const THINKING_VARIABLES: [&str; 2] = ["enable_thinking", "thinking"];

/// Texts in progress.
pub struct Completion {
    /// Event channels, one per text.
    pub receivers: Vec<Receiver<Event>>,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// Time spent on tokenizing the prompt.
    pub tokenize: Duration,
    /// Log-probabilities of the prompt, if requested; the first token has none.
    pub scored: Vec<GeneratedToken>,
    /// Parser of the parts of an answer to a conversation.
    pub reader: Option<AnswerReader>,
    /// Parts of a schema that the texts needn't satisfy.
    pub warnings: Vec<String>,
}

/// Request that waits for its grammar, or for the scheduler.
struct Prepared {
    request: GenerationRequest,
    choices: usize,
    stops: Vec<String>,
    shown: Vec<u32>,
    tokenize: Duration,
    scored: Vec<GeneratedToken>,
    reader: Option<AnswerReader>,
    grammar: Option<RequestGrammar>,
}

/// Grammar of a request.
#[derive(Clone)]
struct RequestGrammar {
    grammar: Grammar,
    /// Field that it comes from.
    field: &'static str,
    /// Whether parts that can't be kept to are refused.
    strict: bool,
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
    /// Creates a service. `speculation` tokens are drafted per call by default; a `draft` model may draft up to its
    /// number more.
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
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>> {
        let tokenizer = Arc::new(Tokenizer::of(model.bundle(), model.folder())?);
        let template = ChatTemplate::of(model.bundle(), model.folder(), &tokenizer);
        Ok(Arc::new(Service {
            name,
            device,
            fingerprint: fingerprint(&model),
            answer: template.as_ref().map_or(AnswerSyntax::Plain, |template| AnswerSyntax::of(template.source())),
            syntax: template.as_ref().ok().and_then(|template| CallSyntax::of(template.source(), &tokenizer)),
            template,
            thinking: OnceLock::new(),
            grammars: OnceLock::new(),
            defaults: Defaults::of(model.bundle(), model.folder(), speculation),
            engine: Scheduler::start(model.clone(), tokenizer.clone(), limits, metrics.clone(), draft),
            loading: OnceLock::new(),
            metrics,
            model,
            tokenizer,
            limits,
            admitted: Semaphore::new(limits.queue + limits.parallel),
            preparing: Arc::new(Semaphore::new(limits.parallel)),
            compiling: Arc::new(Semaphore::new(1)),
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

    /// Loads the model in the background. Earlier requests are answered once it is loaded.
    pub fn load(&self) {
        self.loading.get_or_init(|| Loading::start(self.model.clone()));
    }

    /// Returns the loading stage.
    pub fn stage(&self) -> LoadingStage {
        let begin = || LoadingStage::Loading { done: 0, of: self.model.bundle().functions.len() };
        self.loading.get().map_or_else(begin, Loading::stage)
    }

    /// Returns the scheduler.
    pub fn engine(&self) -> &Scheduler {
        &self.engine
    }

    /// Parses and validates a request and queues the texts of its submissions. This runs on a blocking thread, because
    /// parsing, rendering, tokenizing and compiling grammars take time. At most `parallel` requests are prepared at a
    /// time, and one grammar is compiled. Dropping the future stops the preparation.
    ///
    /// # Errors
    /// If the request is wrong or exceeds the context, the queue is full, or the preparation exceeds the time limit.
    pub async fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        read: impl FnOnce(&Service) -> Result<(Vec<Submission>, T), ServeError> + Send + 'static,
    ) -> Result<(Vec<Completion>, T), ServeError> {
        let prepare = |service: &Service, client: &Weak<()>| {
            let (submissions, rest) = read(service)?;
            let prepared = submissions.into_iter().map(|submission| service.prepare(submission, client));
            Ok((prepared.collect::<Result<Vec<_>, _>>()?, rest))
        };
        let (prepared, rest) = self.compute(prepare).await?;
        let has_grammar = prepared.iter().any(|prepared| prepared.grammar.is_some());
        let constraints: Vec<Option<Constraint>> = match has_grammar {
            false => prepared.iter().map(|_| None).collect(),
            true => {
                let grammars: Vec<_> = prepared.iter().map(|prepared| prepared.grammar.clone()).collect();
                let compile = move |service: &Service, client: &Weak<()>| {
                    let compile = |grammar: &RequestGrammar| service.constraint(grammar, client);
                    grammars
                        .iter()
                        .map(|grammar| grammar.as_ref().map(compile).transpose())
                        .collect::<Result<Vec<_>, _>>()
                };
                self.blocking(self.compiling.clone(), compile).await?
            }
        };
        let queue = |(prepared, constraint)| self.queue(prepared, constraint);
        Ok((prepared.into_iter().zip(constraints).map(queue).collect::<Result<Vec<_>, _>>()?, rest))
    }

    /// Queues the one text of a request, as [`Service::ask`] does.
    ///
    /// # Errors
    /// Returns any error of [`Service::ask`].
    pub(super) async fn ask_one<T: Send + 'static>(
        self: &Arc<Self>,
        read: impl FnOnce(&Service) -> Result<(Submission, T), ServeError> + Send + 'static,
    ) -> Result<(Completion, T), ServeError> {
        let read = |service: &Service| read(service).map(|(submission, rest)| (vec![submission], rest));
        let (answers, rest) = self.ask(read).await?;
        let answer = answers.into_iter().next().ok_or_else(ServeError::panicked)?;
        Ok((answer, rest))
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
        self.blocking(self.preparing.clone(), work).await
    }

    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        places: Arc<Semaphore>,
        work: impl FnOnce(&Service, &Weak<()>) -> Result<T, ServeError> + Send + 'static,
    ) -> Result<T, ServeError> {
        let waiting = self.limits.queue;
        let _admitted = self.admitted.try_acquire().map_err(|_| ServeError::Busy { waiting })?;
        let (service, client) = (self.clone(), Arc::new(()));
        let wanted = Arc::downgrade(&client);
        let prepared = async move {
            let place = places.acquire_owned().await.map_err(|_| ServeError::Stopping)?;
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

    /// Validates and tokenizes a request while `client` is connected.
    fn prepare(&self, submission: Submission, client: &Weak<()>) -> Result<Prepared, ServeError> {
        let wanted = || if client.strong_count() > 0 { Ok(()) } else { Err(ServeError::Stopping) };
        let Submission { prompt, parameters, logprobs, tools, scored } = submission;
        let tools = tools.as_ref();
        self.model.continues_texts()?;
        let start = Instant::now();
        let (field, is_chat) = (prompt.field(), matches!(prompt, RequestPrompt::Chat(_)));
        wanted()?;
        let prompt = self.tokens(prompt)?;
        let tokenize = start.elapsed();
        let room = self.room(&prompt, field)?;
        let vocab_size = self.model.bundle().model.vocab_size;
        let mut request = parameters.request(prompt, room, self.model.end_tokens(), vocab_size, &self.defaults)?;
        request.logprobs = logprobs;
        let form = parameters.grammar()?;
        let mut grammar = form.map(|(grammar, strict)| RequestGrammar { grammar, field: "response_format", strict });
        let mut stops = parameters.stops()?;
        if let Some(tools) = tools {
            if !self.template.as_ref().is_ok_and(ChatTemplate::takes_tools) {
                let problem = "this model's chat template has no place for tools";
                return Err(ServeError::field("tools", problem));
            }
            let form = grammar.as_ref().map(|grammar| &grammar.grammar);
            if let Some(with_calls) = tools.grammar(self.syntax, form, &self.tokenizer)? {
                // the form of a required call takes the place of the answer's
                let strict = !tools.is_required() && grammar.is_some_and(|form| form.strict);
                let field = if tools.is_required() { "tools" } else { "response_format" };
                grammar = Some(RequestGrammar { grammar: with_calls, field, strict });
            }
            // within reasoning, a mark is text
            if !matches!(self.answer, AnswerSyntax::Marked(_)) {
                stops.extend(self.syntax.and_then(|syntax| tools.stop(syntax)).map(str::to_owned));
            }
        }
        request.check(&self.model, grammar.is_some())?;
        let calls = tools.zip(self.syntax.or_else(|| self.answer.calls()));
        let mut shown = calls.map(|(_, syntax)| syntax.marks(&self.tokenizer)).unwrap_or_default();
        let mut reader = None;
        if is_chat {
            // what has a form has it from its first character on
            let answer = if grammar.is_some() { AnswerSyntax::Plain } else { self.answer };
            shown.extend(answer.marks(&self.tokenizer));
            let end = &request.prompt[request.prompt.len().saturating_sub(16)..];
            let opened = answer.is_opened_by(&self.tokenizer.decode(end, true)?);
            let calls = calls.map(|(tools, syntax)| tools.reader(syntax));
            let forced = tools.is_some_and(Tools::is_required);
            reader = Some(AnswerReader::new(answer, opened, calls, forced));
        }
        let scored = if scored { self.score(&request.prompt, logprobs.unwrap_or(0), &wanted)? } else { Vec::new() };
        wanted()?;
        Ok(Prepared { request, choices: parameters.choices()?, stops, shown, tokenize, scored, reader, grammar })
    }

    /// Returns the tokens of a prompt with their log-probabilities.
    fn score(
        &self,
        prompt: &[u32],
        top: usize,
        wanted: &dyn Fn() -> Result<(), ServeError>,
    ) -> Result<Vec<GeneratedToken>, ServeError> {
        let mut session = self.model.start(prompt.len() as u64)?;
        let options = ForwardOptions::all(Chunking::Largest);
        let mut pass = session.begin(prompt, &options)?;
        let mut scored: Vec<GeneratedToken> =
            prompt.iter().take(1).map(|id| GeneratedToken { id: *id, logprobs: None }).collect();
        let width = self.model.bundle().model.vocab_size as usize;
        while session.advance(&mut pass)? {
            wanted()?;
            for row in pass.take_logits().chunks_exact(width) {
                if let Some(id) = prompt.get(scored.len()).copied() {
                    scored.push(GeneratedToken { id, logprobs: Some(Logprobs::of(row, id, top)) });
                }
            }
        }
        Ok(scored)
    }

    /// Queues the texts of a prepared request.
    fn queue(&self, prepared: Prepared, constraint: Option<Constraint>) -> Result<Completion, ServeError> {
        let Prepared { request, choices, stops, shown, tokenize, scored, reader, .. } = prepared;
        let warnings = constraint.as_ref().map(|constraint| constraint.warnings().to_vec()).unwrap_or_default();
        let job = |index: usize| {
            let mut request = request.clone();
            // each of the n texts gets its own seed, derived from the request's
            request.sampling.seed = request.sampling.seed.wrapping_add(index as u64);
            Job { request, constraint: constraint.clone(), stops: stops.clone(), shown: shown.clone() }
        };
        let receivers = self.engine.submit((0..choices).map(job).collect())?;
        Ok(Completion { receivers, prompt: request.prompt, tokenize, scored, reader, warnings })
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
            self.tokenizer.check_length(text, context).map_err(|error| self.unreadable(error, field))?;
        }
        Ok(text_or_pair(&self.model, &self.tokenizer, text, second, false)?)
    }

    /// Returns whether the model reasons before it answers conversations.
    pub(super) fn thinking(&self) -> Thinking {
        *self.thinking.get_or_init(|| {
            let render = |thinks: bool| {
                let mut chat = Chat::new(vec![Message::new("user", "Hi")]);
                chat.variables.extend(THINKING_VARIABLES.map(|name| (name.to_owned(), thinks.into())));
                self.template.as_ref().ok().and_then(|template| template.render(&chat).ok())
            };
            match (render(true) == render(false), self.answer) {
                (false, _) => Thinking::Optional,
                (true, AnswerSyntax::Plain) => Thinking::Never,
                (true, _) => Thinking::Always,
            }
        })
    }

    /// Returns the source of the chat template, if the model has one.
    pub(super) fn template_source(&self) -> Option<&str> {
        self.template.as_ref().ok().map(ChatTemplate::source)
    }

    /// Returns whether the model can call functions in a known syntax.
    pub(super) fn calls_functions(&self) -> bool {
        let is_known = self.syntax.is_some() || self.answer.calls().is_some();
        is_known && self.template.as_ref().is_ok_and(ChatTemplate::takes_tools)
    }

    /// Returns whether the model can insert a text between two others.
    pub(super) fn inserts_texts(&self) -> bool {
        self.model.continues_texts().is_ok() && self.middle_marks().is_some()
    }

    /// Checks that a model that continues texts can answer conversations.
    ///
    /// # Errors
    /// If it has no chat template.
    pub(super) fn check_template(&self) -> Result<(), ServeError> {
        match self.lacks_template() {
            true => {
                let problem = "this model has no chat template: /v1/completions continues a `prompt`";
                Err(ServeError::field("messages", problem))
            }
            false => Ok(()),
        }
    }

    /// Returns whether the model continues texts but can't answer conversations.
    pub(super) fn lacks_template(&self) -> bool {
        self.model.continues_texts().is_ok() && matches!(self.template, Err(RuntimeError::NoChatTemplate { .. }))
    }

    /// Renders the prompt of a conversation.
    ///
    /// # Errors
    /// If the model has no chat template, or its template refuses the conversation.
    pub(super) fn render(&self, chat: &Chat) -> Result<String, ServeError> {
        Ok(self.chat_template("messages", "this model has no chat template")?.render(chat)?)
    }

    /// Returns the chat template; `none` is what is said of `field` if there is none.
    fn chat_template(&self, field: &'static str, none: &str) -> Result<&ChatTemplate, ServeError> {
        self.template.as_ref().map_err(|error| match error {
            RuntimeError::NoChatTemplate { .. } => ServeError::field(field, none),
            error => ServeError::Model { problem: error.to_string() },
        })
    }

    /// Tokenizes a prompt.
    ///
    /// # Errors
    /// If it exceeds the context in any case, or the model can't read it.
    pub(super) fn tokens(&self, prompt: RequestPrompt) -> Result<Vec<u32>, ServeError> {
        let (context, field) = (self.context(), prompt.field());
        let tokens = match prompt {
            RequestPrompt::Ids(ids) => Ok(ids),
            RequestPrompt::Middle { prefix, suffix } => return self.middle(&prefix, &suffix),
            RequestPrompt::Text { text, special } => {
                self.tokenizer.check_length(&text, context).and_then(|()| match special {
                    false => self.tokenizer.encode_literal(&text),
                    true => self.tokenizer.encode(&text),
                })
            }
            RequestPrompt::Chat(chat) => {
                let none = "this model has no chat template: give a `prompt` without `system`, which is continued";
                self.chat_template(field, none)?.encode_within(&self.tokenizer, &chat, context)
            }
        };
        tokens.map_err(|error| self.unreadable(error, field))
    }

    /// Returns the error of a field whose text can't be tokenized.
    pub(super) fn unreadable(&self, error: RuntimeError, field: &'static str) -> ServeError {
        match error {
            RuntimeError::TextTooLong { bytes, .. } => {
                ServeError::PromptBytes { context: self.context(), bytes, field }
            }
            error => error.into(),
        }
    }

    /// Returns the tokens that mark the texts before and after a gap, and the gap.
    fn middle_marks(&self) -> Option<[u32; 3]> {
        // Qwen2.5-Coder and Granite, StarCoder, CodeGemma, DeepSeek-Coder, Codestral, Code Llama
        const MARKS: [[&str; 3]; 6] = [
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
            ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
            ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            ["[PREFIX]", "[SUFFIX]", "[MIDDLE]"],
            ["▁<PRE>", "▁<SUF>", "▁<MID>"],
        ];
        let ids = |marks: [&str; 3]| -> Option<[u32; 3]> {
            let [begin, hole, end] = marks.map(|mark| self.tokenizer.id(mark));
            Some([begin?, hole?, end?])
        };
        MARKS.into_iter().find_map(ids)
    }

    /// Tokenizes the texts around a gap.
    fn middle(&self, prefix: &str, suffix: &str) -> Result<Vec<u32>, ServeError> {
        let Some([begin, hole, end]) = self.middle_marks() else {
            return Err(ServeError::field("suffix", "this model has no tokens for a text between others"));
        };
        let encode = |text: &str, field: &'static str| -> Result<Vec<u32>, ServeError> {
            let checked = self.tokenizer.check_length(text, self.context());
            checked.map_err(|error| self.unreadable(error, field))?;
            Ok(self.tokenizer.tokens(text)?.0.into_iter().map(|token| token.id).collect())
        };
        let (prefix, suffix) = (encode(prefix, "prompt")?, encode(suffix, "suffix")?);
        Ok([&[begin][..], &prefix, &[hole], &suffix, &[end]].concat())
    }

    /// Returns the number of tokens that can follow a prompt.
    fn room(&self, prompt: &[u32], field: &'static str) -> Result<u64, ServeError> {
        if prompt.is_empty() {
            return Err(ServeError::field(field, "the prompt has no tokens"));
        }
        let vocab_size = self.model.bundle().model.vocab_size;
        if let Some(token) = prompt.iter().copied().find(|token| u64::from(*token) >= vocab_size) {
            return Err(RuntimeError::Token { token, vocab_size }.into());
        }
        let (context, prompt) = (self.model.context(), prompt.len() as u64);
        match prompt < context {
            true => Ok(context - prompt),
            false => {
                let tokens = prompt.saturating_add(1);
                Err(ServeError::ContextLength { context, tokens, prompt, more: 1, field })
            }
        }
    }

    fn constraint(&self, grammar: &RequestGrammar, client: &Weak<()>) -> Result<Constraint, ServeError> {
        let make = || {
            let vocab_size = self.model.bundle().model.vocab_size;
            Grammars::new(&self.tokenizer, vocab_size, &self.model.end_tokens()).map_err(|error| error.to_string())
        };
        let problem = |problem: String| ServeError::field(grammar.field, problem);
        let grammars = self.grammars.get_or_init(make).as_ref().map_err(|error| problem(error.clone()))?;
        let waits = || client.strong_count() > 0;
        let constraint = grammars.start_while(&grammar.grammar, &waits).map_err(|error| problem(error.to_string()))?;
        match constraint.warnings() {
            [first, ..] if grammar.strict => Err(problem(format!("the schema can't be kept to the letter: {first}"))),
            _ => Ok(constraint),
        }
    }

    /// Returns a token's text and bytes; the bytes may be part of a character.
    pub fn spell(&self, token: u32) -> (String, Vec<u8>) {
        let bytes = self.tokenizer.token_bytes(token);
        (String::from_utf8_lossy(&bytes).into_owned(), bytes)
    }
}

/// Returns an identifier of a model's files.
fn fingerprint(model: &LoadedModel) -> String {
    let digest = model.bundle().digest().to_string();
    let digits = digest.rsplit(':').next().unwrap_or_default();
    format!("fp_{}", &digits[..digits.len().min(10)])
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
