//! Texts that are continued.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anec::base::Error;
use anec::runtime::chat::Message;
use anec::runtime::{Finish, RuntimeError};
use anec::{GenerateOptions, Grammar, Prompt, Sampling, Session};

use super::error::AnecError;

/// Tokens of a prompt that are computed before a cancellation is looked for.
const PROMPT_CHUNK: usize = 256;

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, uniffi::Record)]
pub struct ChatTurn {
    /// Who speaks: `system`, `user`, `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// What a text has to be.
#[derive(Clone, Debug, PartialEq, Eq, uniffi::Enum)]
pub enum TextForm {
    /// JSON by a JSON Schema.
    JsonSchema {
        /// The schema, as JSON.
        schema: String,
    },
    /// A text that a regular expression matches as a whole.
    Regex {
        /// The expression.
        pattern: String,
    },
    /// A text by a grammar.
    Lark {
        /// The grammar in Lark's form, as llguidance extends it.
        grammar: String,
    },
}

/// How a text is continued. Without a change, the most likely token is taken each time.
#[derive(Clone, Debug, PartialEq, uniffi::Record)]
pub struct TextOptions {
    /// Most tokens to add.
    #[uniffi(default = 128)]
    pub max_tokens: u32,
    /// 0 takes the most likely token; higher is bolder.
    #[uniffi(default = 0.0)]
    pub temperature: f32,
    /// Only this many most likely tokens; 0 for all.
    #[uniffi(default = 0)]
    pub top_k: u32,
    /// Only the most likely tokens that together have this probability.
    #[uniffi(default = 1.0)]
    pub top_p: f32,
    /// Only tokens with at least this share of the most likely one's probability.
    #[uniffi(default = 0.0)]
    pub min_p: f32,
    /// Makes tokens that the prompt or the text has less likely; 1 for not.
    #[uniffi(default = 1.0)]
    pub repetition_penalty: f32,
    /// Taken off the logit of tokens that the text has.
    #[uniffi(default = 0.0)]
    pub presence_penalty: f32,
    /// Taken off the logit of a token for each time that the text has it.
    #[uniffi(default = 0.0)]
    pub frequency_penalty: f32,
    /// Equal seeds give equal texts.
    #[uniffi(default = 0)]
    pub seed: u64,
    /// Strings before which the text ends.
    #[uniffi(default = [])]
    pub stops: Vec<String>,
    /// What the text has to be.
    #[uniffi(default = None)]
    pub form: Option<TextForm>,
    /// Most tokens that are guessed from the text's past and checked in one call. The text is the same either way.
    #[uniffi(default = 0)]
    pub speculation: u32,
}

impl TextOptions {
    fn generate_options(self) -> Result<GenerateOptions, AnecError> {
        let form = match self.form {
            None => None,
            Some(TextForm::Regex { pattern }) => Some(Grammar::Regex(pattern)),
            Some(TextForm::Lark { grammar }) => Some(Grammar::Lark(grammar)),
            Some(TextForm::JsonSchema { schema }) => {
                let wrong = |error| RuntimeError::Grammar { problem: format!("the schema isn't JSON: {error}") };
                Some(Grammar::JsonSchema(serde_json::from_str(&schema).map_err(wrong).map_err(Error::from)?))
            }
        };
        let mut options = GenerateOptions::default().max_tokens(self.max_tokens as usize).sampling(Sampling {
            temperature: self.temperature,
            top_k: self.top_k as usize,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
        });
        (options.stops, options.grammar, options.speculation) = (self.stops, form, self.speculation as usize);
        options.prompt_chunk = PROMPT_CHUNK;
        Ok(options)
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, uniffi::Enum)]
pub enum TextEnd {
    /// The model ended it, a stop string came, or its form is complete.
    Stop,
    /// It has as many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
    /// It was cancelled, or the listener wanted no more.
    Cancelled,
}

/// A text that was written.
#[derive(Clone, Debug, PartialEq, uniffi::Record)]
pub struct GeneratedText {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub end: TextEnd,
    /// Tokens of the prompt that the session knew already.
    pub cached_tokens: u64,
    /// Milliseconds until the first token.
    pub first_token_ms: f64,
    /// Tokens of the prompt per second, of those that had to be computed.
    pub prompt_tokens_per_second: f64,
    /// Tokens per second after the first.
    pub tokens_per_second: f64,
}

/// Is given a text while it is written.
#[uniffi::export(with_foreign)]
pub trait TextListener: Send + Sync {
    /// The next piece, which never cuts a character. Gives whether more is wanted. It runs on the thread that called, between
    /// two tokens: `cancel` may be called in it, another text may not.
    ///
    /// # Errors
    /// When the app's code fails: the text ends.
    fn on_text(&self, piece: String) -> Result<bool, AnecError>;
}

/// A text, or a chat, on its way through a model. It keeps what it computed: a prompt that begins as the text before did goes
/// on from there. One text at a time; a second thread waits.
#[derive(uniffi::Object)]
pub struct AnecSession {
    session: Mutex<Session>,
    cancelled: AtomicBool,
}

impl AnecSession {
    pub(crate) fn new(session: Session) -> Self {
        AnecSession { session: Mutex::new(session), cancelled: AtomicBool::new(false) }
    }

