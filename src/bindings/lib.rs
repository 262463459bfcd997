//! Bundles in apps. UniFFI generates the Swift and the Python module from the functions, types and comments of this
//! crate.
//!
//! ```
//! use anec_bindings::AnecModel;
//!
//! # let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
//! # let folder = tempfile::tempdir().unwrap();
//! # let bundle = folder.path().join("demo.anec");
//! # let manifest = anec::Manifest::from_yaml("context: 256", "the example", &[]).unwrap();
//! # anec::Converter::new(manifest).source(format!("{root}/demo/model")).out(&bundle).convert().unwrap();
//! let model = AnecModel::open(bundle.display().to_string(), None, None)?;
//! assert_eq!(model.info().task, "text_generation");
//! assert!(model.count_tokens("It was a fine morning".into())? < model.info().context);
//! # Ok::<(), anec_bindings::AnecError>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `model` | opened bundle, its first load, embeddings and redaction |
//! | `session` | text generation: options, streaming, cancellation |
//! | `download` | verification of downloaded files |
//! | `error` | errors, grouped by what an app can do |
//!
//! This crate computes nothing: it wraps the library `anec` without its converter, server and command line.

mod download;
mod error;
mod model;
mod session;

pub use download::file_has_digest;
pub use error::AnecError;
pub use model::{AnecModel, AnecModelInfo, AnecUnits, LabelledSpan, PrewarmEstimate, PrewarmListener, RedactedText};
pub use session::{AnecSession, ChatTurn, GeneratedText, TextEnd, TextForm, TextListener, TextOptions};

uniffi::setup_scaffolding!("anec");
