//! PyTorch's checkpoints (`torch.save`): a pickle of the tensors' names, types and strides, and the storages that they
//! lie in, in a zip archive or, before PyTorch 1.6, one after another. No code of the pickle is run.

mod pickle;

use std::collections::{BTreeMap, HashMap};
use std::io::Cursor;
use std::ops::Range;
use std::sync::Arc;

use anec_base::MappedFile;
use anec_base::listing::quote;
use zip::{CompressionMethod, ZipArchive};

use self::pickle::{Pickle, Value};
use super::dtype::SourceDtype;
use super::error::{Result, SourceError};
use super::tensor::SourceTensor;
use super::weight::SourceWeight;

/// File name of the weights of an unsharded model.
pub const SINGLE: &str = "pytorch_model.bin";
/// File name of the index of a sharded model.
pub const INDEX: &str = "pytorch_model.bin.index.json";
/// Extensions of checkpoints.
pub const EXTENSIONS: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// Start of a zip archive.
const ZIP: &[u8] = b"PK\x03\x04";
/// Magic number at the start of a file without archive.
const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
/// Keys that hold the weights of a checkpoint of training.
const WRAPPERS: [&str; 3] = ["state_dict", "model_state_dict", "model"];
/// Most bytes of the pickle in an archive.
const MOST_PICKLE: u64 = 1 << 28;

/// Whether a file starts as a checkpoint does.
pub(super) fn is_checkpoint(bytes: &[u8]) -> bool {
    bytes.starts_with(ZIP) || bytes.get(..14).is_some_and(|start| start[2..4] == [0x8a, 10] && start[4..] == MAGIC)
}

/// Returns the tensors of a checkpoint.
///
/// # Errors
/// Returns an error if the file isn't a checkpoint, or is damaged, or holds a tensor of a type or with strides that
/// models aren't stored in.
pub fn tensors(file: &Arc<MappedFile>) -> Result<Vec<SourceTensor>> {
    let path = file.path();
    if !is_checkpoint(file.bytes()) {
        return Err(SourceError::file(path, "it isn't a checkpoint of PyTorch, neither a zip archive nor a pickle")
            .advise("download it again, or save the model with transformers' save_pretrained"));
    }
    let checkpoint = match file.bytes().starts_with(ZIP) {
        true => Checkpoint::of_archive(file.bytes()),
        false => Checkpoint::of_sequence(file.bytes()),
    };
    checkpoint.map_err(|problem| SourceError::file(path, problem))?.tensors(file)
}

/// A pickle, and where in the file the storages that it names lie.
struct Checkpoint {
    pickle: Pickle,
    storages: HashMap<String, Range<u64>>,
}

/// A part of a storage, as a tensor.
struct View {
    storage: String,
    dtype: SourceDtype,
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

impl Checkpoint {
    fn of_archive(bytes: &[u8]) -> Result<Self, String> {
        let damaged = |error| format!("the zip archive is damaged: {error}");
        let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(damaged)?;
        let (mut pickle, mut storages) = (None, HashMap::new());
        for index in 0..archive.len() {
            let entry = archive.by_index_raw(index).map_err(damaged)?;
            // the archive holds one folder, named after the file
            let name = entry.name().map_err(damaged)?;
            let Some((_, name)) = name.split_once('/') else { continue };
            let key = name.strip_prefix("data/").map(str::to_owned);
            if key.is_none() && !["data.pkl", "byteorder"].contains(&name) {
                continue;
            }
            if entry.compression() != CompressionMethod::Stored {
                return Err(format!("{} is compressed, which PyTorch doesn't write", quote(name)));
            }
            let start = entry.data_start().ok_or("the zip archive is damaged")?;
            let range = start..start.saturating_add(entry.size());
            let within = bytes.get(range.start as usize..range.end as usize);
            let content = within.ok_or_else(|| format!("the file ends within {}", quote(name)))?;
            match key {
                Some(key) => drop(storages.insert(key, range)),
                None if name == "byteorder" && content != b"little" => {
                    return Err("it was written on a machine with big-endian numbers".into());
                }
                None if name == "byteorder" => {}
                None if entry.size() > MOST_PICKLE => return Err("its pickle is larger than 256 MB".into()),
                None => pickle = Some(Pickle::read(content)?.0),
            }
        }
        let pickle = pickle.ok_or("the zip archive holds no data.pkl, so that it isn't a checkpoint of PyTorch")?;
        Ok(Checkpoint { pickle, storages })
    }