    fn write(
        &self,
        prompt: Prompt,
        options: TextOptions,
        listener: Option<Arc<dyn TextListener>>,
    ) -> Result<GeneratedText, AnecError> {
        let options = options.generate_options()?;
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        // what was cancelled is the text before
        self.cancelled.store(false, Ordering::Relaxed);
        let mut pieces = session.generate(prompt, &options)?;
        let (mut text, mut wanted) = (String::new(), true);
        while let Some(piece) = pieces.step()? {
            text.push_str(&piece);
            if let Some(listener) = listener.as_ref().filter(|_| !piece.is_empty()) {
                wanted = listener.on_text(piece)?;
            }
            if !wanted || self.cancelled.load(Ordering::Relaxed) {
                break;
            }
        }
        let output = pieces.output().expect("pieces keep their text until they are dropped");
        let timings = output.timings;
        Ok(GeneratedText {
            text,
            end: match output.finish {
                Finish::Stop | Finish::Repetition => TextEnd::Stop,
                Finish::Length => TextEnd::Length,
                Finish::Context => TextEnd::Context,
                Finish::Interrupted => TextEnd::Cancelled,
            },
            tokens: output.ids,
            cached_tokens: timings.cached_tokens as u64,
            first_token_ms: timings.ttft_ms,
            prompt_tokens_per_second: timings.prefill_tps,
            tokens_per_second: timings.decode_tps,
        })
    }
}

#[uniffi::export]
impl AnecSession {
    /// Continues a prompt. It waits until the text is written; the listener gets it as it comes. Special tokens that are written
    /// out in the prompt are letters like all others.
    ///
    /// # Errors
    /// When the prompt is empty or doesn't fit, an option is wrong, a function or the listener fails.
    #[uniffi::method(default(listener = None))]
    pub fn generate(
        &self,
        prompt: String,
        options: TextOptions,
        listener: Option<Arc<dyn TextListener>>,
    ) -> Result<GeneratedText, AnecError> {
        self.write(Prompt::Text(prompt), options, listener)
    }

    /// Answers the last message of a chat, put into words by the model's template. Give all messages each time: those that the
    /// session knows aren't computed again.
    ///
    /// # Errors
    /// As `generate`, and when the model has no chat template.
    #[uniffi::method(default(listener = None))]
    pub fn chat(
        &self,
        messages: Vec<ChatTurn>,
        options: TextOptions,
        listener: Option<Arc<dyn TextListener>>,
    ) -> Result<GeneratedText, AnecError> {
        let messages = messages.iter().map(|turn| Message::new(&turn.role, &turn.content)).collect();
        self.write(Prompt::Chat(messages), options, listener)
    }

    /// Ends the text that is being written, from any thread: after the token that is being computed, or the part of the prompt.
    /// Without one it does nothing.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}
