//! Core ML itself: compiling packages, reading compute plans, running functions. It is there on macOS and iOS only.
//!
//! Everything else is written against [`Engine`], which [`CoreMl`] implements there by Apple's public
//! interfaces. Elsewhere [`CoreMl`] can't be had, and says so. What needs no Mac (what a compute plan is, how a package is
//! turned so that its plan speaks for one function and length, how strided arrays are read) is in files of its own, and
//! tested everywhere.
//!
//! ```
//! use anec_coreml::{CoreMl, Engine};
//!
//! match CoreMl::new() {
//!     Ok(engine) => println!("{}", engine.machine()?),
//!     Err(why) => println!("no Core ML here: {why}"),
//! }
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`engine`] | what the other crates need of Core ML |
//! | [`plan`] | what Core ML plans to run where, as data: `plan.json` |
//! | [`project`](mod@project) | a program whose compute plan speaks for one function and number of tokens |
//! | [`array`](mod@array) | elements of strided arrays |
//! | [`cache`] | models that were compiled |

pub mod array;
pub mod cache;
pub mod engine;
pub mod error;
pub mod plan;
pub mod project;

#[cfg(not(any(target_os = "macos", target_os = "ios")))]
mod elsewhere;
#[cfg(any(target_os = "macos", target_os = "ios"))]
mod macos;

#[cfg(not(any(target_os = "macos", target_os = "ios")))]
pub use elsewhere::CoreMl;
pub use engine::{Engine, LoadedFunction};
pub use error::CoreMlError;
#[cfg(any(target_os = "macos", target_os = "ios"))]
pub use macos::CoreMl;
pub use plan::{ComputePlan, ComputeUnits};
pub use project::project;
