//! Metadata of a file: parser, and typed access by key.

use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::Strings;
use super::cursor::Cursor;
use super::value::{GgufArray, GgufValue};
use crate::error::{Result, SourceError};

/// Metadata of a file: keys and values in the file's order.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufMetadata {
    path: PathBuf,
    values: IndexMap<String, GgufValue>,
}

/// Maximum depth of nested arrays, so that hostile files can't overflow the stack.
const DEEPEST_ARRAY: u32 = 8;

impl GgufMetadata {
    /// Returns metadata of the file at `path`, which messages name.
    pub fn new(path: &Path, values: IndexMap<String, GgufValue>) -> Self {
        GgufMetadata { path: path.to_owned(), values }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keys and values in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &GgufValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key)
    }

    /// Returns the value of a key as converted by `convert`, or an error if the key exists and `convert` returns
    /// `None`.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>> {
        self.get(key)
            .map(|value| {
                convert(value).ok_or_else(|| {
                    SourceError::key(&self.path, key, format!("the value is {value}, expected {expected}"))
                })
            })
            .transpose()
    }

    /// Returns a string, if the key is there.
    ///
    /// # Errors
    /// Returns an error if the value is something else.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |value| match value {
            GgufValue::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// Returns a boolean, if the key is there.
    ///
    /// # Errors
    /// Returns an error if the value is something else.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a boolean", |value| match value {
            GgufValue::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// Returns a number that isn't negative, of any integer type, if the key is there.
    ///
    /// # Errors
    /// Returns an error if the value is something else.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "an integer that isn't negative", |value| u64::try_from(value.integer()?).ok())
    }

    /// Returns a floating-point number of either type, if the key is there.
    ///
    /// # Errors
    /// Returns an error if the value is something else.
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a floating-point number", |value| match *value {
            GgufValue::F32(value) => Some(value.into()),
            GgufValue::F64(value) => Some(value),
            _ => None,
        })
    }

    /// Strings, if the key is there.
    ///
    /// # Errors
    /// Returns an error if the value is something else.
    pub fn strings(&self, key: &str) -> Result<Option<&Strings>> {
        self.typed(key, "an array of strings", |value| match value {
            GgufValue::Array(GgufArray::String(values)) => Some(values),
            _ => None,
        })
    }

    /// Single-precision numbers, if the key is there.
    ///
    /// # Errors
    /// Returns an error if the value is something else.
    pub fn f32s(&self, key: &str) -> Result<Option<&[f32]>> {
        self.typed(key, "an array of f32", |value| match value {
            GgufValue::Array(GgufArray::F32(values)) => Some(values.as_slice()),
            _ => None,
        })
    }

    /// Integers of any type (booleans count as 0 and 1), if the key is there. A single integer is an array of one.
    ///
    /// # Errors
    /// Returns an error if the value is something else.
    pub fn i64s(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.typed(key, "an array of integers", |value| match value {
            GgufValue::Array(array) => array.integers(),
            value => Some(vec![i64::try_from(value.integer()?).ok()?]),
        })
    }
}

/// Reads `count` keys and values.
pub(super) fn parse(cursor: &mut Cursor, count: u64) -> Result<GgufMetadata> {
    // Length of the key, type, and a value of one byte.
    const SMALLEST_PAIR: u64 = 8 + 4 + 1;
    cursor.check_count(count, SMALLEST_PAIR, format_args!("metadata keys"))?;
    let mut values = IndexMap::with_capacity(count as usize);
    for index in 0..count {
        let key = cursor.string(format_args!("metadata key {index} of {count}"))?.to_owned();
        let value = parse_value(cursor, &key)?;
        if values.contains_key(&key) {
            return Err(SourceError::key(cursor.path(), &key, "the file has this key twice"));
        }
        values.insert(key, value);
    }
    Ok(GgufMetadata::new(cursor.path(), values))
}

fn parse_value(cursor: &mut Cursor, key: &str) -> Result<GgufValue> {
    let number = cursor.u32(format_args!("the type of key `{key}`"))?;
    let what = format_args!("the value of key `{key}`");
    Ok(match number {
        0 => GgufValue::U8(u8::from_le_bytes(cursor.array(what)?)),
        1 => GgufValue::I8(i8::from_le_bytes(cursor.array(what)?)),
        2 => GgufValue::U16(u16::from_le_bytes(cursor.array(what)?)),
        3 => GgufValue::I16(i16::from_le_bytes(cursor.array(what)?)),
        4 => GgufValue::U32(u32::from_le_bytes(cursor.array(what)?)),
        5 => GgufValue::I32(i32::from_le_bytes(cursor.array(what)?)),
        6 => GgufValue::F32(f32::from_le_bytes(cursor.array(what)?)),
        7 => GgufValue::Bool(boolean(cursor.path(), key, cursor.array(what)?)?),
        8 => GgufValue::String(cursor.string(what)?.to_owned()),
        9 => GgufValue::Array(parse_array(cursor, key, DEEPEST_ARRAY)?),
        10 => GgufValue::U64(u64::from_le_bytes(cursor.array(what)?)),
        11 => GgufValue::I64(i64::from_le_bytes(cursor.array(what)?)),
        12 => GgufValue::F64(f64::from_le_bytes(cursor.array(what)?)),
        _ => return Err(unknown_type(cursor.path(), key, number)),
    })
}

