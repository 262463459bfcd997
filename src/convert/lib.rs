//! Conversions. A manifest and a source become a bundle.
//!
//! [`pipeline::convert`] plans the packages, builds their functions through the model's family, checks and writes them
//! one after another, and finishes with the host's file, the tokenizer and `bundle.json`. Weights are read, converted
//! and written in one stream.
//!
//! ```
//! use anec_convert::{ConvertOptions, Outcome, convert};
//! use anec_manifest::Manifest;
//!
//! let folder = tempfile::tempdir().unwrap();
//! # let demo = concat!("source=", env!("CARGO_MANIFEST_DIR"), "/../../demo/model").to_owned();
//! let manifest = Manifest::from_yaml("context: 64", "the example", &[demo])?;
//! let options = ConvertOptions {
//!     manifest,
//!     out: Some(folder.path().join("demo.anec")),
//!     force: false,
//!     compile: false,
//!     progress: anec_base::Progress::hidden(),
//!     check_tokenizer: None,
//! };
//! let Outcome::Written(written) = convert(&options)? else { panic!("the folder was empty") };
//! assert_eq!(written.bundle.model.contexts, [64]);
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`plan`], [`size`] | what goes into which package, and how many bytes that takes |
//! | [`workload`] | what a function reads and computes |
//! | [`estimate`] | how fast that might run |
//! | [`emit`] | weights in the number format of their role |
//! | [`open`] | the source that a manifest names, and the model in it |
//! | [`functions`] | the functions of a package |
//! | [`pipeline`] | the conversion itself |
//! | `run` | its files, written several at a time |
//! | [`resume`] | the journal by which an interrupted conversion goes on |
//! | [`output`] | the folder that the bundle gets |
//! | [`host`], [`tokenizer`], [`files`] | the files beside the packages |
//! | [`compile`] | Core ML's compiler |
//! | [`anemll`] | a bundle in the layout that apps made for Anemll's models read |
//! | [`hf_swift`] | a bundle as the one package that swift-transformers runs |
//! | `exported` | what both have in common |
//! | [`report`], [`notes`] | `report.json` and what the user should know |

#![forbid(unsafe_code)]

pub mod anemll;
pub mod compile;
pub mod digests;
pub mod emit;
pub mod error;
pub mod estimate;
mod exported;
pub mod files;
pub mod functions;
pub mod hf_swift;
pub mod host;
pub mod notes;
pub mod open;
pub mod output;
pub mod pipeline;
pub mod plan;
pub mod report;
pub mod resume;
mod run;
pub mod size;
pub mod tokenizer;
pub mod workload;

pub use error::ConvertError;
pub use estimate::{Estimate, FormEstimate};
pub use pipeline::{Choose, Chosen, ConvertOptions, Outcome, convert, convert_chosen};
pub use plan::ConvertPlan;
pub use report::CalibrationReport;
pub use size::WeightUse;
pub use workload::Workload;
