//! Runs bundles. All knowledge of a model comes from `bundle.json`; no family has code here.
//!
//! ```
//! use anec_exec::Precision;
//! use anec_runtime::{ForwardOptions, LoadedModel, Tokenizer, sampling::argmax};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let bundle = folder.path().join("demo.anec");
//! # let demo = concat!("source=", env!("CARGO_MANIFEST_DIR"), "/../../demo/model");
//! # anec_testing::fake::convert_demo(&bundle, &["context=64", demo]);
//! let model = LoadedModel::on_cpu(&bundle, Precision::F32)?;
//! let tokenizer = Tokenizer::of(model.bundle(), &bundle)?;
//! let mut session = model.start(64)?;
//! let logits = session.forward(&tokenizer.encode("It was a fine")?, &ForwardOptions::last())?.logits;
//! println!("{:?}", tokenizer.decode(&[argmax(&logits)], true)?);
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `backend` | traits that execute functions |
//! | `cpu`, `cpu_options` | backend over the CPU executor |
//! | [`coreml`] | backend over Core ML |
//! | [`plan`] | which functions run, in which order, with how many tokens per call |
//! | `host` | embedding and rotary tables |
//! | [`inputs`] | inputs of a call |
//! | `model` | bundle with a backend |
//! | `forward` | options and result of a forward pass |
//! | `session` | text with its states |
//! | `buffers` | reused tensors of calls |
//! | `call` | one function call: its inputs, its result |
//! | `intercepted` | backend decorator that times, records or observes calls |
//! | `function_pool` | functions in memory, under a limit |
//! | `state_transfer` | states carried from one context to another |
//! | `together` | batched calls of several texts |
//! | `states` | states of a text |
//! | `idle_states` | pool of unused states |
//! | `hidden` | hidden states between calls |
//! | `head` | results of the LM head |
//! | `widened` | larger calls than a bundle allows, on the executor |
//! | [`encode`] | embeddings and classification of whole texts |
//! | [`classify`] | token classification: windows, labels, spans, redaction |
//! | [`profile`] | time spent in each function |
//! | [`bench`](mod@bench) | benchmarks |
//! | [`energy`] | energy measurement |
//! | `prefix` | sessions kept for texts with the same beginning |
//! | [`sampling`], `logprobs` | choice of the next token, and its log-probability |
//! | `constraint` | text constrained by a JSON Schema or a grammar |
//! | `lookup` | drafts from the text's own past |
//! | `draft` | drafts by a smaller model |
//! | `request`, `generation` | generation request, and the generation loop |
//! | `tokenizer`, `detokenizer`, [`chat`] | text to tokens and back; conversations to text |
//! | `bpe` | fast reader of byte-pair encoding vocabularies |
//! | `text` | generated text, up to a stop string |
//! | [`tools`], [`reasoning`] | function calls within a text, and the reasoning before it |

#![forbid(unsafe_code)]

mod backend;
pub mod bench;
mod bpe;
mod buffers;
pub(crate) mod call;
mod charsmap;
pub mod chat;
pub mod classify;
#[cfg(feature = "grammar")]
mod constraint;
#[cfg(not(feature = "grammar"))]
#[path = "no_constraint.rs"]
mod constraint;
pub mod coreai;
pub mod coreml;
mod cpu;
mod cpu_options;
mod detokenizer;
mod draft;
pub mod encode;
mod encoded_text;
pub mod energy;
mod error;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
#[allow(missing_docs, reason = "for tests of this workspace")]
pub mod fake;
mod forward;
pub(crate) mod function_pool;
mod generation;
mod grammar;
mod growth;
mod head;
pub(crate) mod hidden;
mod host;
mod idle_states;
pub mod inputs;
mod intercepted;
mod jinja;
mod logprobs;
mod lookup;
mod model;
pub mod plan;
mod prefix;
pub mod profile;
pub mod reasoning;
mod request;
pub mod sampling;
#[cfg(feature = "grammar")]
mod schema;
mod session;
pub(crate) mod stack;
mod state_transfer;
pub(crate) mod states;
#[cfg(test)]
mod tests;
mod text;
mod together;
mod tokenizer;
pub mod tools;
mod trial;
mod widened;

pub use backend::{
    Backend, BatchMember, BatchResult, FunctionCall, Phase, Sequence, Watch, run_anew, run_each, run_in_turn,
};
#[cfg(feature = "grammar")]
pub use constraint::probe;
pub use constraint::{Constraint, Grammar, Grammars};
pub use cpu::{CpuBackend, PackageStore};
pub use cpu_options::{CachePrecision, CpuOptions};
pub use detokenizer::Detokenizer;
pub use draft::Drafter;
pub use encoded_text::EncodedText;
pub use error::RuntimeError;
pub use forward::{Chunking, ForwardOptions, ForwardOutput, Hidden, Positions};
pub use generation::{Finish, GeneratedToken, Generation, GenerationOutput, Timings};
pub use hidden::HiddenFrame;
pub use host::{HostTables, TokenRun};
pub use intercepted::{InterceptedBackend, Interceptor};
pub use logprobs::Logprobs;
pub use lookup::Speculation;
pub use model::{FirstLoadWork, LoadedModel};
pub use prefix::PrefixCache;
pub use request::GenerationRequest;
pub use session::{ForwardPass, PreviousHidden, TokenSession};
pub use text::{TextDelta, TextGeneration, TextStream};
pub use together::{NextTokens, forward_together};
pub use tokenizer::{TokenEntry, Tokenizer};
pub use widened::widened;
