//! Gates that verify a bundle. Each gate makes claims and tests them; a claim that can't be tested is `unproven`, never
//! passed.
//!
//! ```
//! use anec_bundle::Bundle;
//! use anec_validate::{GatesReport, Verdict, structure};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path().join("demo.anec");
//! # let demo = concat!("source=", env!("CARGO_MANIFEST_DIR"), "/../../demo/model");
//! # anec_testing::fake::convert_demo(&folder, &["context=64", demo]);
//! let bundle = Bundle::read(&folder)?;
//! let gate = structure(&bundle, &folder);
//! assert_eq!(gate.verdict, Verdict::Passed);
//! assert_eq!(GatesReport::new(&bundle.name, vec![gate]).exit_code(false), 0);
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`structure`](mod@structure) | the gate of form |
//! | [`numerics`](mod@numerics) | the gate of half precision |
//! | [`parity`](mod@parity) | the gate that compares with a golden |
//! | [`residency`] | the gate of placement |
//! | [`bisect`] | the smallest piece of a program that fails a gate |
//! | [`forecast`](mod@forecast) | rules applied to a program: no proof |
//! | [`arithmetic`] | `validators/ane-arithmetic.yaml` |
//! | `simulation` | what the Neural Engine makes of a text, simulated |
//! | [`rules`] | `validators/ane-rules.yaml` and `validators/errors.yaml` |
//! | [`speed`] | how fast a call is on a chip, predicted, and the published speeds behind that |
//! | [`predict`](mod@predict) | what a conversion would do on a chip, predicted |
//! | [`search`](mod@search) | the manifest with which a model takes least time, by the prediction |
//! | [`chips`] | `validators/chips.yaml`: what is published of chips |
//! | [`verdict`] | claims, gates, reports |
//! | [`thresholds`] | `validators/gates.yaml` |
//! | [`lint`] | what constants and ops say of half precision without a run |
//! | [`trial`] | what a function that can't be run says |
//! | [`watch`] | a backend that notes how large every value gets |
//! | [`perplexity`](mod@perplexity) | how well a model predicts a text |
//! | [`probe`] | small programs for the self-test of a Mac |
//! | [`experiment`] | `validators/probes.yaml`: experiments that settle contested rules on a Mac |
//! | [`prompts`] | the text that models are tried on |
//! | [`third_party`] | packages that anec did not make |
//! | [`golden`] | what a reference computed |
//! | [`measure`] | how far numbers are apart |

#![forbid(unsafe_code)]

pub mod arithmetic;
pub mod bisect;
pub mod chips;
mod data;
pub mod experiment;
pub mod forecast;
pub mod golden;
pub mod lint;
pub mod measure;
pub mod numerics;
pub mod parity;
pub mod perplexity;
pub mod predict;
pub mod probe;
pub mod prompts;
pub mod residency;
pub mod rules;
pub mod search;
mod simulation;
pub mod speed;
pub mod structure;
pub mod third_party;
pub mod thresholds;
mod trace;
pub mod trial;
pub mod verdict;
pub mod watch;

pub use chips::{Chip, ChipTable};
pub use forecast::forecast;
pub use golden::{Golden, GoldenText, Greedy};
pub use measure::{LogitMeasures, RowMeasures};
pub use numerics::numerics;
pub use parity::{Candidate, parity};
pub use perplexity::{Perplexity, perplexity};
pub use predict::predict;
pub use search::search;
pub use simulation::first_deviation;
pub use structure::structure;
pub use thresholds::Thresholds;
pub use verdict::{Check, GateReport, GatesReport, Verdict};
