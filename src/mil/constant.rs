//! Constants: small literals in memory, and large contents whose bytes are produced when written or executed.

use std::fmt;
use std::sync::Arc;

use super::types::{DataType, Dim, TensorType};
use anec_base::Result;

/// Bytes of a large constant, produced on demand and in pieces.
///
/// Bytes are laid out as in a weight file: little-endian, row-major, sub-byte elements packed least significant bit
/// first. Two constants that hold the same `Arc` share one place in a weight file.
pub trait Content: Send + Sync {
    /// Total length in bytes.
    fn length(&self) -> u64;

    /// Alignment of reads in bytes: offsets are multiples of it, and so are lengths of reads that stop before the end.
    fn granule(&self) -> u64;

    /// Prepares reads, for example by finding a scale. Idempotent.
    ///
    /// # Errors
    /// Returns an error if the data can't be produced: an unreadable source, or NaN in place of a number.
    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    /// Fills `out` with the bytes from `offset`.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`prepare`](Content::prepare).
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()>;
}

/// A typed constant tensor or string.
#[derive(Clone)]
pub struct Constant {
    /// Element type and shape; every dimension is fixed.
    pub ty: TensorType,
    /// Elements.
    pub data: Data,
}

/// Storage of a constant's elements.
#[derive(Clone)]
pub enum Data {
    /// Little-endian packed elements; a bool is one byte.
    Literal(Arc<[u8]>),
    /// String elements.
    Strings(Arc<[String]>),
    /// Elements produced on demand.
    Content(Arc<dyn Content>),
}

impl Constant {
    /// Creates a constant of literal bytes.
    pub fn literal(ty: TensorType, bytes: impl Into<Arc<[u8]>>) -> Self {
        Constant { ty, data: Data::Literal(bytes.into()) }
    }

    /// Creates a constant whose bytes are produced on demand.
    pub fn content(ty: TensorType, content: Arc<dyn Content>) -> Self {
        Constant { ty, data: Data::Content(content) }
    }

    /// Creates a string scalar.
    pub fn string(text: &str) -> Self {
        Constant { ty: TensorType::scalar(DataType::String), data: Data::Strings(Arc::new([text.to_owned()])) }
    }

    /// Creates a boolean scalar.
    pub fn bool(value: bool) -> Self {
        Self::literal(TensorType::scalar(DataType::Bool), [u8::from(value)])
    }

    /// Creates an int32 scalar.
    pub fn int32(value: i32) -> Self {
        Self::literal(TensorType::scalar(DataType::Int32), value.to_le_bytes())
    }

    /// Creates an fp32 scalar.
    pub fn fp32(value: f32) -> Self {
        Self::literal(TensorType::scalar(DataType::Fp32), value.to_le_bytes())
    }

    /// Creates an fp16 scalar, rounded to nearest even.
    pub fn fp16(value: f32) -> Self {
        Self::literal(TensorType::scalar(DataType::Fp16), half::f16::from_f32(value).to_le_bytes())
    }