    fn of_sequence(bytes: &[u8]) -> Result<Self, String> {
        let mut at = 0;
        let mut next = || -> Result<(Pickle, usize), String> {
            let (pickle, length) = Pickle::read(&bytes[at..])?;
            at += length;
            Ok((pickle, at))
        };
        let (magic, _) = next()?;
        if !matches!(magic.root(), Value::Long(number) if *number == MAGIC) {
            return Err("it isn't a checkpoint of PyTorch".into());
        }
        let (_version, _) = next()?;
        let (system, _) = next()?;
        if let Value::Dict(entries) = system.root() {
            let is_big = |(key, value): &(usize, usize)| {
                *system.get(*key) == Value::Text("little_endian".into()) && *system.get(*value) == Value::Bool(false)
            };
            if entries.iter().any(is_big) {
                return Err("it was written on a machine with big-endian numbers".into());
            }
        }
        let (pickle, _) = next()?;
        let (keys, mut start) = next()?;
        let sizes = element_sizes(&pickle);
        let mut storages = HashMap::new();
        for key in keys.elements(keys.root()).ok_or("it has no list of storages")? {
            let key = text(key).ok_or("the name of a storage isn't text")?;
            let count = bytes[start..].first_chunk().ok_or("the file ends before its storages")?;
            let size = *sizes.get(key).ok_or("it has a storage that no tensor uses")?;
            let length = u64::from_le_bytes(*count).checked_mul(size).and_then(|bytes| usize::try_from(bytes).ok());
            let data = start + 8;
            let end = length.and_then(|length| data.checked_add(length)).filter(|end| *end <= bytes.len());
            start = end.ok_or_else(|| format!("the file ends within storage {}", quote(key)))?;
            storages.insert(key.to_owned(), data as u64..start as u64);
        }
        Ok(Checkpoint { pickle, storages })
    }

    fn tensors(&self, file: &Arc<MappedFile>) -> Result<Vec<SourceTensor>> {
        let path = file.path();
        let mut entries = self.entries(self.pickle.root());
        for wrapper in WRAPPERS {
            if let Some(inner) = entries.get(wrapper).filter(|inner| matches!(inner, Value::Dict(_))) {
                entries = self.entries(inner);
            }
        }
        let mut tensors = Vec::new();
        for (name, value) in entries {
            let view = self.view(value).map_err(|problem| {
                SourceError::tensor(path, name, problem).advise("save the model with transformers' save_pretrained")
            })?;
            if let Some(view) = view {
                tensors.push(self.tensor(name, view, file)?);
            }
        }
        match tensors.is_empty() {
            true => Err(SourceError::file(path, "it holds no tensors by name, so that it isn't a model's state dict")),
            false => Ok(tensors),
        }
    }

    /// Values by name. A later value replaces an earlier one, as in Python.
    fn entries(&self, dict: &Value) -> BTreeMap<&str, &Value> {
        let Value::Dict(entries) = dict else { return BTreeMap::new() };
        let named = |(key, value): &(usize, usize)| Some((text(self.pickle.get(*key))?, self.pickle.get(*value)));
        entries.iter().filter_map(named).collect()
    }

