//! Gates that verify a bundle. Each gate makes claims and tests them; a claim that can't be tested is `unproven`, never
//! passed.
//!
//! ```
//! use anec_bundle::Bundle;
//! use anec_validate::structure::structure;
//! use anec_validate::verdict::{GatesReport, Verdict};
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
//! | [`structure`](mod@structure) | gate: files, descriptions and programs are well-formed |
//! | [`numerics`](mod@numerics) | gate: fp16 computes what f32 computes |
//! | [`parity`](mod@parity) | gate: results agree with a golden |
//! | [`residency`] | gate: every op prefers the Neural Engine |
//! | [`bisect`] | the smallest piece of a program that fails a gate |
//! | `simulation` | effect of the Neural Engine's published arithmetic |
//! | [`verdict`] | checks of claims, gates, reports |
//! | `thresholds` | thresholds of the gates, `gates.yaml` |
//! | [`lint`] | static checks of a program's numerics |
//! | [`trial`] | errors of running functions, as checks |
//! | [`watch`] | a backend that records the magnitudes of values |
//! | [`perplexity`](mod@perplexity) | perplexity of a text |
//! | [`prompts`] | built-in texts |
//! | [`migration`] | a migrated package against its Core AI asset |
//! | [`asset`] | gates of assets of Core AI that anec didn't make |
//! | [`third_party`] | gates of packages that anec didn't make |
//! | `golden` | results of a reference |
//! | `measure` | distance measures of vectors |

#![forbid(unsafe_code)]

pub mod asset;
pub mod bisect;
mod golden;
pub mod lint;
mod measure;
pub mod migration;
pub mod numerics;
pub mod parity;
pub mod perplexity;
pub mod prompts;
pub mod residency;
mod simulation;
mod sizes;
pub mod structure;
pub mod third_party;
mod thresholds;
mod trace;
pub mod trial;
pub mod verdict;
pub mod watch;

pub use golden::{Golden, GoldenError, GoldenText, Greedy, TensorFile};
pub use measure::{LogitMeasures, RowMeasures};
pub use simulation::first_deviation;
pub use thresholds::{ResidencyThresholds, Thresholds};
