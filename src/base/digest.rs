//! Digests of files, tagged with the hash function.
//!
//! anec uses BLAKE3, whose tree of blocks is hashed by all cores at once. SHA-256 is sequential, 1 to 2 GB/s; other
//! systems ask for it, and bundles of schema version 2 contain it.

use std::fmt::{self, Write};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use blake3::hazmat::{self, ChainingValue, HasherExt, Mode};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::Digest;

use crate::regular;

/// Digest of some bytes. Its text form is `blake3:` or `sha256:` and 64 hexadecimal digits; without a prefix it is
/// SHA-256.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ContentDigest {
    /// BLAKE3, in hexadecimal.
    Blake3(String),
    /// SHA-256, in hexadecimal.
    Sha256(String),
}

/// Error for a text that isn't a digest.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a digest, expected `blake3:` or `sha256:` and 64 hexadecimal digits")]
pub struct InvalidDigest(String);

/// Bytes read at a time: few enough to stay in a core's cache.
const READ_SIZE: usize = 128 << 10;
/// Bytes of a subtree that is hashed on its own: a power of two, as BLAKE3's tree requires.
const SUBTREE: u64 = 256 << 10;
/// Subtrees that one core hashes in sequence.
const SUBTREES_PER_TASK: usize = 16;

impl ContentDigest {
    /// Returns the BLAKE3 digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self::blake3(&blake3::hash(bytes))
    }

    /// Wraps a BLAKE3 hash.
    pub fn blake3(hash: &blake3::Hash) -> Self {
        ContentDigest::Blake3(hexadecimal(hash.as_bytes()))
    }

    /// Computes the digest of a file with the same hash function.
    ///
    /// # Errors
    /// If the file can't be read.
    pub fn rehash_file(&self, path: &Path) -> io::Result<Self> {
        match self {
            ContentDigest::Blake3(_) => Self::blake3_of_file(path),
            ContentDigest::Sha256(_) => Self::sha256_of_file(path),
        }
    }

    /// Computes the BLAKE3 digest of a file on rayon's thread pool. The file is read, not mapped: copying into a buffer
    /// that stays in a core's cache takes less time than mapping and unmapping pages.
    ///
    /// # Errors
    /// If the file can't be read.
    pub fn blake3_of_file(path: &Path) -> io::Result<Self> {
        FileDigester::new(std::fs::metadata(path)?.len()).finish(path)
    }

    /// Computes the SHA-256 digest of a file.
    ///
    /// # Errors
    /// If the file can't be read.
    pub fn sha256_of_file(path: &Path) -> io::Result<Self> {
        let mut hasher = sha2::Sha256::new();
        let (mut file, length) = regular::open(path)?;
        read_through(&mut file, length, |bytes| hasher.update(bytes))?;
        Ok(ContentDigest::Sha256(hexadecimal(&hasher.finalize())))
    }

    /// Hexadecimal digits of the digest.
    pub fn hex(&self) -> &str {
        match self {
            ContentDigest::Blake3(hex) | ContentDigest::Sha256(hex) => hex,
        }
    }
}

/// Incremental BLAKE3 of a file: parts are hashed in any order, by any thread, while they are in memory for another
/// reason.
pub struct FileDigester {
    length: u64,
    /// Chaining values of the hashed subtrees. Empty if the file has only one subtree, which would be the root.
    subtrees: Vec<OnceLock<ChainingValue>>,
}

impl FileDigester {
    /// Creates a digester for a file of `length` bytes.
    pub fn new(length: u64) -> Self {
        let count = if length > SUBTREE { length.div_ceil(SUBTREE) } else { 0 };
        FileDigester { length, subtrees: (0..count).map(|_| OnceLock::new()).collect() }
    }

    /// Hashes the subtrees that begin in `range` of the file, whose content is `bytes`. Skips those already hashed.
    /// Returns the end of what was read, which may lie behind the end of the range.
    pub fn update(&self, bytes: &[u8], range: Range<usize>) -> usize {
        let step = SUBTREE as usize;
        let within = range.start.div_ceil(step)..range.end.div_ceil(step).min(self.subtrees.len());
        let end_of = |index: usize| {
            let mut end = range.end;
            self.subtrees[index].get_or_init(|| {
                end = bytes.len().min((index + 1) * step);
                let mut hasher = hasher_at(index);
                hasher.update(&bytes[index * step..end]);
                hasher.finalize_non_root()
            });
            end
        };
        // split large tensors among the cores
        within.into_par_iter().with_min_len(SUBTREES_PER_TASK).map(end_of).max().unwrap_or(range.end)
    }

    /// Returns the digest of the file at `path`. Reads what wasn't hashed yet, on rayon's thread pool.
    ///
    /// # Errors
    /// If the file can't be read.
    pub fn finish(&self, path: &Path) -> io::Result<ContentDigest> {
        let hashed = |file: &mut File, index: usize| {
            let first = index as u64 * SUBTREE;
            let mut hasher = hasher_at(index);
            file.seek(SeekFrom::Start(first))?;
            read_through(file, SUBTREE.min(self.length - first), |bytes| {
                hasher.update(bytes);
            })?;
            Ok::<_, io::Error>(hasher)
        };
        if self.subtrees.is_empty() {
            return hashed(&mut regular::open(path)?.0, 0).map(|hasher| ContentDigest::blake3(&hasher.finalize()));
        }
        self.subtrees.par_chunks(SUBTREES_PER_TASK).enumerate().try_for_each(|(chunk, subtrees)| {
            let mut file = None;
            for (index, subtree) in subtrees.iter().enumerate().filter(|(_, subtree)| subtree.get().is_none()) {
                let file = match &mut file {
                    Some(file) => file,
                    None => file.insert(regular::open(path)?.0),
                };
                let value = hashed(file, chunk * SUBTREES_PER_TASK + index)?.finalize_non_root();
                subtree.get_or_init(|| value);
            }
            io::Result::Ok(())
        })?;
        let subtrees: Vec<ChainingValue> = self.subtrees.iter().filter_map(OnceLock::get).copied().collect();
        let (left, right) = subtrees.split_at(left_subtrees(subtrees.len()));
        Ok(ContentDigest::blake3(&hazmat::merge_subtrees_root(&joined(left), &joined(right), Mode::Hash)))
    }
}

