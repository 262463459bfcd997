//! `anec` turns language-model weights into Core ML programs for Apple's Neural Engine, proves what it emitted, and
//! runs it.
//!
//! The modules are floors; a file imports only from floors below its own, top to bottom:
//!
//! | floor | modules |
//! |---|---|
//! | 7 | [`cli`] |
//! | 6 | [`report`], [`serve`] |
//! | 5 | [`runtime`], [`validate`] |
//! | 4 | [`convert`], [`exec`], [`coreml`] |
//! | 3 | [`family`], [`quant`] |
//! | 2 | [`source`], [`package`] |
//! | 1 | [`mil`] |
//! | 0 | [`manifest`], [`error`] |

pub mod cli;
pub mod convert;
pub mod coreml;
pub mod error;
pub mod exec;
pub mod family;
pub mod manifest;
pub mod mil;
pub mod package;
pub mod quant;
pub mod report;
pub mod runtime;
pub mod serve;
pub mod source;
#[cfg(test)]
mod testing;
pub mod validate;
