//! Errors of the runtime.

use std::path::PathBuf;

use anec_base::listing::list;
use anec_base::{Diagnostic, Fault, FileError};
use anec_exec::ExecError;

/// Error between a bundle and its text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// File error of the system.
    #[error(transparent)]
    File(#[from] FileError),
    /// File of the bundle that is damaged or contradicts another.
    #[error("{}: {problem}", path.display())]
    Bundle {
        /// Path of the file.
        path: PathBuf,
        /// Found and expected values.
        problem: String,
    },
    /// Function that the CPU executor can't run.
    #[error("{package}, {error}")]
    Function {
        /// Package that contains it.
        package: String,
        /// Function, op, found and expected values.
        error: ExecError,
    },
    /// File that another program has changed.
    #[error("{}: it was changed after the model was opened", path.display())]
    Changed {
        /// Path of the file.
        path: PathBuf,
    },
    /// Folder without a bundle.
    #[error("{}: no bundle here: it has no bundle.json", path.display())]
    NoBundle {
        /// Path of the folder.
        path: PathBuf,
    },
    /// Folder with several bundles.
    #[error("the current folder holds {} bundles: {}", names.len(), list(names))]
    SeveralBundles {
        /// Folders of the bundles.
        names: Vec<String>,
    },
    /// Energy that can't be measured.
    #[error("energy can't be measured: {problem}")]
    NoEnergy {
        /// Attempt and its outcome.
        problem: String,
    },
    /// Text that exceeds the KV cache.
    #[error("the text needs {tokens} tokens, but the bundle's largest context has {context}")]
    ContextFull {
        /// Number of tokens of the text.
        tokens: u64,
        /// Number of tokens that fit.
        context: u64,
    },
    /// Requested length without room in the KV cache.
    #[error("{wanted} has to be from 1 to {most}: the bundle's largest context has {context} tokens")]
    BenchmarkLength {
        /// Option and its value.
        wanted: String,
        /// Number of tokens that fit there.
        most: u64,
        /// Size of the largest context.
        context: u64,
    },
    /// Token outside of the vocabulary.
    #[error(
        "token {token} doesn't exist: the vocabulary has {vocab_size} tokens, 0 to {}",
        vocab_size.saturating_sub(1)
    )]
    Token {
        /// Token id.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: u64,
    },
    /// Parameter outside of its range.
    #[error("`{field}` is {value}, but has to be from {least} to {most}")]
    OutOfRange {
        /// Name of the parameter.
        field: &'static str,
        /// Value of the parameter.
        value: String,
        /// Smallest value.
        least: String,
        /// Largest value.
        most: String,
    },
    /// Text that exceeds the context however it is tokenized.
    #[error("the text has {bytes} bytes, and the bundle's largest context of {context} tokens holds at most {most}")]
    TextTooLong {
        /// Size of the text in bytes.
        bytes: usize,
        /// Number of tokens that fit.
        context: u64,
        /// Maximum number of bytes that so many tokens can stand for.
        most: u64,
    },
    /// Function whose weights alone exceed the memory limit.
    #[error("{package} has {needed} bytes of weights, but functions may have {limit} bytes in memory")]
    Memory {
        /// Package that contains it.
        package: String,
        /// Size of its weights in bytes.
        needed: u64,
        /// Limit in bytes.
        limit: u64,
    },
    /// Need for logits that the bundle doesn't give.
    #[error("{what} the logits of all tokens, and the bundle's head gives only the {}", largest(*k))]
    NoLogits {
        /// Subject and verb: `log-probabilities need`.
        what: &'static str,
        /// Number of the largest logits that it gives.
        k: usize,
    },
    /// Empty prompt.
    #[error("the prompt has no tokens")]
    NoTokens,
    /// Call size that no function has.
    #[error("no call of {size} tokens is possible: the bundle's functions take {allowed}")]
    Chunk {
        /// Requested size.
        size: u64,
        /// Possible sizes.
        allowed: String,
    },
    /// Bundle without a tokenizer.
    #[error("{}: the bundle has no tokenizer", path.display())]
    NoTokenizer {
        /// Path of the bundle.
        path: PathBuf,
    },
    /// Model without a chat template.
    #[error("{}: the model has no chat template", path.display())]
    NoChatTemplate {
        /// Path of the bundle.
        path: PathBuf,
    },
    /// Chat template that can't be rendered.
    #[error("chat template: {problem}")]
    ChatTemplate {
        /// Message of the template engine.
        problem: String,
    },
    /// Grammar that is wrong, unsupported or too complex.
    #[error("grammar: {problem}")]
    Grammar {
        /// Message of the grammar compiler.
        problem: String,
    },
    /// Token classifier, which can't continue texts.
    #[error("{}: the model labels the tokens of a text; it doesn't continue one", path.display())]
    LabelsTokens {
        /// Path of the bundle.
        path: PathBuf,
    },
    /// Model without token labels.
    #[error("{}: the model doesn't label tokens", path.display())]
    NoLabels {
        /// Path of the bundle.
        path: PathBuf,
    },
    /// Embedding model, which can't continue texts.
    #[error("{}: the model gives vectors of texts; it doesn't continue one", path.display())]
    GivesVectors {
        /// Path of the bundle.
        path: PathBuf,
    },
    /// Text classifier, which can't continue texts.
    #[error("{}: the model classifies whole texts; it doesn't continue one", path.display())]
    LabelsTexts {
        /// Path of the bundle.
        path: PathBuf,
    },
    /// Model that is no embedding model.
    #[error("{}: the model gives no vectors of texts", path.display())]
    NoEmbedding {
        /// Path of the bundle.
        path: PathBuf,
    },
    /// Prompt that the model doesn't have.
    #[error("the model has no prompt `{name}`")]
    UnknownPrompt {
        /// Name that was asked for.
        name: String,
        /// Names of its prompts.
        known: Vec<String>,
    },
    /// Model that is no text classifier.
    #[error("{}: the model doesn't classify whole texts", path.display())]
    NoTextLabels {
        /// Path of the bundle.
        path: PathBuf,
    },
    /// Text that exceeds one call where calls are too small to overlap.
    #[error(
        "a text of more than {window} tokens needs calls of more than {}, for the layers of one function see {halo} \
         tokens to each side; the bundle's calls have up to {window}",
        halo.saturating_mul(2)
    )]
    Window {
        /// Maximum number of tokens per call.
        window: u64,
        /// Number of tokens that layers see on each side.
        halo: u64,
    },
    /// Labels that aren't BIOES labels.
    #[error("{problem}")]
    Labels {
        /// Invalid label and the expected form.
        problem: String,
    },
    /// Bundles with different tokenizers, which can't be compared token by token.
    #[error(
        "{} and {} turn the text into different tokens: their perplexities can't be compared",
        one.display(), other.display()
    )]
    UnlikeTokenizers {
        /// First bundle.
        one: PathBuf,
        /// Second bundle.
        other: PathBuf,
    },
    /// Tokenizer failure.
    #[error("tokenizer: {problem}")]
    Tokenizer {
        /// Message of the tokenizer.
        problem: String,
    },
    /// Operation that the backend doesn't support, or a missing backend.
    #[error("backend {backend}: {problem}")]
    Backend {
        /// Name of the backend.
        backend: &'static str,
        /// Missing ability.
        problem: String,
    },
}

