//! Floor 5: proves what a bundle is. Each gate makes claims and tries them; what can't be tried is `unproven`, never green.
//!
//! | module | holds |
//! |---|---|
//! | [`structure`] | the gate of form |
//! | [`parity`] | the gate that compares with a golden |
//! | [`residency`] | the gate of placement |
//! | [`verdict`] | claims, gates, reports |
//! | [`thresholds`] | `validators/gates.yaml` |
//! | [`golden`] | what a reference computed |
//! | [`measure`] | how far numbers are apart |

pub mod golden;
pub mod measure;
pub mod parity;
pub mod residency;
pub mod structure;
pub mod thresholds;
pub mod verdict;

pub use golden::{Golden, Greedy};
pub use measure::Measures;
pub use parity::{Candidate, parity};
pub use structure::structure;
pub use thresholds::Thresholds;
pub use verdict::{Check, GateReport, Report, Verdict};
