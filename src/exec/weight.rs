//! Constants in memory. Small ones are tensors; large ones stay in the form they are stored in and are expanded, a few
//! rows at a time, inside the kernels.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use bytemuck::Pod;
use half::{bf16, f16};
use rayon::prelude::*;

use super::tensor::{Dims, Tensor, TensorData};
use super::workspace::Workspaces;
use anec_base::Result;
use anec_kernels::codes::{CodeTables, PackedCodes};
use anec_kernels::layout::MatrixLayout;
use anec_kernels::memory::{Arena, ArenaVec};
use anec_kernels::pool;
use anec_kernels::product::Activations;
use anec_kernels::weight::{Elements, Scales, StoredWeight};
use anec_mil::constant::Data;
use anec_mil::{Constant, Content, DataType};

/// Floating-point constants of fewer elements than this become plain tensors.
pub(crate) const SMALL: usize = 1024;

/// A large constant, seen as rows: the first axis by all the others.
#[derive(Debug)]
pub struct LoadedWeight {
    stored: StoredWeight,
    dense: OnceLock<Arc<Tensor>>,
}

impl LoadedWeight {
    /// A weight that is stored uncompressed.
    pub(crate) fn plain(shape: Vec<usize>, elements: Arc<Elements>) -> Self {
        LoadedWeight { stored: StoredWeight::plain(shape, elements), dense: OnceLock::new() }
    }

    /// A tensor of floats.
    pub(crate) fn of(tensor: &Tensor) -> Option<Self> {
        let elements = Elements::F32(tensor.floats()?.to_vec().into());
        Some(LoadedWeight::plain(tensor.shape.clone(), Arc::new(elements)))
    }

    /// A weight of bytes and scales.
    pub(crate) fn scaled(shape: Vec<usize>, elements: Arc<Elements>, scales: Scales) -> Self {
        LoadedWeight { stored: StoredWeight::scaled(shape, elements, scales), dense: OnceLock::new() }
    }

    /// A weight of codes, tables and scales.
    pub(crate) fn coded(shape: Vec<usize>, elements: Arc<Elements>, tables: CodeTables, scales: Scales) -> Self {
        LoadedWeight { stored: StoredWeight::coded(shape, elements, tables, scales), dense: OnceLock::new() }
    }

    /// The whole of it as a tensor; made once and kept.
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

/// A content, kept so that its address stays its own, and its elements.
type Held = (Arc<dyn Content>, Arc<Elements>);

/// The bytes of weights by the content they come from, so that functions which use the same weights hold them once, and the
/// memory of their runs.
#[derive(Default)]
pub struct WeightCache {
    held: Mutex<HashMap<(usize, DataType), Held>>,
    arena: Arena,
    workspaces: Workspaces,
}

impl WeightCache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// What runs of all functions work with.
    pub(super) fn workspaces(&self) -> &Workspaces {
        &self.workspaces
    }

    /// Bytes that the weights take in memory.
    pub fn bytes(&self) -> usize {
        let held = self.held.lock().unwrap_or_else(|e| e.into_inner());
        let size = |elements: &Elements| match elements {
            Elements::F32(v) => 4 * v.len(),
            Elements::F16(v) => 2 * v.len(),
            Elements::Int8(v) => v.len(),
            Elements::Codes(v) => v.bytes().len(),
        };
        held.values().map(|(_, elements)| size(elements)).sum()
    }

    /// Gives back the memory of weights that no executable uses any more.
    pub fn release_unused(&self) {
        let mut held = self.held.lock().unwrap_or_else(|e| e.into_inner());
        held.retain(|_, (_, elements)| Arc::strong_count(elements) > 1);
    }

    /// The elements of a floating-point constant, or of one of integers of no more than eight bits, of which only signed
    /// bytes aren't codes; `None` for other types.
    pub(crate) fn elements(&self, constant: &Constant) -> Result<Option<Arc<Elements>>> {
        self.elements_as(constant, constant.ty.dtype)
    }

    /// The same, of a constant whose bytes hold packed elements of a type. Bits that pad the last byte may come as further
    /// elements.
    pub(crate) fn elements_as(&self, constant: &Constant, dtype: DataType) -> Result<Option<Arc<Elements>>> {
        let Data::Content(content) = &constant.data else {
            return Ok(decode_elements(dtype, &constant.bytes()?).map(Arc::new));
        };
        let key = (Arc::as_ptr(content).cast::<()>() as usize, dtype);
        if let Some((_, elements)) = self.held.lock().unwrap_or_else(|e| e.into_inner()).get(&key) {
            return Ok(Some(elements.clone()));
        }
        let Some(elements) = self.load(dtype, content.as_ref())?.map(Arc::new) else { return Ok(None) };
        let mut held = self.held.lock().unwrap_or_else(|e| e.into_inner());
        Ok(Some(held.entry(key).or_insert((content.clone(), elements)).1.clone()))
    }
}

/// Bytes read at a time by one thread.
const PIECE: u64 = 4 << 20;

