//! Constants in memory. Small ones are tensors; large ones stay in their stored form and are expanded inside the
//! kernels, a few rows at a time.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};

use super::tensor::{Dims, Tensor, TensorData};
use anec_base::Result;
use anec_kernels::codes::{CodeTables, PackedCodes};
use anec_kernels::layout::MatrixLayout;
use anec_kernels::pool;
use anec_kernels::product::Activations;
use anec_kernels::weight::{Elements, Scales, StoredWeight};
use anec_mil::{Constant, DataType};

/// Floating-point constants with fewer elements become tensors.
pub(crate) const SMALL: usize = 1024;

/// Large constant as rows: the first axis by all others.
#[derive(Debug)]
pub struct LoadedWeight {
    stored: StoredWeight,
    dense: OnceLock<Arc<Tensor>>,
}

impl LoadedWeight {
    /// Uncompressed weight.
    pub(crate) fn plain(shape: Vec<usize>, elements: Arc<Elements>) -> Self {
        LoadedWeight { stored: StoredWeight::plain(shape, elements), dense: OnceLock::new() }
    }

    /// Weight of a tensor of floats.
    pub(crate) fn of(tensor: &Tensor) -> Option<Self> {
        let elements = Elements::F32(tensor.floats()?.to_vec().into());
        Some(LoadedWeight::plain(tensor.shape.clone(), Arc::new(elements)))
    }

    /// Weight of bytes and scales.
    pub(crate) fn scaled(shape: Vec<usize>, elements: Arc<Elements>, scales: Scales) -> Self {
        LoadedWeight { stored: StoredWeight::scaled(shape, elements, scales), dense: OnceLock::new() }
    }

    /// Weight of codes, tables and scales.
    pub(crate) fn coded(shape: Vec<usize>, elements: Arc<Elements>, tables: CodeTables, scales: Scales) -> Self {
        LoadedWeight { stored: StoredWeight::coded(shape, elements, tables, scales), dense: OnceLock::new() }
    }

    /// The whole weight as a tensor, computed once.
    pub(crate) fn dense(&self) -> &Arc<Tensor> {
        self.dense.get_or_init(|| {
            let mut out = vec![0.0; self.shape().iter().product()];
            pool::for_each_chunk(&mut out, self.columns().max(1), |row, out| self.expand_row(row, out));
            Arc::new(Tensor::new(self.shape(), out))
        })
    }
}

impl Deref for LoadedWeight {
    type Target = StoredWeight;

    fn deref(&self) -> &StoredWeight {
        &self.stored
    }
}

/// Elements of a constant in the form that products take; `None` for types without such a form.
pub(crate) fn decode_elements(dtype: DataType, bytes: &[u8]) -> Option<Elements> {
    Some(match dtype {
        DataType::Fp16 => Elements::F16(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect()),
        DataType::Int8 => Elements::Int8(bytes.iter().map(|b| *b as i8).collect()),
        d if d.is_float() => Elements::F32(decode_floats(d, bytes)?.into()),
        d if is_code(d) => Elements::Codes(PackedCodes::new(d.bits() as usize, bytes.to_vec().into())),
        _ => return None,
    })
}

/// Returns whether elements of this type are looked up in a table.
pub(crate) fn is_code(dtype: DataType) -> bool {
    dtype.is_integer() && dtype.bits() <= 8
}

fn decode_floats(dtype: DataType, bytes: &[u8]) -> Option<Vec<f32>> {
    Some(match dtype {
        DataType::Fp16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        DataType::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        DataType::Fp32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        DataType::Fp64 => bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b) as f32).collect(),
        _ => return None,
    })
}

