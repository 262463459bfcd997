//! Conversion of a source into a bundle, as a manifest describes it.
//!
//! [`pipeline::convert`] plans the packages, builds their functions through the model's family, verifies and writes
//! them, and finishes with the host's file, the tokenizer and `bundle.json`. Weights are read, converted and written as
//! streams.
//!
//! ```
//! use anec_convert::{ConvertOptions, Outcome, convert};
//! use anec_manifest::Manifest;
//!
//! let folder = tempfile::tempdir().unwrap();
//! # let demo = concat!("source=", env!("CARGO_MANIFEST_DIR"), "/../../demo/model").to_owned();
//! let manifest = Manifest::from_yaml("context: 64", "the example", &[demo])?;
//! let mut options = ConvertOptions::new(manifest);
//! options.out = Some(folder.path().join("demo.anec"));
//! let Outcome::Written(written) = convert(&options)? else { panic!("the folder was empty") };
//! assert_eq!(written.bundle.model.contexts, [64]);
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`plan`], `size` | layers and functions of each package, and its size |
//! | `workload` | memory traffic and arithmetic of a function |
//! | `estimate` | rough speed estimates |
//! | [`emit`] | weights in the number format of their role |
//! | [`open`] | the manifest's source and its model |
//! | [`functions`] | construction of a package's functions |
//! | `pipeline` | the conversion itself |
//! | `run` | parallel writing of files |
//! | [`resume`] | the journal for resuming an interrupted conversion |
//! | [`output`] | the bundle's folder |
//! | [`host`], [`tokenizer`], [`files`] | files beside the packages |
//! | [`compile`] | Core ML's compiler |
//! | [`anemll`] | export in Anemll's layout |
//! | [`hf_swift`] | export for swift-transformers |
//! | [`coreai_llm`] | export for Apple's Core AI engine of language models |
//! | `exported` | parts shared by exports |
//! | [`report`], [`notes`] | `report.json` and notes for the user |

#![forbid(unsafe_code)]

pub mod anemll;
pub mod compile;
mod coreai;
pub mod coreai_llm;
pub mod digests;
pub mod emit;
mod error;
mod estimate;
mod exported;
pub mod files;
pub mod functions;
pub mod hf_swift;
pub mod host;
pub mod notes;
pub mod open;
pub mod output;
mod pipeline;
pub mod plan;
pub mod report;
pub mod resume;
mod run;
mod size;
pub mod tokenizer;
mod workload;

pub use coreai::asset_name;
pub use error::ConvertError;
pub use estimate::{Estimate, FormEstimate};
pub use exported::ExportError;
pub use pipeline::{
    Choose, Chosen, ConvertOptions, ConvertSteps, ConvertedBundle, Outcome, convert, convert_opened, convert_with,
};
pub use size::WeightUse;
pub use workload::Workload;
