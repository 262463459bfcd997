//! Source of the weights, and files of the bundle.

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use anec_base::ContentDigest;

/// Source of the weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SourceFacts {
    /// Name given in the manifest or command.
    pub name: String,
    /// Format: `gguf`, `safetensors`, …
    pub format: String,
    /// Files that weights were read from.
    pub files: Vec<FileDigest>,
}

/// Accounting of a source's tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LedgerTotals {
    /// Number of tensors used.
    pub used: usize,
    /// Bytes of the tensors used, in the source.
    pub used_bytes: u64,
    /// Number of tensors whose integers the packages keep, with their zero points, and with their scales in fp16.
    #[serde(default, skip_serializing_if = "is_none")]
    pub kept: usize,
    /// Unused tensors, each with the reason.
    pub ignored: BTreeMap<String, String>,
}

/// File with its size and digest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FileDigest {
    /// Name, relative to the bundle or the source.
    pub file: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Digest of the content: `blake3:` and 64 hexadecimal digits. Up to schema version 2 it was a SHA-256 without
    /// prefix, with the key `sha256`.
    #[serde(alias = "sha256")]
    #[schemars(with = "String")]
    pub digest: ContentDigest,
}

impl FileDigest {
    /// Returns one digest of several files: of the list of their digests and names, one per line.
    pub fn of_all<'a>(files: impl IntoIterator<Item = &'a FileDigest>) -> ContentDigest {
        let lines: String = files.into_iter().map(|file| format!("{} {}\n", file.digest, file.file)).collect();
        ContentDigest::of(lines.as_bytes())
    }
}

/// A `.mlpackage`, or the `.aimodel` of a bundle of Core AI.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PackageEntry {
    /// Folder name within the bundle.
    pub package: String,
    /// Folder name of the compiled model, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compiled: Option<String>,
    /// Bytes of the weights, without padding of the weight file.
    pub weight_bytes: u64,
    /// Files of the package.
    pub files: Vec<FileDigest>,
}

impl PackageEntry {
    /// Whether this is an asset of Core AI.
    pub fn is_asset(&self) -> bool {
        Path::new(&self.package).extension().is_some_and(|extension| extension == "aimodel")
    }

    /// One digest of all files.
    pub fn digest(&self) -> ContentDigest {
        FileDigest::of_all(&self.files)
    }
}

fn is_none(count: &usize) -> bool {
    *count == 0
}
