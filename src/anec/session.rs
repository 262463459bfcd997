//! High-level API for running bundles.

use std::iter::FusedIterator;
use std::path::Path;
use std::sync::Arc;

use anec_base::Result;
use anec_bundle::Bundle;
use anec_coreml::plan::ComputeUnits;
use anec_exec::Precision;
use anec_runtime::chat::{Chat, ChatTemplate, Message};
use anec_runtime::sampling::Sampling;
use anec_runtime::{CpuOptions, GenerationOutput, GenerationRequest, Grammar, Grammars, TextGeneration, Tokenizer};

/// Bundle that is ready to run.
///
/// ```no_run
/// # fn main() -> anec::base::Result<()> {
/// let model = anec::Model::on_cpu("qwen3.anec")?;
/// let mut session = model.session();
/// for piece in session.generate("Once upon a time", &anec::GenerateOptions::default())? {
///     print!("{}", piece?);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Model {
    model: Arc<anec_runtime::LoadedModel>,
    tokenizer: Option<Arc<Tokenizer>>,
}

impl Model {
    /// Opens a bundle on the CPU in f32.
    ///
    /// # Errors
    /// If the bundle is missing or invalid.
    pub fn on_cpu(folder: impl AsRef<Path>) -> Result<Self> {
        Self::new(anec_runtime::LoadedModel::on_cpu_with(folder.as_ref(), &CpuOptions::to_write(Precision::F32))?)
    }

    /// Opens a bundle on Core ML.
    ///
    /// # Errors
    /// Returns any error from [`Model::on_cpu`], and an error if Core ML isn't available.
    pub fn on_core_ml(folder: impl AsRef<Path>, units: ComputeUnits) -> Result<Self> {
        Self::new(anec_runtime::coreml::open(folder.as_ref(), units, None)?)
    }

    /// Wraps a model of the runtime, which has more options.
    ///
    /// # Errors
    /// If the bundle's tokenizer can't be read.
    pub fn new(model: Arc<anec_runtime::LoadedModel>) -> Result<Self> {
        let has_tokenizer = model.bundle().tokenizer.contains_key("tokenizer");
        let tokenizer = has_tokenizer.then(|| Tokenizer::of(model.bundle(), model.folder())).transpose()?;
        Ok(Model { model, tokenizer: tokenizer.map(Arc::new) })
    }

    /// Draft layer of the bundle for [`Session::with_draft`], if it was converted with one.
    ///
    /// # Errors
    /// If it can't be loaded.
    pub fn draft_layer(&self) -> Result<Option<Model>> {
        let layer = self.model.draft_layer()?;
        Ok(layer.map(|model| Model { model, tokenizer: self.tokenizer.clone() }))
    }

    /// Description of the bundle.
    pub fn bundle(&self) -> &Bundle {
        self.model.bundle()
    }

    /// Model of the runtime.
    pub fn runtime(&self) -> &Arc<anec_runtime::LoadedModel> {
        &self.model
    }

    /// Tokenizer, if the bundle has one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// Starts a session.
    pub fn session(&self) -> Session {
        Session { model: self.clone(), session: None, draft: None }
    }

    fn needed_tokenizer(&self) -> Result<Arc<Tokenizer>> {
        match &self.tokenizer {
            Some(tokenizer) => Ok(tokenizer.clone()),
            // returns the reason why there is none
            None => Ok(Arc::new(Tokenizer::of(self.model.bundle(), self.model.folder())?)),
        }
    }
}

/// Prompt.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Prompt {
    /// Text. Special tokens in it are treated as plain text.
    Text(String),
    /// Messages, formatted by the model's chat template.
    Chat(Vec<Message>),
    /// Token ids.
    Tokens(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Prompt::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt::Text(text)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Prompt::Tokens(tokens)
    }
}

impl From<Vec<Message>> for Prompt {
    fn from(messages: Vec<Message>) -> Self {
        Prompt::Chat(messages)
    }
}

impl Prompt {
    fn tokens(self, model: &Model) -> Result<Vec<u32>> {
        match self {
            Prompt::Tokens(tokens) => Ok(tokens),
            Prompt::Text(text) => {
                let tokenizer = model.needed_tokenizer()?;
                tokenizer.check_length(&text, model.model.context())?;
                Ok(tokenizer.encode_literal(&text)?)
            }
            Prompt::Chat(messages) => {
                let tokenizer = model.needed_tokenizer()?;
                let template = ChatTemplate::of(model.bundle(), model.model.folder(), &tokenizer)?;
                Ok(template.encode_within(&tokenizer, &Chat::new(messages), model.model.context())?)
            }
        }
    }

    /// Text of the prompt; `None` for tokens and conversations.
    #[cfg(feature = "convert")]
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Prompt::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Tokens of a text, with special tokens parsed.
    #[cfg(feature = "convert")]
    pub(crate) fn written_tokens(self, model: &Arc<anec_runtime::LoadedModel>) -> Result<Vec<u32>> {
        match self {
            Prompt::Text(text) => Ok(Tokenizer::of(model.bundle(), model.folder())?.encode(&text)?),
            other => other.tokens(&Model::new(model.clone())?),
        }
    }
}

