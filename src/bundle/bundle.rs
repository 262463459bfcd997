//! `bundle.json` as a whole.

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    BundleError, DraftFunctions, FILE_NAME, FileDigest, FunctionEntry, HostFacts, LedgerTotals, ModelFacts,
    OLDEST_VERSION, PackageEntry, SCHEMA_VERSION, SourceFacts,
};
use anec_base::{ContentDigest, input, json};
use anec_manifest::{Manifest, Transform};

/// Converted model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Bundle {
    /// Version of this schema.
    pub schema_version: u32,
    /// Version of anec that wrote the file.
    pub anec_version: String,
    /// Name of the model.
    pub name: String,
    /// Model family.
    pub family: String,
    /// Properties of the model that a runtime needs.
    pub model: ModelFacts,
    /// The family's configuration as resolved from the source.
    pub config: serde_json::Value,
    /// Manifest with every default filled in.
    pub manifest: Manifest,
    /// Transforms applied to the weights before quantization, in order. They keep the model's function.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transforms: Vec<Transform>,
    /// Source of the weights.
    pub source: SourceFacts,
    /// Packages, in the order of their functions.
    pub packages: Vec<PackageEntry>,
    /// Functions of all packages, in the order of a call: layers from first to last, each function of layers followed
    /// by the experts of its last layer, then the head from first to last row. Functions of one part for several
    /// contexts and numbers of tokens are adjacent.
    pub functions: Vec<FunctionEntry>,
    /// Layer that drafts tokens, if it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftFunctions>,
    /// Tensors that the host uses.
    pub host: HostFacts,
    /// Tokenizer files by kind: `tokenizer`, `tokenizer_config`, `chat_template`, `generation_config`.
    pub tokenizer: BTreeMap<String, String>,
    /// Tokenizer files with their digests.
    #[serde(default)]
    pub tokenizer_files: Vec<FileDigest>,
    /// Accounting of the source's tensors.
    pub ledger: LedgerTotals,
}

/// Largest number of bytes, and of tokens, rows or layers: sums of the former and products of two of the latter fit
/// into 64 bits.
const MOST_BYTES: u64 = 1 << 48;
const MOST: u64 = 1 << 31;

/// Returns the first number that is larger than any bundle has, and its place. Numbers in the family's configuration
/// and in the manifest aren't computed with.
fn too_large(json: &serde_json::Value, place: &mut String) -> Option<(String, u64)> {
    use serde_json::Value;

    let length = place.len();
    let mut within = |name: &str, value: &Value| {
        place.push_str(name);
        let found = too_large(value, place);
        place.truncate(length);
        found
    };
    match json {
        Value::Number(number) => {
            let key = place.rsplit('.').next().unwrap_or_default();
            let most = if key.contains("bytes") || place.starts_with("ledger") { MOST_BYTES } else { MOST };
            Some((place.clone(), number.as_u64().filter(|number| *number > most)?))
        }
        Value::Array(items) => items.iter().zip(0..).find_map(|(value, index)| within(&format!("[{index}]"), value)),
        Value::Object(map) => {
            let dot = if length == 0 { "" } else { "." };
            let counted = map.iter().filter(|(key, _)| length > 0 || !["config", "manifest"].contains(&key.as_str()));
            counted.into_iter().find_map(|(key, value)| within(&format!("{dot}{key}"), value))
        }
        _ => None,
    }
}

impl Bundle {
    /// Reads the `bundle.json` of a folder.
    ///
    /// # Errors
    /// If the file can't be read, isn't valid, or has an unsupported version.
    pub fn read(folder: &Path) -> Result<Bundle, BundleError> {
        let path = folder.join(FILE_NAME);
        let wrong = |problem: String| BundleError::Content { path: path.clone(), problem };
        let text = input::read_file(&path, input::MOST_JSON)?;
        // check the version first: other versions can have other fields
        let json: serde_json::Value = json::read(&text).map_err(|e| wrong(format!("it isn't JSON: {e}")))?;
        match json.get("schema_version").and_then(serde_json::Value::as_u64) {
            Some(version) if (u64::from(OLDEST_VERSION)..=u64::from(SCHEMA_VERSION)).contains(&version) => {}
            Some(found) => return Err(BundleError::Version { path, found }),
            None => return Err(wrong("no `schema_version`: this isn't a bundle".into())),
        }
        if let Some((key, number)) = too_large(&json, &mut String::new()) {
            return Err(wrong(format!("`{key}` is {number}, larger than any model has")));
        }
        let bundle: Bundle = json::read_value(&json).map_err(|e| wrong(e.to_string()))?;
        // rewritten files have the current version
        Ok(Bundle { schema_version: SCHEMA_VERSION, ..bundle })
    }

    /// All files of the bundle that have a digest: all except `bundle.json` and models compiled on this machine.
    pub fn files(&self) -> impl Iterator<Item = &FileDigest> {
        self.packages.iter().flat_map(|package| &package.files).chain([&self.host.file]).chain(&self.tokenizer_files)
    }

    /// One digest of all files, independent of folders: equal for bundles that compute the same from the same bytes.
    pub fn digest(&self) -> ContentDigest {
        FileDigest::of_all(self.files())
    }

    /// Copy of the bundle for publication: source names without the folders of this machine, and no models compiled on
    /// it.
    pub fn portable(&self) -> Bundle {
        let mut bundle = self.clone();
        bundle.source.name = anec_manifest::without_folders(&self.source.name).to_owned();
        bundle.manifest = self.manifest.portable();
        bundle.packages.iter_mut().for_each(|package| package.compiled = None);
        bundle
    }
}
