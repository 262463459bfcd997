//! File errors and memory-mapped files.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memmap2::Mmap;

use crate::digest::{ContentDigest, FileDigester};
use crate::error::{Diagnostic, Fault};
use crate::fault::Registration;
use crate::regular;
use crate::release::Released;

/// Failure to open, map, read or write a file.
#[derive(Debug, thiserror::Error)]
#[error("{}: can't {action}: {error}", path.display())]
pub struct FileError {
    /// File or folder.
    pub path: PathBuf,
    /// Action that failed: open, map, read, write, …
    pub action: &'static str,
    /// Error of the system.
    pub error: io::Error,
}

impl FileError {
    /// Returns a closure for `map_err` that adds the path and the action to an I/O error.
    pub fn of(path: impl Into<PathBuf>, action: &'static str) -> impl FnOnce(io::Error) -> FileError {
        let path = path.into();
        move |error| FileError { path, action, error }
    }

    /// Whether the file was being read. If so the file is at fault, otherwise the system.
    fn reading(&self) -> bool {
        matches!(self.action, "open" | "map" | "read" | "list")
    }
}

impl Diagnostic for FileError {
    fn fault(&self) -> Fault {
        if self.reading() { Fault::Source } else { Fault::Platform }
    }

    fn help(&self) -> Option<String> {
        let help = match (self.error.kind(), self.reading()) {
            (io::ErrorKind::NotFound, _) => "check the path",
            (io::ErrorKind::InvalidInput, true) => "name a regular file",
            (io::ErrorKind::PermissionDenied, true) => "make it readable",
            (_, true) => "check the path and the disk that it is on",
            (io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded, _) => {
                "free some space, or write to another disk"
            }
            (io::ErrorKind::FileTooLarge, _) => {
                "raise the limit on the size of files (`ulimit -f`), or write to another disk"
            }
            _ => "choose a folder that may be written to",
        };
        Some(help.into())
    }
}

/// Opens a regular file and returns it with its size. Folders, pipes, sockets and devices are refused.
///
/// # Errors
/// If it isn't a regular file, or the system refuses.
pub fn open_file(path: &Path) -> Result<(File, u64), FileError> {
    regular::open(path).map_err(FileError::of(path, "open"))
}

/// File mapped into memory, or bytes that were never a file.
pub struct MappedFile {
    path: PathBuf,
    bytes: Bytes,
    digester: OnceLock<FileDigester>,
    released: Released,
    _registration: Option<Registration>,
}

enum Bytes {
    Map(Mmap),
    /// Content of empty files, which can't be mapped, and of tests and fuzzers.
    Memory(Vec<u8>),
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// If it isn't a regular file, or the system refuses.
    #[allow(unsafe_code, reason = "a memory map")]
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let (file, length) = open_file(path)?;
        let bytes = if length == 0 {
            Bytes::Memory(Vec::new())
        } else {
            // SAFETY: the map is only read. The system offers no way to keep other processes from truncating or
            // rewriting the file; every reader of mapped model files asks its user not to.
            Bytes::Map(unsafe { Mmap::map(&file) }.map_err(FileError::of(path, "map"))?)
        };
        let registration = match &bytes {
            Bytes::Map(map) => Some(Registration::new(map, path)),
            Bytes::Memory(_) => None,
        };
        Ok(MappedFile {
            path: path.to_owned(),
            bytes,
            digester: OnceLock::new(),
            released: Released::default(),
            _registration: registration,
        })
    }

    /// Wraps bytes as a file called `path`.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Self {
        MappedFile {
            path: path.to_owned(),
            bytes: Bytes::Memory(bytes),
            digester: OnceLock::new(),
            released: Released::default(),
            _registration: None,
        }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Content of the file.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Map(map) => map,
            Bytes::Memory(bytes) => bytes,
        }
    }

    /// From now on, hashes ranges as they are released, while they are in memory, so that [`MappedFile::digest`] reads
    /// little.
    pub fn digest_released(&self) {
        self.digester.get_or_init(|| FileDigester::new(self.bytes().len() as u64));
    }

    /// Returns the BLAKE3 digest of the file. Reads the parts that weren't hashed yet.
    ///
    /// # Errors
    /// If the file can't be read.
    pub fn digest(&self) -> io::Result<ContentDigest> {
        match self.digester.get() {
            Some(digester) => digester.finish(&self.path),
            None => ContentDigest::blake3_of_file(&self.path),
        }
    }

    /// Returns the pages that `range` touches to the system, which counts pages of mapped files as memory of the
    /// process. The pages may be returned later, together with others. They can still be read, also by other threads at
    /// the same time.
    pub fn release(&self, range: Range<usize>) {
        let range = match self.digester.get() {
            Some(digester) => range.start..digester.update(self.bytes(), range),
            None => range,
        };
        /// Largest page size of all systems; page sizes are powers of two.
        const PAGE: usize = 64 << 10;
        let pages = range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE).min(self.bytes().len());
        if !pages.is_empty() {
            self.released.add(pages).into_iter().for_each(|pages| self.give_back(pages));
        }
    }

    #[allow(unsafe_code, reason = "advice about a memory map")]
    fn give_back(&self, pages: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::Map(map) = &self.bytes {
            // SAFETY: the map is shared, of a file and never written, so a page that is dropped comes back with
            // the same content. Failure to release is harmless.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, pages.start, pages.len()) };
        }
        #[cfg(not(unix))]
        let _ = pages;
    }
}

impl std::fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MappedFile({}, {} bytes)", self.path.display(), self.bytes().len())
    }
}
