//! safetensors: one file, or shards with an index.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use safetensors::{SafeTensorError, SafeTensors};
use serde_json::Value as Json;

use super::dtype::SourceDtype;
use super::error::{Result, SourceError};
use super::tensor::SourceTensor;
use anec_base::listing::quote;
use anec_base::{MappedFile, path_inside};

/// File name of the weights of an unsharded model.
pub const SINGLE: &str = "model.safetensors";
/// File name of the index of a sharded model.
pub const INDEX: &str = "model.safetensors.index.json";

/// Returns the tensors of a file.
///
/// # Errors
/// Returns an error if the header is damaged, doesn't describe the rest of the file exactly, or has an unknown element
/// type.
pub fn tensors(file: &Arc<MappedFile>) -> Result<Vec<SourceTensor>> {
    let path = file.path();
    let bytes = file.bytes();
    let (header_length, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| damaged(path, bytes, error))?;
    let data_start = 8 + header_length as u64;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let dtype = SourceDtype::from_safetensors(info.dtype).ok_or_else(|| {
            let problem = format!("its type is {:?}, which isn't one that models are stored in", info.dtype);
            SourceError::tensor(path, &name, problem).advise("save the model again, in F32, F16 or BF16")
        })?;
        let shape = info.shape.iter().map(|&dimension| dimension as u64).collect();
        let (start, end) = info.data_offsets;
        let range = data_start + start as u64..data_start + end as u64;
        tensors.push(SourceTensor::in_file(name, dtype, shape, file, range)?);
    }
    Ok(tensors)
}

fn damaged(path: &Path, bytes: &[u8], error: SafeTensorError) -> SourceError {
    use SafeTensorError::*;
    let size = bytes.len();
    if bytes.starts_with(b"PK") {
        return SourceError::file(path, "it is a zip archive, as PyTorch writes, and not safetensors")
            .advise("save the model as safetensors, for example with transformers' save_pretrained");
    }
    let problem = match &error {
        InvalidHeader(error) => format!("the header isn't UTF-8: {error}"),
        InvalidHeaderDeserialization(error) => {
            format!("the header isn't a table of tensors in JSON: {}", anec_base::json::problem(error))
        }
        HeaderTooLarge => "the file says that its header is larger than 100 MB".into(),
        HeaderTooSmall => format!("the file has {size} bytes, expected at least the 8 of the header's length"),
        InvalidHeaderLength => {
            let announced = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
            format!("the file says that its header has {announced} bytes, but ends after {}", size.saturating_sub(8))
        }
        InvalidOffset(name) => format!("tensor `{}` doesn't begin where the one before it ends", quote(name)),
        TensorInvalidInfo => "a tensor's shape and type don't take the bytes that the header gives it".into(),
        MetadataIncompleteBuffer => format!("the file has {size} bytes, which isn't where its last tensor ends"),
        ValidationOverflow => "the size of a tensor overflows".into(),
        _ => format!("the header is damaged: {error}"),
    };
    SourceError::file(path, problem)
}

/// Parses an index: returns the names of the tensors in each shard, by file name.
///
/// # Errors
/// Returns an error if the index isn't `{"weight_map": {tensor: file}}`, or a file isn't a plain name.
pub fn parse_index(path: &Path, index: &Json) -> Result<BTreeMap<String, Vec<String>>> {
    let map = index
        .get("weight_map")
        .and_then(Json::as_object)
        .ok_or_else(|| SourceError::key(path, "weight_map", "it isn't there, or isn't an object"))?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in map {
        // names come from the network and must not lead out of the folder
        let plain = file.as_str().filter(|name| !name.contains('/') && path_inside(name).is_some());
        let Some(file) = plain else {
            let problem = format!("the file of tensor `{tensor}` is {file}, expected a file name in the same folder");
            return Err(SourceError::key(path, "weight_map", problem));
        };
        shards.entry(file.to_owned()).or_default().push(tensor.clone());
    }
    Ok(shards)
}

/// Checks that a shard holds exactly the tensors of the index.
///
/// # Errors
/// Returns an error if a tensor is missing or superfluous.
pub fn check_shard(index_path: &Path, shard: &Path, expected: &[String], tensors: &[SourceTensor]) -> Result<()> {
    let shard_name = shard.file_name().unwrap_or_default().display();
    let has: std::collections::HashSet<&str> = tensors.iter().map(SourceTensor::name).collect();
    if let Some(missing) = expected.iter().find(|name| !has.contains(name.as_str())) {
        let problem = format!("the index says that it is in {shard_name}, but it isn't there");
        return Err(SourceError::tensor(index_path, missing, problem));
    }
    let expected: std::collections::HashSet<&str> = expected.iter().map(String::as_str).collect();
    if let Some(superfluous) = tensors.iter().find(|tensor| !expected.contains(tensor.name())) {
        let problem = format!("it is in {shard_name}, but the index doesn't say so");
        return Err(SourceError::tensor(index_path, superfluous.name(), problem));
    }
    Ok(())
}