/// Returns how many logits a head gives, in words.
fn largest(k: usize) -> String {
    if k == 1 { "largest one".into() } else { format!("{k} largest ones") }
}

impl RuntimeError {
    /// Returns a [`RuntimeError::Bundle`].
    pub fn bundle(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        RuntimeError::Bundle { path: path.into(), problem: problem.into() }
    }
}

impl Diagnostic for RuntimeError {
    fn fault(&self) -> Fault {
        match self {
            RuntimeError::Bundle { .. } | RuntimeError::Changed { .. } => Fault::Source,
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
            RuntimeError::Changed { .. } => "open the model again; replace bundles by new folders, not in place",
            RuntimeError::SeveralBundles { .. } => "name one of them",
            RuntimeError::NoBundle { .. } => "give the folder of a bundle, which has a bundle.json",
            RuntimeError::ContextFull { .. } | RuntimeError::TextTooLong { .. } => {
                "give a shorter text, or a smaller number of tokens to generate, or convert with a larger `context` in \
                 the manifest"
            }
            RuntimeError::BenchmarkLength { .. } => {
                "give a length in that range, or convert with a larger `context` in the manifest"
            }
            RuntimeError::Memory { .. } => {
                "raise the memory limit, or convert into smaller packages (`shards`, `lm_head.split`)"
            }
            RuntimeError::NoLogits { k: 1, .. } => {
                "generate greedily (`temperature` 0), or convert the model with `lm_head.logits: true`"
            }
            RuntimeError::NoLogits { k, .. } => {
                return Some(format!(
                    "sample from the {k} most likely tokens or fewer (`top_k`), or convert the model with \
                     `lm_head.logits: true`"
                ));
            }
            RuntimeError::Chunk { .. } => "sizes come from `lengths` in the manifest that the bundle was made with",
            RuntimeError::LabelsTokens { .. } => "classify or redact with it",
            RuntimeError::GivesVectors { .. } => "compute embeddings with it",
            RuntimeError::LabelsTexts { .. } => "classify texts with it",
            RuntimeError::NoEmbedding { .. } => {
                "convert an encoder, or a folder whose modules.json says how sentence-transformers pools"
            }
            RuntimeError::UnknownPrompt { known, .. } if known.is_empty() => {
                "write the prompt into the text; the model's files name none"
            }
            RuntimeError::UnknownPrompt { known, .. } => return Some(format!("its prompts are {}", list(known))),
            RuntimeError::NoTextLabels { .. } => "convert a model …ForSequenceClassification",
            RuntimeError::NoLabels { .. } => {
                "generate text or compute embeddings with it; only classifiers label texts"
            }
            RuntimeError::Window { .. } => {
                "convert with a larger `lengths` in the manifest, or fewer layers in each package (`shards`)"
            }
            RuntimeError::UnlikeTokenizers { .. } => "compare bundles of the same model",
            RuntimeError::NoEnergy { .. } => "it needs macOS' powermetrics and root; or measure without energy",
            RuntimeError::NoTokenizer { .. } => "give token ids instead of text",
            RuntimeError::NoChatTemplate { .. } => "give a prompt instead of messages",
            _ => return None,
        };
        Some(help.into())
    }
}