fn parse_array(cursor: &mut Cursor, key: &str, depth: u32) -> Result<GgufArray> {
    let number = cursor.u32(format_args!("the type of the array of key `{key}`"))?;
    let count = cursor.u64(format_args!("the length of the array of key `{key}`"))?;
    Ok(match number {
        0 => GgufArray::U8(elements(cursor, key, count, u8::from_le_bytes)?),
        1 => GgufArray::I8(elements(cursor, key, count, i8::from_le_bytes)?),
        2 => GgufArray::U16(elements(cursor, key, count, u16::from_le_bytes)?),
        3 => GgufArray::I16(elements(cursor, key, count, i16::from_le_bytes)?),
        4 => GgufArray::U32(elements(cursor, key, count, u32::from_le_bytes)?),
        5 => GgufArray::I32(elements(cursor, key, count, i32::from_le_bytes)?),
        6 => GgufArray::F32(elements(cursor, key, count, f32::from_le_bytes)?),
        7 => {
            let path = cursor.path();
            let bytes: Vec<[u8; 1]> = elements(cursor, key, count, |byte| byte)?;
            GgufArray::Bool(bytes.into_iter().map(|byte| boolean(path, key, byte)).collect::<Result<_>>()?)
        }
        8 => {
            cursor.check_count(count, 8, format_args!("strings of key `{key}`"))?;
            let mut ahead = cursor.clone();
            match together(&mut ahead, count) {
                Some(strings) => {
                    *cursor = ahead;
                    GgufArray::String(strings)
                }
                None => GgufArray::String(one_by_one(cursor, key, count)?),
            }
        }
        9 => {
            if depth == 0 {
                let problem = format!("arrays are nested more than {DEEPEST_ARRAY} deep");
                return Err(SourceError::key(cursor.path(), key, problem));
            }
            cursor.check_count(count, 4 + 8, format_args!("arrays of key `{key}`"))?;
            GgufArray::Array((0..count).map(|_| parse_array(cursor, key, depth - 1)).collect::<Result<_>>()?)
        }
        10 => GgufArray::U64(elements(cursor, key, count, u64::from_le_bytes)?),
        11 => GgufArray::I64(elements(cursor, key, count, i64::from_le_bytes)?),
        12 => GgufArray::F64(elements(cursor, key, count, f64::from_le_bytes)?),
        _ => return Err(unknown_type(cursor.path(), key, number)),
    })
}

/// Reads strings all at once, which is faster than one at a time for hundreds of thousands of short ones. `None` if one
/// is invalid.
fn together(cursor: &mut Cursor, count: u64) -> Option<Strings> {
    let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(count as usize));
    for _ in 0..count {
        bytes.extend_from_slice(cursor.sized()?);
        ends.push(bytes.len());
    }
    Strings::divided(bytes, ends)
}

/// Reads strings one by one, for an error that names the first invalid one.
fn one_by_one(cursor: &mut Cursor, key: &str, count: u64) -> Result<Strings> {
    (0..count).map(|index| cursor.string(format_args!("string {index} of {count} of key `{key}`"))).collect()
}

fn elements<T, const N: usize>(cursor: &mut Cursor, key: &str, count: u64, read: fn([u8; N]) -> T) -> Result<Vec<T>> {
    let length = count.saturating_mul(N as u64);
    let bytes = cursor.take(length, format_args!("the array of {count} numbers of key `{key}`"))?;
    Ok(bytes.as_chunks().0.iter().map(|&bytes| read(bytes)).collect())
}

fn boolean(path: &Path, key: &str, [byte]: [u8; 1]) -> Result<bool> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(SourceError::key(path, key, format!("a boolean is {byte}, expected 0 or 1"))),
    }
}

fn unknown_type(path: &Path, key: &str, number: u32) -> SourceError {
    SourceError::key(path, key, format!("its type number is {number}, expected 0 to 12"))
}
