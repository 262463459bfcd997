//! Errors of running a bundle.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault, FileError};
use anec_exec::ExecError;

/// What can go wrong between a bundle and its text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The system refused a file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file of the bundle isn't what it should be, or contradicts another.
    #[error("{}: {problem}", path.display())]
    Bundle {
        /// The file.
        path: PathBuf,
        /// Found and expected.
        problem: String,
    },
    /// A function of the bundle can't be run by the CPU executor.
    #[error("{package}, {error}")]
    Function {
        /// The package that it is in.
        package: String,
        /// Function, op, found and expected.
        error: ExecError,
    },
    /// The folder holds no bundle.
    #[error("{}: no bundle here: it has no bundle.json", path.display())]
    NoBundle {
        /// The folder.
        path: PathBuf,
    },
    /// The folder holds several bundles.
    #[error("the current folder holds {} bundles: {}", names.len(), names.join(", "))]
    SeveralBundles {
        /// Their folders.
        names: Vec<String>,
    },
    /// Energy can't be measured.
    #[error("energy can't be measured: {problem}")]
    NoEnergy {
        /// What was tried, and what came of it.
        problem: String,
    },
    /// The text doesn't fit into the key-value cache.
    #[error("the text needs {tokens} tokens, but the bundle's largest context has {context}")]
    ContextFull {
        /// Tokens that it would have.
        tokens: u64,
        /// Tokens that fit.
        context: u64,
    },
    /// A length to measure that the key-value cache has no room for, or none at all.
    #[error("{wanted} has to be from 1 to {most}: the bundle's largest context has {context} tokens")]
    BenchmarkLength {
        /// The option, and what it asks for.
        wanted: String,
        /// Tokens that fit there.
        most: u64,
        /// Tokens that fit in all.
        context: u64,
    },
    /// A token that the model doesn't have.
    #[error("token {token} doesn't exist: the vocabulary has {vocab_size} tokens, 0 to {}", vocab_size.saturating_sub(1))]
    Token {
        /// The token.
        token: u32,
        /// Tokens of the model.
        vocab_size: u64,
    },
    /// A parameter is out of its range.
    #[error("`{field}` is {value}, but has to be from {least} to {most}")]
    OutOfRange {
        /// The parameter.
        field: &'static str,
        /// What it is.
        value: String,
        /// Its least value.
        least: String,
        /// Its largest value.
        most: String,
    },
    /// A text that can't fit into the context, however it is tokenized.
    #[error("the text has {bytes} bytes, and the bundle's largest context of {context} tokens holds at most {most}")]
    TextTooLong {
        /// Bytes of the text.
        bytes: usize,
        /// Tokens that fit.
        context: u64,
        /// Bytes that so many tokens can stand for.
        most: u64,
    },
    /// A function whose weights alone are more than may be in memory.
    #[error("{package} has {needed} bytes of weights, but functions may have {limit} bytes in memory")]
    Memory {
        /// The package that the function is in.
        package: String,
        /// Bytes of its weights.
        needed: u64,
        /// Bytes that are allowed.
        limit: u64,
    },
    /// Nothing to compute.
    #[error("the prompt has no tokens")]
    NoTokens,
    /// A number of tokens per call that no function takes.
    #[error("no call of {size} tokens is possible: the bundle's functions take {allowed}")]
    Chunk {
        /// The number that was asked for.
        size: u64,
        /// What is possible.
        allowed: String,
    },
    /// Text was given or asked for, but the bundle has no tokenizer.
    #[error("{}: the bundle has no tokenizer", path.display())]
    NoTokenizer {
        /// The bundle.
        path: PathBuf,
    },
    /// A chat was asked for, but the model has no chat template.
    #[error("{}: the model has no chat template", path.display())]
    NoChatTemplate {
        /// The bundle.
        path: PathBuf,
    },
    /// The chat template can't be rendered.
    #[error("chat template: {problem}")]
    ChatTemplate {
        /// What it says.
        problem: String,
    },
    /// A form that a text was to keep to is wrong or unsupported.
    #[error("grammar: {problem}")]
    Grammar {
        /// What is wrong with it.
        problem: String,
    },
    /// The model labels tokens and can't continue a text.
    #[error("{}: the model labels the tokens of a text; it doesn't continue one", path.display())]
    LabelsTokens {
        /// The bundle.
        path: PathBuf,
    },
    /// The model continues a text and has no labels.
    #[error("{}: the model doesn't label tokens", path.display())]
    NoLabels {
        /// The bundle.
        path: PathBuf,
    },
    /// The model gives vectors of texts and can't continue one.
    #[error("{}: the model gives vectors of texts; it doesn't continue one", path.display())]
    GivesVectors {
        /// The bundle.
        path: PathBuf,
    },
    /// The model classifies texts and can't continue one.
    #[error("{}: the model classifies whole texts; it doesn't continue one", path.display())]
    LabelsTexts {
        /// The bundle.
        path: PathBuf,
    },
    /// The model gives no vectors.
    #[error("{}: the model gives no vectors of texts", path.display())]
    NoEmbedding {
        /// The bundle.
        path: PathBuf,
    },
    /// The model doesn't classify whole texts.
    #[error("{}: the model doesn't classify whole texts", path.display())]
    NoTextLabels {
        /// The bundle.
        path: PathBuf,
    },
    /// A text is longer than a call, and calls are too small to overlap.
    #[error(
        "a text of more than {window} tokens needs calls of more than {}, for the layers of one function see {halo} \
         tokens to each side; the bundle's calls have up to {window}",
        halo.saturating_mul(2)
    )]
    Window {
        /// Tokens of the largest call.
        window: u64,
        /// Tokens that a function's layers see on each side.
        halo: u64,
    },
    /// Labels that name no places within spans.
    #[error("{problem}")]
    Labels {
        /// What is wrong with them.
        problem: String,
    },
    /// Two bundles that tokenize a text differently can't be compared token by token.
    #[error(
        "{} and {} turn the text into different tokens: their perplexities can't be compared",
        one.display(), other.display()
    )]
    UnlikeTokenizers {
        /// The first bundle.
        one: PathBuf,
        /// The other.
        other: PathBuf,
    },
    /// The tokenizer failed on a text.
    #[error("tokenizer: {problem}")]
    Tokenizer {
        /// What it says.
        problem: String,
    },
    /// The backend doesn't do this, or isn't available here.
    #[error("backend {backend}: {problem}")]
    Backend {
        /// Its name.
        backend: &'static str,
        /// What it can't do.
        problem: String,
    },
}

