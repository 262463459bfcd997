//! The front door to running bundles.

use std::iter::FusedIterator;
use std::path::Path;
use std::sync::Arc;

use anec_base::Result;
use anec_bundle::Bundle;
use anec_coreml::ComputeUnits;
use anec_exec::Precision;
use anec_runtime::chat::{Chat, ChatTemplate, Message};
use anec_runtime::{
    CpuOptions, GenerationOutput, GenerationRequest, Grammar, Grammars, Sampling, TextGeneration, Tokenizer,
};

/// A bundle, ready to run.
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
    /// The bundle in a folder, on the CPU in f32.
    ///
    /// # Errors
    /// When there is no bundle, or it contradicts itself.
    pub fn on_cpu(folder: impl AsRef<Path>) -> Result<Self> {
        Self::new(anec_runtime::LoadedModel::on_cpu_with(folder.as_ref(), &CpuOptions::to_write(Precision::F32))?)
    }

    /// The bundle in a folder, on Core ML.
    ///
    /// # Errors
    /// As [`Model::on_cpu`], and where there is no Core ML.
    pub fn on_core_ml(folder: impl AsRef<Path>, units: ComputeUnits) -> Result<Self> {
        Self::new(anec_runtime::coreml::open(folder.as_ref(), units, None)?)
    }

    /// A model of the runtime, which has more choices.
    ///
    /// # Errors
    /// When the bundle's tokenizer can't be read.
    pub fn new(model: Arc<anec_runtime::LoadedModel>) -> Result<Self> {
        let has_tokenizer = model.bundle().tokenizer.contains_key("tokenizer");
        let tokenizer = has_tokenizer.then(|| Tokenizer::of(model.bundle(), model.folder())).transpose()?;
        Ok(Model { model, tokenizer: tokenizer.map(Arc::new) })
    }

    /// The layer of the bundle that drafts for [`Session::with_draft`], if it was converted with one.
    ///
    /// # Errors
    /// When it can't be run.
    pub fn draft_layer(&self) -> Result<Option<Model>> {
        let layer = self.model.draft_layer()?;
        Ok(layer.map(|model| Model { model, tokenizer: self.tokenizer.clone() }))
    }

    /// What the bundle says of itself.
    pub fn bundle(&self) -> &Bundle {
        self.model.bundle()
    }

    /// The model of the runtime.
    pub fn runtime(&self) -> &Arc<anec_runtime::LoadedModel> {
        &self.model
    }

    /// Its tokenizer, if the bundle has one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// Begins a text.
    pub fn session(&self) -> Session {
        Session { model: self.clone(), session: None, draft: None }
    }

    fn needed_tokenizer(&self) -> Result<Arc<Tokenizer>> {
        match &self.tokenizer {
            Some(tokenizer) => Ok(tokenizer.clone()),
            // says why there is none
            None => Ok(Arc::new(Tokenizer::of(self.model.bundle(), self.model.folder())?)),
        }
    }
}

/// What a model continues.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Prompt {
    /// Text. Special tokens that are written out in it are letters like all others.
    Text(String),
    /// Messages, put into words by the model's chat template.
    Chat(Vec<Message>),
    /// Tokens.
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
            Prompt::Text(text) => Ok(model.needed_tokenizer()?.encode_literal(&text)?),
            Prompt::Chat(messages) => {
                let tokenizer = model.needed_tokenizer()?;
                let template = ChatTemplate::of(model.bundle(), model.model.folder(), &tokenizer)?;
                Ok(template.encode(&tokenizer, &Chat::new(messages))?)
            }
        }
    }

    /// The tokens of a text in which special tokens may be written out.
    #[cfg(feature = "convert")]
    pub(crate) fn written_tokens(self, model: &Arc<anec_runtime::LoadedModel>) -> Result<Vec<u32>> {
        match self {
            Prompt::Text(text) => Ok(Tokenizer::of(model.bundle(), model.folder())?.encode(&text)?),
            other => other.tokens(&Model::new(model.clone())?),
        }
    }
}

/// How a text is continued.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GenerateOptions {
    /// Most tokens to add.
    pub max_tokens: usize,
    /// How tokens are chosen: the most likely ones, by default.
    pub sampling: Sampling,
    /// Strings before which the text ends.
    pub stops: Vec<String>,
    /// What the text has to be.
    pub grammar: Option<Grammar>,
    /// Most tokens that are guessed from the text's past and checked in one call. The text is the same either way.
    pub speculation: usize,
    /// Most tokens of the prompt that one [step](TextPieces::step) computes; 0 for all.
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
    /// Adds at most this many tokens.
    pub fn max_tokens(mut self, count: usize) -> Self {
        self.max_tokens = count;
        self
    }

    /// Chooses tokens so.
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.sampling = sampling;
        self
    }

    /// Ends the text before this string.
    pub fn stop(mut self, stop: impl Into<String>) -> Self {
        self.stops.push(stop.into());
        self
    }

    /// Holds the text to a grammar.
    pub fn grammar(mut self, grammar: Grammar) -> Self {
        self.grammar = Some(grammar);
        self
    }
}

/// A text on its way through a model. It keeps what it computed: a prompt that begins as the text before did goes on from
/// there.
pub struct Session {
    model: Model,
    /// None before the first prompt, whose length decides how much room is needed.
    session: Option<anec_runtime::TokenSession>,
    /// A smaller model that drafts, and most tokens of a draft.
    draft: Option<(Model, usize)>,
}

impl Session {
    /// Lets a smaller model with the same tokenizer draft up to `tokens` tokens that are checked in one call. The text is the same
    /// either way.
    #[must_use]
    pub fn with_draft(mut self, model: &Model, tokens: usize) -> Self {
        self.draft = Some((model.clone(), tokens));
        self
    }

    /// Continues a prompt: text comes piece by piece, each when it is certain.
    ///
    /// # Errors
    /// When the prompt is empty or doesn't fit, the bundle has no tokenizer, or the grammar is wrong.
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

/// A continuation as pieces of text, as they come. After an error there are no more.
pub struct TextPieces<'s> {
    /// There until it is dropped.
    text: Option<TextGeneration>,
    /// Where the runtime's session goes back to.
    session: &'s mut Option<anec_runtime::TokenSession>,
}

impl TextPieces<'_> {
    /// The tokens so far, how long they took, and why the text ended.
    pub fn output(&self) -> Option<GenerationOutput> {
        self.text.as_ref().map(|text| text.generation().output())
    }

    /// Makes at most one call of the model: a part of the prompt, or the next tokens. Gives the text that is certain by it, which may
    /// be empty, and nothing when the text has ended.
    ///
    /// # Errors
    /// When a function fails.
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

    /// All of the text that is still to come.
    ///
    /// # Errors
    /// When a function fails.
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
        // a token may be a part of a character only
        let delta = self.text.as_mut()?.find(|delta| delta.as_ref().map_or(true, |delta| !delta.text.is_empty()))?;
        Some(delta.map(|delta| delta.text))
    }
}

impl FusedIterator for TextPieces<'_> {}
