//! Files of a source, mapped into memory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::Value as Json;

use anec_base::json::problem;
use anec_base::{ContentDigest, FileError, MappedFile, input};

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

/// Reads a JSON file. `NaN`, `Infinity` and `-Infinity`, which Python writes, become objects as transformers writes
/// them: `{"__float__": "Infinity"}`.
///
/// # Errors
/// Returns an error if the file can't be read or isn't JSON.
pub fn read_json(path: &Path) -> Result<Json> {
    let bytes = input::read_file(path, input::MOST_JSON)?;
    refuse_pointer(path, &bytes)?;
    // some editors write a byte order mark
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let json = serde_json::from_slice(text).or_else(|error| {
        let of_python = without_python_floats(text);
        of_python.and_then(|text| serde_json::from_slice(&text).ok()).ok_or(error)
    });
    json.map_err(|error| SourceError::file(path, format!("it isn't JSON: {}", problem(&error))))
}

/// Replaces Python's spellings of floats that JSON doesn't have. Returns `None` if there are none outside of strings.
fn without_python_floats(text: &[u8]) -> Option<Vec<u8>> {
    const SPELLINGS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let mut out = Vec::with_capacity(text.len());
    let (mut at, mut in_string, mut found) = (0, false, false);
    while let Some(byte) = text.get(at) {
        let spelling = SPELLINGS.into_iter().find(|spelling| !in_string && text[at..].starts_with(spelling));
        if let Some(spelling) = spelling {
            out.extend_from_slice(br#"{"__float__":""#);
            out.extend_from_slice(spelling);
            out.extend_from_slice(br#""}"#);
            at += spelling.len();
            found = true;
            continue;
        }
        if in_string && *byte == b'\\' {
            out.extend_from_slice(&text[at..text.len().min(at + 2)]);
            at += 2;
            continue;
        }
        in_string ^= *byte == b'"';
        out.push(*byte);
        at += 1;
    }
    found.then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_of_python_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_json(&path)
        };
        let found = read(r#"{"limit": [0.0, Infinity], "a": NaN, "b": [-Infinity, "NaN \" Infinity \\"], "c": "\\"}"#);
        let float = |name: &str| serde_json::json!({ "__float__": name });
        let expected = serde_json::json!({
            "limit": [0.0, float("Infinity")], "a": float("NaN"), "b": [float("-Infinity"), "NaN \" Infinity \\"],
            "c": "\\",
        });
        assert_eq!(found.unwrap(), expected);
        for wrong in ["{\"a\": Infinite}", "{\"a\": NaN", "NaN NaN", "{NaN: 1}"] {
            assert!(read(wrong).unwrap_err().to_string().contains("it isn't JSON: "), "{wrong}");
        }
    }
}
