//! The tests of the whole program in one binary, so that the libraries are linked once.

mod common {
    pub mod client;
    pub mod coremltools;
    pub mod covering;
    pub mod defect;
    pub mod emitted;
    pub mod folder;
    pub mod forms;
    pub mod fp16_literals;
    pub mod gguf;
    pub mod http;
    #[cfg(target_os = "linux")]
    pub mod killed;
    pub mod layers;
    pub mod model;
    pub mod synthetic;
}

mod action;
mod activations;
mod anemll;
mod bad_input;
mod bindings;
mod bisect;
mod book;
mod builtin_manifests;
mod calibrate;
mod chips;
mod config_surprises;
mod convert;
mod coremltools;
mod drafts;
mod encoders;
mod experts;
mod family_graphs;
mod family_parity;
mod format_equivalence;
mod formats;
mod fused;
mod generation;
mod head_bias;
mod hf_swift;
mod hub;
mod instructions;
mod interactions;
mod library;
mod lora;
mod mil;
mod norms;
mod onnx;
mod oracle;
mod outputs;
mod package;
mod reader;
mod real_model;
mod recurrent_states;
mod redact;
mod release;
mod residency;
mod resume;
mod serve;
mod shared_products;
mod tiers;
mod token_classifier;
mod validate;
mod verbs;
mod words;
