//! `bundle.json`: the one interface between converter, validator and runtimes. It is enough to run a model without
//! knowing its family.

pub mod error;
pub mod ports;

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use anec_base::FileError;

pub use anec_manifest::Manifest;

pub use error::BundleError;
pub use ports::{Extent, Port, PortRole, Stage, StatePort, StateRole};

/// Version of the schema; a reader refuses others.
pub const SCHEMA_VERSION: u32 = 1;

/// File name within a bundle's folder.
pub const FILE_NAME: &str = "bundle.json";

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
    /// Where the weights came from.
    pub source: SourceFacts,
    /// Packages, in the order of the stages.
    pub packages: Vec<PackageEntry>,
    /// Every function of every package.
    pub functions: Vec<FunctionEntry>,
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
            Some(version) if version == u64::from(SCHEMA_VERSION) => {}
            Some(version) => {
                return Err(wrong(format!("schema version {version}, expected {SCHEMA_VERSION}; convert it again")));
            }
            None => return Err(wrong("no `schema_version`: this isn't a bundle".into())),
        }
        serde_json::from_value(json).map_err(|e| wrong(e.to_string()))
    }
}

/// JSON Schema of `bundle.json`.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Bundle).into()
}

/// What a runtime must know of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelFacts {
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Number of layers.
    pub num_layers: usize,
    /// Rows of the embedding and of the LM head.
    pub vocab_size: u64,
    /// Hidden states between functions, the embedding's among them, are the model's times this, a power of two by which
    /// fp16 can hold them.
    #[serde(default = "unscaled")]
    pub hidden_scale: f64,
    /// Context lengths for which there are functions, ascending.
    pub contexts: Vec<u64>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u64>,
    /// Token that begins a text, if the model wants one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u64>,
    /// What the model is for.
    #[serde(default, skip_serializing_if = "Task::is_text_generation")]
    pub task: Task,
}

impl ModelFacts {
    /// What the model is as a token classifier, if it is one.
    pub fn classification(&self) -> Option<&Classification> {
        match &self.task {
            Task::TextGeneration => None,
            Task::TokenClassification(classification) => Some(classification),
        }
    }

    /// Rows of the head: tokens, or labels.
    pub fn head_rows(&self) -> u64 {
        self.classification().map_or(self.vocab_size, |classification| classification.labels.len() as u64)
    }
}

/// What a model is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Task {
    /// It continues a text: the head gives a logit for each token of the vocabulary.
    #[default]
    TextGeneration,
    /// It labels every token of a text: the head gives a logit for each label.
    TokenClassification(Classification),
}

impl Task {
    fn is_text_generation(&self) -> bool {
        *self == Task::TextGeneration
    }
}

/// How a text is labelled.
///
/// The functions have no states. A function of n layers sees `n * band` tokens on each side of a token, so that a call
/// with a part of a text gives the right hidden states for all its tokens but that many at each end that isn't an end of
/// the text. A text of any length is labelled exactly in windows: each function, from the first to the last, is called
/// with windows that overlap by twice that much, at rotary positions from 0 on (rotation is relative).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Classification {
    /// Labels, in the order of the head's rows.
    pub labels: Vec<String>,
    /// How far a token sees in one layer, on each side.
    pub band: u64,
    /// Tokens of the largest call: longer texts go through in windows.
    pub window: u64,
    /// Tokens at each inner end of a window whose results don't count, in the function with the most layers.
    pub halo: u64,
    /// Tokens that one window of that function advances: `window - 2 * halo`, and 0 where only texts up to `window`
    /// tokens can be labelled.
    pub stride: u64,
}

fn unscaled() -> f64 {
    1.0
}

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
    /// SHA-256, in hexadecimal.
    pub sha256: String,
}

/// One `.mlpackage`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PackageEntry {
    /// Folder name within the bundle.
    pub package: String,
    /// Folder name of the compiled model, once there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compiled: Option<String>,
    /// Bytes of its weights, without what a weight file has around them.
    pub weight_bytes: u64,
    /// Its files.
    pub files: Vec<FileDigest>,
}

/// One function of a package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FunctionEntry {
    /// Package that holds it.
    pub package: String,
    /// Name within the package.
    pub function: String,
    /// What it does.
    pub stage: Stage,
    /// Slots of its key-value cache. The LM head has none: its functions carry the largest context and serve all.
    pub context: u64,
    /// Numbers of tokens that one call may have.
    pub tokens: Tokens,
    /// Inputs.
    pub inputs: Vec<Port>,
    /// Outputs.
    pub outputs: Vec<Port>,
    /// States.
    pub states: Vec<StatePort>,
}

/// Numbers of tokens that one call may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Tokens {
    /// Every number from the first to the second.
    Range([u64; 2]),
    /// Exactly this many.
    Exactly(u64),
}

impl Tokens {
    /// Whether a call of this many tokens is possible.
    pub fn allows(self, tokens: u64) -> bool {
        match self {
            Tokens::Range([lower, upper]) => (lower..=upper).contains(&tokens),
            Tokens::Exactly(n) => n == tokens,
        }
    }
}

/// What the host computes with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostFacts {
    /// File of the host's tensors.
    pub file: FileDigest,
    /// Name of the embedding table in it, `[vocab_size, hidden_size]` fp16; multipliers are already applied.
    pub embedding: String,
    /// Rotary tables.
    pub rope: Vec<RopeTable>,
}

/// A rotary table: host tensors `{name}.cos` and `{name}.sin`, f32 `[rows, rope_dim / 2]`, with the attention factor
/// multiplied in. A scaling that depends on the length of the text has several variants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RopeTable {
    /// Which table an input asks for.
    pub table: String,
    /// Variants by length, ascending: a text of n tokens (prompt and continuation) uses the first whose `max_length`
    /// is at least n, for all its positions.
    pub variants: Vec<RopeVariant>,
}

/// One variant of a rotary table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RopeVariant {
    /// Longest text it is for.
    pub max_length: u64,
    /// Host tensor of the cosines.
    pub cos: String,
    /// Host tensor of the sines.
    pub sin: String,
}
