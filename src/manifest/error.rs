//! Errors of manifests. The user can correct all of them, so all have exit code 2.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault};

/// Error in a manifest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// No file and no built-in manifest has this name.
    #[error("no file `{name}`, and no built-in manifest of that name")]
    NotFound {
        /// Name as the user gave it.
        name: String,
        /// Similar built-in names.
        like: Vec<&'static str>,
    },
    /// Unreadable file.
    #[error("can't read manifest {}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// Text that isn't a manifest.
    #[error("manifest {origin}: {message}")]
    Syntax {
        /// File name, or `--set key=value`.
        origin: String,
        /// Problem with line, column and surrounding lines.
        message: String,
        /// Most similar valid key or value.
        suggestion: Option<String>,
    },
    /// Override that isn't `key=value`.
    #[error("override `{given}`: expected key=value, for example quant.granularity=per_channel")]
    Override {
        /// Override as the user gave it.
        given: String,
    },
    /// Well-typed value that is out of range or inconsistent.
    #[error("`{key}`: {problem}")]
    Value {
        /// Path of the key.
        key: String,
        /// Found and expected.
        problem: String,
        /// Remedy.
        advice: Option<String>,
    },
}

impl ManifestError {
    pub(super) fn value(key: &str, problem: impl Into<String>) -> Self {
        ManifestError::Value { key: key.to_owned(), problem: problem.into(), advice: None }
    }

    pub(super) fn advise(self, text: impl Into<String>) -> Self {
        match self {
            ManifestError::Value { key, problem, .. } => {
                ManifestError::Value { key, problem, advice: Some(text.into()) }
            }
            other => other,
        }
    }
}

impl Diagnostic for ManifestError {
    fn fault(&self) -> Fault {
        Fault::Usage
    }

    fn help(&self) -> Option<String> {
        match self {
            ManifestError::NotFound { like, .. } => Some(match &like[..] {
                [] => "`builtin::names` lists the built-in ones".into(),
                [first @ .., last] => {
                    let first: Vec<String> = first.iter().map(|name| format!("`{name}`")).collect();
                    let or = if first.is_empty() { "" } else { " or " };
                    format!("did you mean {}{or}`{last}`?", first.join(", "))
                }
            }),
            ManifestError::Syntax { suggestion: Some(name), .. } => Some(format!("did you mean `{name}`?")),
            ManifestError::Value { advice: Some(advice), .. } => Some(advice.clone()),
            ManifestError::Syntax { .. } | ManifestError::Value { .. } | ManifestError::Override { .. } => {
                Some("the manifest's JSON Schema describes every key".into())
            }
            ManifestError::Unreadable { .. } => Some("a manifest is a text file that may be read".into()),
        }
    }
}

/// Returns the candidate most similar to `given`, if one is close enough.
pub fn nearest<'a>(given: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(given, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.chars().count() / 4)
        .min()
        .map(|(_, candidate)| candidate)
}
