//! Programs to protobuf and back.
//!
//! [`encode`] and [`decode`] are inverse to each other but for what the format can't hold: it has no symbols, so a
//! dimension that isn't fixed is written as unknown, and comes back as [`Dim::Unknown`] — at an
//! input as a symbol, which is the one named by the caller's [`Dimensions`] or a fresh one for each dimension. It has
//! functions by name, so they come back in the order of their names. Operators that the catalogue doesn't know are kept
//! as they are.
//!
//! Large constants go to weight files through [`BlobSink`] and come from there through [`BlobSource`]; this module
//! knows only which constants those are.

mod decode;
mod encode;
mod types;
mod values;

use std::collections::BTreeMap;

use super::constant::{Constant, Data};
use super::error::MilError;
use super::ir::SymbolRange;
use super::types::{Dim, Symbol, TensorType};
use anec_base::Result;

pub use decode::{decode, unknown_dimensions};
pub use encode::{encode, place_blobs};

/// The text of a message that is a string in place.
pub fn as_string(value: &coreml_proto::mil_spec::Value) -> Option<&str> {
    values::as_string(value)
}

/// A place in a weight file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlobPlace {
    /// The file's name as the format has it, `@model_path/weights/weight.bin`.
    pub file_name: String,
    /// Offset of the blob's record in bytes.
    pub offset: u64,
}

/// Takes the constants that are too large to be written in place.
pub trait BlobSink {
    /// Where a constant's data will be. Constants that hold the same content share a place. `owner` says whose it is,
    /// for messages.
    ///
    /// # Errors
    /// When the data can't be placed.
    fn place(&mut self, constant: &Constant, owner: &str) -> Result<BlobPlace>;
}

/// Gives the constants that are in weight files.
pub trait BlobSource {
    /// The data at a place, checked against the type that it must have. Equal places give the same data.
    ///
    /// # Errors
    /// When nothing of this type is there.
    fn load(&self, place: &BlobPlace, ty: &TensorType, owner: &str) -> Result<Data>;
}

/// What is known of one function's inputs beside their types: which dimension is which symbol, and what it may be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dimensions {
    /// Dimensions by input and axis.
    pub dims: BTreeMap<(String, usize), Dim>,
    /// Sizes of the symbols.
    pub lengths: BTreeMap<Symbol, SymbolRange>,
}

fn encoding(place: impl Into<String>, problem: impl Into<String>) -> MilError {
    MilError::Encoding { place: place.into(), problem: problem.into() }
}

#[cfg(test)]
mod tests;
