//! Errors of sources.

use std::path::{Path, PathBuf};

use anec_base::{Diagnostic, Fault, FileError};

/// Result of an operation on a source.
pub type Result<T, E = SourceError> = std::result::Result<T, E>;

/// Error of reading a source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// File that can't be read.
    #[error(transparent)]
    Io(#[from] FileError),
    /// File or folder with invalid content.
    #[error("{}: {problem}", path.display())]
    File {
        /// Path of the file or folder.
        path: PathBuf,
        /// Problem: found and expected.
        problem: String,
        /// Remedy.
        help: Option<String>,
    },
    /// Invalid metadata or configuration key.
    #[error("{}: key `{key}`: {problem}", path.display())]
    Key {
        /// Path of the file.
        path: PathBuf,
        /// Key.
        key: String,
        /// Problem: found and expected.
        problem: String,
        /// Remedy.
        help: Option<String>,
    },
    /// Invalid tensor.
    #[error("{}: tensor `{tensor}`: {problem}", path.display())]
    Tensor {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Problem: found and expected.
        problem: String,
        /// Remedy.
        help: Option<String>,
    },
    /// Missing tensor.
    #[error("{source_name}: tensor `{tensor}` is missing{}", similar(nearest))]
    MissingTensor {
        /// Name of the source, as given.
        source_name: String,
        /// Name of the tensor.
        tensor: String,
        /// Similar names in the source.
        nearest: Vec<String>,
    },
    /// Tensor used twice.
    #[error("tensor `{tensor}` is taken twice")]
    TakenTwice {
        /// Name of the tensor.
        tensor: String,
    },
    /// Tensors that are neither used nor ignored.
    #[error("{source_name}: {} no part of the model: {}", count_unused(unused), list_unused(unused))]
    Unused {
        /// Name of the source, as given.
        source_name: String,
        /// Unused tensors; the first of them with the most similar used name.
        unused: Vec<(String, Option<String>)>,
    },
    /// Weight that isn't finite.
    #[error("tensor `{tensor}`, row {row}, column {column}: the weight is {value}, expected a finite number")]
    NotFinite {
        /// Name of the tensor.
        tensor: String,
        /// Row within the tensor.
        row: u64,
        /// Column within the row.
        column: u64,
        /// Value found.
        value: f32,
    },
    /// Weights that don't fit together, or a read out of bounds.
    #[error("weight `{weight}`: {problem}")]
    Weight {
        /// Key of the weight.
        weight: String,
        /// Problem: found and expected.
        problem: String,
    },
    /// Read of a tensor of which only the shape is known.
    #[error("tensor `{tensor}`: only its shape is known, its weights aren't here")]
    ShapeOnly {
        /// Name of the tensor.
        tensor: String,
    },
    /// Invalid name of a source.
    #[error("source `{name}`: {problem}")]
    Name {
        /// Name as given.
        name: String,
        /// Problem.
        problem: String,
    },
    /// Failed download from the Hugging Face hub.
    #[error("source `{name}`: {problem}")]
    Hub {
        /// Name as given.
        name: String,
        /// Problem.
        problem: String,
        /// Whether the hub answered that the file doesn't exist, as opposed to not answering.
        absent: bool,
    },
}

impl SourceError {
    /// Returns a [`SourceError::File`] without advice.
    pub(crate) fn file(path: &Path, problem: impl Into<String>) -> Self {
        SourceError::File { path: path.to_owned(), problem: problem.into(), help: None }
    }

    /// Returns a [`SourceError::Tensor`] without advice.
    pub(crate) fn tensor(path: &Path, tensor: &str, problem: impl Into<String>) -> Self {
        SourceError::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), problem: problem.into(), help: None }
    }

    /// Returns a [`SourceError::Key`].
    pub(crate) fn key(path: &Path, key: &str, problem: impl Into<String>) -> Self {
        SourceError::Key { path: path.to_owned(), key: key.to_owned(), problem: problem.into(), help: None }
    }

    /// Adds advice to an error of a file, key or tensor; other errors are returned unchanged.
    pub(crate) fn advise(mut self, text: impl Into<String>) -> Self {
        if let SourceError::File { help, .. } | SourceError::Key { help, .. } | SourceError::Tensor { help, .. } =
            &mut self
        {
            *help = Some(text.into());
        }
        self
    }
}

impl Diagnostic for SourceError {
    fn fault(&self) -> Fault {
        match self {
            SourceError::Name { .. } => Fault::Usage,
            SourceError::Hub { absent: false, .. } => Fault::Platform,
            SourceError::Io(error) => error.fault(),
            _ => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            SourceError::Io(error) => return error.help(),
            SourceError::File { help, .. } | SourceError::Key { help, .. } | SourceError::Tensor { help, .. } => {
                help.as_deref().unwrap_or("the file is incomplete or damaged; download or copy it again")
            }
            SourceError::MissingTensor { .. } => {
                "the weights are incomplete, an adapter, or of another model than their configuration; get the whole \
                 model from its publisher"
            }
            SourceError::Unused { .. } => {
                "the model family doesn't know these tensors, so the result would not be this model"
            }
            SourceError::NotFinite { .. } => {
                "the file is damaged, or was trained or quantized wrongly; get it again from its publisher"
            }
            SourceError::ShapeOnly { .. } => "name a source with weights",
            SourceError::Name { .. } => {
                "a source is a path, or hf:owner/name, hf:owner/name@revision, hf:owner/name/file.gguf"
            }
            SourceError::Hub { absent: true, .. } => {
                "check the name and the revision; a model that isn't public needs a token in HF_TOKEN"
            }
            SourceError::Hub { absent: false, .. } => {
                "download the files by other means and give their path as the source"
            }
            SourceError::TakenTwice { .. } | SourceError::Weight { .. } => {
                "this is a defect of anec; please report it with the name of the source"
            }
        };
        Some(text.into())
    }
}

/// `; the source has …` for an error message, or nothing.
fn similar(names: &[String]) -> String {
    match names {
        [] => String::new(),
        names => format!("; the source has {}", names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")),
    }
}

fn count_unused(unused: &[(String, Option<String>)]) -> String {
    match unused.len() {
        1 => "1 tensor is".into(),
        n => format!("{n} tensors are"),
    }
}

/// Maximum number of unused tensors that an error lists.
pub(super) const SHOWN: usize = 10;

/// Formats the first unused tensors; with the wrong family there can be hundreds.
fn list_unused(unused: &[(String, Option<String>)]) -> String {
    let mut text: Vec<String> = unused
        .iter()
        .take(SHOWN)
        .map(|(name, nearest)| match nearest {
            Some(nearest) => format!("`{name}` (nearest that is used: `{nearest}`)"),
            None => format!("`{name}`"),
        })
        .collect();
    if unused.len() > SHOWN {
        text.push(format!("and {} more", unused.len() - SHOWN));
    }
    text.join(", ")
}
