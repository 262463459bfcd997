//! Advice about the Neural Engine: which chips there are, what keeps a program off them, how fast a conversion would
//! be, and which form of a model is fastest. All of it is prediction from published sources, and none of it is proof.
//!
//! ```
//! use anec_advice::ChipTable;
//!
//! let target = ChipTable::built_in().target("m4-max@26")?;
//! assert_eq!(target.os, Some(26));
//! assert!(target.chip.bandwidth_gb_s.is_some());
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `chips` | `tables/chips.yaml`: published facts about chips |
//! | [`rules`] | `tables/ane-rules.yaml`, `tables/errors.yaml`: obstacles to the Neural Engine; error codes |
//! | `forecast` | the rules applied to a program |
//! | `asset` | the rules applied to an asset of Core AI |
//! | [`speed`] | predicted time of a call, and `tables/speeds.yaml`, the measurements behind it |
//! | `predict` | predicted speed, memory and first load of a conversion on a chip |
//! | [`search`](mod@search) | the manifest with the least predicted time |
//! | [`arithmetic`] | `tables/ane-arithmetic.yaml`: published properties of the Neural Engine's arithmetic |
//! | [`tables`] | reading built-in tables |

#![forbid(unsafe_code)]

pub mod arithmetic;
mod asset;
mod chips;
mod forecast;
mod predict;
pub mod rules;
pub mod search;
pub mod speed;
pub mod tables;

pub use asset::{forecast_asset, forecast_graphs};
pub use chips::{Chip, ChipError, ChipTable, ChipTarget};
pub use forecast::{ForecastFinding, forecast};
pub use predict::{CallPrediction, ChipPrediction, ContextPrediction, predict};
