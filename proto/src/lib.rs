//! Prost types of the part of Core ML's model format that `anec` reads and writes.
//!
//! `schema/` declares the format's message names, field names and numbers. `tests/schema.rs` generates the code under
//! `generated/`, which is committed so that a build needs no schema compiler. All maps are ordered, so that equal
//! messages have equal bytes. Model kinds other than ML Programs decode as empty messages, so that they can be named.
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

    /// `CoreML.Specification.CoreMLModels`: model kinds that are recognised only by name.
    pub mod core_ml_models {
        include!("generated/core_ml.specification.core_ml_models.rs");
    }

    /// `CoreML.Specification.MILSpec`: ML Programs.
    pub mod mil_spec {
        include!("generated/core_ml.specification.mil_spec.rs");
    }
}

pub use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};
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

/// Encodes a model file from a model without its program and the encoded program.
pub fn encode_ml_program(model: &Model, program: &[u8]) -> Vec<u8> {
    /// Field number of `mlProgram`; larger than those of the fields in `model`.
    const ML_PROGRAM: u32 = 502;
    let mut out = model.encode_to_vec();
    out.reserve_exact(program.len() + 16);
    append_bytes(ML_PROGRAM, program, &mut out);
    out
}

/// Appends the encoding of a block. Concatenated encodings decode as one block with their repeated fields in order.
pub fn append_block(block: &mil_spec::Block, out: &mut Vec<u8>) {
    block.encode_raw(out);
}

/// Appends a field of text or of an encoded message.
pub fn append_bytes(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// Appends an entry of a map from texts to messages. An empty message is omitted from its entry, as in prost.
pub fn append_entry(number: u32, key: &str, message: &[u8], out: &mut Vec<u8>) {
    let fields = [(1, key.as_bytes()), (2, message)].into_iter().filter(|(_, bytes)| !bytes.is_empty());
    let length = fields.clone().map(|(_, bytes)| 1 + encoded_len_varint(bytes.len() as u64) + bytes.len());
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(length.sum::<usize>() as u64, out);
    fields.for_each(|(number, bytes)| append_bytes(number, bytes, out));
}
