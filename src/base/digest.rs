//! Digests of files, with the name of the function that made them.
//!
//! anec's own are BLAKE3, a tree of blocks that all cores can work at. SHA-256 goes through a file from its beginning to
//! its end, at a gigabyte or two in a second: it is what other systems ask for, and what bundles of schema version 2 have.

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
/// Bytes of a subtree of BLAKE3's tree, which is digested for itself: a power of two.
const SUBTREE: u64 = 256 << 10;
/// Subtrees that a core digests one after another.
const AT_A_TIME: usize = 16;

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
        FileDigester::new(std::fs::metadata(path)?.len()).finish(path)
    }

    /// The SHA-256 of a file, for systems that ask for it.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn sha256_of_file(path: &Path) -> io::Result<Self> {
        let mut hasher = sha2::Sha256::new();
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        read_through(&mut file, length, |bytes| hasher.update(bytes))?;
        Ok(ContentDigest::Sha256(hexadecimal(&hasher.finalize())))
    }

    /// The digest in hexadecimal digits.
    pub fn hex(&self) -> &str {
        match self {
            ContentDigest::Blake3(hex) | ContentDigest::Sha256(hex) => hex,
        }
    }
}

/// BLAKE3 of a file, parts of which are digested when they are in memory for another reason, in any order and by any thread.
pub struct FileDigester {
    length: u64,
    /// Their values, once they are known. There are none if the file is no more than one, which would be the root.
    subtrees: Vec<OnceLock<ChainingValue>>,
}

impl FileDigester {
    /// Of a file of so many bytes, none of which was digested.
    pub fn new(length: u64) -> Self {
        let count = if length > SUBTREE { length.div_ceil(SUBTREE) } else { 0 };
        FileDigester { length, subtrees: (0..count).map(|_| OnceLock::new()).collect() }
    }

    /// Digests the subtrees that begin in `range` of the file, whose bytes are these, unless that was done before; gives the end
    /// of what was read, which may be behind that of the range.
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
        // whole tensors are the work of several cores
        within.into_par_iter().with_min_len(AT_A_TIME).map(end_of).max().unwrap_or(range.end)
    }

    /// The digest of the file, which is at `path`: what wasn't digested yet is read, by the threads of rayon's pool.
    ///
    /// # Errors
    /// When it can't be read.
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
            return hashed(&mut File::open(path)?, 0).map(|hasher| ContentDigest::blake3(&hasher.finalize()));
        }
        self.subtrees.par_chunks(AT_A_TIME).enumerate().try_for_each(|(chunk, subtrees)| {
            let mut file = None;
            for (index, subtree) in subtrees.iter().enumerate().filter(|(_, subtree)| subtree.get().is_none()) {
                let file = match &mut file {
                    Some(file) => file,
                    None => file.insert(File::open(path)?),
                };
                let value = hashed(file, chunk * AT_A_TIME + index)?.finalize_non_root();
                subtree.get_or_init(|| value);
            }
            io::Result::Ok(())
        })?;
        let subtrees: Vec<ChainingValue> = self.subtrees.iter().filter_map(OnceLock::get).copied().collect();
        let (left, right) = subtrees.split_at(left_of(subtrees.len()));
        Ok(ContentDigest::blake3(&hazmat::merge_subtrees_root(&joined(left), &joined(right), Mode::Hash)))
    }
}

/// A hasher of the subtree with this number.
fn hasher_at(index: usize) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(index as u64 * SUBTREE);
    hasher
}

/// Gives the next `length` bytes of a file to a hasher.
fn read_through(file: &mut File, length: u64, mut update: impl FnMut(&[u8])) -> io::Result<()> {
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

/// Lower-case hexadecimal digits.
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
        let most = (AT_A_TIME + 2) * SUBTREE as usize + 5;
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
    fn what_was_digested_before_is_not_read_again() {
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
        let hex = &NOTHING[1][7..];
        assert_eq!(read(hex).unwrap(), ContentDigest::Sha256(hex.into()));
        assert_eq!(serde_json::to_value(read(hex).unwrap()).unwrap(), NOTHING[1]);
        for wrong in ["", "md5:00", &hex[1..], "sha256:zz", &hex.to_uppercase()] {
            assert!(read(wrong).unwrap_err().to_string().contains("is no digest"), "{wrong}");
        }
    }
}