    /// Tensor of a value; `None` if it is another object.
    fn view(&self, value: &Value) -> Result<Option<View>, String> {
        let Some((function, arguments)) = self.pickle.call(value) else { return Ok(None) };
        let Some(function) = function.strip_prefix("torch.") else { return Ok(None) };
        match (function, &arguments[..]) {
            ("_utils._rebuild_parameter" | "_utils._rebuild_parameter_with_state", [data, ..]) => self.view(data),
            (
                "_utils._rebuild_tensor_v2" | "_utils._rebuild_tensor_v3",
                [stored_in, offset, shape, strides, rest @ ..],
            ) => {
                let (key, stored) =
                    storage(&self.pickle, stored_in).ok_or("its storage isn't described as PyTorch does")?;
                // the third version gives its type; storages are bytes
                let dtype = match (function, rest) {
                    ("_utils._rebuild_tensor_v3", [_, _, Value::Global(dtype), ..]) => dtype.strip_prefix("torch."),
                    _ => Some(stored),
                };
                let dtype = dtype.and_then(element_type).ok_or_else(|| format!("its type is {stored}"))?;
                let numbers = |value: &Value| -> Option<Vec<u64>> {
                    self.pickle.elements(value)?.into_iter().map(number).collect()
                };
                let (Some(offset), Some(shape), Some(strides)) = (number(offset), numbers(shape), numbers(strides))
                else {
                    return Err("its shape isn't a list of numbers".into());
                };
                Ok(Some(View { storage: key.to_owned(), dtype, offset, shape, strides }))
            }
            _ => Err(format!("it is made by torch.{function}, which isn't a plain tensor")),
        }
    }

