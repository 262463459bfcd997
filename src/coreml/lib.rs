//! Core ML: compiling packages, reading compute plans, running functions. Available on macOS and iOS only.
//!
//! All other code uses [`Engine`], which [`CoreMl`] implements there with Apple's public interfaces. Elsewhere
//! [`CoreMl::new`] fails. Code that needs no Mac (the meaning of compute plans, packages for the plan of one function
//! and length, strided arrays) is in modules of its own and tested everywhere.
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
//! | `engine` | interface that the other crates use |
//! | [`plan`] | compute plans as data: `plan.json` |
//! | `project` | program whose compute plan describes one function and number of tokens |
//! | [`array`](mod@array) | elements of strided arrays |
//! | [`cache`] | cache of compiled models |

pub mod array;
pub mod cache;
mod engine;
mod error;
pub mod plan;
mod project;

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
pub use project::project;
