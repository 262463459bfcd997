//! GGUF, versions 2 and 3: a header of typed metadata, a table of tensors, then their data.
//!
//! All lengths and counts of a file are checked against the bytes that are left before anything is allocated for them.
//!
//! | module | contents |
//! |---|---|
//! | [`metadata`], [`value`] | typed keys and values |
//! | [`split`] | models in several files |
//! | [`strings`] | many strings in one piece of memory |
//! | [`mod@write`] | a writer, for synthetic models |

mod cursor;
pub mod metadata;
pub mod split;
pub mod strings;
pub mod value;
pub mod write;

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use super::dtype::SourceDtype;
use super::error::{Result, SourceError};
use super::tensor::byte_length;
use cursor::Cursor;
pub use metadata::GgufMetadata;
pub use strings::Strings;
pub use value::{GgufArray, GgufValue};

/// First four bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// Key of the alignment of tensor data.
pub const ALIGNMENT_KEY: &str = "general.alignment";
/// Default alignment of tensor data.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// Maximum number of dimensions in ggml.
const MOST_DIMENSIONS: u32 = 4;

/// Header of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Version of the format, 2 or 3. The difference doesn't matter here.
    pub version: u32,
    /// Keys and values.
    pub metadata: GgufMetadata,
    /// Tensors, in the order of the file.
    pub tensors: Vec<TensorInfo>,
}

/// Entry of the table of tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: SourceDtype,
    /// Dimensions, outermost first: the reverse of the file's order.
    pub shape: Vec<u64>,
    /// Range of the data in the file, in bytes.
    pub range: Range<u64>,
}

/// Reads the header of the file whose content is `bytes`; `path` is for messages.
///
/// # Errors
/// Returns an error if the file isn't GGUF, ends too soon, has lengths, numbers or names that can't be, has a tensor
/// type that isn't known, or tensors that overlap or lie outside the file.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Header> {
    let mut cursor = Cursor::new(path, bytes);
    let magic = cursor.array::<4>(format_args!("the magic number"))?;
    if magic != MAGIC {
        return Err(SourceError::file(path, format!("the file begins with {magic:02x?}, expected `GGUF`")));
    }
    let version = cursor.u32(format_args!("the version"))?;
    check_version(path, version)?;
    let tensor_count = cursor.u64(format_args!("the number of tensors"))?;
    let key_count = cursor.u64(format_args!("the number of keys"))?;
    let metadata = metadata::parse(&mut cursor, key_count)?;
    let alignment = alignment(&metadata)?;
    let entries = parse_table(&mut cursor, tensor_count)?;
    let data_start = (cursor.position() as u64).next_multiple_of(alignment);
    let tensors = place(path, entries, alignment, data_start, bytes.len() as u64)?;
    Ok(Header { version, metadata, tensors })
}

fn check_version(path: &Path, version: u32) -> Result<()> {
    let version_is = format!("GGUF version {version}, expected 2 or 3");
    Err(match version {
        2 | 3 => return Ok(()),
        1 => SourceError::file(path, version_is).advise("convert it with a current llama.cpp"),
        v if (1..=3).contains(&v.swap_bytes()) => {
            SourceError::file(path, "GGUF for big-endian machines, expected little-endian")
                .advise("convert it with gguf-py's gguf-convert-endian")
        }
        _ => SourceError::file(path, version_is),
    })
}

fn alignment(metadata: &GgufMetadata) -> Result<u64> {
    match metadata.get(ALIGNMENT_KEY) {
        None => Ok(DEFAULT_ALIGNMENT),
        // larger alignments are useless, and the start of the data must not overflow
        Some(&GgufValue::U32(alignment)) if alignment.is_power_of_two() && alignment <= 1 << 20 => Ok(alignment.into()),
        Some(value) => {
            Err(SourceError::key(metadata.path(), ALIGNMENT_KEY, format!("{value}, expected a power of two as u32")))
        }
    }
}

/// Entry of the table of tensors, as stored.
struct Entry {
    name: String,
    shape: Vec<u64>,
    type_number: u32,
    offset: u64,
}

