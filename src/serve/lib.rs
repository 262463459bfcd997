//! Answers requests with a model, many at a time: over HTTP as OpenAI's API has it, and as JSON lines.
//!
//! ```
//! use anec_serve::Parameters;
//!
//! let parameters: Parameters = serde_json::from_str(r#"{"max_tokens": 10, "stop": ["\n", "END"]}"#)?;
//! assert_eq!(parameters.stops().unwrap(), ["\n", "END"]);
//! assert_eq!(parameters.choices().unwrap(), 1);
//! # Ok::<(), serde_json::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`engine`] | the thread that computes: a bounded queue, texts taking turns |
//! | [`service`] | from what a client asks to tokens, and the checks before any work |
//! | [`loading`] | loading the model while the server already answers |
//! | [`parameters`] | what clients can ask for, under the names that they know |
//! | [`http`] | connections, routes, limits |
//! | `clients` | how many connections an address holds |
//! | `origin` | hosts and origins that requests may name |
//! | [`embeddings`] | vectors of texts, and rankings of documents |
//! | [`openai`] | bodies of requests and answers |
//! | [`stream`] | answers in parts |
//! | [`tools`] | functions that a request offers, and their calls |
//! | [`json_lines`] | JSON lines over stdin or a Unix socket |
//! | `fields` | names of the fields of a request |
//! | [`metrics`] | numbers for Prometheus |

#![forbid(unsafe_code)]

mod clients;
pub mod embeddings;
pub mod engine;
pub mod error;
mod fields;
pub mod http;
pub mod json_lines;
pub mod loading;
pub mod metrics;
pub mod openai;
mod origin;
pub mod parameters;
pub mod service;
pub mod stream;
pub mod tools;

pub use engine::{Ending, Event, Job, Scheduler, ServeLimits};
pub use error::ServeError;
pub use http::{HttpOptions, serve};
pub use metrics::Metrics;
pub use parameters::Parameters;
pub use service::{Service, Submission};
