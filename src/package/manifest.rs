//! `Manifest.json`, and the metadata of a model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anec_base::{input, json, path_inside};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::features::SYMBOLS_KEY;
use super::{DATA, MODEL, PackageError, WEIGHTS};

/// Namespace of ids, which are derived from contents.
const NAMESPACE: Uuid = Uuid::from_u128(0x6b1f_6a2e_52f5_5d0c_9c3e_2f0d_8a47_b6d1);

/// Only format version of manifests.
const FORMAT_VERSION: &str = "1.0.0";

/// Maximum size of a manifest in bytes; a valid one has two entries of a few hundred bytes.
const MAX_BYTES: u64 = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    file_format_version: String,
    item_info_entries: BTreeMap<String, Item>,
    root_model_identifier: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Item {
    #[serde(default)]
    author: String,
    #[serde(default)]
    description: String,
    #[serde(default)]
    name: String,
    path: String,
}

impl Manifest {
    /// Returns the manifest of a model and, if there is one, its folder of weights; ids follow from the BLAKE3 of the
    /// files.
    pub(super) fn new(model: &[u8; 32], weights: Option<&[u8; 32]>) -> Self {
        let item = |path: &str, name: &str, description: &str| Item {
            author: "com.apple.CoreML".into(),
            description: description.into(),
            name: name.into(),
            path: path.into(),
        };
        let root = id(MODEL, model);
        let mut entries = BTreeMap::from([(root.clone(), item(MODEL, "model.mlmodel", "CoreML Model Specification"))]);
        if let Some(weights) = weights {
            entries.insert(id(WEIGHTS, weights), item(WEIGHTS, "weights", "CoreML Model Weights"));
        }
        Manifest { file_format_version: FORMAT_VERSION.into(), item_info_entries: entries, root_model_identifier: root }
    }

    /// Returns the manifest as text.
    pub(super) fn to_json(&self) -> String {
        // serializing strings can't fail
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Returns the model's message, from the manifest of a package.
    pub(super) fn model_path(package: &Path) -> Result<PathBuf, PackageError> {
        let path = package.join("Manifest.json");
        let size = std::fs::metadata(&path).map_err(|e| PackageError::unreadable(&path, e))?.len();
        let corrupt = |problem: String| PackageError::corrupt(&path, problem);
        if size > MAX_BYTES {
            return Err(corrupt(format!("{size} bytes are no manifest")));
        }
        let text = input::read_file(&path, MAX_BYTES).map_err(|e| PackageError::unreadable(&path, e.error))?;
        let manifest: Manifest = json::read(&text).map_err(|e| corrupt(format!("no manifest: {e}")))?;
        if manifest.file_format_version.split('.').next() != Some("1") {
            let version = &manifest.file_format_version;
            return Err(corrupt(format!("fileFormatVersion `{version}`, expected {FORMAT_VERSION}")));
        }
        let root = &manifest.root_model_identifier;
        let item = manifest.item_info_entries.get(root);
        let item = item.ok_or_else(|| corrupt(format!("rootModelIdentifier `{root}` names no item")))?;
        let below = path_inside(&item.path)
            .ok_or_else(|| corrupt(format!("the model's path `{}` leads out of the package", item.path)))?;
        Ok(package.join(DATA).join(below))
    }
}

fn id(path: &str, digest: &[u8; 32]) -> String {
    let mut name = path.as_bytes().to_vec();
    name.extend_from_slice(digest);
    Uuid::new_v5(&NAMESPACE, &name).hyphenated().to_string().to_uppercase()
}

/// Metadata of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PackageMetadata {
    /// Description of one paragraph.
    pub short_description: String,
    /// Author.
    pub author: String,
    /// Licence.
    pub license: String,
    /// Version of the model.
    pub version: String,
    /// Other metadata by key. Keys that begin with `anec.symbols.` belong to the writer and are dropped.
    pub user_defined: BTreeMap<String, String>,
}

impl PackageMetadata {
    /// Converts to the format's message; `None` if all metadata is empty.
    pub(super) fn to_proto(&self, symbols: BTreeMap<String, String>) -> Option<coreml_proto::Metadata> {
        let own = self.user_defined.iter().filter(|(key, _)| !key.starts_with(SYMBOLS_KEY));
        let user_defined = own.map(|(k, v)| (k.clone(), v.clone())).chain(symbols).collect();
        let metadata = coreml_proto::Metadata {
            short_description: self.short_description.clone(),
            version_string: self.version.clone(),
            author: self.author.clone(),
            license: self.license.clone(),
            user_defined,
        };
        (metadata != coreml_proto::Metadata::default()).then_some(metadata)
    }

    /// Converts from the format's message.
    pub(super) fn from_proto(metadata: Option<&coreml_proto::Metadata>) -> Self {
        let Some(metadata) = metadata.cloned() else { return Self::default() };
        PackageMetadata {
            short_description: metadata.short_description,
            author: metadata.author,
            license: metadata.license,
            version: metadata.version_string,
            user_defined: metadata.user_defined.into_iter().filter(|(k, _)| !k.starts_with(SYMBOLS_KEY)).collect(),
        }
    }
}
