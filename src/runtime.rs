//! Floor 5: runs bundles. Everything it knows of a model is in `bundle.json`: no family has code here.
//!
//! | module | holds |
//! |---|---|
//! | [`backend`] | what runs the functions |
//! | [`cpu`] | the backend over the CPU executor |
//! | [`coreml`] | the backend over Core ML |
//! | [`plan`] | which functions, in which order, with how many tokens at a time |
//! | [`host`] | embedding and rotary tables |
//! | [`feed`] | the inputs of a call |
//! | [`session`] | a text on its way through the bundle |
//! | [`sampling`] | choosing the next token |
//! | [`generate`] | continuing a prompt |
//! | [`tokenizer`], [`chat`] | text to tokens and back; conversations to text |

pub mod backend;
pub mod chat;
pub(crate) mod clock;
pub mod coreml;
pub mod cpu;
#[cfg(test)]
pub(crate) mod double;
pub mod error;
pub mod feed;
pub mod generate;
pub mod host;
pub mod plan;
pub mod sampling;
pub mod session;
pub mod tokenizer;

pub use backend::{Backend, Sequence, Watch};
pub use coreml::CoreMlBackend;
pub use cpu::{CpuBackend, Programs};
pub use error::RuntimeError;
pub use generate::{Finish, Generation, Request, Timings, generate};
pub use host::Host;
pub use sampling::{Sampler, Sampling};
pub use session::{Answer, Ask, Chunking, Hidden, Model, Positions, Session};
pub use tokenizer::{Detokenizer, Tokenizer};
