//! Errors of packages, weight files and archives.

use std::io;
use std::path::{Path, PathBuf};

use anec_base::{Diagnostic, Error, Fault};

/// Error of reading or writing a package.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackageError {
    /// File that can't be read.
    #[error("{}: can't be read: {source}", .path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// File with invalid content.
    #[error("{}: {problem}", .path.display())]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Found and expected values.
        problem: String,
    },
    /// Core ML model that isn't an ML Program.
    #[error("{}: not an ML Program: it is a {kind}", .path.display())]
    NotAProgram {
        /// Path of the model file.
        path: PathBuf,
        /// Kind of model, in the format's terms.
        kind: String,
    },
    /// Model with an inconsistent program.
    #[error("{}: {cause}", .path.display())]
    Invalid {
        /// Path of the model file.
        path: PathBuf,
        /// Cause.
        cause: Error,
    },
    /// Blob that a program refers to but that is missing or damaged.
    #[error("{}, blob at {offset}: {problem} ({owner})", .path.display())]
    Blob {
        /// Path of the weight file.
        path: PathBuf,
        /// Offset of the blob's record.
        offset: u64,
        /// Name of the constant.
        owner: String,
        /// Found and expected values.
        problem: String,
    },
    /// Constant whose data can't be produced.
    #[error("{owner}: {cause}")]
    Constant {
        /// Name of the constant.
        owner: String,
        /// Cause.
        cause: Error,
    },
    /// File or folder that can't be written.
    #[error("{}: can't {action}: {source}", .path.display())]
    Write {
        /// Path of the file or folder.
        path: PathBuf,
        /// Operation that failed.
        action: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Disk without enough free space.
    #[error("{}: {needed} bytes are needed, {available} are free", .path.display())]
    NoSpace {
        /// Path of the folder to write to.
        path: PathBuf,
        /// Number of bytes to write.
        needed: u64,
        /// Number of free bytes.
        available: u64,
    },
    /// File or folder that already exists.
    #[error("{}: exists already", .path.display())]
    Exists {
        /// Path of the file or folder.
        path: PathBuf,
    },
    /// Path that can't be written to.
    #[error("{}: {problem}", .path.display())]
    Name {
        /// Path.
        path: PathBuf,
        /// Reason.
        problem: String,
    },
    /// Program with a signature that a package can't describe.
    #[error("function `{function}`, `{feature}`: {problem}")]
    Interface {
        /// Function.
        function: String,
        /// Input, output or state.
        feature: String,
        /// Found and expected values.
        problem: String,
    },
    /// Program that a package can't hold.
    #[error("program: {problem}")]
    Program {
        /// Found and expected values.
        problem: String,
    },
    /// Archive that is unsafe to unpack.
    #[error("{}, entry `{entry}`: {problem}", .path.display())]
    Entry {
        /// Path of the archive.
        path: PathBuf,
        /// Name of the entry.
        entry: String,
        /// Found and expected values.
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
