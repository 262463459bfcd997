//! Errors of sources.

use std::path::{Path, PathBuf};

use anec_base::{Diagnostic, Fault, FileError};

/// The result of an operation on a source.
pub type Result<T, E = SourceError> = std::result::Result<T, E>;

/// What can be wrong with a source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The system refused a file.
    #[error(transparent)]
    Io(#[from] FileError),
    /// A file isn't what it should be, as a whole.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong: found and expected.
        problem: String,
        /// What to do about it.
        help: Option<String>,
    },
    /// A metadata or configuration key is wrong.
    #[error("{}: key `{key}`: {problem}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong: found and expected.
        problem: String,
        /// What to do about it.
        help: Option<String>,
    },
    /// A tensor of a file is wrong.
    #[error("{}: tensor `{tensor}`: {problem}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong: found and expected.
        problem: String,
        /// What to do about it.
        help: Option<String>,
    },
    /// A tensor that is needed isn't in the source.
    #[error("{source_name}: tensor `{tensor}` is missing{}", similar(nearest))]
    MissingTensor {
        /// The source, as the user named it.
        source_name: String,
        /// The tensor.
        tensor: String,
        /// Names in the source that look like it.
        nearest: Vec<String>,
    },
    /// A tensor was asked for twice.
    #[error("tensor `{tensor}` is taken twice")]
    TakenTwice {
        /// The tensor.
        tensor: String,
    },
    /// Tensors that nothing used and nothing declared superfluous.
    #[error("{source_name}: {} no part of the model: {}", count_unused(unused), list_unused(unused))]
    Unused {
        /// The source, as the user named it.
        source_name: String,
        /// Each unused tensor; the first of them with the used name nearest to it.
        unused: Vec<(String, Option<String>)>,
    },
    /// A weight has a number that isn't finite.
    #[error("tensor `{tensor}`, row {row}, column {column}: the weight is {value}, expected a finite number")]
    NotFinite {
        /// The tensor of the source.
        tensor: String,
        /// Row within the tensor.
        row: u64,
        /// Column within the row.
        column: u64,
        /// What stands there.
        value: f32,
    },
    /// Weights don't fit together, or a read is out of bounds.
    #[error("weight `{weight}`: {problem}")]
    Weight {
        /// Key of the weight.
        weight: String,
        /// What is wrong: found and expected.
        problem: String,
    },
    /// The elements of a tensor were asked for, of which only the shape is known.
    #[error("tensor `{tensor}`: only its shape is known, its weights aren't here")]
    ShapeOnly {
        /// The tensor.
        tensor: String,
    },
    /// The name of a source can't be understood.
    #[error("source `{name}`: {problem}")]
    Name {
        /// As the user wrote it.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A download from the Hugging Face hub failed.
    #[error("source `{name}`: {problem}")]
    Hub {
        /// As the user wrote it.
        name: String,
        /// What failed.
        problem: String,
        /// Whether the hub answered that there is no such thing, in contrast to not answering.
        absent: bool,
    },
}

impl SourceError {
    /// A [`SourceError::File`] without advice.
    pub(crate) fn file(path: &Path, problem: impl Into<String>) -> Self {
        SourceError::File { path: path.to_owned(), problem: problem.into(), help: None }
    }

    /// A [`SourceError::Tensor`] without advice.
    pub(crate) fn tensor(path: &Path, tensor: &str, problem: impl Into<String>) -> Self {
        SourceError::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), problem: problem.into(), help: None }
    }

    /// A [`SourceError::Key`].
    pub(crate) fn key(path: &Path, key: &str, problem: impl Into<String>) -> Self {
        SourceError::Key { path: path.to_owned(), key: key.to_owned(), problem: problem.into(), help: None }
    }

    /// The same error with advice; only errors of files, keys and tensors take any.
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
            SourceError::ShapeOnly { .. } => "name a source with weights by --source",
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

/// How many unused tensors an error lists.
pub(super) const SHOWN: usize = 10;

/// The first unused tensors, for an error message; a model with the wrong family can have hundreds.
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