/// Options of a generation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GenerateOptions {
    /// Maximum number of tokens to generate.
    pub max_tokens: usize,
    /// Sampling options; greedy by default.
    pub sampling: Sampling,
    /// Strings that stop the generation.
    pub stops: Vec<String>,
    /// Grammar that constrains the text.
    pub grammar: Option<Grammar>,
    /// Maximum number of tokens drafted from the text itself and verified in one call. The output stays the same.
    pub speculation: usize,
    /// Maximum number of prompt tokens that one [step](TextPieces::step) processes; 0 for all.
    pub prompt_chunk: usize,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_tokens: 128,
            sampling: Sampling::default(),
            stops: Vec::new(),
            grammar: None,
            speculation: 0,
            prompt_chunk: 0,
        }
    }
}

impl GenerateOptions {
    /// Sets the maximum number of tokens to generate.
    pub fn max_tokens(mut self, count: usize) -> Self {
        self.max_tokens = count;
        self
    }

    /// Sets the sampling options.
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.sampling = sampling;
        self
    }

    /// Adds a string that stops the generation.
    pub fn stop(mut self, stop: impl Into<String>) -> Self {
        self.stops.push(stop.into());
        self
    }

    /// Constrains the text by a grammar.
    pub fn grammar(mut self, grammar: Grammar) -> Self {
        self.grammar = Some(grammar);
        self
    }
}

/// Generation session. It keeps the KV cache: a prompt that starts like the previous text reuses it.
pub struct Session {
    model: Model,
    /// `None` before the first prompt, whose length determines the capacity.
    session: Option<anec_runtime::TokenSession>,
    /// Draft model, and the maximum number of tokens of a draft.
    draft: Option<(Model, usize)>,
}

impl Session {
    /// Drafts up to `tokens` tokens per step with a smaller model of the same tokenizer. The output stays the same.
    #[must_use]
    pub fn with_draft(mut self, model: &Model, tokens: usize) -> Self {
        self.draft = Some((model.clone(), tokens));
        self
    }

    /// Generates text from a prompt, piece by piece.
    ///
    /// # Errors
    /// If the prompt is empty or doesn't fit, the bundle has no tokenizer, or the grammar is invalid.
    pub fn generate(&mut self, prompt: impl Into<Prompt>, options: &GenerateOptions) -> Result<TextPieces<'_>> {
        let model = &self.model.model;
        let request = GenerationRequest {
            prompt: prompt.into().tokens(&self.model)?,
            max_tokens: options.max_tokens,
            sampling: options.sampling,
            stops: model.end_tokens(),
            speculation: options.speculation,
            ..GenerationRequest::default()
        };
        let tokenizer = self.model.needed_tokenizer()?;
        let constraint = match &options.grammar {
            None => None,
            Some(grammar) => {
                let vocab_size = model.bundle().model.vocab_size;
                Some(Grammars::new(&tokenizer, vocab_size, &model.end_tokens())?.start(grammar)?)
            }
        };
        let session = match self.session.take() {
            Some(mut session) if session.is_compatible_with(request.length(model)) => {
                session.set_length(request.length(model))?;
                session
            }
            _ => model.start(request.length(model))?,
        };
        let mut generation = session.generate(request)?.with_constraint(constraint);
        if options.prompt_chunk > 0 {
            generation = generation.with_prompt_chunk(options.prompt_chunk);
        }
        if let Some((draft, tokens)) = &self.draft {
            generation = generation.with_draft(&draft.model, *tokens)?;
        }
        let text = TextGeneration::new(generation, &tokenizer, &options.stops, &[])?;
        Ok(TextPieces { text: Some(text), session: &mut self.session })
    }
}

/// Iterator over the pieces of a generated text. It ends after an error.
pub struct TextPieces<'s> {
    /// `None` after the drop.
    text: Option<TextGeneration>,
    /// Slot that the runtime's session returns to.
    session: &'s mut Option<anec_runtime::TokenSession>,
}

impl TextPieces<'_> {
    /// Generated tokens, timings and the reason for the end.
    pub fn output(&self) -> Option<GenerationOutput> {
        self.text.as_ref().map(|text| text.generation().output())
    }

    /// Makes at most one call of the model: a part of the prompt, or the next tokens. Returns the new text, which may
    /// be empty, or `None` at the end.
    ///
    /// # Errors
    /// If a function fails.
    pub fn step(&mut self) -> Result<Option<String>> {
        let Some(text) = self.text.as_mut() else { return Ok(None) };
        if let Some(delta) = text.ready() {
            return Ok(Some(delta.text));
        }
        if text.is_over() {
            return Ok(None);
        }
        text.step()?;
        Ok(Some(text.ready().map_or_else(String::new, |delta| delta.text)))
    }

    /// Generates the rest of the text.
    ///
    /// # Errors
    /// If a function fails.
    pub fn text(&mut self) -> Result<String> {
        self.collect()
    }
}

impl Drop for TextPieces<'_> {
    fn drop(&mut self) {
        *self.session = self.text.take().map(|text| text.into_generation().into_session());
    }
}

impl Iterator for TextPieces<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        // a token may be only a part of a character
        let delta = self.text.as_mut()?.find(|delta| delta.as_ref().map_or(true, |delta| !delta.text.is_empty()))?;
        Some(delta.map(|delta| delta.text))
    }
}

impl FusedIterator for TextPieces<'_> {}
