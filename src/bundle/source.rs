//! Where the weights came from, and the files that were written.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use anec_base::ContentDigest;

/// Where the weights came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SourceFacts {
    /// As the manifest or command named it.
    pub name: String,
    /// `gguf`, `safetensors`, …
    pub format: String,
    /// Files that weights were read from.
    pub files: Vec<FileDigest>,
}

/// How the tensors of a source were accounted for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LedgerTotals {
    /// Tensors used.
    pub used: usize,
    /// Bytes of them in the source.
    pub used_bytes: u64,
    /// Tensors not used, with the reason.
    pub ignored: BTreeMap<String, String>,
}

/// A file with its size and digest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FileDigest {
    /// Name, relative to the bundle (or to the source).
    pub file: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Digest of its content: `blake3:` and 64 hexadecimal digits. Up to schema version 2 it was a SHA-256 without a name,
    /// as `sha256`.
    #[serde(alias = "sha256")]
    #[schemars(with = "String")]
    pub digest: ContentDigest,
}

impl FileDigest {
    /// One digest of several files: that of their digests and names, a line each.
    pub fn of_all<'a>(files: impl IntoIterator<Item = &'a FileDigest>) -> ContentDigest {
        let lines: String = files.into_iter().map(|file| format!("{} {}\n", file.digest, file.file)).collect();
        ContentDigest::of(lines.as_bytes())
    }
}

/// One `.mlpackage`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PackageEntry {
    /// Folder name within the bundle.
    pub package: String,
    /// Folder name of the compiled model, once there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compiled: Option<String>,
    /// Bytes of its weights, without what its weight file has between them.
    pub weight_bytes: u64,
    /// Its files.
    pub files: Vec<FileDigest>,
}

impl PackageEntry {
    /// One digest of its files.
    pub fn digest(&self) -> ContentDigest {
        FileDigest::of_all(&self.files)
    }
}
