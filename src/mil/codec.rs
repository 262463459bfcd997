//! Conversion of programs to and from protobuf.
//!
//! [`encode`] and [`decode`] are inverse to each other except for information that the format doesn't store. It has
//! no symbols: a dimension that isn't fixed is written as unknown. It comes back as [`Dim::Unknown`], or at an input as
//! a symbol from the caller's [`Dimensions`] or a fresh one. Functions come back in the order of their names. Operators
//! that the catalogue doesn't know are preserved.
//!
//! Large constants are written to weight files through [`BlobSink`] and read through [`BlobSource`]; this module
//! only determines which constants those are.

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

/// Text of a string value stored in place.
pub fn as_string(value: &coreml_proto::mil_spec::Value) -> Option<&str> {
    values::as_string(value)
}

/// Location of a blob in a weight file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlobPlace {
    /// File name in the format, `@model_path/weights/weight.bin`.
    pub file_name: String,
    /// Offset of the blob's record in bytes.
    pub offset: u64,
}

/// Destination of constants that are too large to be written in place.
pub trait BlobSink {
    /// Places a constant's data. Constants that hold the same content share a place. `owner` names its op in messages.
    ///
    /// # Errors
    /// Returns an error if the data can't be placed.
    fn place(&mut self, constant: &Constant, owner: &str) -> Result<BlobPlace>;
}

/// Source of constants in weight files.
pub trait BlobSource {
    /// Loads the data at a place and checks it against its type. Equal places return the same data.
    ///
    /// # Errors
    /// Returns an error if the place has no data of this type.
    fn load(&self, place: &BlobPlace, ty: &TensorType, owner: &str) -> Result<Data>;
}

/// Symbolic dimensions of a function's inputs and the sizes of the symbols.
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