impl RuntimeError {
    /// A [`RuntimeError::Bundle`].
    pub fn bundle(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        RuntimeError::Bundle { path: path.into(), problem: problem.into() }
    }
}

impl Diagnostic for RuntimeError {
    fn fault(&self) -> Fault {
        match self {
            RuntimeError::Bundle { .. } => Fault::Source,
            RuntimeError::File(error) => error.fault(),
            RuntimeError::Function { error, .. } => error.fault(),
            RuntimeError::Backend { .. } | RuntimeError::NoEnergy { .. } => Fault::Platform,
            _ => Fault::Usage,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            RuntimeError::Function { error, .. } => return error.help(),
            RuntimeError::File(error) => return error.help(),
            RuntimeError::Bundle { .. } => "convert the model again, or unpack the bundle again",
            RuntimeError::SeveralBundles { .. } => "name one of them",
            RuntimeError::NoBundle { .. } => "give the folder that `anec convert` wrote",
            RuntimeError::ContextFull { .. } | RuntimeError::TextTooLong { .. } => {
                "give a shorter text, or a smaller --max-tokens where one is written, or convert with a larger `context` in \
                 the manifest"
            }
            RuntimeError::BenchmarkLength { .. } => {
                "give a length in that range, or convert with a larger `context` in the manifest"
            }
            RuntimeError::Memory { .. } => {
                "raise --max-memory-mb, or convert into smaller packages (`shards`, `lm_head.split`)"
            }
            RuntimeError::Chunk { .. } => "sizes come from `lengths` in the manifest that the bundle was made with",
            RuntimeError::LabelsTokens { .. } => "use `anec classify`, `anec redact` or `anec logits`",
            RuntimeError::GivesVectors { .. } => "use `anec embed`",
            RuntimeError::LabelsTexts { .. } => "use `anec classify`",
            RuntimeError::NoEmbedding { .. } => {
                "convert an encoder, or a folder whose modules.json says how sentence-transformers pools"
            }
            RuntimeError::NoTextLabels { .. } => "convert a model …ForSequenceClassification",
            RuntimeError::NoLabels { .. } => {
                "use `anec run`, or `anec embed` for vectors; `anec classify` and `anec redact` are for classifiers"
            }
            RuntimeError::Window { .. } => {
                "convert with a larger `lengths` in the manifest, or fewer layers in each package (`shards`)"
            }
            RuntimeError::UnlikeTokenizers { .. } => "compare bundles of the same model",
            RuntimeError::NoEnergy { .. } => {
                "it needs macOS' powermetrics and root: `sudo anec bench --energy`, or leave out --energy"
            }
            RuntimeError::NoTokenizer { .. } => "give token ids, by --tokens or `anec run --ids`",
            RuntimeError::NoChatTemplate { .. } => "`anec run --prompt` without --chat continues a text as it is",
            _ => return None,
        };
        Some(help.into())
    }
}