/// Integers of a packed constant; 64-bit and unsigned 32-bit values that don't fit are clamped to `i32`.
pub(crate) fn decode_integers(dtype: DataType, bytes: &[u8], count: usize) -> Option<Vec<i32>> {
    let clamp = |v: i64| v.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
    Some(match dtype {
        DataType::Int8 => bytes.iter().map(|b| i32::from(*b as i8)).collect(),
        DataType::Uint8 | DataType::Bool => bytes.iter().map(|b| i32::from(*b)).collect(),
        DataType::Int16 => bytes.chunks_exact(2).map(|b| i16::from_le_bytes([b[0], b[1]]).into()).collect(),
        DataType::Uint16 => bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]).into()).collect(),
        DataType::Int32 => bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect(),
        DataType::Uint32 => bytes.as_chunks::<4>().0.iter().map(|b| clamp(u32::from_le_bytes(*b).into())).collect(),
        DataType::Int64 => bytes.as_chunks::<8>().0.iter().map(|b| clamp(i64::from_le_bytes(*b))).collect(),
        DataType::Uint64 => {
            bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b).min(i32::MAX as u64) as i32).collect()
        }
        DataType::Int4 => unpack(bytes, 4, count).map(|v| (v ^ 8) - 8).collect(),
        DataType::Uint1 | DataType::Uint2 | DataType::Uint3 | DataType::Uint4 | DataType::Uint6 => {
            unpack(bytes, dtype.bits() as usize, count).collect()
        }
        _ => return None,
    })
}

/// Unsigned elements of `bits` < 8 bits, packed least significant bit first across byte boundaries.
fn unpack(bytes: &[u8], bits: usize, count: usize) -> impl Iterator<Item = i32> + '_ {
    (0..count).map(move |i| {
        let (byte, shift) = (i * bits / 8, i * bits % 8);
        let low = bytes.get(byte).copied().unwrap_or(0);
        let high = bytes.get(byte + 1).copied().unwrap_or(0);
        (i32::from(u16::from_le_bytes([low, high]) >> shift)) & ((1 << bits) - 1)
    })
}

/// Shape of a constant.
pub(crate) fn constant_shape(constant: &Constant) -> Vec<usize> {
    constant.ty.shape.iter().map(|d| d.fixed().unwrap_or(0) as usize).collect()
}

/// Constant as a tensor; `None` for strings.
pub(crate) fn constant_tensor(constant: &Constant) -> Result<Option<Tensor>> {
    let shape = constant_shape(constant);
    let dtype = constant.ty.dtype;
    let bytes = constant.bytes()?;
    let data = if dtype.is_float() {
        decode_floats(dtype, &bytes).map(TensorData::F32)
    } else if dtype == DataType::Bool {
        Some(TensorData::Bool(bytes.iter().map(|b| *b != 0).collect()))
    } else {
        decode_integers(dtype, &bytes, shape.iter().product()).map(TensorData::I32)
    };
    Ok(data.map(|data| Tensor { shape, data }))
}

/// `weight x + bias` for some tokens.
pub(crate) struct WeightProduct<'c> {
    pub weight: &'c LoadedWeight,
    pub activations: Activations,
    pub bias: Option<&'c [f32]>,
    pub x: (&'c [f32], MatrixLayout),
    pub tokens: usize,
    /// Shape of the result, and its layout.
    pub shape: Dims,
    pub layout: MatrixLayout,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_integers_are_unpacked_across_bytes() {
        // 3 bits each: 1, 2, 3, 4, 5 -> 0b001 | 0b010<<3 | 0b011<<6 | 0b100<<9 | 0b101<<12
        let packed = (1u32 | 2 << 3 | 3 << 6 | 4 << 9 | 5 << 12).to_le_bytes();
        assert_eq!(decode_integers(DataType::Uint3, &packed[..2], 5).unwrap(), [1, 2, 3, 4, 5]);
        assert_eq!(decode_integers(DataType::Int4, &[0x8f, 0x07], 3).unwrap(), [-1, -8, 7]);
    }

    #[test]
    fn rows_are_expanded_with_the_scale_of_their_block() {
        let elements = Arc::new(Elements::Int8(vec![1, 2, 3, 4, -1, -2, -3, -4].into()));
        let scales = Scales { values: vec![1.0, 10.0, 0.5, 2.0], blocks: 2 };
        let weight = LoadedWeight::scaled(vec![2, 4], elements, scales);
        assert_eq!(weight.dense().floats().unwrap(), [1.0, 2.0, 30.0, 40.0, -0.5, -1.0, -6.0, -8.0]);
    }
}
