//! Errors of packages, weight files and archives.

use std::io;
use std::path::{Path, PathBuf};

use anec_base::{Diagnostic, Error, Fault};

/// What can go wrong with a package.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackageError {
    /// A file that must be read can't be.
    #[error("{}: can't be read: {source}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file that isn't what it should be.
    #[error("{}: {problem}", .path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Found and expected.
        problem: String,
    },
    /// A Core ML model of another kind.
    #[error("{}: not an ML Program: it is a {kind}", .path.display())]
    NotAProgram {
        /// The model file.
        path: PathBuf,
        /// The kind of model, as the format names it.
        kind: String,
    },
    /// A model whose program doesn't hold together.
    #[error("{}: {cause}", .path.display())]
    Invalid {
        /// The model file.
        path: PathBuf,
        /// What is wrong.
        cause: Error,
    },
    /// A blob that a program refers to and that isn't there as it should be.
    #[error("{}, blob at {offset}: {problem} ({owner})", .path.display())]
    Blob {
        /// The weight file.
        path: PathBuf,
        /// Offset of the blob's record.
        offset: u64,
        /// Whose constant it is.
        owner: String,
        /// Found and expected.
        problem: String,
    },
    /// A constant's data can't be produced.
    #[error("{owner}: {cause}")]
    Constant {
        /// Whose constant it is.
        owner: String,
        /// Why.
        cause: Error,
    },
    /// The system refused to write.
    #[error("{}: can't {action}: {source}", .path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// There is no room for what would be written.
    #[error("{}: {needed} bytes are needed, {available} are free", .path.display())]
    NoSpace {
        /// The folder that would be written to.
        path: PathBuf,
        /// Bytes that would be written.
        needed: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// Something is there already.
    #[error("{}: exists already", .path.display())]
    Exists {
        /// The file or folder.
        path: PathBuf,
    },
    /// A path that can't name what would be written.
    #[error("{}: {problem}", .path.display())]
    Name {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A program whose signature a package can't describe.
    #[error("function `{function}`, `{feature}`: {problem}")]
    Interface {
        /// The function.
        function: String,
        /// The input, output or state.
        feature: String,
        /// Found and expected.
        problem: String,
    },
    /// Something about the program as a whole that a package can't hold.
    #[error("program: {problem}")]
    Program {
        /// Found and expected.
        problem: String,
    },
    /// An archive that must not be unpacked.
    #[error("{}, entry `{entry}`: {problem}", .path.display())]
    Entry {
        /// The archive.
        path: PathBuf,
        /// The entry's name.
        entry: String,
        /// Found and expected.
        problem: String,
    },
}

impl PackageError {
    pub(super) fn unreadable(path: &Path, source: io::Error) -> Self {
        PackageError::Unreadable { path: path.to_owned(), source }
    }

    pub(super) fn corrupt(path: &Path, problem: impl Into<String>) -> Self {
        PackageError::Corrupt { path: path.to_owned(), problem: problem.into() }
    }

    pub(super) fn write(path: &Path, action: &'static str, source: io::Error) -> Self {
        PackageError::Write { path: path.to_owned(), action, source }
    }
}

impl Diagnostic for PackageError {
    fn fault(&self) -> Fault {
        match self {
            PackageError::Write { .. } | PackageError::NoSpace { .. } => Fault::Platform,
            PackageError::Exists { .. } | PackageError::Name { .. } => Fault::Usage,
            PackageError::Constant { cause, .. } | PackageError::Invalid { cause, .. } => cause.fault(),
            _ => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            PackageError::Write { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Some("free some space or write to another disk".into())
            }
            PackageError::Write { source, .. } if source.kind() == io::ErrorKind::FileTooLarge => {
                Some("raise the limit on the size of files (`ulimit -f`), or write to another disk".into())
            }
            PackageError::Write { .. } => Some("choose a folder that may be written to".into()),
            PackageError::NoSpace { .. } => Some("free some space or write to another disk".into()),
            PackageError::Exists { .. } => Some("remove it, choose another name, or ask for it to be replaced".into()),
            PackageError::NotAProgram { .. } => {
                Some("only ML Programs are supported; convert the model again with that as its kind".into())
            }
            PackageError::Constant { cause, .. } | PackageError::Invalid { cause, .. } => cause.help(),
            _ => None,
        }
    }
}