fn parse_table(cursor: &mut Cursor, count: u64) -> Result<Vec<Entry>> {
    // Length of the name, number of dimensions, type and offset.
    const SMALLEST_ENTRY: u64 = 8 + 4 + 4 + 8;
    cursor.check_count(count, SMALLEST_ENTRY, format_args!("tensors"))?;
    let mut entries = Vec::with_capacity(count as usize);
    let mut names = HashSet::with_capacity(count as usize);
    for index in 0..count {
        let name = cursor.string(format_args!("the name of tensor {index} of {count}"))?.to_owned();
        let path = cursor.path();
        if !names.insert(name.clone()) {
            return Err(SourceError::tensor(path, &name, "the file has two tensors of this name"));
        }
        let dimensions = cursor.u32(format_args!("the number of dimensions of tensor `{name}`"))?;
        if dimensions > MOST_DIMENSIONS {
            let problem = format!("it has {dimensions} dimensions, expected at most {MOST_DIMENSIONS}");
            return Err(SourceError::tensor(path, &name, problem));
        }
        let mut shape = (0..dimensions)
            .map(|_| cursor.u64(format_args!("the dimensions of tensor `{name}`")))
            .collect::<Result<Vec<u64>>>()?;
        shape.reverse();
        let type_number = cursor.u32(format_args!("the type of tensor `{name}`"))?;
        let offset = cursor.u64(format_args!("the offset of tensor `{name}`"))?;
        entries.push(Entry { name, shape, type_number, offset });
    }
    Ok(entries)
}

/// Computes the ranges of tensors and checks that they lie in the file without overlap.
fn place(path: &Path, entries: Vec<Entry>, alignment: u64, data_start: u64, size: u64) -> Result<Vec<TensorInfo>> {
    let length = size.saturating_sub(data_start);
    // AngelSlim's fork took these numbers before ggml did, one after the other
    let [type_40, type_41] =
        [SourceDtype::NVFP4, SourceDtype::Q1_0].map(|own| with_shared_number(own, &entries, alignment, length));
    let mut tensors = Vec::with_capacity(entries.len());
    for Entry { name, shape, type_number, offset } in entries {
        let dtype = match SourceDtype::from_ggml(type_number) {
            Some(SourceDtype::NVFP4) => type_40,
            Some(SourceDtype::Q1_0) => type_41,
            Some(dtype) => dtype,
            None => {
                let problem = format!("its ggml type number {type_number} isn't one that is known");
                let help = match type_number {
                    4 | 5 | 31..=33 | 36..=38 => "ggml has removed this type; quantize the model again",
                    9 => "Q8_1 is for activations; no model file should have it",
                    _ => {
                        "the file may be damaged, or made by a fork or a newer version of ggml; another quantization \
                          of the model will do"
                    }
                };
                return Err(SourceError::tensor(path, &name, problem).advise(help));
            }
        };
        let wrong = |problem| SourceError::tensor(path, &name, problem);
        if offset % alignment != 0 {
            return Err(wrong(format!("its offset {offset} isn't a multiple of the alignment {alignment}")));
        }
        let length = byte_length(dtype, &shape).map_err(wrong)?;
        let range = data_start
            .checked_add(offset)
            .and_then(|start| Some(start..start.checked_add(length)?))
            .filter(|range| range.end <= size)
            .ok_or_else(|| {
                wrong(format!("its {length} bytes at offset {offset} of the data end after the file, {size} bytes"))
            })?;
        tensors.push(TensorInfo { name, dtype, shape, range });
    }
    check_apart(path, &tensors)?;
    Ok(tensors)
}

fn check_apart(path: &Path, tensors: &[TensorInfo]) -> Result<()> {
    let mut order: Vec<&TensorInfo> = tensors.iter().filter(|tensor| !tensor.range.is_empty()).collect();
    order.sort_by_key(|tensor| tensor.range.start);
    for pair in order.windows(2) {
        if pair[0].range.end > pair[1].range.start {
            let problem = format!("its bytes {:?} overlap {:?} of `{}`", pair[1].range, pair[0].range, pair[0].name);
            return Err(SourceError::tensor(path, &pair[1].name, problem));
        }
    }
    Ok(())
}

/// Returns the type that a file means by the number of `own`: ggml's, or the 2-bit type of AngelSlim's fork. Only the
/// space between tensors distinguishes them, because writers put tensors right after each other.
fn with_shared_number(own: SourceDtype, entries: &[Entry], alignment: u64, data_length: u64) -> SourceDtype {
    let mut starts: Vec<u64> = entries.iter().map(|entry| entry.offset).collect();
    starts.push(data_length);
    starts.sort_unstable();
    let fits = |dtype: SourceDtype| {
        entries.iter().filter(|entry| Some(entry.type_number) == own.ggml_number()).all(|entry| {
            let next = starts.partition_point(|&start| start <= entry.offset);
            let space = starts.get(next).map_or(0, |next| next - entry.offset);
            byte_length(dtype, &entry.shape)
                .is_ok_and(|bytes| bytes == space || bytes.next_multiple_of(alignment) == space)
        })
    };
    if fits(SourceDtype::SEQ_2BIT) && !fits(own) { SourceDtype::SEQ_2BIT } else { own }
}

#[cfg(test)]
mod tests;
