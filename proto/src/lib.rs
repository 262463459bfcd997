//! Core ML's model format as prost types: the part that `anec` reads and writes.
//!
//! `schema/` states the format's message names, field names and numbers; the code under `generated/` is made from it by
//! `tests/schema.rs` and committed, so that a build needs no schema compiler. All maps are ordered, so that equal
//! messages have equal bytes. Model kinds other than ML Programs decode as empty messages: enough to name them.
//!
//! ```
//! use coreml_proto::{Model, ModelDescription, decode_model, encode_model};
//!
//! let model = Model {
//!     specification_version: 9,
//!     description: Some(ModelDescription { default_function_name: "main".into(), ..ModelDescription::default() }),
//!     ..Model::default()
//! };
//! let read = decode_model(&encode_model(&model))?;
//! assert_eq!(read, model);
//! # Ok::<(), prost::DecodeError>(())
//! ```

#![forbid(unsafe_code)]

/// `CoreML.Specification`: the model and its description.
#[allow(missing_docs, clippy::large_enum_variant)] // names and numbers are the format's; there is nothing to add
pub mod specification {
    include!("generated/core_ml.specification.rs");

    /// `CoreML.Specification.CoreMLModels`: kinds of model that are only recognised.
    pub mod core_ml_models {
        include!("generated/core_ml.specification.core_ml_models.rs");
    }

    /// `CoreML.Specification.MILSpec`: ML Programs.
    pub mod mil_spec {
        include!("generated/core_ml.specification.mil_spec.rs");
    }
}

pub use prost::Message;
pub use specification::{mil_spec, *};

/// Decodes a model file. The code for all messages is instantiated here, once, not in every crate that calls it.
///
/// # Errors
/// When the bytes aren't a message of the format.
pub fn decode_model(bytes: &[u8]) -> Result<Model, prost::DecodeError> {
    Model::decode(bytes)
}

/// Encodes a model file; equal models give equal bytes.
pub fn encode_model(model: &Model) -> Vec<u8> {
    model.encode_to_vec()
}
