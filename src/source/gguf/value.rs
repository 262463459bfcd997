//! Metadata values of GGUF.

use std::fmt;

use serde::Serialize;

use super::Strings;

/// Metadata value. Variants have GGUF's names.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
#[allow(missing_docs, reason = "the names say it")]
pub enum GgufValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(GgufArray),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// Array of values of one type.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
#[allow(missing_docs, reason = "the names say it")]
pub enum GgufArray {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Strings),
    Array(Vec<GgufArray>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl GgufValue {
    pub(super) fn integer(&self) -> Option<i128> {
        Some(match *self {
            GgufValue::U8(value) => value.into(),
            GgufValue::I8(value) => value.into(),
            GgufValue::U16(value) => value.into(),
            GgufValue::I16(value) => value.into(),
            GgufValue::U32(value) => value.into(),
            GgufValue::I32(value) => value.into(),
            GgufValue::U64(value) => value.into(),
            GgufValue::I64(value) => value.into(),
            _ => return None,
        })
    }

    /// Number of the type in the format.
    pub(super) fn type_number(&self) -> u32 {
        match self {
            GgufValue::U8(_) => 0,
            GgufValue::I8(_) => 1,
            GgufValue::U16(_) => 2,
            GgufValue::I16(_) => 3,
            GgufValue::U32(_) => 4,
            GgufValue::I32(_) => 5,
            GgufValue::F32(_) => 6,
            GgufValue::Bool(_) => 7,
            GgufValue::String(_) => 8,
            GgufValue::Array(_) => 9,
            GgufValue::U64(_) => 10,
            GgufValue::I64(_) => 11,
            GgufValue::F64(_) => 12,
        }
    }
}

impl GgufArray {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            GgufArray::U8(values) => values.len(),
            GgufArray::I8(values) => values.len(),
            GgufArray::U16(values) => values.len(),
            GgufArray::I16(values) => values.len(),
            GgufArray::U32(values) => values.len(),
            GgufArray::I32(values) => values.len(),
            GgufArray::F32(values) => values.len(),
            GgufArray::Bool(values) => values.len(),
            GgufArray::String(values) => values.len(),
            GgufArray::Array(values) => values.len(),
            GgufArray::U64(values) => values.len(),
            GgufArray::I64(values) => values.len(),
            GgufArray::F64(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn integers(&self) -> Option<Vec<i64>> {
        fn widen<T: Copy + Into<i64>>(values: &[T]) -> Vec<i64> {
            values.iter().map(|&value| value.into()).collect()
        }
        Some(match self {
            GgufArray::U8(values) => widen(values),
            GgufArray::I8(values) => widen(values),
            GgufArray::U16(values) => widen(values),
            GgufArray::I16(values) => widen(values),
            GgufArray::U32(values) => widen(values),
            GgufArray::I32(values) => widen(values),
            GgufArray::I64(values) => values.clone(),
            GgufArray::U64(values) => values.iter().map(|&value| value.try_into().ok()).collect::<Option<_>>()?,
            GgufArray::Bool(values) => widen(values),
            _ => return None,
        })
    }

    /// Number of the elements' type in the format.
    pub(super) fn type_number(&self) -> u32 {
        match self {
            GgufArray::U8(_) => 0,
            GgufArray::I8(_) => 1,
            GgufArray::U16(_) => 2,
            GgufArray::I16(_) => 3,
            GgufArray::U32(_) => 4,
            GgufArray::I32(_) => 5,
            GgufArray::F32(_) => 6,
            GgufArray::Bool(_) => 7,
            GgufArray::String(_) => 8,
            GgufArray::Array(_) => 9,
            GgufArray::U64(_) => 10,
            GgufArray::I64(_) => 11,
            GgufArray::F64(_) => 12,
        }
    }
}

/// Formats the value for one line: arrays as length and type.
impl fmt::Display for GgufValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const TYPES: [&str; 13] =
            ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"];
        match self {
            GgufValue::U8(value) => write!(f, "{value}"),
            GgufValue::I8(value) => write!(f, "{value}"),
            GgufValue::U16(value) => write!(f, "{value}"),
            GgufValue::I16(value) => write!(f, "{value}"),
            GgufValue::U32(value) => write!(f, "{value}"),
            GgufValue::I32(value) => write!(f, "{value}"),
            GgufValue::F32(value) => write!(f, "{value:?}"),
            GgufValue::Bool(value) => write!(f, "{value}"),
            GgufValue::String(text) => match text.char_indices().nth(60) {
                Some((end, _)) => write!(f, "{:?}…", &text[..end]),
                None => write!(f, "{text:?}"),
            },
            GgufValue::Array(array) => write!(f, "array of {} {}", array.len(), TYPES[array.type_number() as usize]),
            GgufValue::U64(value) => write!(f, "{value}"),
            GgufValue::I64(value) => write!(f, "{value}"),
            GgufValue::F64(value) => write!(f, "{value:?}"),
        }
    }
}

macro_rules! value_from {
    ($($from:ty => |$value:ident| $to:expr;)*) => {
        $(impl From<$from> for GgufValue {
            fn from($value: $from) -> Self {
                $to
            }
        })*
    };
}

value_from! {
    u16 => |value| GgufValue::U16(value);
    u32 => |value| GgufValue::U32(value);
    i32 => |value| GgufValue::I32(value);
    u64 => |value| GgufValue::U64(value);
    f32 => |value| GgufValue::F32(value);
    bool => |value| GgufValue::Bool(value);
    &str => |value| GgufValue::String(value.to_owned());
    String => |value| GgufValue::String(value);
    Vec<String> => |values| GgufValue::Array(GgufArray::String(values.iter().collect()));
    Vec<f32> => |values| GgufValue::Array(GgufArray::F32(values));
    Vec<i32> => |values| GgufValue::Array(GgufArray::I32(values));
    Vec<u32> => |values| GgufValue::Array(GgufArray::U32(values));
}
