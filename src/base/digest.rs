//! Digests of files, with the name of the function that made them.
//!
//! anec's own are BLAKE3, a tree of blocks that all cores can work at. SHA-256 goes through a file from its beginning to
//! its end, at a gigabyte or two in a second: it is what other systems ask for, and what bundles of schema version 2 have.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use blake3::hazmat::{self, ChainingValue, HasherExt, Mode};
use rayon::prelude::*;
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

/// Bytes that are read at a time: few enough to stay in a core's cache.
const STEP: usize = 128 << 10;
/// Bytes that a core digests at a time: a subtree of BLAKE3's tree, so a power of two.
const SUBTREE: u64 = 4 << 20;

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
            ContentDigest::Blake3(_) => Self::blake3_of_file(path),
            ContentDigest::Sha256(_) => Self::sha256_of_file(path),
        }
    }

    /// The BLAKE3 of a file, by the threads of rayon's pool. Bytes are read rather than mapped: to copy them into a buffer that
    /// stays in a core's cache takes less time than to map their pages and give them back.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn blake3_of_file(path: &Path) -> io::Result<Self> {
        let length = std::fs::metadata(path)?.len();
        let hashed = |first: u64| {
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(first);
            read_through(path, first, SUBTREE.min(length - first), |bytes| {
                hasher.update(bytes);
            })?;
            Ok(hasher)
        };
        if length <= SUBTREE {
            return hashed(0).map(|hasher| Self::blake3(&hasher.finalize()));
        }
        let subtree = |index: u64| hashed(index * SUBTREE).map(|hasher| hasher.finalize_non_root());
        let subtrees = (0..length.div_ceil(SUBTREE)).into_par_iter().map(subtree).collect::<io::Result<Vec<_>>>()?;
        let (left, right) = subtrees.split_at(left_of(subtrees.len()));
        Ok(Self::blake3(&hazmat::merge_subtrees_root(&joined(left), &joined(right), Mode::Hash)))
    }

    /// The SHA-256 of a file, for systems that ask for it.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn sha256_of_file(path: &Path) -> io::Result<Self> {
        let mut hasher = sha2::Sha256::new();
        read_through(path, 0, std::fs::metadata(path)?.len(), |bytes| hasher.update(bytes))?;
        Ok(ContentDigest::Sha256(hexadecimal(&hasher.finalize())))
    }

    /// The digest in hexadecimal digits.
    pub fn hex(&self) -> &str {
        match self {
            ContentDigest::Blake3(hex) | ContentDigest::Sha256(hex) => hex,
        }
    }
}

/// Gives `length` bytes of a file, from `first` on, to a hasher.
fn read_through(path: &Path, first: u64, length: u64, mut update: impl FnMut(&[u8])) -> io::Result<()> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(first))?;
    let mut buffer = vec![0; STEP.min(length as usize)];
    let mut left = length;
    while left > 0 {
        let step = &mut buffer[..(STEP as u64).min(left) as usize];
        file.read_exact(step)?;
        update(step);
        left -= step.len() as u64;
    }
    Ok(())
}

/// How many of so many subtrees, more than one, are on the left of the root.
fn left_of(count: usize) -> usize {
    count.next_power_of_two() / 2
}

/// What neighbouring subtrees are together.
fn joined(subtrees: &[ChainingValue]) -> ChainingValue {
    if let [one] = subtrees {
        return *one;
    }
    let (left, right) = subtrees.split_at(left_of(subtrees.len()));
    hazmat::merge_subtrees_non_root(&joined(left), &joined(right), Mode::Hash)
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
        let most = 5 * SUBTREE as usize + 5;
        let bytes: Vec<u8> = (0..most).map(|i| (i % 251) as u8).collect();
        let subtrees = [1, 2, 3, 4].map(|count| count * SUBTREE as usize);
        for length in [most, 0, STEP, subtrees[0] + 1].into_iter().chain(subtrees) {
            let bytes = &bytes[..length];
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
