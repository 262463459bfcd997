//! Files of a source, mapped into memory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::Value as Json;

use anec_base::FileError;

use anec_base::{ContentDigest, MappedFile};

use super::error::{Result, SourceError};

/// Maps a file of a source.
///
/// # Errors
/// Returns an error if the file can't be read or is a Git LFS pointer.
pub(super) fn map(path: &Path) -> Result<MappedFile> {
    let file = MappedFile::open(path)?;
    refuse_pointer(path, file.bytes())?;
    Ok(file)
}

/// Refuses pointer files, which Git LFS leaves in a clone in place of large files.
pub(super) fn refuse_pointer(path: &Path, bytes: &[u8]) -> Result<()> {
    if bytes.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Err(SourceError::file(path, "it is a pointer of Git LFS, not the file that it stands for")
            .advise("fetch the file itself with `git lfs pull`"));
    }
    Ok(())
}

/// File that a source was read from.
#[derive(Debug)]
pub struct SourceFile {
    name: String,
    path: PathBuf,
    size: u64,
    /// Map that tensors are read from.
    map: Option<Arc<MappedFile>>,
    digest: OnceLock<ContentDigest>,
}

impl SourceFile {
    /// Returns the file at `path`, named by its path within `folder` if it is in there.
    ///
    /// # Errors
    /// Returns an error if the file's metadata can't be read.
    pub(super) fn new(path: &Path, folder: &Path) -> Result<Self> {
        let size = std::fs::metadata(path).map_err(FileError::of(path, "open"))?.len();
        let own = || Path::new(path.file_name().unwrap_or(path.as_os_str()));
        let within = path.strip_prefix(folder).ok().filter(|within| !within.as_os_str().is_empty());
        let name = within.unwrap_or_else(own).to_string_lossy().replace('\\', "/");
        Ok(SourceFile { name, path: path.to_owned(), size, map: None, digest: OnceLock::new() })
    }

    /// Sets the map that tensors are read from.
    pub(super) fn mapped(self, map: Option<Arc<MappedFile>>) -> Self {
        SourceFile { map, ..self }
    }

    /// Starts to digest the parts of tensors that are released.
    pub(super) fn digest_released(&self) {
        self.map.iter().for_each(|map| map.digest_released());
    }

    /// File name within the source's folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the digest of the content, computed on all cores at the first call.
    ///
    /// # Errors
    /// Returns an error if the file can't be read.
    pub fn digest(&self) -> Result<&ContentDigest> {
        if let Some(digest) = self.digest.get() {
            return Ok(digest);
        }
        let digest = match &self.map {
            Some(map) => map.digest(),
            None => ContentDigest::blake3_of_file(&self.path),
        };
        let digest = digest.map_err(FileError::of(&self.path, "read"))?;
        Ok(self.digest.get_or_init(|| digest))
    }
}

/// Reads a JSON file.
///
/// # Errors
/// Returns an error if it can't be read or isn't JSON.
pub fn read_json(path: &Path) -> Result<Json> {
    let bytes = std::fs::read(path).map_err(FileError::of(path, "read"))?;
    refuse_pointer(path, &bytes)?;
    // some editors write a byte order mark
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    serde_json::from_slice(text).map_err(|error| SourceError::file(path, format!("it isn't JSON: {error}")))
}