    /// Creates a vector of int32.
    pub fn int32s(values: &[i32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::literal(TensorType::new(DataType::Int32, [values.len() as u64]), bytes)
    }

    /// Creates a vector of booleans.
    pub fn bools(values: &[bool]) -> Self {
        let bytes: Vec<u8> = values.iter().map(|v| u8::from(*v)).collect();
        Self::literal(TensorType::new(DataType::Bool, [values.len() as u64]), bytes)
    }

    /// Creates an fp16 tensor from f32 values, rounded to nearest even. `values` has the product of `shape` elements.
    pub fn fp16_tensor(shape: &[u64], values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
        Self::literal(TensorType::new(DataType::Fp16, shape.iter().copied()), bytes)
    }

    /// Elements as `i64`; `None` unless this is a literal of integers or booleans.
    pub fn as_integers(&self) -> Option<Vec<i64>> {
        let Data::Literal(bytes) = &self.data else { return None };
        let read = |width: usize, f: fn(&[u8]) -> i64| Some(bytes.chunks_exact(width).map(f).collect());
        match self.ty.dtype {
            DataType::Bool | DataType::Uint8 => read(1, |b| i64::from(b[0])),
            DataType::Int8 => read(1, |b| i64::from(b[0] as i8)),
            DataType::Int16 => read(2, |b| i64::from(i16::from_le_bytes([b[0], b[1]]))),
            DataType::Uint16 => read(2, |b| i64::from(u16::from_le_bytes([b[0], b[1]]))),
            DataType::Int32 => read(4, |b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            DataType::Uint32 => read(4, |b| i64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            DataType::Int64 => read(8, |b| b.try_into().map_or(0, i64::from_le_bytes)),
            _ => None,
        }
    }

    /// Elements as `f32`; `None` unless this is a literal of floating-point numbers.
    pub fn as_floats(&self) -> Option<Vec<f32>> {
        let Data::Literal(bytes) = &self.data else { return None };
        match self.ty.dtype {
            DataType::Fp16 => {
                Some(bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect())
            }
            DataType::Bf16 => {
                Some(bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect())
            }
            DataType::Fp32 => {
                Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
            }
            DataType::Fp64 => {
                Some(bytes.chunks_exact(8).map(|b| b.try_into().map_or(0.0, f64::from_le_bytes) as f32).collect())
            }
            _ => None,
        }
    }

    /// Integer of a scalar or single-element constant.
    pub fn as_integer(&self) -> Option<i64> {
        self.as_integers().and_then(|v| if v.len() == 1 { v.first().copied() } else { None })
    }

    /// Float of a scalar or single-element constant.
    pub fn as_float(&self) -> Option<f32> {
        self.as_floats().and_then(|v| if v.len() == 1 { v.first().copied() } else { None })
    }

    /// Boolean of a scalar constant.
    pub fn as_bool(&self) -> Option<bool> {
        if self.ty.dtype == DataType::Bool { self.as_integer().map(|v| v != 0) } else { None }
    }

    /// String of a string constant.
    pub fn as_str(&self) -> Option<&str> {
        match &self.data {
            Data::Strings(strings) if strings.len() == 1 => Some(&strings[0]),
            _ => None,
        }
    }

    /// Produces all bytes; strings have none. Meant for execution and small constants.
    ///
    /// # Errors
    /// Returns an error if the content can't be produced.
    pub fn bytes(&self) -> Result<Arc<[u8]>> {
        match &self.data {
            Data::Literal(bytes) => Ok(bytes.clone()),
            Data::Strings(_) => Ok(Arc::new([])),
            Data::Content(content) => {
                content.prepare()?;
                let mut out = vec![0; content.length() as usize];
                content.read(0, &mut out)?;
                Ok(out.into())
            }
        }
    }

    /// Number of elements; 0 if unknown.
    pub fn elements(&self) -> u64 {
        self.ty.elements().unwrap_or(0)
    }

    /// Returns whether every dimension of the type is fixed and literal data has the length of the type.
    pub fn is_consistent(&self) -> bool {
        let fixed = self.ty.shape.iter().all(|d| matches!(d, Dim::Fixed(_)));
        fixed
            && match &self.data {
                Data::Literal(bytes) => self.ty.bytes() == Some(bytes.len() as u64),
                Data::Strings(strings) => {
                    self.ty.dtype == DataType::String && self.ty.elements() == Some(strings.len() as u64)
                }
                Data::Content(content) => self.ty.bytes() == Some(content.length()),
            }
    }
}

impl fmt::Debug for Constant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.ty)?;
        match &self.data {
            Data::Literal(bytes) if bytes.len() <= 64 => write!(f, "{bytes:02x?}")?,
            Data::Literal(bytes) => write!(f, "{} bytes", bytes.len())?,
            Data::Strings(strings) => write!(f, "{strings:?}")?,
            Data::Content(content) => write!(f, "{} bytes on demand", content.length())?,
        }
        f.write_str(")")
    }
}

impl PartialEq for Constant {
    /// Compares types and literals; contents are equal if they are the same object.
    fn eq(&self, other: &Self) -> bool {
        self.ty == other.ty
            && match (&self.data, &other.data) {
                (Data::Literal(a), Data::Literal(b)) => a == b,
                (Data::Strings(a), Data::Strings(b)) => a == b,
                (Data::Content(a), Data::Content(b)) => Arc::ptr_eq(a, b),
                _ => false,
            }
    }
}