    fn tensor(&self, name: &str, view: View, file: &Arc<MappedFile>) -> Result<SourceTensor> {
        let path = file.path();
        let View { storage, dtype, offset, shape, strides } = view;
        let wrong = |problem: String| SourceError::tensor(path, name, problem);
        let range = self.storages.get(&storage);
        let range = range.ok_or_else(|| wrong(format!("its storage {} isn't in the file", quote(&storage))))?;
        let elements = shape.iter().try_fold(1, |product: u64, dimension| product.checked_mul(*dimension));
        let first = dtype.bytes(offset).and_then(|bytes| range.start.checked_add(bytes));
        let length = elements.and_then(|elements| dtype.bytes(elements));
        let last = first.zip(length).and_then(|(first, length)| first.checked_add(length));
        let (Some(first), Some(last)) = (first, last.filter(|last| *last <= range.end)) else {
            return Err(wrong(format!("{dtype} {shape:?} from element {offset} is more than its storage holds")));
        };
        let in_file = |shape| SourceTensor::in_file(name.to_owned(), dtype, shape, file, first..last);
        if is_row_major(&shape, &strides) {
            return in_file(shape);
        }
        match (&shape[..], &strides[..]) {
            ([rows, columns], [1, stride]) if stride == rows => {
                let stored = SourceWeight::from(in_file(vec![*columns, *rows])?);
                Ok(SourceTensor::computed(name.to_owned(), stored.transpose()?, dtype, last - first, path))
            }
            _ => Err(wrong(format!("its elements {shape:?} are {strides:?} apart, which isn't row by row"))
                .advise("save the model with transformers' save_pretrained")),
        }
    }
}

/// Bytes of an element of each storage, by key.
fn element_sizes(pickle: &Pickle) -> HashMap<&str, u64> {
    let of_storage = |value| {
        let (key, dtype) = storage(pickle, value)?;
        Some((key, element_type(dtype).and_then(|dtype| dtype.bytes(1)).unwrap_or(1)))
    };
    pickle.values().filter_map(of_storage).collect()
}

/// Key and element type of a storage, from its persistent id: `("storage", type, key, device, elements, ..)`.
fn storage<'a>(pickle: &'a Pickle, value: &Value) -> Option<(&'a str, &'a str)> {
    let Value::Persistent(id) = value else { return None };
    let id = pickle.elements(pickle.get(*id))?;
    match &id[..] {
        [kind, Value::Global(class), Value::Text(key), _, _, view @ ..]
            if text(kind) == Some("storage") && matches!(view, [] | [Value::None]) =>
        {
            let class = class.strip_prefix("torch.")?;
            Some((key, class.strip_prefix("storage.").unwrap_or(class)))
        }
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::Text(text) => Some(text),
        _ => None,
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Integer(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

/// Element type of a class of storages, or of a `torch.dtype`.
fn element_type(name: &str) -> Option<SourceDtype> {
    Some(match name {
        "DoubleStorage" | "float64" => SourceDtype::F64,
        "FloatStorage" | "float32" => SourceDtype::F32,
        "HalfStorage" | "float16" => SourceDtype::F16,
        "BFloat16Storage" | "bfloat16" => SourceDtype::BF16,
        "float8_e4m3fn" => SourceDtype::F8_E4M3,
        "float8_e5m2" => SourceDtype::F8_E5M2,
        "float8_e8m0fnu" => SourceDtype::F8_E8M0,
        "LongStorage" | "int64" => SourceDtype::I64,
        "IntStorage" | "int32" => SourceDtype::I32,
        "ShortStorage" | "int16" => SourceDtype::I16,
        "CharStorage" | "int8" => SourceDtype::I8,
        "ByteStorage" | "uint8" => SourceDtype::U8,
        "uint16" => SourceDtype::U16,
        "uint32" => SourceDtype::U32,
        "uint64" => SourceDtype::U64,
        "BoolStorage" | "bool" => SourceDtype::Bool,
        _ => return None,
    })
}

/// Whether elements lie row by row; the stride of a dimension of one element means nothing.
fn is_row_major(shape: &[u64], strides: &[u64]) -> bool {
    let mut apart = 1u64;
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(dimension, stride)| {
            let fits = *dimension == 1 || *stride == apart;
            apart = apart.saturating_mul(*dimension);
            fits
        })
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use serde_json::Value as Json;

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/pytorch").join(name)
    }

    fn read(name: &str) -> Result<Vec<SourceTensor>> {
        tensors(&Arc::new(MappedFile::open(&fixture(name))?))
    }

    /// Every tensor of `names`, in both containers, has the type, shape and values that PyTorch says.
    #[test]
    fn tensors_are_those_of_pytorch() {
        let expected = crate::read_json(&fixture("values.json")).unwrap();
        for (file, count) in [("archive.bin", 22), ("sequence.bin", 20), ("training.ckpt", 20)] {
            let tensors = read(file).unwrap();
            assert_eq!(tensors.len(), count, "{file}");
            for tensor in tensors {
                let expected = &expected[tensor.name()];
                let dtype = format!("{:?}", tensor.dtype()).to_lowercase();
                let named = expected["dtype"].as_str().unwrap();
                let short = named.replace("float8_e4m3fn", "f8_e4m3").replace("bfloat", "bf").replace("float", "f");
                assert_eq!(dtype, short.replace("uint", "u").replace("int", "i"), "{file}, {}", tensor.name());
                let numbers = |key: &str| expected[key].as_array().unwrap().iter();
                let shape: Vec<u64> = numbers("shape").filter_map(Json::as_u64).collect();
                assert_eq!(tensor.shape(), shape, "{file}, {}", tensor.name());
                let mut found = vec![f32::NAN; tensor.elements() as usize];
                tensor.read(0, &mut found).unwrap();
                let values: Vec<f32> = numbers("values").filter_map(Json::as_f64).map(|value| value as f32).collect();
                assert_eq!(found, values, "{file}, {}", tensor.name());
            }
        }
    }

    #[test]
    fn what_is_no_plain_tensor_is_refused_by_name() {
        let error = read("sparse.bin").unwrap_err().to_string();
        assert!(error.contains("tensor `a`: it is made by torch._utils._rebuild_sparse_tensor"), "{error}");
    }

    /// Files that end anywhere, or with any byte changed, are read or refused, within their size.
    #[test]
    fn damaged_checkpoints_are_refused() {
        for name in ["archive.bin", "sequence.bin", "training.ckpt"] {
            let whole = std::fs::read(fixture(name)).unwrap();
            let read = |bytes: Vec<u8>| {
                let read = tensors(&Arc::new(MappedFile::from_bytes(Path::new("memory.bin"), bytes)));
                for tensor in read.iter().flatten() {
                    assert!(tensor.byte_length() <= whole.len() as u64);
                    let mut values = vec![0.0; tensor.elements() as usize];
                    tensor.read(0, &mut values).unwrap();
                }
                read.is_ok()
            };
            assert!(read(whole.clone()));
            for end in (0..whole.len()).step_by(7) {
                assert!(!read(whole[..end].to_vec()), "{name} of {end} bytes");
            }
            for at in 0..whole.len() {
                let mut changed = whole.clone();
                changed[at] ^= 1 << (at % 8);
                read(changed);
            }
        }
    }
}
