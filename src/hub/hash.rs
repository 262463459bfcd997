//! Digests of the hub: SHA-256 for files in Git LFS, git's SHA-1 for the others.

use anec_base::hexadecimal;
use sha2::Digest;

/// Digest of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileHash {
    /// SHA-256 of the content, for files in Git LFS.
    Sha256(String),
    /// Git's name of a blob: SHA-1 of `blob LENGTH\0` and the content.
    GitBlob(String),
}

impl FileHash {
    /// Returns the SHA-256 of bytes.
    pub fn sha256(bytes: &[u8]) -> Self {
        FileHash::Sha256(hexadecimal(&sha2::Sha256::digest(bytes)))
    }

    /// Returns git's name of bytes.
    pub fn git_blob(bytes: &[u8]) -> Self {
        let mut running = RunningDigest::like(&FileHash::GitBlob(String::new()), bytes.len() as u64);
        running.update(bytes);
        running.finish()
    }

    /// Returns the hexadecimal digits.
    pub fn hex(&self) -> &str {
        match self {
            FileHash::Sha256(hex) | FileHash::GitBlob(hex) => hex,
        }
    }
}

/// Incremental digest.
pub(crate) enum RunningDigest {
    Sha256(sha2::Sha256),
    GitBlob(sha1_smol::Sha1),
}

impl RunningDigest {
    /// Begins a digest of the kind of `hash`, of a file of `size` bytes.
    pub(crate) fn like(hash: &FileHash, size: u64) -> Self {
        match hash {
            FileHash::Sha256(_) => RunningDigest::Sha256(sha2::Sha256::new()),
            FileHash::GitBlob(_) => {
                let mut sha1 = sha1_smol::Sha1::new();
                sha1.update(format!("blob {size}\0").as_bytes());
                RunningDigest::GitBlob(sha1)
            }
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            RunningDigest::Sha256(sha256) => sha256.update(bytes),
            RunningDigest::GitBlob(sha1) => sha1.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> FileHash {
        match self {
            RunningDigest::Sha256(sha256) => FileHash::Sha256(hexadecimal(&sha256.finalize())),
            RunningDigest::GitBlob(sha1) => FileHash::GitBlob(sha1.digest().to_string()),
        }
    }
}
