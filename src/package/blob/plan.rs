//! Layout of a weight file, decided before any data exists.

use std::collections::HashMap;
use std::sync::Arc;

use super::{ALIGNMENT, Record, code, padding_bits};
use crate::PackageError;
use anec_base::Result;
use anec_mil::codec::{BlobPlace, BlobSink};
use anec_mil::{Constant, Content, Data, DataType};

/// Place and content of a constant.
pub(super) struct Planned {
    pub(super) record: Record,
    pub(super) data: Data,
    /// First constant with this data, for messages.
    pub(super) owner: String,
}

/// Planned weight file. Contents that are the same object and literals that are equal share a place.
#[derive(Default)]
pub struct WeightPlan {
    pub(super) blobs: Vec<Planned>,
    /// End of the last blob's data.
    end: u64,
    contents: HashMap<(usize, DataType), u64>,
    literals: HashMap<(DataType, Arc<[u8]>), u64>,
}

impl WeightPlan {
    /// Name by which a program refers to the file.
    pub const FILE_NAME: &str = "@model_path/weights/weight.bin";

    /// Returns an empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the plan has no constants.
    pub fn is_empty(&self) -> bool {
        self.blobs.is_empty()
    }

    /// Size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.end.max(ALIGNMENT)
    }

    /// Size of all constants, each counted once, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        self.records().map(|record| record.length).sum()
    }

    /// Size of all constants with their records and alignment, in bytes: their share of a file.
    pub fn padded_bytes(&self) -> u64 {
        self.records().map(|record| ALIGNMENT + record.length.next_multiple_of(ALIGNMENT)).sum()
    }

    /// Returns the records, in the order of the file.
    pub fn records(&self) -> impl ExactSizeIterator<Item = Record> + '_ {
        self.blobs.iter().map(|b| b.record)
    }

    fn find(&self, constant: &Constant) -> Option<u64> {
        let dtype = constant.ty.dtype;
        match &constant.data {
            Data::Content(content) => self.contents.get(&(address(content), dtype)),
            Data::Literal(bytes) => self.literals.get(&(dtype, bytes.clone())),
            Data::Strings(_) => None,
        }
        .copied()
    }
}

/// Returns the identity of a content. The plan keeps contents alive, so that addresses stay unique.
pub(super) fn address(content: &Arc<dyn Content>) -> usize {
    Arc::as_ptr(content).cast::<()>().addr()
}

impl BlobSink for WeightPlan {
    fn place(&mut self, constant: &Constant, owner: &str) -> Result<BlobPlace> {
        let file_name = Self::FILE_NAME.to_owned();
        if let Some(offset) = self.find(constant) {
            return Ok(BlobPlace { file_name, offset });
        }
        let problem = |problem: String| PackageError::Program { problem: format!("{owner}: {problem}") };
        let dtype = constant.ty.dtype;
        if code(dtype).is_none() {
            return Err(problem(format!("{dtype} can't be in a weight file")).into());
        }
        let (Some(elements), Some(length)) = (constant.ty.elements(), constant.ty.bytes()) else {
            return Err(problem(format!("{} has no fixed size", constant.ty)).into());
        };
        let too_large = || problem("the weight file grows beyond 2^63 bytes".into());
        let offset = self.size().checked_next_multiple_of(ALIGNMENT).ok_or_else(too_large)?;
        let data = offset + ALIGNMENT;
        let end = data.checked_add(length).filter(|end| *end <= i64::MAX as u64).ok_or_else(too_large)?;
        let record = Record { offset, dtype, length, data, padding_bits: padding_bits(dtype, elements) };
        self.blobs.push(Planned { record, data: constant.data.clone(), owner: owner.to_owned() });
        self.end = end;
        match &constant.data {
            Data::Content(content) => self.contents.insert((address(content), dtype), offset),
            Data::Literal(bytes) => self.literals.insert((dtype, bytes.clone()), offset),
            Data::Strings(_) => None,
        };
        Ok(BlobPlace { file_name, offset })
    }
}
