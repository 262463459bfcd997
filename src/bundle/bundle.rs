//! `bundle.json` as a whole.

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    BundleError, DraftFunctions, FILE_NAME, FileDigest, FunctionEntry, HostFacts, LedgerTotals, ModelFacts,
    OLDEST_VERSION, PackageEntry, SCHEMA_VERSION, SourceFacts,
};
use anec_base::{ContentDigest, FileError};
use anec_manifest::{Manifest, Transform};

/// A converted model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Bundle {
    /// Version of this schema.
    pub schema_version: u32,
    /// Version of anec that wrote it.
    pub anec_version: String,
    /// Name of the model.
    pub name: String,
    /// Model family.
    pub family: String,
    /// What a runtime must know of the model.
    pub model: ModelFacts,
    /// The family's configuration as it was resolved from the source.
    pub config: serde_json::Value,
    /// The manifest with every default filled in.
    pub manifest: Manifest,
    /// What was done to the weights before they were quantized, in this order. None of it changes what the model computes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transforms: Vec<Transform>,
    /// Where the weights came from.
    pub source: SourceFacts,
    /// Packages, in the order of their functions.
    pub packages: Vec<PackageEntry>,
    /// Every function of every package, in the order of a call: layers from the first to the last, behind each function
    /// of layers the experts of its last layer, then the head from the first row to the last. Functions of one part stand
    /// side by side, for several contexts and numbers of tokens.
    pub functions: Vec<FunctionEntry>,
    /// The layer that guesses the tokens after the next, if it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftFunctions>,
    /// What the host computes with.
    pub host: HostFacts,
    /// Tokenizer files, by what they are: `tokenizer`, `tokenizer_config`, `chat_template`, `generation_config`.
    pub tokenizer: BTreeMap<String, String>,
    /// The same files with their digests.
    #[serde(default)]
    pub tokenizer_files: Vec<FileDigest>,
    /// How the source's tensors were accounted for.
    pub ledger: LedgerTotals,
}

impl Bundle {
    /// Reads the `bundle.json` of a folder.
    ///
    /// # Errors
    /// When there is none, or it isn't one of this version.
    pub fn read(folder: &Path) -> Result<Bundle, BundleError> {
        let path = folder.join(FILE_NAME);
        let wrong = |problem: String| BundleError::Content { path: path.clone(), problem };
        let text = std::fs::read(&path).map_err(FileError::of(&path, "read"))?;
        // the version first: another one can have other fields
        let json: serde_json::Value = serde_json::from_slice(&text).map_err(|e| wrong(format!("not JSON: {e}")))?;
        match json.get("schema_version").and_then(serde_json::Value::as_u64) {
            Some(version) if (u64::from(OLDEST_VERSION)..=u64::from(SCHEMA_VERSION)).contains(&version) => {}
            Some(found) => return Err(BundleError::Version { path, found }),
            None => return Err(wrong("no `schema_version`: this isn't a bundle".into())),
        }
        let bundle: Bundle = serde_json::from_value(json).map_err(|e| wrong(e.to_string()))?;
        // what is written again is of this version
        Ok(Bundle { schema_version: SCHEMA_VERSION, ..bundle })
    }

    /// Every file of the bundle that has a digest: all but `bundle.json` and what is made on the machine that runs it.
    pub fn files(&self) -> impl Iterator<Item = &FileDigest> {
        self.packages.iter().flat_map(|package| &package.files).chain([&self.host.file]).chain(&self.tokenizer_files)
    }

    /// One digest of all its files: equal for bundles that compute the same from the same bytes, whatever their folders.
    pub fn digest(&self) -> ContentDigest {
        FileDigest::of_all(self.files())
    }

    /// The bundle as it is given to others: what it came from is named without the folders of this machine, and models that
    /// were compiled here are not a part of it.
    pub fn portable(&self) -> Bundle {
        let mut bundle = self.clone();
        bundle.source.name = anec_manifest::without_folders(&self.source.name).to_owned();
        bundle.manifest = self.manifest.portable();
        bundle.packages.iter_mut().for_each(|package| package.compiled = None);
        bundle
    }
}
