//! Bundles in apps. The functions and types of this crate are those of the Swift and the Python module: UniFFI generates
//! both from them, comments included.
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
