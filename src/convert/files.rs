//! Files of a bundle: written atomically, with their digests.

use std::path::Path;

use anec_base::FileError;
use anec_base::output::{OutputFile, write_file};

use super::error::ConvertError;
use anec_base::ContentDigest;
use anec_base::Result;
use anec_bundle::FileDigest;
use anec_package::stream::{self, Blake3Pieces, FilePart, NotWritten, StreamSummary};

/// Writes a file.
///
/// # Errors
/// If the file can't be written.
pub fn write(path: &Path, bytes: &[u8]) -> Result<FileDigest, ConvertError> {
    write_file(path, bytes)?;
    Ok(digest(path, StreamSummary { bytes: bytes.len() as u64, digest: blake3::hash(bytes) }))
}

/// Writes a file from consecutive parts. `written` receives the index of a part and the size of each chunk.
///
/// # Errors
/// If a part can't be produced or the file can't be written.
pub fn write_parts(path: &Path, parts: &[FilePart<'_>], written: &(dyn Fn(usize, u64) + Sync)) -> Result<FileDigest> {
    let output = OutputFile::create(path)?;
    match stream::write_parts::<Blake3Pieces>(output.file(), parts, written) {
        Ok(summary) => {
            output.commit()?;
            Ok(digest(path, summary))
        }
        Err(NotWritten::File { action, source }) => Err(FileError::of(path, action)(source).into()),
        Err(NotWritten::Part { cause, .. }) => Err(cause),
    }
}

fn digest(path: &Path, StreamSummary { bytes, digest }: StreamSummary) -> FileDigest {
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    FileDigest { file, bytes, digest: ContentDigest::blake3(&digest) }
}

/// Writes a value as indented JSON with a final newline.
///
/// # Errors
/// If the file can't be written.
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<FileDigest, ConvertError> {
    let mut text = serde_json::to_string_pretty(value).map_err(|e| FileError::of(path, "write")(e.into()))?;
    text.push('\n');
    write(path, text.as_bytes())
}