/// Hasher for the subtree with this index.
fn hasher_at(index: usize) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(index as u64 * SUBTREE);
    hasher
}

/// Feeds the next `length` bytes of a file to a hasher.
fn read_through(file: &mut File, length: u64, mut update: impl FnMut(&[u8])) -> io::Result<()> {
    let mut buffer = vec![0; READ_SIZE.min(length as usize)];
    let mut left = length;
    while left > 0 {
        let step = &mut buffer[..(READ_SIZE as u64).min(left) as usize];
        file.read_exact(step)?;
        update(step);
        left -= step.len() as u64;
    }
    Ok(())
}

/// Number of subtrees left of the root, of `count` > 1 subtrees.
fn left_subtrees(count: usize) -> usize {
    count.next_power_of_two() / 2
}

/// Chaining value of adjacent subtrees.
fn joined(subtrees: &[ChainingValue]) -> ChainingValue {
    if let [one] = subtrees {
        return *one;
    }
    let (left, right) = subtrees.split_at(left_subtrees(subtrees.len()));
    hazmat::merge_subtrees_non_root(&joined(left), &joined(right), Mode::Hash)
}

/// Formats bytes as lower-case hexadecimal digits.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
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
    type Error = InvalidDigest;

    fn try_from(text: String) -> Result<Self, InvalidDigest> {
        let (name, hex) = text.split_once(':').unwrap_or(("sha256", &text));
        let digits = |hex: &str| hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match name {
            "blake3" if digits(hex) => Ok(ContentDigest::Blake3(hex.to_owned())),
            "sha256" if digits(hex) => Ok(ContentDigest::Sha256(hex.to_owned())),
            _ => Err(InvalidDigest(text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published digests of the empty input: BLAKE3 (its test vectors) and SHA-256 (FIPS 180).
    const EMPTY_DIGESTS: [&str; 2] = [
        "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ];

    #[test]
    fn file_digests_match_byte_digests() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let most = (SUBTREES_PER_TASK + 2) * SUBTREE as usize + 5;
        let bytes: Vec<u8> = (0..most).map(|i| (i % 251) as u8).collect();
        let subtrees = [1, 2, 3, 4].map(|count| count * SUBTREE as usize);
        for length in [most, 0, READ_SIZE, subtrees[0] + 1].into_iter().chain(subtrees) {
            let bytes = &bytes[..length];
            std::fs::write(&path, bytes).unwrap();
            let [blake3, sha256] = EMPTY_DIGESTS.map(|text| ContentDigest::try_from(text.to_owned()).unwrap());
            assert_eq!(blake3.rehash_file(&path).unwrap(), ContentDigest::of(bytes));
            let expected = ContentDigest::Sha256(hexadecimal(&sha2::Sha256::digest(bytes)));
            assert_eq!(sha256.rehash_file(&path).unwrap(), expected);
            if bytes.is_empty() {
                assert_eq!([ContentDigest::of(bytes), expected].map(|digest| digest.to_string()), EMPTY_DIGESTS);
            }
        }
    }

    #[test]
    fn hashed_parts_are_not_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let subtree = SUBTREE as usize;
        let bytes: Vec<u8> = (0..4 * subtree + 5).map(|i| (i % 251) as u8).collect();
        let digester = FileDigester::new(bytes.len() as u64);
        // the second subtree begins in this range, which ends within it; the last one is short
        assert_eq!(digester.update(&bytes, 1..subtree + 1), 2 * subtree);
        assert_eq!(digester.update(&bytes, 1..subtree + 1), subtree + 1);
        assert_eq!(digester.update(&bytes, 4 * subtree..bytes.len()), bytes.len());
        let mut others = bytes.clone();
        others[subtree..2 * subtree].fill(0);
        others[4 * subtree..].fill(0);
        std::fs::write(&path, others).unwrap();
        assert_eq!(digester.finish(&path).unwrap(), ContentDigest::of(&bytes));
        // a file of one subtree is read whole
        std::fs::write(&path, &bytes[..subtree]).unwrap();
        let digester = FileDigester::new(SUBTREE);
        assert_eq!(digester.update(&bytes[..subtree], 0..7), 7);
        assert_eq!(digester.finish(&path).unwrap(), ContentDigest::of(&bytes[..subtree]));
    }

    #[test]
    fn a_digest_without_a_name_is_sha256() {
        let read = |text: &str| serde_json::from_value::<ContentDigest>(text.into());
        let hex = &EMPTY_DIGESTS[1][7..];
        assert_eq!(read(hex).unwrap(), ContentDigest::Sha256(hex.into()));
        assert_eq!(serde_json::to_value(read(hex).unwrap()).unwrap(), EMPTY_DIGESTS[1]);
        for wrong in ["", "md5:00", &hex[1..], "sha256:zz", &hex.to_uppercase()] {
            assert!(read(wrong).unwrap_err().to_string().contains("is not a digest"), "{wrong}");
        }
    }
}
