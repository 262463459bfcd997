//! `anec` converts language models to Core ML programs for Apple's Neural Engine, verifies them, and runs them: on the
//! Neural Engine of a Mac, or on the CPU of any machine.
//!
//! A [`Manifest`] describes a conversion. A [`Converter`] writes a bundle: a folder of .mlpackage files with a
//! [`bundle.json`](Bundle) that has everything needed to run them. A [`Validator`] verifies the bundle, gate by gate. A
//! [`Model`] runs it, and its [`Session`] generates text.
//!
//! ```
//! use anec::{Converter, Gate, GenerateOptions, Manifest, Model, Validator};
//!
//! # std::env::set_current_dir("../..").unwrap();
//! # let folder = tempfile::tempdir().unwrap();
//! # let out = folder.path().join("demo.anec");
//! // `source` can be a .gguf, a .safetensors, an .onnx, a Hugging Face folder, or hf:owner/name
//! let manifest = Manifest::from_yaml("source: demo/model\ncontext: 256", "the example", &[])?;
//! Converter::new(manifest).out(&out).observe(|event| println!("{event:?}")).convert()?;
//!
//! let gates = [Gate::Structure, Gate::Parity];
//! let validation = Validator::new(&out).gates(gates).golden("demo/golden.safetensors").run()?;
//! assert_eq!(validation.report.exit_code(false), 0, "all passed");
//!
//! let model = Model::on_cpu(&out)?;
//! let mut session = model.session();
//! let options = GenerateOptions::default().max_tokens(12);
//! for piece in session.generate("It was a fine morning, and", &options)? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), anec::base::Error>(())
//! ```
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | none | opening and running bundles; reading and writing packages; MIL |
//! | `convert` | sources, the converter, the gates |
//! | `hub` | sources named `hf:owner/name` are downloaded |
//! | `grammar` | text constrained by a JSON Schema, a regular expression or a grammar |
//! | `serve` | OpenAI's HTTP API |
//!
//! # Crates
//!
//! Each crate is re-exported under its name:
//!
//! | tier | crate | holds |
//! |---|---|---|
//! | 9 | `bindings`, `cli` | the API for apps in Swift and Python; the program `anec` |
//! | 8 | [`report`] | results as tables, JSON, JUnit, Markdown, HTML |
//! | 7 | [`validate`], [`experiment`] | gates: structure, numerics, parity, residency; experiments on a Mac |
//! | 6 | [`advice`], [`calibrate`] | chips, rules, forecasts, predictions, search; calibrated quantization |
//! | 5 | [`convert`], [`serve`] | conversion: plan, build, quantize, write, compile; the HTTP server |
//! | 4 | [`family`], [`quant`], [`runtime`] | model graphs; number formats; sessions, sampling, tokenizers |
//! | 3 | [`source`], [`exec`], [`coreml`], [`coreai`] | GGUF, safetensors, ONNX; CPU executor; Core ML; Core AI |
//! | 2 | [`bundle`], [`package`] | bundle.json; reading and writing .mlpackage files |
//! | 1 | `hub`, [`manifest`], [`mil`] | the Hugging Face hub; conversion manifests; Core ML's intermediate language |
//! | 0 | [`base`], `kernels` | errors, files, progress; inner loops, threads and vector units |
//!
//! A crate depends on crates of lower tiers only; a test reads this table.

#![forbid(unsafe_code)]

#[cfg(feature = "convert")]
mod cache;
#[cfg(feature = "convert")]
mod choice;
#[cfg(feature = "convert")]
mod converter;
#[cfg(feature = "convert")]
mod doctor;
#[cfg(feature = "convert")]
mod golden;
#[cfg(feature = "convert")]
mod scratch;
mod session;
#[cfg(feature = "hub")]
pub mod share;
#[cfg(feature = "convert")]
mod validator;

pub use anec_base::{Progress, ProgressEvent};
pub use anec_bundle::Bundle;
#[cfg(feature = "hub")]
pub use anec_hub as hub;
pub use anec_manifest::Manifest;
pub use anec_runtime::Grammar;
pub use anec_runtime::sampling::Sampling;
#[cfg(feature = "serve")]
pub use anec_serve as serve;
pub use session::{GenerateOptions, Model, Prompt, Session, TextPieces};
#[cfg(feature = "convert")]
pub use {
    anec_advice as advice, anec_calibrate as calibrate, anec_convert as convert, anec_experiment as experiment,
    anec_family as family, anec_quant as quant, anec_report as report, anec_source as source,
    anec_validate as validate,
};
pub use {
    anec_base as base, anec_bundle as bundle, anec_coreai as coreai, anec_coreml as coreml, anec_exec as exec,
    anec_manifest as manifest, anec_mil as mil, anec_package as package, anec_runtime as runtime,
};
#[cfg(feature = "convert")]
pub use {
    cache::{BundleCache, CacheError, CacheRecord, CachedBundle},
    converter::Converter,
    doctor::{Ability, MachineReport},
    golden::GoldenBuilder,
    validator::{Gate, Validation, Validator, candidates, find_bundle, forecast_of, is_asset, is_compiled, is_package},
};