/// Fills `out` with a content from its start, in parallel pieces.
fn read_all(content: &dyn Content, out: &mut [u8]) -> Result<()> {
    content.prepare()?;
    let granule = content.granule().max(1);
    let piece = usize::try_from(granule * (PIECE / granule).max(1)).unwrap_or(usize::MAX);
    out.par_chunks_mut(piece).enumerate().try_for_each(|(i, out)| content.read(i as u64 * piece as u64, out))
}

impl WeightCache {
    /// The elements of a content, in the form they are kept in.
    fn load(&self, dtype: DataType, content: &dyn Content) -> Result<Option<Elements>> {
        let length = content.length() as usize;
        Ok(Some(match dtype {
            DataType::Fp32 => Elements::F32(self.read(length, content)?),
            DataType::Fp16 => Elements::F16(self.read(length, content)?),
            DataType::Int8 => Elements::Int8(self.read(length, content)?),
            _ if is_code(dtype) => {
                Elements::Codes(PackedCodes::new(dtype.bits() as usize, self.read(length, content)?))
            }
            // decoded to f32
            _ if dtype.is_float() => {
                let mut bytes = vec![0u8; length];
                read_all(content, &mut bytes)?;
                return Ok(decode_elements(dtype, &bytes).map(|elements| self.keep(elements)));
            }
            _ => return Ok(None),
        }))
    }

    /// So many bytes of a content, as they are.
    fn read<T: Pod>(&self, length: usize, content: &dyn Content) -> Result<ArenaVec<T>> {
        self.arena.filled(length / size_of::<T>(), |values| read_all(content, bytemuck::cast_slice_mut(values)))
    }

    /// Elements made by decoding, kept like those that are read.
    pub(crate) fn keep(&self, elements: Elements) -> Elements {
        match elements {
            Elements::F32(values) => Elements::F32(self.copied(&values)),
            Elements::F16(values) => Elements::F16(self.copied(&values)),
            Elements::Int8(values) => Elements::Int8(self.copied(&values)),
            Elements::Codes(codes) => Elements::Codes(PackedCodes::new(codes.bits(), self.copied(codes.bytes()))),
        }
    }

    fn copied<T: Pod>(&self, values: &[T]) -> ArenaVec<T> {
        let Ok(copied) = self.arena.filled(values.len(), |copied| {
            copied.copy_from_slice(values);
            Ok::<_, Infallible>(())
        });
        copied
    }
}

fn decode_elements(dtype: DataType, bytes: &[u8]) -> Option<Elements> {
    Some(match dtype {
        DataType::Fp16 => Elements::F16(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect()),
        DataType::Int8 => Elements::Int8(bytes.iter().map(|b| *b as i8).collect()),
        d if d.is_float() => Elements::F32(decode_floats(d, bytes)?.into()),
        d if is_code(d) => Elements::Codes(PackedCodes::new(d.bits() as usize, bytes.to_vec().into())),
        _ => return None,
    })
}

/// Whether elements of a type are few enough to be looked up in a table.
fn is_code(dtype: DataType) -> bool {
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

/// The integers of a packed constant; 64-bit and unsigned 32-bit values that don't fit are clamped to `i32`.
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

/// Unsigned elements of `bits` < 8 bits, packed least significant bit first across byte borders.
fn unpack(bytes: &[u8], bits: usize, count: usize) -> impl Iterator<Item = i32> + '_ {
    (0..count).map(move |i| {
        let (byte, shift) = (i * bits / 8, i * bits % 8);
        let low = bytes.get(byte).copied().unwrap_or(0);
        let high = bytes.get(byte + 1).copied().unwrap_or(0);
        (i32::from(u16::from_le_bytes([low, high]) >> shift)) & ((1 << bits) - 1)
    })
}

/// The shape of a constant.
pub(crate) fn constant_shape(constant: &Constant) -> Vec<usize> {
    constant.ty.shape.iter().map(|d| d.fixed().unwrap_or(0) as usize).collect()
}

/// A constant as a tensor, whatever its type; strings have none.
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

/// `weight x + bias` of some tokens.
pub(crate) struct WeightProduct<'c> {
    pub weight: &'c LoadedWeight,
    pub activations: Activations,
    pub bias: Option<&'c [f32]>,
    pub x: (&'c [f32], MatrixLayout),
    pub tokens: usize,
    /// Shape of the result, and where its elements lie.
    pub shape: Dims,
    pub layout: MatrixLayout,
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_mil::TensorType;

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

    #[test]
    fn functions_share_the_bytes_of_a_content() {
        struct Bytes(Vec<u8>);
        impl Content for Bytes {
            fn length(&self) -> u64 {
                self.0.len() as u64
            }
            fn granule(&self) -> u64 {
                4
            }
            fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
                out.copy_from_slice(&self.0[offset as usize..][..out.len()]);
                Ok(())
            }
        }
        let values: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let constant = Constant::content(TensorType::new(DataType::Fp32, [2u64]), Arc::new(Bytes(values)));
        let cache = WeightCache::new();
        let first = cache.elements(&constant).unwrap().unwrap();
        let second = cache.elements(&constant.clone()).unwrap().unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(cache.bytes(), 8);
        assert!(matches!(&*first, Elements::F32(v) if **v == [1.5, -2.0]));
    }
}
