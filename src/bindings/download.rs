//! Verification of downloaded files, for apps that download bundles themselves.

use std::path::Path;

use anec::base::{ContentDigest, Error, FileError};

use super::error::AnecError;

/// Returns whether a file's content has a digest of `bundle.json`: `blake3:` or `sha256:` and hexadecimal digits, or
/// the digits of a SHA-256 alone, as up to schema version 2. The file is streamed, whatever its size.
///
/// # Errors
/// If the text is no digest, or the file can't be read.
#[uniffi::export]
pub fn file_has_digest(path: String, digest: String) -> Result<bool, AnecError> {
    let expected = ContentDigest::try_from(digest)
        .map_err(|error| AnecError::WrongArgument { message: error.to_string(), help: String::new() })?;
    let path = Path::new(&path);
    let found = expected.rehash_file(path).map_err(FileError::of(path, "read")).map_err(Error::from)?;
    Ok(found == expected)
}
