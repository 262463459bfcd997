//! Files of a source, mapped into memory.

use std::fmt::Write;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memmap2::Mmap;
use sha2::{Digest, Sha256};

use super::error::{Result, SourceError};

/// A file mapped into memory, or bytes that were never a file.
pub struct MappedFile {
    path: PathBuf,
    bytes: Bytes,
}

enum Bytes {
    Map(Mmap),
    /// An empty file can't be mapped; tests and fuzzers have bytes without a file.
    Memory(Vec<u8>),
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// When the system refuses, or the file only stands for another.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(SourceError::io(path, "open"))?;
        let length = file.metadata().map_err(SourceError::io(path, "open"))?.len();
        let bytes = if length == 0 {
            Bytes::Memory(Vec::new())
        } else {
            // SAFETY: the map is only read. That nobody shortens or rewrites the file meanwhile can't be had from the
            // system; it is what every reader of mapped model files asks of its user.
            Bytes::Map(unsafe { Mmap::map(&file) }.map_err(SourceError::io(path, "map"))?)
        };
        let file = MappedFile { path: path.to_owned(), bytes };
        refuse_pointer(path, file.bytes())?;
        Ok(file)
    }

    /// Bytes that pass for a file called `path`.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Self {
        MappedFile { path: path.to_owned(), bytes: Bytes::Memory(bytes) }
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its content.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Map(map) => map,
            Bytes::Memory(bytes) => bytes,
        }
    }

    /// Gives the memory of the pages that `range` touches back to the system, which counts pages of mapped files that
    /// were read as this process's. They can be read again, by another thread at this moment, too; nothing is lost.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::Map(map) = &self.bytes {
            /// No page of any system is larger, and their sizes are powers of two.
            const PAGE: usize = 64 << 10;
            let (start, end) = (range.start / PAGE * PAGE, range.end.next_multiple_of(PAGE).min(map.len()));
            if start < end {
                // SAFETY: the map is shared, of a file and never written, so a page that is dropped comes back with
                // the same content. Failure to release is harmless.
                let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl std::fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MappedFile({}, {} bytes)", self.path.display(), self.bytes().len())
    }
}

/// Refuses what Git LFS leaves in a clone in place of large files.
pub(super) fn refuse_pointer(path: &Path, bytes: &[u8]) -> Result<()> {
    if bytes.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Err(SourceError::file(path, "it is a pointer of Git LFS, not the file that it stands for")
            .advise("fetch the file itself with `git lfs pull`"));
    }
    Ok(())
}

/// A file that a source was read from.
#[derive(Debug)]
pub struct SourceFile {
    name: String,
    path: PathBuf,
    size: u64,
    sha256: OnceLock<String>,
}

impl SourceFile {
    /// The file at `path`.
    ///
    /// # Errors
    /// When it can't be looked at.
    pub(super) fn new(path: &Path) -> Result<Self> {
        let size = std::fs::metadata(path).map_err(SourceError::io(path, "open"))?.len();
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(SourceFile { name, path: path.to_owned(), size, sha256: OnceLock::new() })
    }

    /// File name within the source's folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// SHA-256 of its content, in hexadecimal. Read when first asked for.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn sha256(&self) -> Result<&str> {
        /// Bytes that are mapped at a time.
        const STEP: usize = 4 << 20;
        if let Some(digest) = self.sha256.get() {
            return Ok(digest);
        }
        // a map of its own: to release its pages takes none from those who read tensors
        let file = MappedFile::open(&self.path)?;
        let mut hasher = Sha256::new();
        for (index, bytes) in file.bytes().chunks(STEP).enumerate() {
            hasher.update(bytes);
            file.release(index * STEP..index * STEP + bytes.len());
        }
        Ok(self.sha256.get_or_init(|| hexadecimal(&hasher.finalize())))
    }
}

/// Lower-case hexadecimal digits.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
