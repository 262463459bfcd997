//! Bundles in apps. The functions and types of this crate are those of the Swift and the Python module: UniFFI generates
//! both from them, comments included.
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
//! | `model` | a bundle that is opened, its first load, vectors and redaction |
//! | `session` | texts that are continued: options, pieces as they come, cancelling |
//! | `download` | whether a file is what `bundle.json` says, for apps that download bundles themselves |
//! | `error` | what can go wrong, by what an app does about it |
//!
//! Nothing here computes: it is the library `anec` without its converter, server and command line.

mod download;
mod error;
mod model;
mod session;

pub use download::file_has_digest;
pub use error::AnecError;
pub use model::{AnecModel, AnecModelInfo, AnecUnits, LabelledSpan, PrewarmEstimate, PrewarmListener, RedactedText};
pub use session::{AnecSession, ChatTurn, GeneratedText, TextEnd, TextForm, TextListener, TextOptions};

uniffi::setup_scaffolding!("anec");
