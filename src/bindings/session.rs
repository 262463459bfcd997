//! Text generation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anec::base::Error;
use anec::runtime::chat::Message;
use anec::runtime::{Finish, RuntimeError};
use anec::{GenerateOptions, Grammar, Prompt, Sampling, Session};

use super::error::AnecError;

/// Number of prompt tokens between two checks for cancellation.
const PROMPT_CHUNK: usize = 256;

/// Message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, uniffi::Record)]
pub struct ChatTurn {
    /// Role of the speaker: `system`, `user`, `assistant`.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

/// Form of a generated text.
#[derive(Clone, Debug, PartialEq, Eq, uniffi::Enum)]
pub enum TextForm {
    /// JSON that satisfies a JSON Schema.
    JsonSchema {
        /// Schema as JSON.
        schema: String,
    },
    /// Text that a regular expression matches as a whole.
    Regex {
        /// Regular expression.
        pattern: String,
    },
    /// Text of a grammar.
    Lark {
        /// Grammar in llguidance's variant of Lark.
        grammar: String,
    },
}

/// Options of text generation. The defaults choose the most likely token each time.
#[derive(Clone, Debug, PartialEq, uniffi::Record)]
pub struct TextOptions {
    /// Maximum number of generated tokens.
    #[uniffi(default = 128)]
    pub max_tokens: u32,
    /// Sampling temperature; 0 takes the most likely token.
    #[uniffi(default = 0.0)]
    pub temperature: f32,
    /// Number of most likely tokens to keep; 0 for all.
    #[uniffi(default = 0)]
    pub top_k: u32,
    /// Total probability of the most likely tokens to keep.
    #[uniffi(default = 1.0)]
    pub top_p: f32,
    /// Minimum probability of a token relative to the most likely one.
    #[uniffi(default = 0.0)]
    pub min_p: f32,
    /// Penalty factor for tokens of the prompt or the text; 1 for none.
    #[uniffi(default = 1.0)]
    pub repetition_penalty: f32,
    /// Amount subtracted from the logit of tokens in the text.
    #[uniffi(default = 0.0)]
    pub presence_penalty: f32,
    /// Amount subtracted from the logit of a token for each occurrence in the text.
    #[uniffi(default = 0.0)]
    pub frequency_penalty: f32,
    /// Seed; equal seeds give equal texts.
    #[uniffi(default = 0)]
    pub seed: u64,
    /// Strings before which the text ends.
    #[uniffi(default = [])]
    pub stops: Vec<String>,
    /// Form of the text.
    #[uniffi(default = None)]
    pub form: Option<TextForm>,
    /// Maximum number of tokens drafted from the text's past and verified in one call. The text is the same either way.
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

/// Reason why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, uniffi::Enum)]
pub enum TextEnd {
    /// End token, stop string, or completed form.
    Stop,
    /// Maximum number of tokens.
    Length,
    /// Full context.
    Context,
    /// Cancellation, or a listener that wanted no more.
    Cancelled,
}

/// Generated text.
#[derive(Clone, Debug, PartialEq, uniffi::Record)]
pub struct GeneratedText {
    /// Text without the prompt.
    pub text: String,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Reason why the text ended.
    pub end: TextEnd,
    /// Number of prompt tokens that the session already held.
    pub cached_tokens: u64,
    /// Time to first token in milliseconds.
    pub first_token_ms: f64,
    /// Prefill throughput in tokens per second, of computed tokens.
    pub prompt_tokens_per_second: f64,
    /// Decode throughput in tokens per second, after the first token.
    pub tokens_per_second: f64,
}

/// Listener for a text while it is generated.
#[uniffi::export(with_foreign)]
pub trait TextListener: Send + Sync {
    /// Receives the next piece, which never splits a character; returns whether more is wanted. Runs on the calling
    /// thread between two tokens: it may call `cancel`, but not generate another text.
    ///
    /// # Errors
    /// If the app's code fails: the text ends.
    fn on_text(&self, piece: String) -> Result<bool, AnecError>;
}

/// Text or chat with its states. A prompt with the same beginning as the previous text reuses its states. One text at a
/// time; other threads wait.
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
        // a cancellation applies to the previous text
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
    /// Continues a prompt and returns when the text is complete; the listener receives it as it comes. Special tokens
    /// spelled out in the prompt are plain text.
    ///
    /// # Errors
    /// If the prompt is empty or doesn't fit, an option is wrong, a function or the listener fails.
    #[uniffi::method(default(listener = None))]
    pub fn generate(
        &self,
        prompt: String,
        options: TextOptions,
        listener: Option<Arc<dyn TextListener>>,
    ) -> Result<GeneratedText, AnecError> {
        self.write(Prompt::Text(prompt), options, listener)
    }

    /// Answers the last message of a chat with the model's chat template. Pass all messages each time; known ones
    /// aren't computed again.
    ///
    /// # Errors
    /// Returns any error of `generate`; also if the model has no chat template.
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

    /// Ends the current text, from any thread, after the current token or part of the prompt. Does nothing without one.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}
