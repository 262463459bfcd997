//! Files of a bundle: written whole or not at all, with their digests.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anec_base::FileError;

use sha2::{Digest, Sha256};

use super::error::ConvertError;
use anec_base::Result;
use anec_base::hexadecimal;
use anec_bundle::FileDigest;
use anec_package::stream::{self, NotWritten, Part, Summary};

/// Writes a whole file.
///
/// # Errors
/// When the system refuses.
pub fn write(path: &Path, bytes: &[u8]) -> Result<FileDigest, ConvertError> {
    let (partial, mut file) = begin(path)?;
    file.write_all(bytes).map_err(FileError::of(path, "write"))?;
    let summary = Summary { bytes: bytes.len() as u64, sha256: Sha256::digest(bytes).into() };
    finish(path, &partial, summary)
}

/// Writes a file whose parts follow each other. `written` is told the part's number and the bytes of each of its pieces.
///
/// # Errors
/// When a part can't be produced, or the system refuses.
pub fn write_parts(path: &Path, parts: &[Part<'_>], written: &(dyn Fn(usize, u64) + Sync)) -> Result<FileDigest> {
    let (partial, file) = begin(path)?;
    match stream::write_parts(&file, parts, written) {
        Ok(summary) => Ok(finish(path, &partial, summary)?),
        Err(NotWritten::File { action, source }) => Err(FileError::of(path, action)(source).into()),
        Err(NotWritten::Part { cause, .. }) => Err(cause),
    }
}

/// A new file beside the path, which gets its name when it is complete.
///
/// # Errors
/// When it can't be created.
pub fn begin(path: &Path) -> Result<(PathBuf, File), ConvertError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&partial);
    let file = file.map_err(FileError::of(&partial, "create"))?;
    Ok((partial, file))
}

fn finish(path: &Path, partial: &Path, Summary { bytes, sha256 }: Summary) -> Result<FileDigest, ConvertError> {
    std::fs::rename(partial, path).map_err(FileError::of(path, "rename"))?;
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(FileDigest { file, bytes, sha256: hexadecimal(&sha256) })
}

/// Writes a value as indented JSON that ends with a newline.
///
/// # Errors
/// When the system refuses.
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<FileDigest, ConvertError> {
    let mut text = serde_json::to_string_pretty(value).map_err(|e| FileError::of(path, "write")(e.into()))?;
    text.push('\n');
    write(path, text.as_bytes())
}
