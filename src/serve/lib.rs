//! Server of models: the HTTP APIs of OpenAI, Anthropic and Ollama, and JSON lines, with many requests at a time.
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
//! | `engine` | scheduler thread: bounded queue, texts taking turns |
//! | `service` | request validation, from request to tokens |
//! | `models` | served models, loaded on demand and unloaded when idle |
//! | `facts` | facts about models that needn't be loaded |
//! | [`loading`] | background loading while the server already answers |
//! | `parameters` | sampling parameters of requests |
//! | `app` | what the handlers of all APIs share, limits of requests |
//! | `http` | connections and routes |
//! | `clients` | connections per address |
//! | `origin` | allowed hosts and origins |
//! | [`embeddings`] | embeddings and reranking |
//! | [`openai`] | request and answer bodies |
//! | [`stream`] | streamed answers |
//! | `conversation` | requests of other APIs as conversations |
//! | `answer` | answers of other APIs, whole or in parts |
//! | `error_form` | error bodies of other APIs |
//! | `ollama` | Ollama's API |
//! | `messages` | Anthropic's API |
//! | `responses` | OpenAI's API of responses |
//! | `tokens` | tokens of texts, prompts of conversations |
//! | [`tools`] | offered functions and their calls |
//! | [`json_lines`] | JSON lines over stdin or a Unix socket |
//! | `fields` | field names of a request |
//! | `metrics` | Prometheus metrics |

#![forbid(unsafe_code)]

mod answer;
mod app;
mod clients;
mod conversation;
pub mod embeddings;
mod engine;
mod error;
mod error_form;
mod facts;
mod fields;
mod http;
pub mod json_lines;
pub mod loading;
mod messages;
mod metrics;
mod models;
mod ollama;
pub mod openai;
mod origin;
mod parameters;
mod responses;
mod service;
pub mod stream;
mod tokens;
pub mod tools;

pub use app::HttpOptions;
pub use engine::{Ending, Event, Job, Scheduler, ServeLimits};
pub use error::ServeError;
pub use http::serve;
pub use metrics::Metrics;
pub use models::{Models, ModelsOptions, OpenModel};
pub use parameters::Parameters;
pub use service::{Service, Submission};
