//! Digests of files, with the name of the function that made them.
//!
//! anec's own are BLAKE3, a tree of blocks that all cores can work at. SHA-256 goes through a file from its beginning to
//! its end, at a gigabyte or two in a second: it is what other systems ask for, and what bundles of schema version 2 have.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::Digest;

use crate::file::hexadecimal;

/// A digest of some bytes. As text it is `blake3:` or `sha256:` and 64 hexadecimal digits; without a name it is SHA-256.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ContentDigest {
    /// BLAKE3, in hexadecimal.
    Blake3(String),
    /// SHA-256, in hexadecimal.
    Sha256(String),
}

/// A text that is no digest.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no digest, expected `blake3:` or `sha256:` and 64 hexadecimal digits")]
pub struct NoDigest(String);

/// A digest in the making.
// a hasher's size is that of its tree's edge, and few are alive at a time
#[allow(clippy::large_enum_variant)]
enum Running {
    Blake3(blake3::Hasher),
    Sha256(sha2::Sha256),
}

/// Bytes that are read at a time: enough for several cores.
const STEP: usize = 4 << 20;

impl ContentDigest {
    /// Of some bytes, by BLAKE3.
    pub fn of(bytes: &[u8]) -> Self {
        Self::blake3(&blake3::hash(bytes))
    }

    /// A BLAKE3 hash as digest.
    pub fn blake3(hash: &blake3::Hash) -> Self {
        ContentDigest::Blake3(hexadecimal(hash.as_bytes()))
    }

    /// The digest of a file by the same function.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn likewise(&self, path: &Path) -> io::Result<Self> {
        match self {
            ContentDigest::Blake3(_) => Running::Blake3(blake3::Hasher::new()).of_file(path),
            ContentDigest::Sha256(_) => Self::sha256_of_file(path),
        }
    }

    /// The SHA-256 of a file, for systems that ask for it.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn sha256_of_file(path: &Path) -> io::Result<Self> {
        Running::Sha256(sha2::Sha256::new()).of_file(path)
    }

    /// The digest in hexadecimal digits.
    pub fn hex(&self) -> &str {
        match self {
            ContentDigest::Blake3(hex) | ContentDigest::Sha256(hex) => hex,
        }
    }
}

impl Running {
    fn of_file(mut self, path: &Path) -> io::Result<ContentDigest> {
        let mut file = File::open(path)?;
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let mut buffer = vec![0; usize::try_from(length).map_or(STEP, |length| length.clamp(1, STEP))];
        loop {
            let count = fill(&mut file, &mut buffer)?;
            match &mut self {
                Running::Blake3(hasher) => drop(hasher.update_rayon(&buffer[..count])),
                Running::Sha256(hasher) => hasher.update(&buffer[..count]),
            }
            if count < buffer.len() {
                break;
            }
        }
        Ok(match self {
            Running::Blake3(hasher) => ContentDigest::blake3(&hasher.finalize()),
            Running::Sha256(hasher) => ContentDigest::Sha256(hexadecimal(&hasher.finalize())),
        })
    }
}

/// Reads until the buffer is full, or the file ends.
fn fill(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read(&mut buffer[done..]) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

impl fmt::Display for ContentDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ContentDigest::Blake3(hex) => write!(f, "blake3:{hex}"),
            ContentDigest::Sha256(hex) => write!(f, "sha256:{hex}"),
        }
    }
}

impl From<ContentDigest> for String {
    fn from(digest: ContentDigest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for ContentDigest {
    type Error = NoDigest;

    fn try_from(text: String) -> Result<Self, NoDigest> {
        let (name, hex) = text.split_once(':').unwrap_or(("sha256", &text));
        let digits = |hex: &str| hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match name {
            "blake3" if digits(hex) => Ok(ContentDigest::Blake3(hex.to_owned())),
            "sha256" if digits(hex) => Ok(ContentDigest::Sha256(hex.to_owned())),
            _ => Err(NoDigest(text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published: of nothing, by BLAKE3 (its test vectors) and by SHA-256 (FIPS 180).
    const NOTHING: [&str; 2] = [
        "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ];

    #[test]
    fn a_file_has_the_digest_of_its_bytes_by_either_function() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        // more than is read at a time, and not a whole number of that
        let bytes: Vec<u8> = (0..2 * STEP + 5).map(|i| (i % 251) as u8).collect();
        for bytes in [&bytes[..], &bytes[..STEP], b""] {
            std::fs::write(&path, bytes).unwrap();
            let [blake3, sha256] = NOTHING.map(|text| ContentDigest::try_from(text.to_owned()).unwrap());
            assert_eq!(blake3.likewise(&path).unwrap(), ContentDigest::of(bytes));
            let expected = ContentDigest::Sha256(hexadecimal(&sha2::Sha256::digest(bytes)));
            assert_eq!(sha256.likewise(&path).unwrap(), expected);
            if bytes.is_empty() {
                assert_eq!([ContentDigest::of(bytes), expected].map(|digest| digest.to_string()), NOTHING);
            }
        }
    }

    #[test]
    fn a_digest_without_a_name_is_sha256() {
        let read = |text: &str| serde_json::from_value::<ContentDigest>(text.into());
        let hex = &NOTHING[1][7..];
        assert_eq!(read(hex).unwrap(), ContentDigest::Sha256(hex.into()));
        assert_eq!(serde_json::to_value(read(hex).unwrap()).unwrap(), NOTHING[1]);
        for wrong in ["", "md5:00", &hex[1..], "sha256:zz", &hex.to_uppercase()] {
            assert!(read(wrong).unwrap_err().to_string().contains("is no digest"), "{wrong}");
        }
    }
}
