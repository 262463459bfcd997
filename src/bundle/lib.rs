//! `bundle.json`: the interface between converter, validator and runtimes. It suffices to run a model without knowing
//! its family.
//!
//! | module | holds |
//! |---|---|
//! | `bundle` | the file as a whole, and reading it |
//! | [`check`] | what every bundle must fulfil |
//! | `model` | the model: its dimensions, its task |
//! | `function` | the functions of the packages |
//! | `head` | results of the LM head |
//! | `draft` | the layer that guesses the tokens after the next |
//! | `tokens` | how many tokens a call may have |
//! | `ports` | inputs and outputs of functions |
//! | `states` | what functions carry from call to call |
//! | `host` | the embedding and the rotary tables |
//! | `source` | where the weights came from, the files that were written |
//!
//! ```
//! use anec_bundle::{Stage, schema};
//!
//! // the generated JSON Schema documents the file for readers in other languages
//! assert!(schema()["properties"]["functions"].is_object());
//!
//! let stage: Stage = serde_json::from_str(r#"{"kind": "layers", "first": 0, "end": 12}"#)?;
//! assert_eq!(stage, Stage::Layers { first: 0, end: 12 });
//! # Ok::<(), serde_json::Error>(())
//! ```

#![forbid(unsafe_code)]

mod bundle;
pub mod check;
mod draft;
mod error;
mod function;
mod head;
mod host;
mod model;
mod ports;
mod source;
mod states;
mod tokens;

pub use anec_manifest::Manifest;

pub use bundle::Bundle;
pub use draft::DraftFunctions;
pub use error::BundleError;
pub use function::{FunctionEntry, HiddenProbe, Stage, layer_of, layer_scope};
pub use host::{HostFacts, RopeTable, RopeVariant};
pub use model::{
    Classification, LabelSet, ModelFacts, Pooling, Projection, ProjectionActivation, SequenceClassification, Task,
    TextEmbedding, TextPreparation, WHOLE_TEXT,
};
pub use ports::{MASKED, Port, PortDim, PortRole};
pub use source::{FileDigest, LedgerTotals, PackageEntry, SourceFacts};
pub use states::{StatePart, StatePort, StateRole, state_id};
pub use tokens::TokenCount;

/// Version of the schema. Readers refuse versions that they don't support.
///
/// Version 2: states have ids, functions say which values hold hidden states, numbers of tokens are `fixed` or `range`.
/// Version 3: files have a `digest` that names its function instead of a `sha256`.
pub const SCHEMA_VERSION: u32 = 3;
/// Oldest version that can be read.
pub const OLDEST_VERSION: u32 = 2;

/// File name within a bundle's folder.
pub const FILE_NAME: &str = "bundle.json";

/// JSON Schema of `bundle.json`.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Bundle).into()
}
